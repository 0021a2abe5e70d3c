/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/submission.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "worker/backend/nccl/comm.h"
#include "worker/buffer/queue.h"

enum {
    COUNTERS_STEP = 512, /* 4096 bytes */
};

void submission_free(struct submission *submission)
{
    if (!submission)
        return;
    if (submission->s.counters) {
        const struct cuda_device *device = submission->s.counters_device;
        device->cuda->ctx_set(device->context);
        device->cuda->host_unregister((void *)submission->s.counters);
        munmap((void *)submission->s.counters, submission->s.counters_capacity * sizeof(uint64_t));
    }
    free(submission->s.events);
    free(submission->comms);
    free(submission);
}

void submission_fail(struct submission *submission, int status, const char *text)
{
    if (submission->s.status != GRADD_OK)
        return;
    submission->s.status = status;
    snprintf(submission->s.text, sizeof submission->s.text, "%s", text);
}

void submission_end_ops(struct submission *submission, size_t begin, size_t end, int status,
                        const char *text)
{
    for (size_t i = begin; i < end; i++) {
        submission->batch->ops[i]->status = status;
        submission->batch->ops[i]->text = text;
    }
}

/* Did the op run on what a rank had not brought, because that rank is lost? */
static bool is_unsure(const struct backend_op *op)
{
    for (uint32_t i = 0; i < op->n_ranks; i++)
        if (op->parts[i].queue && queue_is_unsure(op->parts[i].queue, op->parts[i].ticket))
            return true;
    return false;
}

void submission_settle(struct submission *submission)
{
    struct backend_batch *batch = submission->batch;
    for (size_t i = 0; i < batch->n_ops; i++) {
        struct backend_op *op = batch->ops[i];
        if (op->status != GRADD_OK)
            continue;
        if (submission->s.status != GRADD_OK) {
            op->status = submission->s.status;
            op->text = submission->s.text;
        } else if (is_unsure(op)) {
            op->status = GRADD_ERR_RANK_LOST;
            op->text = "a rank was lost before its data is known to have been there";
        }
    }
}

void submission_poison(const struct submission *submission)
{
    for (size_t i = 0; i < submission->batch->n_ops; i++) {
        const struct backend_op *op = submission->batch->ops[i];
        for (uint32_t rank = 0; rank < op->n_ranks; rank++)
            if (op->parts[rank].queue)
                queue_poison(op->parts[rank].queue);
    }
}

/* ------------------------------------------------------------------ counters */

static size_t n_inputs(const struct backend_op *op)
{
    size_t n = 0;
    for (uint32_t i = 0; op->nonfinite && i < op->n_ranks; i++)
        n += op->parts[i].in.base != NULL;
    return n;
}

CUresult submission_prepare_counters(struct submission *submission,
                                     const struct cuda_device *device)
{
    const struct backend_batch *batch = submission->batch;
    size_t n = 0;
    for (size_t i = 0; i < batch->n_ops; i++)
        n += n_inputs(batch->ops[i]);
    submission->s.n_counters = 0;
    if (n > submission->s.counters_capacity) {
        const size_t capacity = (n + COUNTERS_STEP - 1) / COUNTERS_STEP * COUNTERS_STEP;
        const size_t bytes = capacity * sizeof(uint64_t);
        void *memory =
            mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
        device->cuda->ctx_set(device->context);
        const CUresult rc = device->cuda->host_register(
            memory, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
        if (rc != CUDA_SUCCESS) {
            munmap(memory, bytes);
            return rc;
        }
        if (submission->s.counters) {
            device->cuda->host_unregister((void *)submission->s.counters);
            munmap((void *)submission->s.counters,
                   submission->s.counters_capacity * sizeof(uint64_t));
        }
        submission->s.counters = memory;
        submission->s.counters_device = device;
        submission->s.counters_capacity = capacity;
    }
    for (size_t i = 0; i < n; i++)
        atomic_store(&submission->s.counters[i], 0);
    submission->s.n_counters = n;
    return CUDA_SUCCESS;
}

CUdeviceptr submission_counters_of(const struct submission *submission, size_t index,
                                   const struct cuda_device *device)
{
    CUdeviceptr base = 0;
    size_t at = 0;
    if (submission->s.n_counters == 0 || !submission->batch->ops[index]->nonfinite)
        return 0;
    for (size_t i = 0; i < index; i++)
        at += n_inputs(submission->batch->ops[i]);
    device->cuda->ctx_set(device->context);
    if (device->cuda->host_device_pointer(&base, (void *)submission->s.counters, 0) != CUDA_SUCCESS)
        return 0;
    return base + at * sizeof(uint64_t);
}

void submission_collect_counters(struct submission *submission)
{
    const struct backend_batch *batch = submission->batch;
    size_t at = 0;
    for (size_t i = 0; submission->s.n_counters > 0 && i < batch->n_ops; i++) {
        const struct backend_op *op = batch->ops[i];
        if (!op->nonfinite)
            continue;
        for (uint32_t rank = 0, input = 0; rank < op->n_ranks; rank++)
            if (op->parts[rank].in.base)
                atomic_store(&op->nonfinite[input++], atomic_load(&submission->s.counters[at++]));
    }
}

CUresult submission_query(const struct submission *submission)
{
    for (unsigned i = 0; i < submission->s.n_events; i++) {
        const struct submission_event *event = &submission->s.events[i];
        if (!event->is_recorded)
            continue;
        event->device->cuda->ctx_set(event->device->context);
        const CUresult rc = event->device->cuda->event_query(event->event);
        if (rc != CUDA_SUCCESS)
            return rc;
    }
    return CUDA_SUCCESS;
}
