/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A link to the daemon of another node: TCP, TLS with the cluster's key, a greeting, then messages
 * and heartbeats.
 *
 * Thread: loop. Invariant: no message is handed over before the greeting; a link that is up either
 * proves within peer_dead_s that it lives, or is lost; peers_ops.on_lost() is called once, from the
 * loop, never inside a call of its user, and nobody refers to the link afterwards. It is then kept
 * for a while to be shown.
 */
#ifndef GRADD_CONTROL_PEER_LINK_H
#define GRADD_CONTROL_PEER_LINK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "base/loop.h"
#include "control/resolve.h"
#include "wire.h"

struct peers;
struct peer_tls;

enum {
    PEER_NODE_ID_BYTES = 16,
};

enum peer_link_state {
    PEER_CONNECTING, /* to be tried, again and again while somebody waits for it */
    PEER_SECURING,   /* TCP stands, TLS does not yet */
    PEER_GREETING,   /* its PeerHello is awaited */
    PEER_UP,         /* messages flow */
    PEER_LOST,       /* over; only to be shown */
};

struct peer_link {
    TAILQ_ENTRY(peer_link) link;
    struct peers *peers;
    enum peer_link_state state;
    bool is_dialled;         /* by us, else accepted */
    bool is_ending;          /* on_lost() is under way */
    struct resolved targets; /* to dial, in turn */
    unsigned next_target;
    struct peer_address address; /* of the other daemon */
    char address_text[RESOLVE_TEXT_MAX];
    char name[256]; /* its node's; the address until it has said */
    char version[32];
    uint8_t node_id[PEER_NODE_ID_BYTES];
    uint16_t port; /* where its daemon awaits others; 0: not known */
    int fd;        /* -1: none */
    struct watch *watch;
    struct watch *timer; /* what for: by state */
    struct watch *soon;  /* zero timer: send, read on, or report the end */
    struct peer_tls *tls;
    struct wire_in in;
    struct wire_out out;
    uint64_t since_ns;          /* of the state */
    uint64_t up_ns;             /* when it came up; 0: it never did */
    uint64_t heard_ns;          /* when it last sent anything */
    uint64_t used_ns;           /* when somebody last needed it */
    uint64_t ping_ns, ping_seq; /* of the last Ping */
    uint64_t unanswered_ns;     /* of the oldest Ping without a Pong; 0: all have one */
    uint64_t confirmed_ns;      /* when the newest Ping that has a Pong was sent */
    double rtt_us, skew_s;
    uint64_t sent_bytes, received_bytes;
    char error[256]; /* the last trouble */
};

const char *peer_link_state_name(const struct peer_link *link);

/* Dial. NULL: no memory. */
struct peer_link *peer_link_dial(struct peers *peers, const struct resolved *targets);
/* Serve a connection that begins with a TLS record. fd is taken. NULL: no memory. */
struct peer_link *peer_link_accept(struct peers *peers, int take_fd,
                                   const struct peer_address *address);
/* At once, without a word to its users; what is queued is sent if the socket takes it. */
void peer_link_free(struct peer_link *link);

/* Queue a message. Trouble ends the link: on_lost() follows. Dropped unless it is up. */
void peer_link_push(struct peer_link *link, const Pb__Envelope *envelope);
/* Bytes that are queued and have not left. Whoever sends what can be done without looks first: a
 * full queue ends the link. */
size_t peer_link_backlog(const struct peer_link *link);
/* End it; on_lost(reason) follows from the loop. Idempotent. */
void peer_link_end(struct peer_link *link, const char *reason);

/* True when a Ping sent at since_ns or later has been answered; else one is on its way, and
 * peers_ops.on_answer() follows. */
bool peer_link_confirm(struct peer_link *link, uint64_t since_ns);
/* A lost one need not be shown any more; freed from the loop. */
void peer_link_forget(struct peer_link *link);

/* "10.0.0.2" as the other nodes may reach it. */
void peer_link_host(const struct peer_link *link, char *out_text, size_t size);

#endif
