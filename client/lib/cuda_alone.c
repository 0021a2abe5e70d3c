/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A world of one on device memory: the op's stream copies. Where there are factors, or inputs are
 * checked, the data visits pinned host memory and a host function does the arithmetic of solo.c, so
 * that results are those of host memory.
 *
 * Invariant: the op has ended as soon as it is submitted; its event tells when the results are
 * there.
 */
#include <stdlib.h>

#include "cuda.h"

/* For the host function, which may not look at the op. */
struct cuda_alone {
    struct cuda *cuda;
    struct gradd_op request; /* in and out: the pinned memory */
    struct op_shape shape;
    uint64_t nonfinite;
    bool was_run;
};

static bool needs_host(const struct gradd_op *request, const struct op_shape *shape)
{
    bool reduces = request->kind == GRADD_ALLREDUCE || request->kind == GRADD_REDUCE_SCATTER;
    return reduces && shape->in_bytes &&
           (request->check_finite || shape->prescale != 1 || shape->postscale != 1);
}

int cuda_alone_prepare(struct gradd *g, const struct gradd_op *request,
                       const struct op_shape *shape, struct op *op)
{
    struct cuda_op *cu = op->cuda;
    if (cu->alone)
        cu->alone->was_run = false;
    if (!needs_host(request, shape))
        return 0;
    if (!cu->alone && !(cu->alone = calloc(1, sizeof *cu->alone)))
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    return stage_borrow(g, &g->cuda->pinned, shape->in_bytes, &cu->in);
}

static void compute(void *data)
{
    struct cuda_alone *alone = data;
    if (alone->request.check_finite)
        alone->nonfinite = solo_count_nonfinite(&alone->request);
    solo_reduce(&alone->request, &alone->shape);
    alone->was_run = true;
    atomic_fetch_sub(&alone->cuda->n_launches, 1);
}

static CUresult run_by_host(struct cuda *cuda, struct cuda_op *cu, const struct gradd_op *request,
                            const struct op_shape *shape)
{
    void *pinned = cu->in->region->base + cu->in->offset;
    CUdeviceptr at = (uintptr_t)pinned;
    struct cuda_alone *alone = cu->alone;
    *alone = (struct cuda_alone){.cuda = cuda, .request = *request, .shape = *shape};
    alone->request.in = alone->request.out = pinned;
    CUresult rc = cuda->table->copy_async(at, (uintptr_t)request->in, shape->in_bytes, cu->stream);
    if (rc != CUDA_SUCCESS)
        return rc;
    atomic_fetch_add(&cuda->n_launches, 1);
    rc = cuda->table->launch_host(cu->stream, compute, alone);
    if (rc != CUDA_SUCCESS) {
        atomic_fetch_sub(&cuda->n_launches, 1);
        return rc;
    }
    return cuda->table->copy_async((uintptr_t)request->out, at, shape->in_bytes, cu->stream);
}

static CUresult run(struct cuda *cuda, struct cuda_op *cu, const struct gradd_op *request,
                    const struct op_shape *shape)
{
    CUresult rc = CUDA_SUCCESS;
    if (cu->in)
        rc = run_by_host(cuda, cu, request, shape);
    else if (shape->in_bytes && shape->out_bytes && request->in != request->out)
        rc = cuda->table->copy_async((uintptr_t)request->out, (uintptr_t)request->in,
                                     shape->in_bytes, cu->stream);
    if (rc == CUDA_SUCCESS)
        rc = cuda->table->event_record(cu->event->event, cu->stream);
    return rc;
}

int cuda_alone_run(struct gradd *g, struct op *op, const struct gradd_op *request,
                   const struct op_shape *shape, const char **out_text)
{
    struct cuda *cuda = g->cuda;
    struct cuda_op *cu = op->cuda;
    bool is_gather = request->kind == GRADD_ALLGATHER || request->kind == GRADD_ALLTOALL;
    if (is_gather && request->count > request->out_capacity) {
        *out_text = "the elements of all ranks do not fit into out_capacity";
        return GRADD_ERR_INVALID;
    }
    if (is_gather && op_set_counts(op, &request->count, 1) < 0)
        return GRADD_ERR_NO_MEMORY;
    int status = cuda_enter(cuda, cu->gpu);
    if (status == 0 && !(cu->event = cuda_event_take(cuda, cu->gpu))) {
        cuda_leave(cuda);
        status = GRADD_ERR_INTERNAL;
    }
    if (status == 0) {
        CUresult rc = run(cuda, cu, request, shape);
        cuda_leave(cuda);
        if (rc != CUDA_SUCCESS)
            status = cuda_failure(cuda, rc, "running the op in its stream");
    }
    if (status < 0) {
        *out_text = gradd_error();
        return status;
    }
    cu->out_user = (uintptr_t)request->out;
    cu->is_delivered = true;
    cu->delivered_by = cu->stream;
    return GRADD_OK;
}

void cuda_alone_end(struct op *op)
{
    const struct cuda_alone *alone = op->cuda->alone;
    if (alone && alone->was_run)
        op->nonfinite = alone->nonfinite;
}
