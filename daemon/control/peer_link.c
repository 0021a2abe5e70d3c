/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer_link_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"

enum {
    QUEUE_BYTES = 16 << 20,
};

static const uint64_t SHOW_LOST_NS = UINT64_C(600) * 1000000000;

static void on_socket(void *data, int fd, unsigned events);
static void on_timer(void *data);
static void on_soon(void *data);

const char *peer_link_state_name(const struct peer_link *link)
{
    static const char *const names[] = {
        [PEER_CONNECTING] = "connecting",
        [PEER_SECURING] = "connecting",
        [PEER_GREETING] = "connecting",
        [PEER_UP] = "up",
        [PEER_LOST] = "lost",
    };
    return names[link->state];
}

void peer_link_host(const struct peer_link *link, char *out_text, size_t size)
{
    resolve_format_host(&link->address, out_text, size);
}

/* ------------------------------------------------------------------ life */

void peer_link_set_state(struct peer_link *link, enum peer_link_state state)
{
    link->state = state;
    link->since_ns = clock_now_ns();
}

struct peer_link *peer_link_new(struct peers *peers)
{
    struct peer_link *link = calloc(1, sizeof *link);
    if (!link)
        return NULL;
    link->peers = peers;
    link->fd = -1;
    link->used_ns = clock_now_ns();
    wire_in_init(&link->in);
    wire_out_init(&link->out, QUEUE_BYTES);
    TAILQ_INSERT_TAIL(&peers->links, link, link);
    link->timer = watch_timer(peers->loop, on_timer, link);
    link->soon = watch_timer(peers->loop, on_soon, link);
    if (link->timer && link->soon)
        return link;
    peer_link_free(link);
    return NULL;
}

bool peer_link_watch(struct peer_link *link, unsigned events)
{
    link->watch = watch_fd(link->peers->loop, link->fd, events, on_socket, link);
    return link->watch != NULL;
}

void peer_link_free(struct peer_link *link)
{
    TAILQ_REMOVE(&link->peers->links, link, link);
    if (link->state == PEER_UP && !link->is_ending)
        peer_link_flush(link);
    peer_link_drop_socket(link);
    watch_free(link->timer);
    watch_free(link->soon);
    free(link);
}

void peer_link_forget(struct peer_link *link)
{
    if (link->state == PEER_LOST)
        watch_arm(link->timer, 0);
}

void peer_link_end(struct peer_link *link, const char *reason)
{
    if (link->is_ending || link->state == PEER_LOST)
        return;
    link->is_ending = true;
    snprintf(link->error, sizeof link->error, "%s", reason);
    if (link->watch)
        watch_set(link->watch, 0);
    watch_arm(link->soon, 0);
}

void peer_link_report_end(struct peer_link *link)
{
    struct peers *peers = link->peers;
    enum peer_link_state before = link->state;
    if (before == PEER_UP || before == PEER_GREETING)
        peer_link_flush(link); /* the last words */
    peer_link_drop_socket(link);
    link->is_ending = false;
    peer_link_set_state(link, PEER_LOST);
    if (before == PEER_UP)
        peers_log(peers, LOG_LEVEL_NOTICE, "node %s (%s): %s", link->name, link->address_text,
                  link->error);
    else
        peers_log(peers, LOG_LEVEL_NOTICE, "%s %s: %s", link->is_dialled ? "to" : "from",
                  link->address_text, link->error);
    /* Strangers are not worth a line of the table. */
    bool is_known = before == PEER_UP || link->is_dialled;
    watch_arm(link->timer, is_known ? SHOW_LOST_NS : 0);
    if (is_known)
        peers->ops->on_lost(peers->owner, link, link->error);
}

void peer_link_push(struct peer_link *link, const Pb__Envelope *envelope)
{
    if (link->state == PEER_UP && !link->is_ending)
        peer_link_queue(link, envelope);
}

size_t peer_link_backlog(const struct peer_link *link)
{
    return link->out.end - link->out.begin;
}

/* ------------------------------------------------------------------ events */

static void on_socket(void *data, int fd, unsigned events)
{
    struct peer_link *link = data;
    (void)fd;
    if (link->is_ending)
        return;
    switch (link->state) {
    case PEER_CONNECTING:
    case PEER_SECURING:
        peer_link_open_on_socket(link);
        break;
    case PEER_GREETING:
    case PEER_UP:
        if (events & WATCH_WRITE)
            peer_link_flush(link);
        peer_link_receive(link);
        if (!link->is_ending)
            peer_link_update_watch(link);
        break;
    case PEER_LOST:
        break;
    }
}

static void on_soon(void *data)
{
    struct peer_link *link = data;
    if (link->is_ending) {
        peer_link_report_end(link);
        return;
    }
    if (link->state != PEER_GREETING && link->state != PEER_UP)
        return;
    peer_link_flush(link);
    peer_link_receive(link);
    if (!link->is_ending) {
        peer_link_flush(link);
        peer_link_update_watch(link);
    }
}

static void on_timer(void *data)
{
    struct peer_link *link = data;
    if (link->is_ending)
        return;
    switch (link->state) {
    case PEER_CONNECTING:
    case PEER_SECURING:
    case PEER_GREETING:
        peer_link_open_on_timer(link);
        break;
    case PEER_UP:
        peer_link_beat(link);
        break;
    case PEER_LOST:
        peer_link_free(link);
        break;
    }
}
