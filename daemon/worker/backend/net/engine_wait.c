/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an engine waits for: what to poll, and, when nothing has come for long, which message of
 * which link to blame. Thread: whoever holds the engine's lock.
 */
#include <poll.h>
#include <stdio.h>
#include <sys/ioctl.h>

#include <linux/sockios.h>

#include "worker/backend/net/engine_internal.h"

/* What to poll a lane for; 0: it waits for others, or for nothing. */
static short wanted_events(const struct engine *engine, const struct lane *lane)
{
    short events = 0;
    if (engine_is_open(engine, lane->in.first))
        events |= lane->in.is_blocked ? lane->in.blocked_on : POLLIN;
    if (lane->out.first && lane->out.is_blocked)
        events |= lane->out.blocked_on;
    return events;
}

void engine_wait(struct engine *engine, int fd, pthread_mutex_t *lock)
{
    nfds_t n = 0;
    for (uint32_t i = 0; i < engine->n_used; i++) {
        struct lane *lane = engine->used[i];
        const short events = wanted_events(engine, lane);
        if (!events)
            continue;
        engine->polled[n] = lane;
        engine->poll_fds[n++] = (struct pollfd){.fd = lane->link->fd, .events = events};
    }
    engine->poll_fds[n] = (struct pollfd){.fd = fd, .events = POLLIN};
    pthread_mutex_unlock(lock);
    int result = poll(engine->poll_fds, n + 1, -1);
    pthread_mutex_lock(lock);
    for (nfds_t i = 0; i < n && result > 0; i++)
        if (engine->poll_fds[i].revents)
            lane_unblock(engine->polled[i]);
}

/* ------------------------------------------------------------------ stalls */

/* One direction of a lane that is due to move. */
struct waiting {
    const struct lane *lane;
    bool is_in;
    const struct schedule_message *message; /* NULL: all of them were given to the kernel */
    uint64_t moved;                         /* of the message */
    uint64_t cell;                          /* its number among all of the epoch */
    int n_unacked;                          /* bytes that the kernel could not deliver so far */
};

/*
 * A peer that has no data for us may itself wait for somebody. But half a message is due from that
 * peer alone, which had all of it, and what does not leave here is up to the link or to its end.
 */
static bool is_sure(const struct waiting *waiting)
{
    return !waiting->is_in || waiting->moved > 0;
}

/* The surest; then the oldest, for which the window waits. */
static void consider(struct waiting *likeliest, const struct waiting *one)
{
    if (!likeliest->lane || is_sure(one) > is_sure(likeliest) ||
        (is_sure(one) == is_sure(likeliest) && one->cell < likeliest->cell))
        *likeliest = *one;
}

static struct waiting waiting_for(const struct lane *lane, const struct lane_queue *queue)
{
    struct waiting waiting = {.lane = lane, .is_in = queue == &lane->in, .message = queue->first};
    if (waiting.message) {
        waiting.moved = queue->moved;
        waiting.cell = waiting.message->program->first_cell + waiting.message->cell;
    }
    return waiting;
}

static void consider_lane(const struct engine *engine, const struct lane *lane,
                          struct waiting *likeliest)
{
    struct waiting in = waiting_for(lane, &lane->in), out = waiting_for(lane, &lane->out);
    if (ioctl(lane->link->fd, SIOCOUTQ, &out.n_unacked) < 0)
        out.n_unacked = 0;
    if (engine_is_open(engine, in.message))
        consider(likeliest, &in);
    if ((out.message && lane->out.is_blocked) || out.n_unacked > 0)
        consider(likeliest, &out);
}

static void describe(const struct waiting *waiting, char *text, size_t bytes)
{
    size_t used = (size_t)snprintf(text, bytes, "stream %u: ", waiting->lane->stream);
    if (waiting->message)
        used += (size_t)snprintf(text + used, bytes - used, "%llu of %llu bytes of a message %s",
                                 (unsigned long long)waiting->moved,
                                 (unsigned long long)lane_message_bytes(waiting->message),
                                 waiting->is_in ? "received" : "sent");
    else
        used += (size_t)snprintf(text + used, bytes - used, "all messages sent");
    if (waiting->n_unacked > 0)
        snprintf(text + used, bytes - used, ", %d bytes not acknowledged", waiting->n_unacked);
}

bool engine_describe_stall(const struct engine *engine, struct engine_stall *out)
{
    struct waiting likeliest = {0};
    for (uint32_t i = 0; i < engine->n_used; i++)
        consider_lane(engine, engine->used[i], &likeliest);
    if (!likeliest.lane)
        return false;
    out->node = likeliest.lane->node;
    out->is_sure = is_sure(&likeliest);
    describe(&likeliest, out->text, sizeof out->text);
    return true;
}
