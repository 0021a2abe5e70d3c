/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ops on device memory: finding out which they are, what they need, and putting it into the stream.
 *
 * Invariants: a submission has one GPU, one stream and one kind of memory; what is put into the
 * stream before the submission is known to the worker, or never will be; buffers go back to their
 * pool only when the event behind their last use has happened.
 */
#include <stdlib.h>

#include "cuda.h"

/* ------------------------------------------------------------------ side records */

static struct cuda_op *new_record(struct cuda *cuda, struct cuda_gpu *gpu, CUstream stream)
{
    struct cuda_op *cu = cuda->idle_ops;
    if (cu)
        cuda->idle_ops = cu->next;
    else if (!(cu = malloc(sizeof *cu)))
        return NULL;
    else
        cu->alone = NULL;
    *cu = (struct cuda_op){.gpu = gpu, .stream = stream, .alone = cu->alone};
    return cu;
}

static void recycle(struct cuda *cuda, struct cuda_op *cu)
{
    stage_give_back(cu->in);
    if (cu->out != cu->in)
        stage_give_back(cu->out);
    cuda_word_put(cuda, cu->word);
    cuda_event_put(cu->gpu, cu->event);
    cu->next = cuda->idle_ops;
    cuda->idle_ops = cu;
}

static bool is_under_way(const struct cuda *cuda, const struct cuda_op *cu)
{
    if (!cu->event || cuda_enter(cuda, cu->gpu) < 0)
        return false;
    CUresult rc = cuda->table->event_query(cu->event->event);
    cuda_leave(cuda);
    return rc == CUDA_ERROR_NOT_READY;
}

void cuda_op_release(struct gradd *g, struct op *op)
{
    struct cuda_op *cu = op->cuda;
    op->cuda = NULL;
    if (!is_under_way(g->cuda, cu)) {
        recycle(g->cuda, cu);
        return;
    }
    cu->next = g->cuda->draining;
    g->cuda->draining = cu;
}

void cuda_ops_collect(struct gradd *g)
{
    struct cuda_op **at = &g->cuda->draining;
    while (*at) {
        struct cuda_op *cu = *at;
        if (is_under_way(g->cuda, cu)) {
            at = &cu->next;
            continue;
        }
        *at = cu->next;
        recycle(g->cuda, cu);
    }
}

void cuda_ops_free(struct cuda *cuda)
{
    struct cuda_op *lists[] = {cuda->idle_ops, cuda->draining};
    for (unsigned i = 0; i < 2; i++) {
        while (lists[i]) {
            struct cuda_op *cu = lists[i];
            lists[i] = cu->next;
            free(cu->alone);
            free(cu);
        }
    }
}

/* ------------------------------------------------------------------ whose memory is it? */

struct side {
    const void *address;
    uint64_t bytes;
    bool is_device;
    struct cuda_memory memory;
};

static void look(const struct gradd *g, const struct cuda_table *table, struct side *side)
{
    side->is_device = side->bytes && side->address &&
                      !region_table_find(&g->regions, side->address) &&
                      cuda_memory_find(table, side->address, &side->memory);
}

static int check_sides(const char *name, const struct side *in, const struct side *out)
{
    const struct side *sides[] = {in, out};
    if (in->bytes && out->bytes && in->is_device != out->is_device)
        return error_set(GRADD_ERR_INVALID,
                         "\"%s\": in is %s memory and out is %s memory: both must be of one kind",
                         name, in->is_device ? "device" : "host",
                         out->is_device ? "device" : "host");
    if (in->is_device && out->is_device && in->memory.ordinal != out->memory.ordinal)
        return error_set(GRADD_ERR_INVALID, "\"%s\": in is on GPU %d and out on GPU %d", name,
                         in->memory.ordinal, out->memory.ordinal);
    for (unsigned i = 0; i < 2; i++) {
        const struct side *side = sides[i];
        uint64_t offset = (uintptr_t)side->address - side->memory.base;
        /* VMM memory goes on in the next chunk. */
        if (side->is_device && side->memory.is_ipc &&
            side->bytes > side->memory.bytes - (offset < side->memory.bytes ? offset : 0))
            return error_set(GRADD_ERR_INVALID,
                             "\"%s\": %llu bytes at %p reach beyond their allocation of %zu bytes",
                             name, (unsigned long long)side->bytes, side->address,
                             side->memory.bytes);
    }
    return 0;
}

/* ------------------------------------------------------------------ buffers */

static void use_buffer(struct lane *lane, const struct stage_buffer *buffer)
{
    lane->region = buffer->region;
    lane->offset = buffer->offset;
}

static CUdeviceptr address_of(const struct stage_buffer *buffer)
{
    return (uintptr_t)buffer->region->base + buffer->offset;
}

/* A buffer for each side that is copied; kinds that work piece by piece take one for both. */
static int borrow(struct gradd *g, struct stage_pool *pool, struct op *op, const struct side *in,
                  const struct side *out)
{
    struct cuda_op *cu = op->cuda;
    bool takes_in = in->bytes && !op->in.region, takes_out = out->bytes && !op->out.region;
    int rc = 0;
    if (takes_in && (rc = stage_borrow(g, pool, in->bytes, &cu->in)) == 0) {
        cu->in_user = (uintptr_t)in->address;
        use_buffer(&op->in, cu->in);
    }
    if (rc < 0 || !takes_out)
        return rc;
    if (takes_in && op->is_flowing)
        cu->out = cu->in;
    else
        rc = stage_borrow(g, pool, out->bytes, &cu->out);
    if (rc == 0) {
        cu->out_user = (uintptr_t)out->address;
        use_buffer(&op->out, cu->out);
    }
    return rc;
}

/* The tensor's own memory, if it can be shared and kernels can work there: loads and stores that
 * cross their own size are faults on a GPU. 0 (lane->region says) or a status. */
static int share(struct gradd *g, const struct op *op, const struct side *side, struct lane *lane)
{
    struct cuda_region *region;
    const char *text;
    if (!side->bytes || (uintptr_t)side->address % op->element_bytes != 0)
        return 0;
    int rc = cuda_region_get(g, op->cuda->gpu, &side->memory, side->address, side->bytes, &region,
                             &text);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    lane->region = &region->region;
    lane->offset = (uintptr_t)side->address - (uintptr_t)region->region.base;
    return 0;
}

/* While the lock may be released, a region that is named here must not be taken for unused. */
static void hold(struct lane *lane, int change)
{
    if (lane->region)
        lane->region->n_uses += (unsigned)change;
}

static int place_shared(struct gradd *g, struct op *op, const struct side *in,
                        const struct side *out)
{
    int rc = share(g, op, in, &op->in);
    const struct lane shared_in = op->in;
    hold(&op->in, 1);
    /* In place, these kinds would overwrite what other ranks have still to read. */
    if (rc == 0 && (op->is_flowing || in->address != out->address))
        rc = share(g, op, out, &op->out);
    const struct lane shared_out = op->out;
    hold(&op->out, 1);
    if (rc == 0)
        rc = borrow(g, &op->cuda->gpu->bounce, op, in, out);
    hold(&(struct lane){.region = shared_in.region}, -1);
    hold(&(struct lane){.region = shared_out.region}, -1);
    if (rc == 0)
        op_hold_regions(op);
    return rc;
}

static int place_staged(struct gradd *g, struct op *op, const struct side *in,
                        const struct side *out)
{
    int rc = borrow(g, &g->cuda->pinned, op, in, out);
    if (rc == 0 && op->cuda->gpu->has_flags)
        rc = cuda_word_take(g, op->cuda->gpu, &op->cuda->word);
    if (rc == 0 && op->cuda->word)
        op->cuda->word_value = op->cuda->word->value;
    return rc;
}

/* The root of a broadcast has one buffer on the wire; a second one is filled by its stream. */
static void skip_output_of_root(const struct gradd *g, const struct gradd_op *request,
                                struct op *op, const struct side *in, struct side *out)
{
    if (request->kind != GRADD_BROADCAST || request->root != g->identity.rank || g->is_solo)
        return;
    if (out->bytes && out->address != in->address) {
        op->cuda->root_from = (uintptr_t)in->address;
        op->cuda->root_to = (uintptr_t)out->address;
    }
    out->bytes = 0;
}

int cuda_op_prepare(struct gradd *g, const struct cuda_table *table, const struct gradd_op *request,
                    const struct op_shape *shape, struct op *op)
{
    struct side in = {.address = request->in, .bytes = op->in_bytes};
    struct side out = {.address = request->out, .bytes = op->out_bytes};
    struct cuda *cuda;
    struct cuda_gpu *gpu;
    look(g, table, &in);
    if (out.address != in.address || !in.bytes) {
        look(g, table, &out);
    } else if (out.bytes) {
        out.is_device = in.is_device;
        out.memory = in.memory;
    }
    if (!in.is_device && !out.is_device)
        return CUDA_HOST;
    int rc = check_sides(request->name, &in, &out);
    if (rc == 0)
        rc = cuda_get(g, table, &cuda);
    const struct cuda_memory *memory = in.is_device ? &in.memory : &out.memory;
    if (rc == 0)
        rc = cuda_gpu_get(cuda, memory->ordinal, memory->context, request->stream, &gpu);
    if (rc != 0)
        return rc;
    cuda_ops_collect(g);
    if (!(op->cuda = new_record(cuda, gpu, request->stream)))
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    op->cuda->has_late_size = request->kind == GRADD_ALLGATHER || request->kind == GRADD_ALLTOALL;
    skip_output_of_root(g, request, op, &in, &out);
    if (g->is_solo)
        rc = cuda_alone_prepare(g, request, shape, op);
    else if (g->has_device_path)
        rc = place_shared(g, op, &in, &out);
    else
        rc = place_staged(g, op, &in, &out);
    return rc < 0 ? rc : CUDA_PLACED;
}

/* ------------------------------------------------------------------ submissions */

/* Ops without any memory go with the others. */
static int join_one(struct gradd *g, const struct op *first, struct op *op)
{
    const struct cuda_op *with = first->cuda;
    if (!op->cuda) {
        if (op->in_bytes || op->out_bytes)
            return error_set(GRADD_ERR_INVALID,
                             "a submission has tensors in host and in device memory: submit them "
                             "apart");
        op->cuda = new_record(g->cuda, with->gpu, with->stream);
        return op->cuda ? 0 : error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    }
    if (op->cuda->gpu != with->gpu || op->cuda->stream != with->stream)
        return error_set(GRADD_ERR_INVALID, "a submission has ops of several GPUs or streams: "
                                            "submit them apart");
    return 0;
}

static int check_capture(const struct cuda *cuda, const struct cuda_op *cu)
{
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    int rc = cuda_enter(cuda, cu->gpu);
    if (rc < 0)
        return rc;
    CUresult result = cuda->table->stream_capturing(cu->stream, &status);
    cuda_leave(cuda);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return error_set(GRADD_ERR_UNSUPPORTED,
                         "the op's stream is the default one, which is of no use while a stream "
                         "that waits for it is capturing a graph");
    if (result != CUDA_SUCCESS)
        return cuda_failure(cuda, result, "the op's stream");
    if (status != CU_STREAM_CAPTURE_STATUS_NONE)
        return error_set(GRADD_ERR_UNSUPPORTED,
                         "the op's stream is capturing a graph, which can not contain an op: end "
                         "the capture before it, and begin another one behind it");
    return 0;
}

int cuda_ops_join(struct gradd *g, struct op **ops, size_t n)
{
    struct op *first = NULL;
    for (size_t i = 0; i < n && !first; i++)
        if (ops[i]->cuda)
            first = ops[i];
    if (!first)
        return 0;
    int rc = check_capture(g->cuda, first->cuda);
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = join_one(g, first, ops[i]);
    if (rc != 0 || !g->has_device_path)
        return rc;
    struct cuda_queue *queue;
    rc = cuda_queue_get(g, first->cuda->gpu, first->cuda->stream, &queue);
    for (size_t i = 0; i < n && rc == 0; i++)
        ops[i]->cuda->queue = queue;
    return rc;
}

static int copy(const struct cuda *cuda, CUdeviceptr to, CUdeviceptr from, uint64_t bytes,
                CUstream stream)
{
    CUresult rc = cuda->table->copy_async(to, from, bytes, stream);
    return rc == CUDA_SUCCESS ? 0 : cuda_failure(cuda, rc, "copying device memory");
}

/* Copies in, and an event behind the use of the op's buffers. */
static int issue_one(struct cuda *cuda, struct op *op)
{
    struct cuda_op *cu = op->cuda;
    int rc = 0;
    if (cu->in_user)
        rc = copy(cuda, address_of(cu->in), cu->in_user, op->in_bytes, cu->stream);
    if (rc == 0 && cu->root_to)
        rc = copy(cuda, cu->root_to, cu->root_from, op->out_bytes, cu->stream);
    if (rc < 0 || !(cu->in || cu->out))
        return rc;
    if (!(cu->event = cuda_event_take(cuda, cu->gpu)))
        return GRADD_ERR_INTERNAL;
    CUresult result = cuda->table->event_record(cu->event->event, cu->stream);
    return result == CUDA_SUCCESS ? 0 : cuda_failure(cuda, result, "an event");
}

int cuda_ops_issue(struct gradd *g, struct op **ops, size_t n)
{
    struct cuda *cuda = g->cuda;
    struct cuda_op *cu = ops[0]->cuda;
    uint64_t ticket = 0;
    int rc = cuda_enter(cuda, cu->gpu);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = issue_one(cuda, ops[i]);
    if (rc == 0 && cu->queue)
        rc = cuda_queue_submit(cuda, cu->queue, (uint32_t)n, &ticket);
    cuda_leave(cuda);
    for (size_t i = 0; i < n && rc == 0; i++)
        ops[i]->cuda->ticket = ticket;
    return rc;
}

bool cuda_op_is_staged(const struct op *op)
{
    return op->cuda && !op->cuda->queue;
}

void cuda_ops_launch(struct gradd *g, struct op **ops, size_t n, struct cuda_launch *launch)
{
    struct cuda *cuda = g->cuda;
    struct cuda_op *cu = ops[0]->cuda;
    int rc = cuda_enter(cuda, cu->gpu);
    if (rc == 0) {
        CUresult result = cuda_launch_add(cuda, launch, cu->stream);
        cuda_leave(cuda);
        if (result == CUDA_SUCCESS)
            return;
        rc = cuda_failure(cuda, result, "a host function");
    }
    for (size_t i = 0; i < n; i++)
        context_end_op(g, ops[i], rc, gradd_error());
}

void cuda_op_describe(const struct op *op, Pb__Buffer *signal, Pb__Submit *out)
{
    const struct cuda_op *cu = op->cuda;
    out->is_device = true;
    if (cu->queue) {
        out->queue = cu->queue->id;
        out->ticket = cu->ticket;
    }
    if (cu->word) {
        pb__buffer__init(signal);
        signal->region = cu->word->page->region->id;
        signal->offset = 8 * (uint64_t)cu->word->index;
        out->signal = signal;
        out->signal_value = cu->word_value;
    }
}

/* ------------------------------------------------------------------ what the worker says */

void cuda_op_enqueued(struct gradd *g, struct op *op)
{
    struct cuda_op *cu = op->cuda;
    if (cu->is_launched || !cu->queue)
        return;
    cu->is_launched = true;
    struct cuda_slot *slot = cuda_queue_slot(cu->queue, cu->ticket);
    if (slot && slot->n_unlaunched > 0)
        slot->n_unlaunched--;
    g->has_ended = true; /* a thread may wait for just this */
}

void cuda_op_ended(struct gradd *g, struct op *op, int status)
{
    struct cuda_op *cu = op->cuda;
    struct cuda_slot *slot = cu->queue ? cuda_queue_slot(cu->queue, cu->ticket) : NULL;
    if (slot && !cu->is_launched && slot->n_unlaunched > 0)
        slot->n_unlaunched--;
    if (slot && slot->n_running > 0)
        slot->n_running--;
    if (cu->word && status != GRADD_OK)
        cuda_word_store(cu->word, cu->word_value);
    if (!cu->out_user || status != GRADD_OK)
        cu->is_delivered = true;
}
