/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/net/lane.h"

#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "worker/backend/net/cell.h"

enum { HEADER_MAGIC = 0x67726464 };

/* Little-endian on the wire. */
struct header {
    uint32_t magic, sequence, block, step, digest, bytes;
};

_Static_assert(sizeof(struct header) == LANE_HEADER_BYTES, "no padding");

static void queue_init(struct lane_queue *queue)
{
    *queue = (struct lane_queue){0};
    queue->last = &queue->first;
}

void lane_init(struct lane *lane, struct link *take_link, uint32_t node, uint32_t stream)
{
    lane->link = take_link;
    lane->node = node;
    lane->stream = stream;
    queue_init(&lane->out);
    queue_init(&lane->in);
}

void lane_clear(struct lane *lane)
{
    queue_init(&lane->in);
    queue_init(&lane->out);
}

void lane_deinit(struct lane *lane)
{
    if (lane->link)
        lane->link->ops->free(lane->link);
    lane->link = NULL;
}

static void queue_push(struct lane_queue *queue, struct schedule_message *message)
{
    message->next = NULL;
    *queue->last = message;
    queue->last = &message->next;
}

static void queue_pop(struct lane_queue *queue)
{
    if (!(queue->first = queue->first->next))
        queue->last = &queue->first;
    queue->sequence++;
    queue->moved = 0;
}

void lane_queue_out(struct lane *lane, struct schedule_message *message)
{
    if (!lane->out.first)
        lane->busy_since_ns = clock_now_ns();
    queue_push(&lane->out, message);
}

void lane_queue_in(struct lane *lane, struct schedule_message *message)
{
    queue_push(&lane->in, message);
}

void lane_unblock(struct lane *lane)
{
    lane->in.is_blocked = lane->out.is_blocked = false;
}

static void write_header(const struct lane_queue *queue, uint8_t *to)
{
    const struct schedule_message *message = queue->first;
    const struct schedule_cell *cell = message_cell(message);
    const struct header header = {
        .magic = htole32(HEADER_MAGIC),
        .sequence = htole32(queue->sequence),
        .block = htole32(cell->block),
        .step = htole32(message->step),
        .digest = htole32(message->digest),
        .bytes = htole32(message->pieces.bytes),
    };
    memcpy(to, &header, sizeof header);
}

/* What is left of header and payload. */
static int rest_of(const struct lane_queue *queue, uint8_t *header, struct iovec iov[2])
{
    int n = 0;
    uint64_t in_payload = 0;
    if (queue->moved < LANE_HEADER_BYTES)
        iov[n++] = (struct iovec){header + queue->moved, LANE_HEADER_BYTES - queue->moved};
    else
        in_payload = queue->moved - LANE_HEADER_BYTES;
    iov[n++] =
        (struct iovec){queue->first->memory + in_payload, queue->first->pieces.bytes - in_payload};
    return n;
}

static int after_move(struct lane_queue *queue, ssize_t moved, short events)
{
    if (moved < 0)
        return (int)moved;
    if (moved == 0) {
        queue->is_blocked = true;
        queue->blocked_on = events;
        return LANE_BLOCKED;
    }
    queue->moved += (uint64_t)moved;
    if (queue->moved < LANE_HEADER_BYTES + (uint64_t)queue->first->pieces.bytes)
        return LANE_MOVED;
    queue_pop(queue);
    return LANE_DONE;
}

int lane_send(struct lane *lane)
{
    struct lane_queue *queue = &lane->out;
    struct iovec iov[2];
    if (queue->moved == 0)
        write_header(queue, queue->header);
    int n = rest_of(queue, queue->header, iov);
    ssize_t moved = lane->link->ops->send(lane->link, iov, n);
    int result = after_move(queue, moved, lane->link->wants ? lane->link->wants : POLLOUT);
    if (moved > 0)
        atomic_fetch_add_explicit(&lane->sent_bytes, (uint64_t)moved, memory_order_relaxed);
    if (result == LANE_DONE && !queue->first) {
        atomic_fetch_add_explicit(&lane->busy_ns, clock_now_ns() - lane->busy_since_ns,
                                  memory_order_relaxed);
        lane->busy_since_ns = 0;
    }
    return result;
}

/* Is this the message that the schedule expects? */
static int check_header(const struct lane_queue *queue, char *text, size_t text_bytes)
{
    struct header expected, got;
    write_header(queue, (uint8_t *)&expected);
    memcpy(&got, queue->header, sizeof got);
    if (memcmp(&expected, &got, sizeof got) == 0)
        return 0;
    if (got.magic != expected.magic)
        snprintf(text, text_bytes, "sent bytes that are no message of a collective");
    else
        snprintf(text, text_bytes,
                 "sent message %u (block %u, step %u, %u bytes, op %08x) where message %u (block "
                 "%u, step %u, %u bytes, op %08x) is due",
                 le32toh(got.sequence), le32toh(got.block), le32toh(got.step), le32toh(got.bytes),
                 le32toh(got.digest), le32toh(expected.sequence), le32toh(expected.block),
                 le32toh(expected.step), le32toh(expected.bytes), le32toh(expected.digest));
    return -EBADMSG;
}

int lane_receive(struct lane *lane, char *text, size_t text_bytes)
{
    struct lane_queue *queue = &lane->in;
    struct iovec iov[2];
    const uint64_t before = queue->moved;
    int n = rest_of(queue, queue->header, iov);
    ssize_t moved = lane->link->ops->receive(lane->link, iov, n);
    if (moved > 0) {
        atomic_fetch_add_explicit(&lane->received_bytes, (uint64_t)moved, memory_order_relaxed);
        const uint64_t now = before + (uint64_t)moved;
        if (before < LANE_HEADER_BYTES && now >= LANE_HEADER_BYTES &&
            check_header(queue, text, text_bytes) < 0)
            return -EBADMSG;
    }
    return after_move(queue, moved, lane->link->wants ? lane->link->wants : POLLIN);
}
