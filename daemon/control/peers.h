/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other nodes: the TCP port on which they are awaited, the links to their daemons, and the
 * connections that bring the data of jobs.
 *
 * Thread: loop. Invariant: without a cluster key nothing but the loopback interface is listened on
 * or dialled, and only daemons of the same user (or root) are spoken to.
 */
#ifndef GRADD_CONTROL_PEERS_H
#define GRADD_CONTROL_PEERS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "base/link_proof.h"
#include "base/log.h"
#include "control/cluster_key.h"
#include "control/config.h"
#include "control/peer_link.h"

struct visitor;

struct peers_ops {
    void (*on_up)(void *owner, struct peer_link *link);
    /* why: a part of a sentence: "no heartbeat for 5 s". Nobody may use the link afterwards. */
    void (*on_lost)(void *owner, struct peer_link *link, const char *why);
    /* A dialled link turned out to lead to this very daemon; on_lost() follows. */
    void (*on_self)(void *owner, struct peer_link *link);
    /* It has answered a Ping. */
    void (*on_answer)(void *owner, struct peer_link *link);
    void (*on_message)(void *owner, struct peer_link *link, const Pb__Envelope *envelope);
    /* Somebody waits for the link, or has a job over it. */
    bool (*is_used)(void *owner, const struct peer_link *link);
    /* The secret of the epoch that the hello names. NULL: no such epoch runs here (yet). */
    const uint8_t *(*find_secret)(void *owner, const struct link_hello *hello);
    /* A data connection has proved itself. fd is borrowed. */
    void (*on_data_link)(void *owner, const struct link_hello *hello, int fd);
};

struct peers {
    /* Filled by the owner before peers_start(). */
    struct loop *loop;
    const struct config *config;
    const char *node;
    struct cluster_key key;
    const struct peers_ops *ops;
    void *owner;

    uint8_t node_id[PEER_NODE_ID_BYTES];
    struct resolver *resolver;
    struct listener *listener; /* NULL: no other node can reach this one */
    struct peer_address listening;
    TAILQ_HEAD(peer_links, peer_link) links;
    TAILQ_HEAD(visitor_list, visitor) visitors;
    unsigned n_visitors;
    struct log_limit lines; /* about connections: whoever reaches the port causes them */
};

/*
 * Begin. listen_fd: a TCP socket that listens (taken, even on failure), or -1 with `listens`: bind
 * one. 0 or -errno; errors are logged.
 */
int peers_start(struct peers *peers, bool listens, int take_listen_fd);
/* Ends links without a word to their users. Idempotent; zeroed is fine. */
void peers_stop(struct peers *peers);

uint16_t peers_port(const struct peers *peers);
bool peers_is_listening(const struct peers *peers);

/* One of these addresses is where this daemon is awaited by others. */
bool peers_is_self(const struct peers *peers, const struct resolved *targets);

/*
 * A link to the daemon at one of these addresses, perhaps one that is there already. NULL with
 * *out_error: a sentence.
 */
struct peer_link *peers_dial(struct peers *peers, const struct resolved *targets, char *out_error,
                             size_t size);

/* An epoch has begun: data connections that came early may go on. */
void peers_on_epoch(struct peers *peers);

/* Log a line that whoever reaches the port can cause. */
void peers_log(struct peers *peers, enum log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Without a key: both ends of the connection are on this machine, and the other one is ours. */
bool peers_may_talk(const struct peers *peers, int fd, char *out_error, size_t size);

#endif
