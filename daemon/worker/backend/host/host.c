/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host backend: CPU reductions on the ranks' shared memory.
 *
 * A batch is lowered to strips. What is small runs at once on the loop thread; what is middling,
 * on the loop thread with help from the pool; what is large, on the pool while the loop turns.
 */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "worker/backend/backend.h"
#include "worker/backend/host/pool.h"

enum {
    /* Bytes per buffer up to which the loop thread works alone: waking others costs as much as they
     * would save. With two threads that was measured (tests/bench/RESULTS.md); more save more. */
    ALONE_BYTES_OF_TWO = 1024 * 1024,
    ALONE_BYTES = 256 * 1024,
    /* Bytes per buffer up to which the loop thread works along: well under a millisecond. */
    TOGETHER_BYTES = 4 * 1024 * 1024,
    THREADS_DEFAULT_MAX = 8,
};

struct backend {
    struct pool *pool;
    struct strip_list large; /* runs on the pool */
    struct strip_list small; /* runs now */
    struct backend_batch *running, *first, **tail;
};

static void finish(struct backend_batch *batch, int status, const char *text)
{
    for (size_t i = 0; i < batch->n_ops; i++) {
        batch->ops[i]->status = status;
        batch->ops[i]->text = text;
    }
    batch->done(batch->data, batch);
}

static int lower(struct strip_list *list, const struct backend_batch *batch)
{
    strip_list_clear(list);
    for (size_t i = 0; i < batch->n_ops; i++)
        if (strip_list_add(list, batch->ops[i]) < 0)
            return -ENOMEM;
    strip_list_seal(list);
    return 0;
}

static void start_next(struct backend *host)
{
    while (host->first && !host->running) {
        struct backend_batch *batch = host->first;
        if (!(host->first = batch->next))
            host->tail = &host->first;
        if (lower(&host->large, batch) < 0) {
            finish(batch, GRADD_ERR_NO_MEMORY, "the worker has no memory for this batch");
            continue;
        }
        host->running = batch;
        pool_start(host->pool, &host->large);
    }
}

static void on_pool_done(void *data)
{
    struct backend *host = data;
    struct backend_batch *batch = host->running;
    host->running = NULL;
    start_next(host);
    finish(batch, GRADD_OK, "");
}

static void host_run(struct backend *host, struct backend_batch *batch)
{
    if (lower(&host->small, batch) < 0) {
        finish(batch, GRADD_ERR_NO_MEMORY, "the worker has no memory for this batch");
        return;
    }
    const struct strip_list *list = &host->small;
    if (list->bytes <= (pool_n_threads(host->pool) > 2 ? ALONE_BYTES : ALONE_BYTES_OF_TWO)) {
        for (uint64_t piece = 0; piece < list->n_pieces; piece++)
            strip_list_run_piece(list, piece);
        finish(batch, GRADD_OK, "");
    } else if (list->bytes <= TOGETHER_BYTES && !pool_is_busy(host->pool)) {
        pool_run(host->pool, list);
        finish(batch, GRADD_OK, "");
    } else {
        batch->next = NULL;
        *host->tail = batch;
        host->tail = &batch->next;
        start_next(host);
    }
}

static unsigned cores_allowed(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n < 1 ? 1 : n > THREADS_DEFAULT_MAX ? THREADS_DEFAULT_MAX : (unsigned)n;
}

static void host_free(struct backend *host)
{
    if (!host)
        return;
    pool_free(host->pool);
    strip_list_deinit(&host->large);
    strip_list_deinit(&host->small);
    free(host);
}

static struct backend *host_new(struct loop *loop, unsigned n_threads, const char **out_text)
{
    struct backend *host = calloc(1, sizeof *host);
    if (host) {
        strip_list_init(&host->large);
        strip_list_init(&host->small);
        host->tail = &host->first;
        host->pool = pool_new(loop, n_threads ? n_threads : cores_allowed(), on_pool_done, host);
    }
    if (!host || !host->pool) {
        *out_text = "no memory, descriptors or threads for the reduction pool";
        host_free(host);
        return NULL;
    }
    return host;
}

static unsigned host_n_threads(const struct backend *host)
{
    return pool_n_threads(host->pool);
}

const struct backend_ops backend_host = {
    .name = "host",
    .new = host_new,
    .free = host_free,
    .run = host_run,
    .n_threads = host_n_threads,
};
