/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/launch.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/reduce/reduce.h"

enum {
    CHUNK_OPS_MAX = 64,                    /* of one NCCL group */
    CHUNK_SCRATCH_MAX = 256 * 1024 * 1024, /* bytes per GPU, unless one op needs more */
    SCRATCH_STEP = 2 * 1024 * 1024,
};

void launch_init(struct launch *launch)
{
    *launch = (struct launch){0};
    lower_list_init(&launch->list);
}

static void trim_gpu(struct launch_gpu *gpu)
{
    if (gpu->n_outgrown > 0)
        gpu->device->cuda->ctx_set(gpu->device->context);
    for (size_t i = 0; i < gpu->n_outgrown; i++)
        gpu->device->cuda->mem_free(gpu->outgrown[i]);
    gpu->n_outgrown = 0;
}

void launch_trim(struct launch *launch)
{
    for (unsigned i = 0; i < launch->n_gpus; i++)
        trim_gpu(&launch->gpus[i]);
}

void launch_deinit(struct launch *launch)
{
    launch_trim(launch);
    for (unsigned i = 0; i < launch->n_gpus; i++) {
        struct launch_gpu *gpu = &launch->gpus[i];
        free(gpu->outgrown);
        if (!gpu->scratch)
            continue;
        gpu->device->cuda->ctx_set(gpu->device->context);
        gpu->device->cuda->mem_free(gpu->scratch);
        atomic_store(&gpu->device->scratch_bytes, 0);
    }
    lower_list_deinit(&launch->list);
    free(launch->gpus);
    free(launch->ops);
    launch_init(launch);
}

bool launch_is_fatal(CUresult rc)
{
    return rc != CUDA_SUCCESS && rc != CUDA_ERROR_NOT_READY && rc != CUDA_ERROR_OUT_OF_MEMORY &&
           rc != CUDA_ERROR_INVALID_VALUE && rc != CUDA_ERROR_NOT_SUPPORTED;
}

/* NULL: out of memory. */
static struct launch_gpu *gpu_of(struct launch *launch, struct cuda_device *device)
{
    if (device->index >= launch->n_gpus) {
        const unsigned n = device->index + 1;
        struct launch_gpu *gpus = realloc(launch->gpus, n * sizeof *gpus);
        if (!gpus)
            return NULL;
        memset(gpus + launch->n_gpus, 0, (n - launch->n_gpus) * sizeof *gpus);
        launch->gpus = gpus;
        launch->n_gpus = n;
    }
    struct launch_gpu *gpu = &launch->gpus[device->index];
    if (!gpu->device) {
        gpu->device = device;
        device->cuda->ctx_set(device->context);
        if (device->kernels)
            cuda_kernels_load(&gpu->kernels, device->cuda, device->kernels, device->ordinal);
    }
    return gpu;
}

/* ------------------------------------------------------------------ a chunk */

void launch_begin(struct launch *launch)
{
    lower_list_clear(&launch->list);
    launch->n_ops = 0;
}

static void refuse(struct backend_op *op, int status, const char *text)
{
    op->status = status;
    op->text = text;
}

static bool add_op(struct launch *launch, struct backend_op *op)
{
    if (launch->n_ops == launch->ops_capacity) {
        const size_t capacity = launch->ops_capacity ? 2 * launch->ops_capacity : CHUNK_OPS_MAX;
        struct backend_op **ops = realloc(launch->ops, capacity * sizeof(*ops));
        if (!ops)
            return false;
        launch->ops = ops;
        launch->ops_capacity = capacity;
    }
    launch->ops[launch->n_ops++] = op;
    return true;
}

/* Why this step cannot be launched, or NULL. */
static const char *find_obstacle(struct launch *launch, const struct comm *comm,
                                 const struct lower_step *step)
{
    struct launch_gpu *gpu = gpu_of(launch, comm->gpus[step->gpu].device);
    if (!gpu)
        return "the worker has no memory for this GPU";
    if (step->kind != LOWER_REDUCE && step->kind != LOWER_COUNT)
        return NULL;
    if (!gpu->kernels.cuda)
        return "ranks that share a GPU, factors and NaN checks need gradd's kernels, and there are "
               "none for this GPU (gradctl status says why): use backend = host";
    if (step->n_in > CUDA_REDUCE_MAX || step->n_out > CUDA_REDUCE_MAX)
        return "more than 16 ranks on one GPU, or in an integer average over several GPUs, are not "
               "supported on device memory: use backend = host";
    return NULL;
}

static uint64_t max_scratch(const struct lower_list *list, uint32_t n_local)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < n_local; i++)
        if (list->scratch_bytes[i] > most)
            most = list->scratch_bytes[i];
    return most;
}

enum launch_added launch_add(struct launch *launch, const struct comm *comm, struct backend_op *op,
                             CUdeviceptr counters)
{
    struct lower_list *list = &launch->list;
    size_t begin[LOWER_PHASES];
    const char *obstacle = NULL;
    for (int phase = 0; phase < LOWER_PHASES; phase++)
        begin[phase] = list->phases[phase].n;
    if (lower_op(list, op, &comm->map) < 0)
        obstacle = "the worker has no memory for this op";
    for (int phase = 0; phase < LOWER_PHASES; phase++)
        for (size_t i = begin[phase]; !obstacle && i < list->phases[phase].n; i++) {
            struct lower_step *step = &list->phases[phase].steps[i];
            obstacle = find_obstacle(launch, comm, step);
            if (step->kind == LOWER_COUNT && !counters && !obstacle)
                obstacle = "there is no memory that the GPU could count NaNs in";
            if (step->kind == LOWER_COUNT)
                step->to = counters + step->peer * sizeof(uint64_t);
        }
    if (!obstacle && !add_op(launch, op))
        obstacle = "the worker has no memory for this op";
    if (obstacle) {
        for (int phase = 0; phase < LOWER_PHASES; phase++)
            list->phases[phase].n = begin[phase];
        refuse(op, GRADD_ERR_UNSUPPORTED, obstacle);
        return LAUNCH_REFUSED;
    }
    return launch->n_ops >= CHUNK_OPS_MAX ||
                   max_scratch(list, comm->map.n_local) >= CHUNK_SCRATCH_MAX
               ? LAUNCH_FULL
               : LAUNCH_ADDED;
}

/* ------------------------------------------------------------------ launches */

static bool failed_cuda(struct launch_result *result, const struct cuda_device *device,
                        const char *doing, CUresult rc)
{
    if (rc == CUDA_SUCCESS)
        return false;
    result->status = rc == CUDA_ERROR_OUT_OF_MEMORY ? GRADD_ERR_NO_MEMORY : GRADD_ERR_RANK_LOST;
    result->is_device_broken |= launch_is_fatal(rc);
    snprintf(result->text, sizeof result->text, "%s (%.60s): could not %s: %s", device->uuid_text,
             device->name, doing, cuda_table_error(device->cuda, rc));
    return true;
}

static CUresult use(const struct cuda_device *device)
{
    return device->cuda->ctx_set(device->context);
}

static CUresult grow_scratch(struct launch_gpu *gpu, uint64_t bytes)
{
    const struct cuda_table *cuda = gpu->device->cuda;
    CUdeviceptr grown = 0;
    CUdeviceptr *outgrown = realloc(gpu->outgrown, (gpu->n_outgrown + 1) * sizeof *gpu->outgrown);
    if (!outgrown)
        return CUDA_ERROR_OUT_OF_MEMORY;
    gpu->outgrown = outgrown;
    bytes = (bytes + SCRATCH_STEP - 1) / SCRATCH_STEP * SCRATCH_STEP;
    CUresult rc = cuda->mem_alloc(&grown, bytes);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (gpu->scratch)
        gpu->outgrown[gpu->n_outgrown++] = gpu->scratch;
    gpu->scratch = grown;
    gpu->scratch_bytes = bytes;
    atomic_store(&gpu->device->scratch_bytes, bytes);
    return CUDA_SUCCESS;
}

static bool place_scratch(struct launch *launch, struct comm *comm, struct launch_result *result)
{
    for (uint32_t i = 0; i < comm->map.n_local; i++) {
        struct cuda_device *device = comm->gpus[i].device;
        struct launch_gpu *gpu = gpu_of(launch, device);
        const uint64_t bytes = launch->list.scratch_bytes[i];
        if (bytes == 0 || (gpu && bytes <= gpu->scratch_bytes))
            continue;
        CUresult rc = gpu ? use(device) : CUDA_ERROR_OUT_OF_MEMORY;
        if (rc == CUDA_SUCCESS)
            rc = grow_scratch(gpu, bytes);
        if (failed_cuda(result, device, "allocate scratch memory", rc))
            return false;
    }
    return true;
}

static uint64_t resolve(const struct launch *launch, const struct cuda_device *device,
                        uint64_t address)
{
    return lower_address(address, launch->gpus[device->index].scratch);
}

static CUresult launch_reduce(struct launch *launch, const struct cuda_device *device,
                              const struct lower_step *step)
{
    const uint64_t *addresses = launch->list.addresses + step->first_address;
    const void *in[CUDA_REDUCE_MAX];
    void *out[CUDA_REDUCE_MAX];
    for (uint32_t i = 0; i < step->n_in; i++)
        in[i] = (const void *)(uintptr_t)resolve(launch, device, addresses[i]);
    for (uint32_t i = 0; i < step->n_out; i++)
        out[i] = (void *)(uintptr_t)resolve(launch, device, addresses[step->n_in + i]);
    const struct reduction reduction = {
        .dtype = step->dtype,
        .redop = step->redop,
        .n_in = step->n_in,
        .n_out = step->n_out,
        .in = in,
        .out = out,
        .n_zero = step->n_zero,
        .divisor = step->divisor,
        .prescale = step->prescale,
        .postscale = step->postscale,
    };
    return cuda_kernels_reduce(&launch->gpus[device->index].kernels, device->stream, &reduction,
                               step->count);
}

static CUresult launch_step(struct launch *launch, const struct cuda_device *device,
                            const struct lower_step *step)
{
    const struct cuda_table *cuda = device->cuda;
    switch (step->kind) {
    case LOWER_REDUCE:
        return launch_reduce(launch, device, step);
    case LOWER_COPY:
        return cuda->copy_async(resolve(launch, device, step->to),
                                resolve(launch, device, step->from), step->count, device->stream);
    case LOWER_ZERO:
        return cuda->set8_async(resolve(launch, device, step->to), 0, step->count, device->stream);
    case LOWER_COUNT:
        return cuda_kernels_count_nonfinite(&launch->gpus[device->index].kernels, device->stream,
                                            step->dtype, step->from, step->count, step->to);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static bool launch_phase(struct launch *launch, struct comm *comm, enum lower_phase phase,
                         struct launch_result *result)
{
    const struct lower_steps *steps = &launch->list.phases[phase];
    const struct cuda_device *current = NULL;
    for (size_t i = 0; i < steps->n; i++) {
        const struct lower_step *step = &steps->steps[i];
        const struct cuda_device *device = comm->gpus[step->gpu].device;
        CUresult rc = device == current ? CUDA_SUCCESS : use(device);
        current = device;
        if (rc == CUDA_SUCCESS)
            rc = launch_step(launch, device, step);
        if (failed_cuda(result, device, "launch", rc))
            return false;
    }
    return true;
}

/* For every queue of every op of the chunk. */
static bool order(struct launch *launch, bool is_begin, struct launch_result *result)
{
    const struct cuda_device *current = NULL;
    for (size_t i = 0; i < launch->n_ops; i++)
        for (uint32_t rank = 0; rank < launch->ops[i]->n_ranks; rank++) {
            const struct backend_part *part = &launch->ops[i]->parts[rank];
            if (!part->queue)
                continue;
            const struct cuda_device *device = queue_device(part->queue);
            CUresult rc = device == current ? CUDA_SUCCESS : use(device);
            current = device;
            if (rc == CUDA_SUCCESS)
                rc = is_begin ? queue_wait_inputs(part->queue, part->ticket)
                              : queue_mark_results(part->queue, part->ticket, 1, part->ticket_ops);
            if (failed_cuda(result, device,
                            is_begin ? "wait for a trainer's stream" : "mark results", rc))
                return false;
        }
    return true;
}

static ncclResult_t call(struct launch *launch, struct comm *comm, const struct lower_step *step)
{
    const struct nccl_table *nccl = comm->nccl;
    struct comm_gpu *gpu = &comm->gpus[step->gpu];
    const struct cuda_device *device = gpu->device;
    const void *from = (const void *)(uintptr_t)resolve(launch, device, step->from);
    void *to = (void *)(uintptr_t)resolve(launch, device, step->to);
    const int peer = (int)step->peer;
    ncclRedOp_t op = ncclSum;
    ncclResult_t rc = comm_redop(comm, gpu, step, &op);
    if (rc != ncclSuccess)
        return rc;
    switch (step->kind) {
    case LOWER_ALL_REDUCE:
        return nccl->all_reduce(from, to, step->count, step->dtype, op, gpu->handle,
                                device->stream);
    case LOWER_BROADCAST:
        return nccl->broadcast(from, to, step->count, step->dtype, peer, gpu->handle,
                               device->stream);
    case LOWER_ALL_GATHER:
        return nccl->all_gather(from, to, step->count, step->dtype, gpu->handle, device->stream);
    case LOWER_REDUCE_SCATTER:
        return nccl->reduce_scatter(from, to, step->count, step->dtype, op, gpu->handle,
                                    device->stream);
    case LOWER_REDUCE_TO:
        return nccl->reduce(from, to, step->count, step->dtype, op, peer, gpu->handle,
                            device->stream);
    case LOWER_SEND:
        return nccl->send(from, step->count, step->dtype, peer, gpu->handle, device->stream);
    case LOWER_RECV:
        return nccl->recv(to, step->count, step->dtype, peer, gpu->handle, device->stream);
    default:
        return ncclInvalidArgument;
    }
}

/* Operators are made before the group: NCCL wants nothing between its calls. */
static ncclResult_t make_redops(struct launch *launch, struct comm *comm)
{
    const struct lower_steps *steps = &launch->list.phases[LOWER_CALLS];
    ncclResult_t rc = ncclSuccess;
    ncclRedOp_t op;
    for (size_t i = 0; i < steps->n && rc == ncclSuccess; i++)
        rc = comm_redop(comm, &comm->gpus[steps->steps[i].gpu], &steps->steps[i], &op);
    return rc;
}

static void call_nccl(struct launch *launch, struct comm *comm, struct launch_result *result)
{
    const struct lower_steps *steps = &launch->list.phases[LOWER_CALLS];
    if (steps->n == 0)
        return;
    ncclResult_t rc = make_redops(launch, comm);
    result->has_group = true;
    if (rc == ncclSuccess)
        rc = comm->nccl->group_start();
    if (rc == ncclSuccess) {
        for (size_t i = 0; i < steps->n && (rc == ncclSuccess || rc == ncclInProgress); i++) {
            use(comm->gpus[steps->steps[i].gpu].device);
            rc = call(launch, comm, &steps->steps[i]);
        }
        const ncclResult_t end = comm->nccl->group_end();
        rc = rc == ncclSuccess || rc == ncclInProgress ? end : rc;
    }
    result->nccl = rc;
}

void launch_calls(struct launch *launch, struct comm *comm, struct launch_result *result)
{
    *result = (struct launch_result){.status = GRADD_OK};
    for (uint32_t i = 0; i < comm->map.n_local; i++)
        if (!gpu_of(launch, comm->gpus[i].device)) {
            failed_cuda(result, comm->gpus[i].device, "keep a GPU", CUDA_ERROR_OUT_OF_MEMORY);
            return;
        }
    if (place_scratch(launch, comm, result) && order(launch, true, result) &&
        launch_phase(launch, comm, LOWER_BEFORE, result))
        call_nccl(launch, comm, result);
}

void launch_finish(struct launch *launch, struct comm *comm, struct launch_result *result)
{
    if (launch_phase(launch, comm, LOWER_AFTER, result))
        order(launch, false, result);
}
