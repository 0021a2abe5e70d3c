/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One gradd-worker: started with the rights of the job's owner and no more, spoken to over its
 * channel, supervised until it has been reaped.
 *
 * Thread: loop. Invariant: on_ended() is called exactly once per started worker unless
 * worker_process_end() came first; whatever the worker does, its process is waited for and never
 * waited on.
 */
#ifndef GRADD_CONTROL_WORKER_PROCESS_H
#define GRADD_CONTROL_WORKER_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/loop.h"
#include "control/config.h"
#include "control/gpus.h"
#include "control/peer.h"
#include "wire.h"

struct worker_process;

struct worker_process_ops {
    void (*on_ready)(void *owner);
    /* MemberGone, StallNotice, StatsReply. */
    void (*on_message)(void *owner, const Pb__Envelope *envelope);
    /* It is over. how: the end of a sentence, "was killed by signal 9 (Killed)". The object frees
     * itself; the owner forgets it. */
    void (*on_ended)(void *owner, const char *how);
};

/* What all workers share; the root object owns it. */
struct worker_setup {
    struct loop *loop;
    const struct config *config;
    const char *node;
    char program[4096]; /* path of gradd-worker */
    const struct gpus *gpus;
    bool may_change_user;
};

/* Find the program and what this process may do. 0 or -errno (no such program). */
int worker_setup_init(struct worker_setup *setup, struct loop *loop, const struct config *config,
                      const char *node);

/* Start one for this job with the rights of `owner_peer`. NULL with *out_error: a sentence. */
struct worker_process *worker_process_start(const struct worker_setup *setup, const char *job,
                                            const struct peer *owner_peer,
                                            const struct worker_process_ops *ops, void *owner,
                                            char *out_error, size_t error_size);

/* setup->gpus is done: those that were started before hear what they are to do. */
void worker_process_configure_all(const struct worker_setup *setup);

bool worker_process_is_ready(const struct worker_process *worker);
/* It has been ready at some time. */
bool worker_process_was_ready(const struct worker_process *worker);
pid_t worker_process_pid(const struct worker_process *worker);
const char *worker_process_backend(const struct worker_process *worker);
const char *worker_process_kernels(const struct worker_process *worker);
unsigned worker_process_threads(const struct worker_process *worker);
/* It takes device memory; NULL-safe. Else *out_text says why not, until the worker goes. */
bool worker_process_takes_devices(const struct worker_process *worker, const char **out_text);

/* What all workers take of the GPU of that UUID. */
struct gpu_use {
    unsigned n_workers;
    uint64_t worker_bytes, import_bytes;
};
struct gpu_use worker_process_gpu_use(const char *uuid);

/* Send at once. fd -1: none. 0 or -errno. Trouble ends the worker: on_ended() follows; but for want
 * of a descriptor (-EMFILE, -ENFILE), when nothing was sent. */
int worker_process_send(struct worker_process *worker, const Pb__Envelope *envelope, int fd);

/* Hand over what it has sent already, without waiting for the loop. */
void worker_process_drain(struct worker_process *worker);

/* The owner is done with it: closes the channel, kills it if it stays, reaps it. NULL-safe. */
void worker_process_end(struct worker_process *worker);

/* SIGKILL; on_ended() follows. */
void worker_process_kill(struct worker_process *worker);

/* Wait for children that have ended; called on SIGCHLD. */
void worker_process_reap(void);
/* How many have not been reaped, ended ones included. */
unsigned worker_process_count(void);
/* SIGKILL to all of them. */
void worker_process_kill_all(void);

#endif
