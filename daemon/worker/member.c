/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/member.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "spin.h"
#include "worker/coordinator.h"
#include "worker/epoch.h"
#include "worker/exec.h"

enum { QUEUE_BYTES = 8 * 1024 * 1024 }; /* unsent, before a trainer counts as not reading */

static const struct conn_ops member_conn_ops;

int member_init(struct member *member, struct epoch *epoch, uint32_t rank, int take_fd)
{
    *member = (struct member){.epoch = epoch, .state = MEMBER_ENDED, .rank = rank};
    SLIST_INIT(&member->spare);
    SLIST_INIT(&member->all);
    region_table_init(&member->regions, epoch->setup->chores, epoch->setup->quota);
    if (epoch->device_path)
        member->regions.imports = epoch->setup->imports;
    queue_table_init(&member->queues, epoch->setup->chores,
                     epoch->device_path ? epoch->setup->devices : NULL);
    member->conn = conn_new(epoch->setup->loop, take_fd, QUEUE_BYTES, &member_conn_ops, member);
    if (!member->conn)
        return -ENOMEM;
    conn_set_manual_flush(member->conn);
    conn_pause(member->conn);
    member->state = MEMBER_ACTIVE;
    return 0;
}

void member_init_remote(struct member *member, struct epoch *epoch, uint32_t rank)
{
    const struct layout *layout = epoch->layout;
    *member = (struct member){
        .epoch = epoch,
        .state = MEMBER_ACTIVE,
        .is_remote = true,
        .rank = rank,
        .node = layout->node_of[rank],
        .local_rank = layout->local_rank[rank],
        .pid = layout->pids[rank],
    };
    SLIST_INIT(&member->spare);
    SLIST_INIT(&member->all);
}

void member_start(struct member *member)
{
    if (member->conn)
        conn_resume(member->conn);
}

void member_disconnect(struct member *member, enum member_state state)
{
    member->state = state;
    if (!member->conn)
        return;
    conn_free(member->conn);
    member->conn = NULL;
    member->n_done = member->n_enqueued = 0;
    queue_table_deinit(&member->queues, state != MEMBER_LEFT);
    region_table_deinit(&member->regions);
}

static void request_unpin(struct request *request)
{
    region_unpin(request->in_region);
    region_unpin(request->out_region);
    region_unpin(request->signal_region);
    queue_unpin(request->part.queue);
    request->in_region = request->out_region = request->signal_region = NULL;
    request->part.queue = NULL;
}

void member_deinit(struct member *member)
{
    member_disconnect(member, member->state);
    struct request *request;
    while ((request = SLIST_FIRST(&member->all))) {
        SLIST_REMOVE_HEAD(&member->all, in_all);
        request_unpin(request); /* it may not have been completed */
        free(request->counts);
        free(request->data);
        free(request);
    }
}

/* ------------------------------------------------------------------ requests */

static struct request *request_new(struct member *member, uint64_t id)
{
    struct request *request = SLIST_FIRST(&member->spare);
    if (request) {
        SLIST_REMOVE_HEAD(&member->spare, link);
    } else {
        request = calloc(1, sizeof *request);
        if (!request)
            return NULL;
        SLIST_INSERT_HEAD(&member->all, request, in_all);
    }
    *request = (struct request){
        .member = member,
        .id = id,
        .counts = request->counts,
        .counts_capacity = request->counts_capacity,
        .data = request->data,
        .in_all = request->in_all,
    };
    member->stats.in_flight++;
    return request;
}

static void request_release(struct request *request)
{
    struct member *member = request->member;
    if (request->is_streamed)
        HASH_DEL(member->streamed, request);
    request_unpin(request);
    member->stats.in_flight--;
    SLIST_INSERT_HEAD(&member->spare, request, link);
}

static bool request_copy_counts(struct request *request, const uint64_t *from, size_t n)
{
    if (n > request->counts_capacity) {
        uint64_t *counts = realloc(request->counts, n * sizeof *counts);
        if (!counts)
            return false;
        request->counts = counts;
        request->counts_capacity = n;
    }
    if (n)
        memcpy(request->counts, from, n * sizeof *from);
    request->part.counts = request->counts;
    return true;
}

/* The op may run here. */
static bool request_copy_data(struct request *request, ProtobufCBinaryData data)
{
    if (data.len == 0)
        return true;
    if (!request->data && !(request->data = malloc(CENTRAL_BYTES_MAX)))
        return false;
    memcpy(request->data, data.data, data.len);
    request->part.in.base = request->part.out.base = request->data;
    return true;
}

struct request *member_remote_request(struct member *member, uint64_t id,
                                      const Pb__RemoteSubmit *submit)
{
    struct request *request = request_new(member, id);
    if (!request)
        return NULL;
    if (!request_copy_counts(request, submit->counts, submit->n_counts) ||
        !request_copy_data(request, submit->data)) {
        request_release(request);
        return NULL;
    }
    request->part.count = submit->count;
    request->ready = submit->count;
    request->check_finite = submit->check_finite;
    request->bytes = submit->count * dtype_bytes(submit->dtype);
    return request;
}

/* ------------------------------------------------------------------ replies */

static void push(struct member *member, Pb__Envelope__BodyCase body_case, void *body)
{
    if (!member->conn)
        return;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.completion_batch = body; /* the members of the union are all pointers */
    conn_push(member->conn, &envelope);
}

static void push_done(struct member *member)
{
    if (member->n_done == 0 && member->n_enqueued == 0)
        return;
    Pb__Completion completions[MEMBER_DONE_MAX];
    Pb__Completion *pointers[MEMBER_DONE_MAX];
    for (size_t i = 0; i < member->n_done; i++) {
        completions[i] = (Pb__Completion)PB__COMPLETION__INIT;
        completions[i].id = member->done_ids[i];
        pointers[i] = &completions[i];
    }
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.epoch = member->epoch->number;
    batch.completions = pointers;
    batch.n_completions = member->n_done;
    batch.enqueued = member->enqueued_ids;
    batch.n_enqueued = member->n_enqueued;
    member->n_done = member->n_enqueued = 0;
    push(member, PB__ENVELOPE__BODY_COMPLETION_BATCH, &batch);
}

/* A completion with words or counts leaves in a frame of its own, in order. */
static void push_completion(struct member *member, uint64_t id, int status, const char *text,
                            const struct request_result *result)
{
    push_done(member);
    Pb__Completion completion = PB__COMPLETION__INIT;
    Pb__Completion *pointer = &completion;
    completion.id = id;
    completion.code = (uint32_t)-status;
    completion.text = (char *)text;
    if (result) {
        completion.counts = (uint64_t *)result->counts;
        completion.n_counts = result->n_counts;
        completion.nonfinite = result->nonfinite;
        completion.nonfinite_rank = result->nonfinite_rank;
    }
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.epoch = member->epoch->number;
    batch.completions = &pointer;
    batch.n_completions = 1;
    push(member, PB__ENVELOPE__BODY_COMPLETION_BATCH, &batch);
}

void member_enqueued(struct request *request)
{
    struct member *member = request->member;
    request->is_enqueued = true;
    if (member->n_enqueued == MEMBER_DONE_MAX)
        push_done(member);
    member->enqueued_ids[member->n_enqueued++] = request->id;
}

/* Streams that wait for this op's end go on, however it ended. */
static void release_streams(struct request *request)
{
    struct backend_part *part = &request->part;
    if (part->queue && !request->is_enqueued)
        queue_skip(part->queue, part->ticket, 1, part->ticket_ops);
    if (request->signal)
        atomic_store_explicit(request->signal, request->signal_value, memory_order_release);
}

void member_complete(struct request *request, int status, const char *text,
                     const struct request_result *result)
{
    struct member *member = request->member;
    if (request->part.queue || request->signal)
        release_streams(request);
    if (status == GRADD_OK) {
        member->stats.ops_done++;
        member->stats.bytes += request->bytes;
    } else {
        member->stats.ops_failed++;
    }
    if (member->is_remote) {
        if (status != GRADD_OK)
            coordinator_refuse(member->epoch->coordinator, member, request->id, status, text);
        else if (request->is_central)
            coordinator_give(member->epoch->coordinator, request);
        /* else its node completes it */
    } else if (status != GRADD_OK || result) {
        push_completion(member, request->id, status, text, result);
    } else {
        if (member->n_done == MEMBER_DONE_MAX)
            push_done(member);
        member->done_ids[member->n_done++] = request->id;
    }
    request_release(request);
}

void member_progress(struct request *request, uint64_t done)
{
    Pb__Progress progress = PB__PROGRESS__INIT;
    Pb__Progress *pointer = &progress;
    progress.id = request->id;
    progress.done = done;
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.epoch = request->member->epoch->number;
    batch.progress = &pointer;
    batch.n_progress = 1;
    push(request->member, PB__ENVELOPE__BODY_COMPLETION_BATCH, &batch);
}

void member_flush(struct member *member)
{
    if (!member->conn)
        return;
    push_done(member);
    conn_flush(member->conn);
}

void member_push_failed(struct member *member, uint64_t epoch, int status, const char *text,
                        int rank, int pid)
{
    Pb__EpochFailed failed = PB__EPOCH_FAILED__INIT;
    failed.epoch = epoch;
    failed.code = (uint32_t)-status;
    failed.text = (char *)text;
    failed.rank = rank;
    failed.pid = pid;
    push_done(member);
    push(member, PB__ENVELOPE__BODY_EPOCH_FAILED, &failed);
}

/* ------------------------------------------------------------------ regions */

static void on_region_opened(void *data, uint32_t id, int status, const char *text)
{
    struct member *member = data;
    Pb__RegionReply reply = PB__REGION_REPLY__INIT;
    reply.region = id;
    reply.code = (uint32_t)-status;
    reply.text = (char *)text;
    push(member, PB__ENVELOPE__BODY_REGION_REPLY, &reply);
    member_flush(member);
}

static void on_register_device(struct member *member, struct wire_frame *frame)
{
    const Pb__Register *message = frame->envelope->register_;
    const bool is_ipc = message->kind == PB__REGION_KIND__CUDA_IPC;
    const struct region_device device = {
        .uuid = message->device.data,
        .handle = is_ipc ? message->handle.data : NULL,
        .n_chunks = message->chunks,
    };
    const char *wrong = NULL;
    if (!is_ipc && message->kind != PB__REGION_KIND__CUDA_VMM)
        wrong = "a Register message of an unknown kind";
    else if (frame->n_fds != 0)
        wrong = "a Register message for device memory carries no descriptor";
    else if (message->device.len != CUDA_UUID_BYTES)
        wrong = "a Register message for device memory names its GPU by 16 bytes";
    else if (is_ipc && message->handle.len != CUDA_HANDLE_BYTES)
        wrong = "an IPC handle has 64 bytes";
    if (wrong)
        on_region_opened(member, message->region, GRADD_ERR_INVALID, wrong);
    else
        region_open_device(&member->regions, message->region, message->bytes, &device,
                           on_region_opened, member);
}

static void on_register(struct member *member, struct wire_frame *frame)
{
    const Pb__Register *message = frame->envelope->register_;
    if (message->kind != PB__REGION_KIND__MEMFD) {
        on_register_device(member, frame);
        return;
    }
    if (frame->n_fds != 1) {
        on_region_opened(member, message->region, GRADD_ERR_INVALID,
                         "a Register message carries exactly one descriptor");
        return;
    }
    int fd = frame->fds[0];
    frame->fds[0] = -1;
    region_open(&member->regions, message->region, fd, message->bytes, on_region_opened, member);
}

static void on_register_chunks(struct member *member, struct wire_frame *frame)
{
    const Pb__RegisterChunks *message = frame->envelope->register_chunks;
    if (message->n_bytes == frame->n_fds) {
        region_add_chunks(&member->regions, message->region, frame->fds, message->bytes,
                          frame->n_fds);
        return;
    }
    conn_push_error(member->conn, -GRADD_ERR_PROTOCOL, "chunks without a descriptor each");
    conn_close(member->conn, "chunks without a descriptor each");
}

static void on_region_closed(void *data, uint32_t id)
{
    on_region_opened(data, id, GRADD_OK, "");
}

static void on_unregister(struct member *member, struct wire_frame *frame)
{
    uint32_t id = frame->envelope->unregister->region;
    if (!region_close(&member->regions, id, on_region_closed, member))
        on_region_opened(member, id, GRADD_ERR_INVALID, "no such region");
}

/* ------------------------------------------------------------------ queues */

/* Ops are placed by rank, so a rank has one GPU. A queue on another one is closed again. */
static bool is_on_one_device(struct member *member, uint32_t id)
{
    const char *text;
    struct queue *queue = queue_pin(&member->queues, id, &text);
    bool is_right = queue && epoch_on_device(member->epoch, member, queue_device(queue));
    queue_unpin(queue);
    if (!is_right)
        queue_close(&member->queues, id);
    return is_right;
}

static void on_queue_opened(void *data, uint32_t id, int status, const char *text,
                            const uint8_t *events, uint32_t slots)
{
    struct member *member = data;
    Pb__QueueReply reply = PB__QUEUE_REPLY__INIT;
    ProtobufCBinaryData handles[QUEUE_SLOTS_MAX];
    if (status == GRADD_OK && !is_on_one_device(member, id)) {
        status = GRADD_ERR_INVALID;
        text = "all queues of a rank are on one GPU";
        slots = 0;
    }
    for (uint32_t i = 0; i < slots; i++)
        handles[i] = (ProtobufCBinaryData){CUDA_HANDLE_BYTES,
                                           (uint8_t *)events + (size_t)i * CUDA_HANDLE_BYTES};
    reply.queue = id;
    reply.code = (uint32_t)-status;
    reply.text = (char *)text;
    reply.events = handles;
    reply.n_events = slots;
    push(member, PB__ENVELOPE__BODY_QUEUE_REPLY, &reply);
    member_flush(member);
}

/* The handles one after another, or NULL: not one of 64 bytes per slot. */
static uint8_t *join_events(const Pb__OpenQueue *message)
{
    if (message->n_events != message->slots || message->slots > QUEUE_SLOTS_MAX)
        return NULL;
    uint8_t *events = malloc((size_t)message->slots * CUDA_HANDLE_BYTES + 1);
    for (size_t i = 0; events && i < message->n_events; i++) {
        if (message->events[i].len != CUDA_HANDLE_BYTES) {
            free(events);
            return NULL;
        }
        memcpy(events + i * CUDA_HANDLE_BYTES, message->events[i].data, CUDA_HANDLE_BYTES);
    }
    return events;
}

static void on_open_queue(struct member *member, struct wire_frame *frame)
{
    const Pb__OpenQueue *message = frame->envelope->open_queue;
    const bool is_flag = message->order == PB__QUEUE_ORDER__ORDER_FLAG;
    if (frame->n_fds != (is_flag ? 1u : 0u) || message->device.len != CUDA_UUID_BYTES) {
        on_queue_opened(member, message->queue, GRADD_ERR_INVALID,
                        "an OpenQueue message names its GPU by 16 bytes and carries one "
                        "descriptor for flag order, none for event order",
                        NULL, 0);
        return;
    }
    uint8_t *events = is_flag ? NULL : join_events(message);
    const struct queue_request request = {
        .id = message->queue,
        .slots = message->slots,
        .uuid = message->device.data,
        .order = (int)message->order,
        .events = events,
        .take_fd = is_flag ? frame->fds[0] : -1,
    };
    if (is_flag)
        frame->fds[0] = -1;
    queue_open(&member->queues, &request, on_queue_opened, member);
    free(events);
}

static void on_close_queue(struct member *member, struct wire_frame *frame)
{
    queue_close(&member->queues, frame->envelope->close_queue->queue); /* or it is closed already */
}

/* ------------------------------------------------------------------ submit */

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
    uint64_t n_in, n_out, in_bytes, out_bytes, size = dtype_bytes(submit->dtype);
    buffer_counts(member, submit, &n_in, &n_out);
    if (__builtin_mul_overflow(n_in, size, &in_bytes) ||
        __builtin_mul_overflow(n_out, size, &out_bytes)) {
        *out_text = "has a count beyond all memory";
        return false;
    }
    if (n_in > 0 || n_out > 0) {
        if (size == 0) {
            *out_text = "has an unknown element type";
            return false;
        }
    }
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

static void submit_one(struct member *member, const Pb__Submit *submit)
{
    char sentence[400];
    const char *text = "";
    struct epoch *epoch = member->epoch;
    struct request *request = request_new(member, submit->id);
    if (!request) {
        push_completion(member, submit->id, GRADD_ERR_NO_MEMORY, "the worker has no memory", NULL);
        return;
    }
    int status = GRADD_OK;
    bool is_ordered = pin_order(request, submit, &text);
    if (is_ordered && member->stats.in_flight > epoch->setup->max_in_flight) {
        status = GRADD_ERR_NO_MEMORY;
        text = "is one more than max_in_flight allows on one rank";
    } else if (is_ordered && !request_copy_counts(request, submit->counts, submit->n_counts)) {
        status = GRADD_ERR_NO_MEMORY;
        text = "found no memory in the worker";
    } else if (!is_ordered || !request_pin(request, submit, &text)) {
        status = GRADD_ERR_INVALID;
    }
    if (status == GRADD_OK) {
        const struct signature signature = {
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

static void on_submit_batch(struct member *member, struct wire_frame *frame)
{
    const Pb__SubmitBatch *batch = frame->envelope->submit_batch;
    for (size_t i = 0; i < batch->n_submits; i++) {
        const Pb__Submit *submit = batch->submits[i];
        if (batch->epoch == member->epoch->number)
            submit_one(member, submit);
        else
            push_completion(member, submit->id, GRADD_ERR_RANK_LOST,
                            "the op belongs to an epoch that is over", NULL);
    }
}

static void on_feed_batch(struct member *member, struct wire_frame *frame)
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

/* ------------------------------------------------------------------ connection */

static void on_leave(struct member *member, struct wire_frame *frame)
{
    conn_close(member->conn, "left");
    member->state = MEMBER_LEFT;
}

static const struct {
    Pb__Envelope__BodyCase body_case;
    void (*handle)(struct member *member, struct wire_frame *frame);
} handlers[] = {
    {PB__ENVELOPE__BODY_SUBMIT_BATCH, on_submit_batch},
    {PB__ENVELOPE__BODY_FEED_BATCH, on_feed_batch},
    {PB__ENVELOPE__BODY_REGISTER, on_register},
    {PB__ENVELOPE__BODY_UNREGISTER, on_unregister},
    {PB__ENVELOPE__BODY_LEAVE, on_leave},
    {PB__ENVELOPE__BODY_REGISTER_CHUNKS, on_register_chunks},
    {PB__ENVELOPE__BODY_OPEN_QUEUE, on_open_queue},
    {PB__ENVELOPE__BODY_CLOSE_QUEUE, on_close_queue},
};

static bool takes_fds(const struct wire_frame *frame)
{
    return frame->envelope->body_case == PB__ENVELOPE__BODY_REGISTER ||
           frame->envelope->body_case == PB__ENVELOPE__BODY_REGISTER_CHUNKS ||
           frame->envelope->body_case == PB__ENVELOPE__BODY_OPEN_QUEUE;
}

static void on_frame(void *owner, struct conn *conn, struct wire_frame *frame)
{
    struct member *member = owner;
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        if (handlers[i].body_case != frame->envelope->body_case)
            continue;
        if (frame->n_fds > 0 && !takes_fds(frame)) {
            conn_push_error(conn, -GRADD_ERR_PROTOCOL, "descriptors where none belong");
            conn_close(conn, "descriptors where none belong");
            return;
        }
        handlers[i].handle(member, frame);
        return;
    }
    conn_push_error(conn, -GRADD_ERR_PROTOCOL, "a message that the worker does not know");
}

static void on_batch_end(void *owner, struct conn *conn)
{
    struct member *member = owner;
    epoch_turn(member->epoch);
    /* Ranks in step submit again at once. */
    loop_spin(member->epoch->setup->loop, SPIN_NS);
}

static void on_closed(void *owner, struct conn *conn, const char *reason)
{
    struct member *member = owner;
    epoch_on_member_closed(member->epoch, member, reason);
}

static const struct conn_ops member_conn_ops = {
    .on_frame = on_frame,
    .on_batch_end = on_batch_end,
    .on_closed = on_closed,
};
