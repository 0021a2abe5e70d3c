/* SPDX-License-Identifier: Apache-2.0 */
#include "worker_double.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/queue.h>

#include "control/worker_process.h"

struct worker_process {
    TAILQ_ENTRY(worker_process) link;
    const struct worker_process_ops *ops;
    void *owner;
    bool is_ready;
};

static TAILQ_HEAD(, worker_process) workers = TAILQ_HEAD_INITIALIZER(workers);

static struct worker_process *find(size_t i)
{
    size_t n = worker_double_count();
    struct worker_process *worker = TAILQ_FIRST(&workers);
    for (i = n ? i % n : 0; worker && i > 0; i--)
        worker = TAILQ_NEXT(worker, link);
    return worker;
}

size_t worker_double_count(void)
{
    size_t n = 0;
    const struct worker_process *worker;
    TAILQ_FOREACH(worker, &workers, link)
    n++;
    return n;
}

void worker_double_ready(size_t i)
{
    struct worker_process *worker = find(i);
    if (!worker || worker->is_ready)
        return;
    worker->is_ready = true;
    worker->ops->on_ready(worker->owner);
}

void worker_double_speak(size_t i, const Pb__Envelope *envelope)
{
    struct worker_process *worker = find(i);
    if (!worker || !worker->is_ready)
        return;
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_MEMBER_GONE:
    case PB__ENVELOPE__BODY_STALL_NOTICE:
    case PB__ENVELOPE__BODY_STATS_REPLY:
    case PB__ENVELOPE__BODY_LINK_LOST:
        worker->ops->on_message(worker->owner, envelope);
        break;
    default:
        break;
    }
}

void worker_double_die(size_t i)
{
    struct worker_process *worker = find(i);
    if (!worker)
        return;
    TAILQ_REMOVE(&workers, worker, link);
    worker->ops->on_ended(worker->owner, "was killed by signal 9 (Killed)");
    free(worker);
}

/* ------------------------------------------------------------------ what worker_process.h says */

int worker_setup_init(struct worker_setup *setup, struct loop *loop, const struct config *config,
                      const char *node)
{
    setup->loop = loop;
    setup->config = config;
    setup->node = node;
    return 0;
}

struct worker_process *worker_process_start(const struct worker_setup *setup, const char *job,
                                            const struct peer *owner_peer,
                                            const struct worker_process_ops *ops, void *owner,
                                            char *out_error, size_t error_size)
{
    (void)setup;
    (void)owner_peer;
    struct worker_process *worker = job[0] == '!' ? NULL : calloc(1, sizeof *worker);
    if (!worker) {
        snprintf(out_error, error_size, "no worker for a job that begins with an exclamation mark");
        return NULL;
    }
    worker->ops = ops;
    worker->owner = owner;
    TAILQ_INSERT_TAIL(&workers, worker, link);
    return worker;
}

bool worker_process_is_ready(const struct worker_process *worker)
{
    return worker->is_ready;
}

bool worker_process_was_ready(const struct worker_process *worker)
{
    return worker->is_ready;
}

pid_t worker_process_pid(const struct worker_process *worker)
{
    (void)worker;
    return 4194305; /* above any pid that Linux gives */
}

const char *worker_process_backend(const struct worker_process *worker)
{
    (void)worker;
    return "double";
}

const char *worker_process_kernels(const struct worker_process *worker)
{
    (void)worker;
    return "none";
}

unsigned worker_process_threads(const struct worker_process *worker)
{
    (void)worker;
    return 1;
}

bool worker_process_takes_devices(const struct worker_process *worker, const char **out_text)
{
    (void)worker;
    *out_text = "the worker is a double";
    return false;
}

void worker_process_configure_all(const struct worker_setup *setup)
{
    (void)setup;
}

struct gpu_use worker_process_gpu_use(const char *uuid)
{
    (void)uuid;
    return (struct gpu_use){.n_workers = 1};
}

int worker_process_send(struct worker_process *worker, const Pb__Envelope *envelope, int fd)
{
    (void)worker;
    (void)envelope;
    (void)fd;
    return 0;
}

void worker_process_drain(struct worker_process *worker)
{
    (void)worker;
}

/* Its end follows when the fuzzer says so. */
void worker_process_kill(struct worker_process *worker)
{
    (void)worker;
}

void worker_process_end(struct worker_process *worker)
{
    if (!worker)
        return;
    TAILQ_REMOVE(&workers, worker, link);
    free(worker);
}

void worker_process_reap(void)
{
}

unsigned worker_process_count(void)
{
    return (unsigned)worker_double_count();
}

void worker_process_kill_all(void)
{
}
