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
    queue->moved -= LANE_HEADER_BYTES + (uint64_t)queue->first->pieces.bytes;
    if (!(queue->first = queue->first->next))
        queue->last = &queue->first;
    queue->sequence++;
}

void lane_queue_out(struct lane *lane, struct schedule_message *message)
{
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

static void write_header(const struct schedule_message *message, uint32_t sequence, uint8_t *to)
{
    const struct schedule_cell *cell = message_cell(message);
    const struct header header = {
        .magic = htole32(HEADER_MAGIC),
        .sequence = htole32(sequence),
        .block = htole32(cell->block),
        .step = htole32(message->step),
        .digest = htole32(message->digest),
        .bytes = htole32(message->pieces.bytes),
    };
    memcpy(to, &header, sizeof header);
}

uint64_t lane_message_bytes(const struct schedule_message *message)
{
    return LANE_HEADER_BYTES + (uint64_t)message->pieces.bytes;
}

/* What is left of header and payload after so many bytes. */
static int rest_of(const struct schedule_message *message, uint64_t moved, uint8_t *header,
                   struct iovec iov[2])
{
    int n = 0;
    uint64_t in_payload = 0;
    if (moved < LANE_HEADER_BYTES)
        iov[n++] = (struct iovec){header + moved, LANE_HEADER_BYTES - moved};
    else
        in_payload = moved - LANE_HEADER_BYTES;
    iov[n++] = (struct iovec){message->memory + in_payload, message->pieces.bytes - in_payload};
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
    return queue->moved < lane_message_bytes(queue->first) ? LANE_MOVED : LANE_DONE;
}

/* What was ready to be sent from since_ns on has been sent, or the link took nothing. A sender that
 * waits for data is not busy: the rate is the cable's, and not that of the slowest one around. */
static void count_busy(struct lane *lane, uint64_t since_ns, bool is_blocked)
{
    uint64_t now_ns = clock_now_ns();
    atomic_fetch_add_explicit(&lane->busy_ns, now_ns - since_ns, memory_order_relaxed);
    atomic_store_explicit(&lane->blocked_since_ns, is_blocked ? now_ns : 0, memory_order_relaxed);
}

int lane_send(struct lane *lane, unsigned n)
{
    struct lane_queue *queue = &lane->out;
    uint8_t headers[LANE_SENDS_MAX][LANE_HEADER_BYTES];
    struct iovec iov[2 * LANE_SENDS_MAX];
    const struct schedule_message *message = queue->first;
    int n_iov = 0;
    for (unsigned i = 0; i < n && i < LANE_SENDS_MAX; i++, message = message->next) {
        write_header(message, queue->sequence + i, headers[i]);
        n_iov += rest_of(message, i == 0 ? queue->moved : 0, headers[i], iov + n_iov);
    }
    uint64_t since_ns = atomic_load_explicit(&lane->blocked_since_ns, memory_order_relaxed);
    if (!since_ns)
        since_ns = clock_now_ns();
    ssize_t moved = lane->link->ops->send(lane->link, iov, n_iov);
    count_busy(lane, since_ns, moved == 0);
    if (moved > 0)
        atomic_fetch_add_explicit(&lane->sent_bytes, (uint64_t)moved, memory_order_relaxed);
    return after_move(queue, moved, lane->link->wants ? lane->link->wants : POLLOUT);
}

uint64_t lane_busy_ns(const struct lane *lane)
{
    uint64_t busy_ns = atomic_load_explicit(&lane->busy_ns, memory_order_relaxed);
    uint64_t since_ns = atomic_load_explicit(&lane->blocked_since_ns, memory_order_relaxed);
    uint64_t now_ns = clock_now_ns();
    return busy_ns + (since_ns && since_ns < now_ns ? now_ns - since_ns : 0);
}

struct schedule_message *lane_take_sent(struct lane *lane)
{
    struct lane_queue *queue = &lane->out;
    struct schedule_message *message = queue->first;
    if (!message || queue->moved < lane_message_bytes(message))
        return NULL;
    queue_pop(queue);
    return message;
}

/* Is this the message that the schedule expects? */
static int check_header(const struct lane_queue *queue, char *text, size_t text_bytes)
{
    struct header expected, got;
    write_header(queue->first, queue->sequence, (uint8_t *)&expected);
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
    int n = rest_of(queue->first, before, queue->header, iov);
    ssize_t moved = lane->link->ops->receive(lane->link, iov, n);
    if (moved > 0)
        atomic_fetch_add_explicit(&lane->received_bytes, (uint64_t)moved, memory_order_relaxed);
    int result = after_move(queue, moved, lane->link->wants ? lane->link->wants : POLLIN);
    if (before < LANE_HEADER_BYTES && queue->moved >= LANE_HEADER_BYTES && result >= 0 &&
        check_header(queue, text, text_bytes) < 0)
        return -EBADMSG;
    if (result == LANE_DONE)
        queue_pop(queue);
    return result;
}
