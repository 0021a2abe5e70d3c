/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results of ops on device memory: streams that wait for them, copies into the caller's memory.
 *
 * Invariant: an op's result is copied out once, by the stream that first asked for it, or by the
 * op's own when the host did; every other stream waits for the event behind that copy. Only
 * cuda_await_delivery() waits, and it polls that event.
 */
#include <time.h>

#include "cuda.h"

/* What the op has written of `out`, once that is known. */
static uint64_t result_bytes(const struct op *op)
{
    if (!op->cuda->has_late_size || op->n_counts == 0)
        return op->out_bytes;
    uint64_t sum = 0;
    for (size_t i = 0; i < op->n_counts; i++)
        sum += op->counts[i];
    return sum < op->out_bytes / op->element_bytes ? sum * op->element_bytes : op->out_bytes;
}

static int copy_out(struct cuda *cuda, struct op *op, CUstream stream)
{
    struct cuda_op *cu = op->cuda;
    CUdeviceptr from = (uintptr_t)cu->out->region->base + cu->out->offset;
    uint64_t bytes = result_bytes(op);
    CUresult rc = CUDA_SUCCESS;
    if (bytes > 0)
        rc = cuda->table->copy_async(cu->out_user, from, bytes, stream);
    if (rc == CUDA_SUCCESS)
        rc = cuda->table->event_record(cu->event->event, stream);
    if (rc != CUDA_SUCCESS)
        return cuda_failure(cuda, rc, "copying a result to the device");
    cu->is_delivered = true;
    cu->delivered_by = stream;
    return 0;
}

/* ------------------------------------------------------------------ for the host */

/* Has what was put into streams for this op happened? 0, GRADD_PENDING, or a status. */
static int look(const struct cuda *cuda, const struct cuda_op *cu)
{
    if (!cu->event)
        return 0;
    CUresult rc = cuda->table->event_query(cu->event->event);
    if (rc == CUDA_ERROR_NOT_READY)
        return GRADD_PENDING;
    return rc == CUDA_SUCCESS ? 0 : cuda_failure(cuda, rc, "the op's stream");
}

int cuda_deliver(struct gradd *g, struct op *lead)
{
    struct cuda *cuda = g->cuda;
    int rc = cuda_enter(cuda, lead->cuda->gpu);
    if (rc < 0)
        return rc;
    for (struct op *op = lead; op && rc == 0; op = op->next)
        if (!op->cuda->is_delivered)
            rc = copy_out(cuda, op, op->cuda->stream);
    for (struct op *op = lead; op && rc == 0; op = op->next)
        rc = look(cuda, op->cuda);
    cuda_leave(cuda);
    for (struct op *op = lead; op && rc == 0 && g->is_solo; op = op->next)
        cuda_alone_end(op);
    return rc;
}

int cuda_await_delivery(struct gradd *g, struct op *lead, uint64_t deadline_ns)
{
    /* Short at first: most copies take microseconds. */
    long pause_ns = 5000;
    for (;;) {
        int rc = cuda_deliver(g, lead);
        if (rc != GRADD_PENDING || (deadline_ns && context_now_ns() >= deadline_ns))
            return rc;
        pthread_mutex_unlock(&g->lock);
        nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
        pthread_mutex_lock(&g->lock);
        if (pause_ns < 200000)
            pause_ns += pause_ns;
    }
}

/* ------------------------------------------------------------------ for streams */

static bool is_launched(const struct op *op)
{
    const struct cuda_op *cu = op->cuda;
    if (op->state == OP_ENDED || cu->is_delivered)
        return true;
    if (cu->out_user && cu->has_late_size)
        return false; /* how much to copy is not known yet */
    return cu->queue ? cu->is_launched : cu->word != NULL;
}

bool cuda_is_launched(const void *lead)
{
    for (const struct op *op = lead; op; op = op->next)
        if (!is_launched(op))
            return false;
    return true;
}

static CUresult wait_for(struct cuda *cuda, const struct op *lead, const struct op *op,
                         CUstream stream)
{
    const struct cuda_op *cu = op->cuda;
    if (op->state == OP_ENDED)
        return CUDA_SUCCESS;
    if (cu->queue) /* one ticket for all */
        return op == lead ? cuda_queue_wait(cuda, cu->queue, cu->ticket, stream) : CUDA_SUCCESS;
    return cuda_word_wait(cuda, cu->gpu, cu->word, cu->word_value, stream);
}

static int order_one(struct cuda *cuda, struct op *lead, struct op *op, CUstream stream)
{
    struct cuda_op *cu = op->cuda;
    CUresult rc = CUDA_SUCCESS;
    if (!cu->is_delivered || !cu->out_user)
        rc = wait_for(cuda, lead, op, stream);
    if (rc == CUDA_SUCCESS && cu->out_user && !cu->is_delivered)
        return copy_out(cuda, op, stream);
    const bool is_behind = cu->delivered_by == stream && !cuda_is_per_thread(stream);
    if (rc == CUDA_SUCCESS && cu->out_user && cu->event && !is_behind)
        rc = cuda->table->stream_wait_event(stream, cu->event->event, 0);
    return rc == CUDA_SUCCESS ? 0 : cuda_failure(cuda, rc, "making a stream wait");
}

int cuda_order_stream(struct gradd *g, struct op *lead, CUstream stream)
{
    struct cuda *cuda = g->cuda;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    int rc = cuda_enter(cuda, lead->cuda->gpu);
    if (rc < 0)
        return rc;
    CUresult result = cuda->table->stream_capturing(stream, &status);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        rc = error_set(GRADD_ERR_UNSUPPORTED, "the default stream waits for all others, of which "
                                              "one is capturing a graph");
    else if (result != CUDA_SUCCESS)
        rc = cuda_failure(cuda, result, "the stream that is to wait");
    else if (status != CU_STREAM_CAPTURE_STATUS_NONE)
        rc = error_set(GRADD_ERR_UNSUPPORTED, "the stream that is to wait is capturing a graph");
    /* Waits first: copies of one op must not delay the wait for another. */
    for (struct op *op = lead; op && rc == 0; op = op->next)
        rc = order_one(cuda, lead, op, stream);
    cuda_leave(cuda);
    if (rc == 0)
        cuda_abandon(lead);
    return rc;
}

void cuda_abandon(struct op *lead)
{
    struct cuda_op *cu = lead->cuda;
    struct cuda_slot *slot = cu->queue ? cuda_queue_slot(cu->queue, cu->ticket) : NULL;
    if (slot)
        slot->needs_no_wait = true;
}

void cuda_settle(struct gradd *g, struct op *lead)
{
    if (lead->status == GRADD_OK)
        cuda_deliver(g, lead);
    for (struct op *op = lead; op; op = op->next)
        if (op->cuda)
            cuda_op_release(g, op);
}
