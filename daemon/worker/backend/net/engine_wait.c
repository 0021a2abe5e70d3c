/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an engine waits for: what to poll, and, when nothing has come for long, which message of
 * which link to blame. Thread: whoever holds the engine's lock.
 */
#include <poll.h>
#include <stdio.h>

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

/* One direction of a lane, and the message that is due there. */
struct waiting {
    const struct lane *lane;
    const struct lane_queue *queue;
    uint64_t cell; /* number among all of the epoch */
};

/* Half a message is the surest sign: both ends had all that it takes. Then what is oldest, for
 * which the window waits. */
static bool is_likelier(const struct waiting *one, const struct waiting *other)
{
    if (!other->lane || !one->queue->moved != !other->queue->moved)
        return !other->lane || one->queue->moved;
    return one->cell < other->cell;
}

static void consider(struct waiting *likeliest, const struct lane *lane,
                     const struct lane_queue *queue)
{
    const struct schedule_message *message = queue->first;
    const struct waiting one = {lane, queue, message->program->first_cell + message->cell};
    if (is_likelier(&one, likeliest))
        *likeliest = one;
}

bool engine_describe_stall(const struct engine *engine, struct engine_stall *out)
{
    struct waiting likeliest = {0};
    for (uint32_t i = 0; i < engine->n_used; i++) {
        const struct lane *lane = engine->used[i];
        if (engine_is_open(engine, lane->in.first))
            consider(&likeliest, lane, &lane->in);
        if (lane->out.first && lane->out.is_blocked)
            consider(&likeliest, lane, &lane->out);
    }
    if (!likeliest.lane)
        return false;
    const bool is_in = likeliest.queue == &likeliest.lane->in;
    out->node = likeliest.lane->node;
    snprintf(out->text, sizeof out->text, "stream %u: %llu of %llu bytes of a message %s",
             likeliest.lane->stream, (unsigned long long)likeliest.queue->moved,
             (unsigned long long)lane_message_bytes(likeliest.queue->first),
             is_in ? "received" : "sent");
    return true;
}
