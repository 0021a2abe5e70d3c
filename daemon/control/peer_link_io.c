/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer_link_internal.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "control/peer_tls.h"

enum {
    READ_BYTES = 16 << 10, /* a TLS record */
    READS_PER_TURN = 64,
};

void peer_link_update_watch(struct peer_link *link)
{
    bool wants_write = !wire_out_is_empty(&link->out) || peer_tls_wants_write(link->tls);
    watch_set(link->watch, WATCH_READ | (wants_write ? WATCH_WRITE : 0));
}

void peer_link_flush(struct peer_link *link)
{
    struct wire_out *out = &link->out;
    while (out->begin < out->end) {
        ssize_t n = peer_tls_write(link->tls, out->data + out->begin, out->end - out->begin);
        if (n == -EAGAIN)
            break;
        if (n < 0) {
            /* What it sent before it went is still read, and its end of stream ends us. */
            wire_out_deinit(out);
            break;
        }
        out->begin += (size_t)n;
        link->sent_bytes += (uint64_t)n;
    }
}

void peer_link_queue(struct peer_link *link, const Pb__Envelope *envelope)
{
    int rc = wire_out_push(&link->out, envelope, NULL, 0);
    if (rc == -ENOBUFS)
        peer_link_end(link, "does not read what is sent to it");
    else if (rc < 0)
        peer_link_end(link, strerror(-rc));
    else
        watch_arm(link->soon, 0);
}

static void on_frame(struct peer_link *link, const Pb__Envelope *envelope)
{
    struct peers *peers = link->peers;
    if (link->state == PEER_GREETING) {
        peer_link_on_greeting(link, envelope);
        return;
    }
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_PING:
        peer_link_on_ping(link, envelope->ping);
        break;
    case PB__ENVELOPE__BODY_PONG:
        peer_link_on_pong(link, envelope->pong);
        break;
    default:
        peers->ops->on_message(peers->owner, link, envelope);
    }
}

static void take_frames(struct peer_link *link)
{
    struct wire_frame frame;
    int rc = 0;
    while (!link->is_ending && (rc = wire_in_next(&link->in, &frame)) == 1)
        on_frame(link, frame.envelope);
    if (rc < 0)
        peer_link_end(link, rc == -EPROTO ? link->in.error : strerror(-rc));
}

void peer_link_receive(struct peer_link *link)
{
    uint8_t bytes[READ_BYTES];
    for (unsigned i = 0; i < READS_PER_TURN && !link->is_ending; i++) {
        ssize_t n = peer_tls_read(link->tls, bytes, sizeof bytes);
        if (n == -EAGAIN)
            return;
        if (n <= 0) {
            peer_link_end(link,
                          n == 0 ? "its daemon closed the connection" : peer_tls_error(link->tls));
            return;
        }
        link->heard_ns = clock_now_ns();
        link->received_bytes += (uint64_t)n;
        int rc = wire_in_feed(&link->in, bytes, (size_t)n);
        if (rc < 0)
            peer_link_end(link, strerror(-rc));
        else
            take_frames(link);
    }
    /* TLS may hold bytes that the socket no longer shows. */
    watch_arm(link->soon, 0);
}

void peer_link_drop_socket(struct peer_link *link)
{
    watch_free(link->watch);
    link->watch = NULL;
    peer_tls_free(link->tls);
    link->tls = NULL;
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    wire_in_deinit(&link->in);
    wire_out_deinit(&link->out);
}
