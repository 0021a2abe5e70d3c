/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one thread of a worker that launches on GPUs and calls NCCL, which forbids doing so from
 * several threads on one device. It takes batches in the order given, launches each as soon as its
 * communicators stand, and watches what runs. It never sleeps on a GPU: it looks, with short
 * pauses; without work it sleeps on a condition.
 *
 * Threads: every function here belongs to the loop, and so do the clients' callbacks. A submission
 * is the submitter's from submitter_push() until its on_done; a client, until its on_closed. What
 * both sides touch is guarded by the submitter's mutex or atomic.
 */
#ifndef GRADD_SUBMITTER_H
#define GRADD_SUBMITTER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/loop.h"
#include "worker/backend/nccl/comm.h"
#include "worker/backend/nccl/submission.h"

struct submitter;

/* Who submits: an epoch. Its communicators stand or fall together. */
struct submitter_client {
    struct submitter *submitter;
    struct comm *comms;     /* added to by submitter_add_comm(), never taken from */
    uint64_t op_timeout_ns; /* from launch to end; 0: never */
    /* All ops of the batch are launched or have failed (their status says so). */
    void (*on_enqueued)(struct submission *submission);
    void (*on_done)(struct submission *submission);
    /* Something failed that is more than an op's matter; called once. broken: the GPU's context is
     * lost. */
    void (*on_failed)(struct submitter_client *client, int status, const char *text, bool broken);
    void (*on_aborted)(struct submitter_client *client); /* communicators are gone */
    void (*on_closed)(struct submitter_client *client);
    /* Set by submitter_abort(). */
    _Atomic bool is_aborted;
    int abort_status;
    char abort_text[512];
    /* The submitter's. */
    struct {
        bool wants_abort, wants_close; /* all under the mutex */
        bool is_failed;
        bool tells_failed, tells_aborted, tells_closed, broken;
        int status;
        char text[512];
        struct submitter_client *next, *next_report;
        bool is_reported;
    } s;
};

/* NULL: no memory, descriptors or threads. */
struct submitter *submitter_new(struct loop *loop);
/* Loop: wait until the thread has nothing to do, and tell the clients what it did. False: it is not
 * done after that time. */
bool submitter_drain(struct submitter *submitter, unsigned timeout_s);
/* All clients are closed. NULL-safe. */
void submitter_free(struct submitter *submitter);

void submitter_add_comm(struct submitter_client *client, struct comm *take_comm);
void submitter_push(struct submitter *submitter, struct submission *submission);
/* What is not launched fails with this; communicators are aborted, and on_aborted told. */
void submitter_abort(struct submitter_client *client, int status, const char *text);
/* Nothing of the client is under way: its communicators end, and on_closed is told. */
void submitter_close(struct submitter_client *client);

#endif
