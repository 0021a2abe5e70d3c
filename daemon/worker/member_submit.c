/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a trainer submits: everything that it says is checked, and what the op needs is pinned,
 * before the plan sees the request. Feeds raise how far a streamed one may run.
 */
#include <stdio.h>

#include "worker/epoch.h"
#include "worker/exec.h"
#include "worker/member_internal.h"

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Pin `bytes` of a buffer (its ring, if it is one). False: *out_text says why. */
static bool pin_buffer(struct member *member, const Pb__Buffer *buffer, uint64_t bytes,
                       bool may_be_ring, struct backend_span *span, struct region **region,
                       const char **out_text)
{
    if (bytes == 0)
        return true;
    if (!buffer || buffer->region == 0) {
        *out_text = "names no buffer";
        return false;
    }
    uint64_t ring = buffer->ring_bytes;
    if (ring && (!may_be_ring || ring % 8 != 0)) {
        *out_text = "has a ring where none may be, or one that is no multiple of 8 bytes";
        return false;
    }
    span->base = region_pin(&member->regions, buffer->region, buffer->offset,
                            ring ? min_u64(ring, bytes) : bytes, region, out_text);
    span->ring_bytes = ring < bytes ? ring : 0;
    return span->base;
}

/* How many elements of input and output the op has on this rank. */
static void buffer_counts(const struct member *member, const Pb__Submit *submit, uint64_t *out_in,
                          uint64_t *out_out)
{
    const uint32_t *ranks;
    uint32_t n = epoch_set_ranks(member->epoch, submit->set, &ranks);
    *out_in = submit->count;
    *out_out = submit->count;
    switch (submit->kind) {
    case GRADD_BROADCAST:
        *(submit->root == (int32_t)member->rank ? out_out : out_in) = 0;
        break;
    case GRADD_ALLGATHER:
    case GRADD_ALLTOALL:
        *out_out = submit->out_capacity;
        break;
    case GRADD_REDUCE_SCATTER:
        *out_out = 0;
        for (uint32_t i = 0; i < n && i < submit->n_counts; i++)
            if (ranks[i] == member->rank)
                *out_out = submit->counts[i];
        break;
    case GRADD_ALLREDUCE:
        break;
    default:
        *out_in = *out_out = 0;
    }
}

/* The same in bytes. False: *out_text says why there can be no such buffer. */
static bool buffer_bytes(const struct member *member, const Pb__Submit *submit, uint64_t *out_in,
                         uint64_t *out_out, const char **out_text)
{
    const uint64_t size = dtype_bytes(submit->dtype);
    uint64_t n_in, n_out, in_bytes, out_bytes;
    buffer_counts(member, submit, &n_in, &n_out);
    if (__builtin_mul_overflow(n_in, size, &in_bytes) ||
        __builtin_mul_overflow(n_out, size, &out_bytes)) {
        *out_text = "has a count beyond all memory";
        return false;
    }
    if ((n_in > 0 || n_out > 0) && size == 0) {
        *out_text = "has an unknown element type";
        return false;
    }
    *out_in = in_bytes;
    *out_out = out_bytes;
    return true;
}

/* The word that the trainer's stream waits for. */
static bool pin_signal(struct request *request, const Pb__Submit *submit, const char **out_text)
{
    const Pb__Buffer *signal = submit->signal;
    if (!signal || signal->region == 0)
        return true;
    uint8_t *word = NULL;
    *out_text = "signals to a place that is no 64-bit word";
    if (signal->offset % sizeof(uint64_t) == 0)
        word = region_pin(&request->member->regions, signal->region, signal->offset,
                          sizeof(uint64_t), &request->signal_region, out_text);
    if (!word)
        return false;
    if (region_device(request->signal_region)) {
        *out_text = "signals to device memory, which the worker can not write";
        return false;
    }
    request->signal = (_Atomic uint64_t *)(void *)word;
    request->signal_value = submit->signal_value;
    return true;
}

/* What orders the op, before anything can go wrong with it: whoever waits for its end must be
 * released. */
static bool pin_order(struct request *request, const Pb__Submit *submit, const char **out_text)
{
    const struct member *member = request->member;
    const bool needs_queue =
        submit->is_device && member->epoch->device_path && submit->kind <= GRADD_BARRIER;
    if (submit->queue) {
        struct queue_table *queues = &request->member->queues;
        request->part.queue = queue_pin(queues, submit->queue, out_text);
        if (!request->part.queue)
            return false;
        request->part.ticket = submit->ticket;
        request->part.ticket_ops = submit->group_size ? submit->group_size : 1;
    } else if (needs_queue) {
        *out_text = "is on device memory but names no queue";
        return false;
    }
    return pin_signal(request, submit, out_text);
}

/* Is the memory where the op's queue is? */
static bool is_right_memory(const struct request *request, const struct region *region,
                            const char **out_text)
{
    if (!region)
        return true;
    const struct cuda_device *device = region_device(region);
    const struct queue *queue = request->part.queue;
    if (device == (queue ? queue_device(queue) : NULL))
        return true;
    *out_text = !queue    ? "is on device memory but names no queue"
                : !device ? "names a queue but is on host memory"
                          : "is on another GPU than its queue";
    return false;
}

static bool request_pin(struct request *request, const Pb__Submit *submit, const char **out_text)
{
    struct member *member = request->member;
    /* Between nodes a chunk can not wait for one trainer's copying: data comes whole. */
    bool may_stream = !member->epoch->layout && !submit->queue &&
                      (submit->kind == GRADD_ALLREDUCE || submit->kind == GRADD_BROADCAST);
    if ((member->epoch->layout || submit->queue) && submit->ready < submit->count &&
        (submit->kind == GRADD_ALLREDUCE || submit->kind == GRADD_BROADCAST)) {
        *out_text = "came before its data, which ranks on several nodes, and GPUs, submit whole";
        return false;
    }
    uint64_t in_bytes, out_bytes;
    if (!buffer_bytes(member, submit, &in_bytes, &out_bytes, out_text))
        return false;
    /* A broadcast has one buffer a rank; it may come as either. */
    const Pb__Buffer *in = submit->in, *out = submit->out;
    if (submit->kind == GRADD_BROADCAST) {
        in = in && in->region ? in : out;
        out = out && out->region ? out : in;
    }
    request->part.count = submit->count;
    request->check_finite = submit->check_finite;
    request->bytes = in_bytes ? in_bytes : submit->kind == GRADD_BROADCAST ? out_bytes : 0;
    request->ready = may_stream ? min_u64(submit->ready, submit->count) : submit->count;
    return pin_buffer(member, in, in_bytes, may_stream, &request->part.in, &request->in_region,
                      out_text) &&
           pin_buffer(member, out, out_bytes, may_stream, &request->part.out, &request->out_region,
                      out_text) &&
           is_right_memory(request, request->in_region, out_text) &&
           is_right_memory(request, request->out_region, out_text);
}

/* Everything that the request holds while it runs, within this rank's limits. */
static int request_prepare(struct request *request, const Pb__Submit *submit, const char **out_text)
{
    const struct member *member = request->member;
    if (!pin_order(request, submit, out_text))
        return GRADD_ERR_INVALID;
    if (member->stats.in_flight > member->epoch->setup->max_in_flight) {
        *out_text = "is one more than max_in_flight allows on one rank";
        return GRADD_ERR_NO_MEMORY;
    }
    if (!request_copy_counts(request, submit->counts, submit->n_counts)) {
        *out_text = "found no memory in the worker";
        return GRADD_ERR_NO_MEMORY;
    }
    return request_pin(request, submit, out_text) ? GRADD_OK : GRADD_ERR_INVALID;
}

static struct signature signature_of(const Pb__Submit *submit)
{
    return (struct signature){
        .kind = submit->kind,
        .dtype = submit->dtype,
        .redop = submit->redop,
        .root = submit->root,
        .count = submit->count,
        .out_capacity = submit->out_capacity,
        .prescale = submit->prescale == 0 ? 1 : submit->prescale,
        .postscale = submit->postscale == 0 ? 1 : submit->postscale,
        .counts = submit->counts,
        .n_counts = submit->n_counts,
        .dims = submit->dims,
        .n_dims = submit->n_dims <= PLAN_DIMS_MAX ? submit->n_dims : 0,
        .group = submit->group,
        .group_size = submit->group_size,
        .is_device = submit->kind <= GRADD_BARRIER && (submit->is_device || submit->queue),
    };
}

static void submit_one(struct member *member, const Pb__Submit *submit)
{
    char sentence[400];
    const char *text = "";
    struct epoch *epoch = member->epoch;
    struct request *request = request_new(member, submit->id);
    if (!request) {
        member_push_completion(member, submit->id, GRADD_ERR_NO_MEMORY, "the worker has no memory",
                               NULL);
        return;
    }
    int status = request_prepare(request, submit, &text);
    if (status == GRADD_OK) {
        const struct signature signature = signature_of(submit);
        if (request->ready < submit->count) {
            request->is_streamed = true;
            HASH_ADD(hh, member->streamed, id, sizeof request->id, request);
        }
        status = epoch_submit(epoch, member, submit->set, submit->name, &signature, request, &text);
    } else {
        snprintf(sentence, sizeof sentence, "%s: \"%.200s\": the op of rank %u %s", epoch->label,
                 submit->name, member->rank, text);
        text = sentence;
    }
    if (status != GRADD_OK)
        member_complete(request, status, text, NULL);
}

void member_on_submit_batch(struct member *member, struct wire_frame *frame)
{
    const Pb__SubmitBatch *batch = frame->envelope->submit_batch;
    for (size_t i = 0; i < batch->n_submits; i++) {
        const Pb__Submit *submit = batch->submits[i];
        if (batch->epoch == member->epoch->number)
            submit_one(member, submit);
        else
            member_push_completion(member, submit->id, GRADD_ERR_RANK_LOST,
                                   "the op belongs to an epoch that is over", NULL);
    }
}

void member_on_feed_batch(struct member *member, struct wire_frame *frame)
{
    const Pb__FeedBatch *batch = frame->envelope->feed_batch;
    for (size_t i = 0; i < batch->n_feeds; i++) {
        struct request *request;
        uint64_t id = batch->feeds[i]->id, ready = batch->feeds[i]->ready;
        HASH_FIND(hh, member->streamed, &id, sizeof id, request);
        if (!request || ready <= request->ready)
            continue; /* the op ended meanwhile */
        request->ready = min_u64(ready, request->part.count);
        if (request->run)
            exec_feed(member->epoch->exec, request->run);
    }
}
