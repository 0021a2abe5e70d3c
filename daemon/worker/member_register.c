/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a trainer registers before its ops can name it: shared memory, device memory, and the
 * queues that order ops on a GPU. Tables of regions and queues check and map; replies are sent when
 * they are done.
 */
#include <stdlib.h>
#include <string.h>

#include "worker/epoch.h"
#include "worker/member_internal.h"

static void on_region_opened(void *data, uint32_t id, int status, const char *text)
{
    struct member *member = data;
    Pb__RegionReply reply = PB__REGION_REPLY__INIT;
    reply.region = id;
    reply.code = (uint32_t)-status;
    reply.text = (char *)text;
    member_push(member, PB__ENVELOPE__BODY_REGION_REPLY, &reply);
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

void member_on_register(struct member *member, struct wire_frame *frame)
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

void member_on_register_chunks(struct member *member, struct wire_frame *frame)
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

void member_on_unregister(struct member *member, struct wire_frame *frame)
{
    uint32_t id = frame->envelope->unregister->region;
    if (!region_close(&member->regions, id, on_region_closed, member))
        on_region_opened(member, id, GRADD_ERR_INVALID, "no such region");
}

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
    member_push(member, PB__ENVELOPE__BODY_QUEUE_REPLY, &reply);
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

void member_on_open_queue(struct member *member, struct wire_frame *frame)
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

void member_on_close_queue(struct member *member, struct wire_frame *frame)
{
    queue_close(&member->queues, frame->envelope->close_queue->queue); /* or it is closed already */
}
