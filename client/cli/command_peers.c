/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl peers: the other nodes that this one's daemon is linked to, and how well. */
#include "command.h"

static void write_peers(struct writer *w, const Pb__PeersReply *reply)
{
    static const struct column columns[] = {
        {"node", "NODE"},       {"address", "ADDRESS"},         {"state", "STATE"},
        {"since_s", "SINCE"},   {"rtt_us", "ROUND TRIP"},       {"clock_skew_s", "CLOCK SKEW"},
        {"sent_bytes", "SENT"}, {"received_bytes", "RECEIVED"}, {"jobs", "JOBS"},
        {"version", "VERSION"}, {"last_error", "LAST ERROR"},
    };
    writer_table_begin(w, "peers", "other nodes", columns, sizeof columns / sizeof columns[0]);
    for (size_t i = 0; i < reply->n_peers; i++) {
        const Pb__PeerSummary *p = reply->peers[i];
        const struct value values[] = {
            value_text(p->node),        value_text(p->address),
            value_text(p->state),       value_seconds(p->since_s),
            value_us(p->rtt_us),        value_seconds(p->clock_skew_s),
            value_bytes(p->sent_bytes), value_bytes(p->received_bytes),
            value_count(p->n_jobs),     value_text(p->version),
            value_text(p->last_error),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
}

static int run(struct context *context)
{
    Pb__PeersRequest body = PB__PEERS_REQUEST__INIT;
    const Pb__Envelope *reply;
    int result = link_request(context->link, PB__ENVELOPE__BODY_PEERS_REQUEST, &body,
                              PB__ENVELOPE__BODY_PEERS_REPLY, &reply);
    if (result != LINK_OK)
        return result;
    struct writer *w = context->writer;
    writer_field(w, "listening", "listening on", value_text(reply->peers_reply->listening));
    writer_field(w, "has_key", "cluster key", value_bool(reply->peers_reply->has_key));
    write_peers(w, reply->peers_reply);
    return LINK_OK;
}

const struct command command_peers = {
    .name = "peers",
    .help = "the other nodes: links to their daemons, round trip, bytes",
    .run = run,
};
