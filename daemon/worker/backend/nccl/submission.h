/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch on its way through the submitter: which communicator each op takes, what is counted on
 * the GPUs, where it ends there, and how.
 *
 * Threads: the loop fills it and owns it, but for the time between submitter_push() and on_done,
 * when it is the submitter's. Functions belong to the submitter unless they say otherwise.
 * Invariant: an op of the batch ends as it was launched (its own status), and an op that was
 * launched ends as the submission does (s.status); of several failures the first is told.
 */
#ifndef GRADD_SUBMISSION_H
#define GRADD_SUBMISSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "worker/backend/backend.h"

struct cuda_device;
struct submitter_client;

/* The end of what runs on one device. */
struct submission_event {
    const struct cuda_device *device; /* NULL: none is used */
    CUevent event;
    bool is_recorded;
};

struct submission {
    struct submitter_client *client;
    struct backend_batch *batch;
    struct comm **comms; /* of each op */
    size_t comms_capacity;
    struct submission *next; /* the client's, while it has it */
    /* The submitter's. */
    struct {
        struct submission_event *events; /* by device index */
        unsigned n_events;
        _Atomic uint64_t *counters; /* of not finite elements; memory that GPUs can write */
        size_t n_counters, counters_capacity;
        const struct cuda_device *counters_device; /* where they are registered */
        uint64_t deadline_ns;
        bool uses_nccl;
        int status; /* of the ops that were launched, at the end */
        char text[512];
        bool tells_enqueued, tells_done, is_reported; /* under the submitter's mutex */
        struct submission *next, *next_report;
    } s;
};

/* Loop. Its counters go. Nothing of it is under way. */
void submission_free(struct submission *submission);

/* Ops begin to end - 1 have this status; text is borrowed until the batch is done. */
void submission_end_ops(struct submission *submission, size_t begin, size_t end, int status,
                        const char *text);
/* What was launched has no result. The first failure counts; text is copied. */
void submission_fail(struct submission *submission, int status, const char *text);
/* Loop, before on_done: the ops that were launched end as the submission did. */
void submission_settle(struct submission *submission);

/* Room for the batch's counters, all zero. CUDA_SUCCESS also when there is nothing to count; else
 * it is not counted. */
CUresult submission_prepare_counters(struct submission *submission,
                                     const struct cuda_device *device);
/* Where the counters of op number `index` are, as the device sees them; 0: nothing to count. */
CUdeviceptr submission_counters_of(const struct submission *submission, size_t index,
                                   const struct cuda_device *device);
/* What GPUs counted goes to the ops. All its work is over. */
void submission_collect_counters(struct submission *submission);

/* CUDA_SUCCESS: all its work is over. CUDA_ERROR_NOT_READY: not yet. */
CUresult submission_query(const struct submission *submission);
/* Any thread, until on_done. What waits for trainers that are lost, or for communicators, waits no
 * more. */
void submission_poison(const struct submission *submission);

#endif
