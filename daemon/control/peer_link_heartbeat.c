/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer_link_internal.h"

#include <stdio.h>

#include "base/clock.h"

static const uint64_t MS = 1000000;
static const uint64_t IDLE_LIMIT_NS = UINT64_C(60) * 1000000000; /* of a link nobody uses */

static void push_ping(struct peer_link *link)
{
    Pb__Ping ping = PB__PING__INIT;
    ping.seq = ++link->ping_seq;
    link->ping_ns = clock_now_ns();
    if (!link->unanswered_ns)
        link->unanswered_ns = link->ping_ns;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_PING;
    envelope.ping = &ping;
    peer_link_queue(link, &envelope);
}

/*
 * Silence counts, and so does a Ping that is not answered: where only one direction is broken, the
 * other side may still be heard while it retries what it sent before.
 */
static uint64_t last_sign_of_life(const struct peer_link *link)
{
    bool is_one_way = link->unanswered_ns && link->unanswered_ns < link->heard_ns;
    return is_one_way ? link->unanswered_ns : link->heard_ns;
}

static void arm_heartbeat(struct peer_link *link)
{
    const struct config *config = link->peers->config;
    uint64_t now = clock_now_ns();
    uint64_t ping = link->ping_ns + config->peer_heartbeat_ms * MS;
    uint64_t death = last_sign_of_life(link) + config->peer_dead_ms * MS;
    uint64_t next = ping < death ? ping : death;
    watch_arm(link->timer, next > now ? next - now : 0);
}

void peer_link_start_heartbeat(struct peer_link *link)
{
    push_ping(link);
    arm_heartbeat(link);
}

void peer_link_on_ping(struct peer_link *link, const Pb__Ping *ping)
{
    Pb__Pong pong = PB__PONG__INIT;
    pong.seq = ping->seq;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_PONG;
    envelope.pong = &pong;
    peer_link_queue(link, &envelope);
}

void peer_link_on_pong(struct peer_link *link, const Pb__Pong *pong)
{
    /* An older one's answer: at least the last Ping is still on its way. */
    link->unanswered_ns = pong->seq == link->ping_seq ? 0 : link->ping_ns;
    if (pong->seq != link->ping_seq)
        return;
    link->rtt_us = (double)(clock_now_ns() - link->ping_ns) / 1e3;
    link->confirmed_ns = link->ping_ns;
    link->peers->ops->on_answer(link->peers->owner, link);
}

bool peer_link_confirm(struct peer_link *link, uint64_t since_ns)
{
    if (link->confirmed_ns >= since_ns)
        return true;
    if (link->ping_ns < since_ns && link->state == PEER_UP && !link->is_ending)
        push_ping(link);
    return false;
}

void peer_link_beat(struct peer_link *link)
{
    const struct config *config = link->peers->config;
    uint64_t now = clock_now_ns();
    peer_link_receive(link); /* this process itself may have slept */
    if (link->is_ending)
        return;
    if (now >= last_sign_of_life(link) + config->peer_dead_ms * MS) {
        char text[64];
        snprintf(text, sizeof text, "no heartbeat for %.3g s", (double)config->peer_dead_ms / 1000);
        peer_link_end(link, text);
        return;
    }
    if (link->peers->ops->is_used(link->peers->owner, link))
        link->used_ns = now;
    else if (link->is_dialled && now - link->used_ns > IDLE_LIMIT_NS) {
        peer_link_end(link, "closed: no job needs it");
        return;
    }
    if (now - link->ping_ns >= config->peer_heartbeat_ms * MS)
        push_ping(link);
    arm_heartbeat(link);
}
