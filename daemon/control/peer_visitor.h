/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection that has just arrived on the port for other nodes. Its first byte says what it is:
 * a TLS record begins a link between daemons; the hello of a data connection is proved here and the
 * connection then passed on.
 *
 * Thread: loop. Invariant: a visitor has LIMIT seconds and fixed memory; of a data connection not a
 * byte beyond its proof is read; whatever else it sends ends it, and nothing more happens.
 */
#ifndef GRADD_CONTROL_PEER_VISITOR_H
#define GRADD_CONTROL_PEER_VISITOR_H

#include "control/peers.h"

enum {
    VISITORS_MAX = 256,
};

/* Serve a new connection. fd is taken. */
void peer_visitor_new(struct peers *peers, int take_fd);
/* An epoch has begun: visitors that wait for one look again. */
void peer_visitors_retry(struct peers *peers);
void peer_visitors_free(struct peers *peers);

#endif
