/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/plan/signature.h"
#include "worker/reduce/reduce.h"

enum {
    CHUNK_OPS_MAX = 64,                    /* of one NCCL group */
    CHUNK_SCRATCH_MAX = 256 * 1024 * 1024, /* bytes per GPU, unless one op needs more */
    SMALL_COPY_BYTES = 64 * 1024, /* the copy engine takes longer to begin than these to be made */
};

void launch_init(struct launch *launch)
{
    *launch = (struct launch){0};
    lower_list_init(&launch->list);
}

void launch_trim(struct launch *launch)
{
    for (unsigned i = 0; i < launch->n_gpus; i++)
        launch_gpu_trim(&launch->gpus[i]);
}

void launch_deinit(struct launch *launch)
{
    launch_trim(launch);
    for (unsigned i = 0; i < launch->n_gpus; i++)
        launch_gpu_deinit(&launch->gpus[i]);
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
    if (!gpu->device)
        launch_gpu_init(gpu, device);
    return gpu;
}

bool launch_take_event(struct launch *launch, struct cuda_device *device, CUevent *out)
{
    struct launch_gpu *gpu = gpu_of(launch, device);
    return gpu && launch_gpu_take_event(gpu, out);
}

void launch_give_event(struct launch *launch, const struct cuda_device *device, CUevent event)
{
    launch_gpu_give_event(&launch->gpus[device->index], event);
}

/* ------------------------------------------------------------------ a chunk */

void launch_begin(struct launch *launch)
{
    lower_list_clear(&launch->list);
    launch->n_ops = 0;
    launch->scratch_max = 0;
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
    if (!gpu->kernels.cuda && gpu->device->kernels_text[0])
        return gpu->device->kernels_text;
    if (!gpu->kernels.cuda)
        return "ranks that share a GPU, factors and NaN checks need gradd's kernels, and there are "
               "none for this GPU (gradctl status says why): use backend = host";
    _Static_assert(CUDA_REDUCE_MAX == 64, "the sentence below says so");
    if (step->n_in > CUDA_REDUCE_MAX || step->n_out > CUDA_REDUCE_MAX)
        return "more than 64 ranks on one GPU, or in an integer average over several GPUs, are not "
               "supported on device memory: use backend = host";
    return NULL;
}

/* A kernel that loads across an element's own size faults, and the context with it is lost. */
static bool is_aligned(const struct backend_op *op)
{
    const uintptr_t bytes = dtype_bytes(op->dtype);
    for (uint32_t i = 0; bytes > 1 && i < op->n_ranks; i++)
        if (((uintptr_t)op->parts[i].in.base | (uintptr_t)op->parts[i].out.base) % bytes != 0)
            return false;
    return true;
}

enum launch_added launch_add(struct launch *launch, const struct comm *comm, struct backend_op *op,
                             CUdeviceptr counters)
{
    struct lower_list *list = &launch->list;
    size_t begin[LOWER_PHASES];
    const char *obstacle = NULL;
    for (int phase = 0; phase < LOWER_PHASES; phase++)
        begin[phase] = list->phases[phase].n;
    if (!is_aligned(op))
        obstacle = "a tensor in device memory is not at a multiple of its element's size";
    else if (lower_op(list, op, &comm->map) < 0)
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
    launch->scratch_max += lower_scratch_max(op, &comm->map);
    return launch->n_ops >= CHUNK_OPS_MAX || launch->scratch_max >= CHUNK_SCRATCH_MAX
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
            rc = launch_gpu_grow_scratch(gpu, bytes);
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

/* Small copies are launched as one. */
static bool is_small_copy(const struct launch_gpu *gpu, const struct lower_step *step)
{
    return gpu->kernels.cuda && step->kind == LOWER_COPY && step->count <= SMALL_COPY_BYTES;
}

static CUresult flush_copies(struct launch *launch, const struct cuda_device *device)
{
    const size_t n = launch->n_copies;
    const struct cuda_copy_segment *only = &launch->copies[0];
    launch->n_copies = 0;
    if (n == 0)
        return CUDA_SUCCESS;
    if (n == 1)
        return device->cuda->copy_async(only->to, only->from, only->bytes, device->stream);
    return cuda_kernels_copy(&launch->gpus[device->index].kernels, device->stream, launch->copies,
                             n);
}

/* A step on the device whose context is current. Copies of a phase do not depend on each other. */
static CUresult take_step(struct launch *launch, const struct cuda_device *device,
                          const struct lower_step *step)
{
    const bool is_kept = is_small_copy(&launch->gpus[device->index], step);
    if (!is_kept || launch->n_copies == CUDA_COPY_SEGMENTS) {
        const CUresult rc = flush_copies(launch, device);
        if (rc != CUDA_SUCCESS)
            return rc;
    }
    if (!is_kept)
        return launch_step(launch, device, step);
    launch->copies[launch->n_copies++] = (struct cuda_copy_segment){
        resolve(launch, device, step->to), resolve(launch, device, step->from), step->count};
    return CUDA_SUCCESS;
}

/* The phase's steps on one GPU. */
static bool launch_on(struct launch *launch, const struct cuda_device *device, uint32_t gpu,
                      const struct lower_steps *steps, struct launch_result *result)
{
    CUresult rc = CUDA_SUCCESS;
    bool is_used = false;
    launch->n_copies = 0;
    for (size_t i = 0; i < steps->n && rc == CUDA_SUCCESS; i++) {
        if (steps->steps[i].gpu != gpu)
            continue;
        if (!is_used)
            rc = use(device);
        is_used = true;
        if (rc == CUDA_SUCCESS)
            rc = take_step(launch, device, &steps->steps[i]);
    }
    if (rc == CUDA_SUCCESS)
        rc = flush_copies(launch, device);
    return !failed_cuda(result, device, "launch", rc);
}

static bool launch_phase(struct launch *launch, struct comm *comm, enum lower_phase phase,
                         struct launch_result *result)
{
    for (uint32_t gpu = 0; gpu < comm->map.n_local; gpu++)
        if (!launch_on(launch, comm->gpus[gpu].device, gpu, &launch->list.phases[phase], result))
            return false;
    return true;
}

/* Ops of one ticket, that were submitted as one. */
struct ticket_ops {
    struct queue *queue;
    uint64_t ticket;
    uint32_t n_ops, n_ticket_ops;
};

static bool order_ticket(const struct ticket_ops *ops, bool is_begin, struct launch_result *result)
{
    if (!ops->queue)
        return true;
    const struct cuda_device *device = queue_device(ops->queue);
    CUresult rc = use(device);
    if (rc == CUDA_SUCCESS)
        rc = is_begin ? queue_wait_inputs(ops->queue, ops->ticket)
                      : queue_mark_results(ops->queue, ops->ticket, ops->n_ops, ops->n_ticket_ops);
    return !failed_cuda(result, device, is_begin ? "wait for a trainer's stream" : "mark results",
                        rc);
}

/* Once for every ticket of every rank, however many ops it has in the chunk. */
static bool order(struct launch *launch, bool is_begin, struct launch_result *result)
{
    const uint32_t n_ranks = launch->n_ops > 0 ? launch->ops[0]->n_ranks : 0;
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        struct ticket_ops now = {0};
        for (size_t i = 0; i < launch->n_ops; i++) {
            const struct backend_part *part = &launch->ops[i]->parts[rank];
            if (part->queue == now.queue && part->ticket == now.ticket) {
                now.n_ops++;
                continue;
            }
            if (!order_ticket(&now, is_begin, result))
                return false;
            now = (struct ticket_ops){part->queue, part->ticket, 1, part->ticket_ops};
        }
        if (!order_ticket(&now, is_begin, result))
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
