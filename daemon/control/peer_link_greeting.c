/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer_link_internal.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "gradd/types.h"

static void push_error(struct peer_link *link, int code, const char *text)
{
    Pb__Error error = PB__ERROR__INIT;
    error.code = (uint32_t)-code;
    error.text = (char *)text;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_ERROR;
    envelope.error = &error;
    peer_link_queue(link, &envelope);
    peer_link_flush(link);
}

static double wall_clock_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* We dialled the same daemon by another of its addresses, for other jobs: both links stay. */
static bool is_further(const struct peer_link *link)
{
    const struct peer_link *other;
    TAILQ_FOREACH(other, &link->peers->links, link)
    if (other != link && other->is_dialled && other->state == PEER_UP && !other->is_ending &&
        memcmp(other->node_id, link->node_id, PEER_NODE_ID_BYTES) == 0)
        return link->is_dialled;
    return false;
}

void peer_link_push_hello(struct peer_link *link)
{
    struct peers *peers = link->peers;
    Pb__PeerHello hello = PB__PEER_HELLO__INIT;
    hello.protocol_min = WIRE_PROTOCOL_MIN;
    hello.protocol_max = WIRE_PROTOCOL_MAX;
    hello.version = (char *)GRADD_VERSION;
    hello.node = (char *)peers->node;
    hello.node_id = (ProtobufCBinaryData){sizeof peers->node_id, peers->node_id};
    hello.clock_s = wall_clock_s();
    hello.peer_port = peers_is_listening(peers) ? peers_port(peers) : 0;
    hello.is_further = is_further(link);
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_PEER_HELLO;
    envelope.peer_hello = &hello;
    peer_link_queue(link, &envelope);
}

/* Names and versions are shown on terminals. */
static void copy_printable(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from);
    for (char *c = to; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
}

/* The same daemon, or one that has been started in its place. */
static bool is_same_daemon(const struct peer_link *a, const struct peer_link *b)
{
    return memcmp(a->node_id, b->node_id, PEER_NODE_ID_BYTES) == 0 ||
           (a->port && a->port == b->port && resolve_is_same_host(&a->address, &b->address));
}

/*
 * A daemon dials again only when it has given up the link before: what that one still seems to hold
 * here must not stand in the way of what comes over the new one.
 */
static void replace_older(struct peer_link *link)
{
    struct peer_link *other, *next;
    for (other = TAILQ_FIRST(&link->peers->links); other; other = next) {
        next = TAILQ_NEXT(other, link);
        if (other == link || other->is_dialled || other->state != PEER_UP ||
            !is_same_daemon(other, link))
            continue;
        if (!other->is_ending)
            snprintf(other->error, sizeof other->error, "its daemon has connected anew");
        peer_link_report_end(other);
    }
}

static void on_hello(struct peer_link *link, const Pb__PeerHello *hello)
{
    struct peers *peers = link->peers;
    char text[400];
    unsigned protocol = wire_protocol_agree(hello->protocol_min, hello->protocol_max,
                                            WIRE_PROTOCOL_MIN, WIRE_PROTOCOL_MAX);
    if (!protocol) {
        snprintf(text, sizeof text,
                 "gradd %.32s on node %.64s speaks protocol %u to %u, gradd %s on node %.64s %d to "
                 "%d: install versions that fit",
                 hello->version, hello->node, hello->protocol_min, hello->protocol_max,
                 GRADD_VERSION, peers->node, WIRE_PROTOCOL_MIN, WIRE_PROTOCOL_MAX);
        push_error(link, GRADD_ERR_PROTOCOL, text);
        peer_link_end(link, text);
        return;
    }
    if (hello->node_id.len != PEER_NODE_ID_BYTES || !*hello->node) {
        peer_link_end(link, "introduced itself without a name or an id");
        return;
    }
    memcpy(link->node_id, hello->node_id.data, PEER_NODE_ID_BYTES);
    copy_printable(link->name, sizeof link->name, hello->node);
    copy_printable(link->version, sizeof link->version, hello->version);
    link->skew_s = hello->clock_s - wall_clock_s();
    if (memcmp(link->node_id, peers->node_id, PEER_NODE_ID_BYTES) == 0) {
        if (link->is_dialled)
            peers->ops->on_self(peers->owner, link);
        peer_link_end(link, "leads back to this daemon");
        return;
    }
    link->port = (uint16_t)hello->peer_port;
    if (link->is_dialled)
        peer_link_push_hello(link);
    else if (!hello->is_further)
        replace_older(link);
    if (link->is_ending)
        return;
    peer_link_set_state(link, PEER_UP);
    link->used_ns = link->up_ns = link->since_ns;
    log_info("peer", "node %s (%s, gradd %s) is up", link->name, link->address_text, link->version);
    peer_link_start_heartbeat(link);
    peers->ops->on_up(peers->owner, link);
}

void peer_link_on_greeting(struct peer_link *link, const Pb__Envelope *envelope)
{
    char text[256];
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_PEER_HELLO:
        on_hello(link, envelope->peer_hello);
        break;
    case PB__ENVELOPE__BODY_ERROR:
        copy_printable(text, sizeof text, envelope->error->text);
        peer_link_end(link, text);
        break;
    default:
        peer_link_end(link, "the first message was not PeerHello");
    }
}
