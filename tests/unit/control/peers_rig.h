/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two daemons' peers on one loop, over the loopback interface, for the tests of links and of
 * visitors. What the daemons are told is counted.
 *
 * Thread: any, one per process.
 */
#ifndef TEST_PEERS_RIG_H
#define TEST_PEERS_RIG_H

#include "control/peers.h"

/* One daemon, as far as its peers are concerned. */
struct node {
    struct peers peers;
    struct config config;
    unsigned n_up, n_lost, n_self, n_answers, n_messages, n_data;
    struct peer_link *up; /* the last one */
    char why[256];
    uint64_t last_epoch; /* of a RemoteLeave */
    bool is_used;
    bool has_epoch;
    uint8_t secret[LINK_SECRET_BYTES];
    int data_fd; /* duplicate of the last one */
};

extern struct loop *loop;
extern struct node a, b;
extern const struct peers_ops node_ops; /* owner: struct node */

#define TURN_UNTIL(condition)                                                                      \
    while (!(condition))                                                                           \
    loop_step(loop, true)

/* Around each test: a and b run, with one key. */
void rig_set_up(void);
void rig_tear_down(void);

/* Start a daemon's peers. key 0: none. The port is chosen by the system unless given. */
void node_start(struct node *node, const char *name, uint8_t key);
void node_start_at(struct node *node, const char *name, uint8_t key, uint16_t port);
void node_start_on(struct node *node, const char *name, uint8_t key, const char *host,
                   uint16_t port);
void node_stop(struct node *node);

/* Where it listens. */
struct resolved node_address(const struct node *node);
/* Its link to the other one. */
struct peer_link *node_dial(struct node *from, const struct node *to);
/* A plain connection to its port. */
int node_visit(const struct node *node);
/* Send a message that shows as last_epoch on the other side. */
void push_leave(struct peer_link *link, uint64_t epoch);
/* Turn the loop until the other side has closed the connection, and close it. */
void await_close(int fd);

#endif
