/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of a link share: peer_link.c (life, and what happens to it by state),
 * peer_link_open.c (TCP and TLS, until the greeting), peer_link_greeting.c (PeerHello),
 * peer_link_heartbeat.c (whether it lives) and peer_link_io.c (bytes and frames).
 *
 * Thread: loop. Invariant: whoever calls something that may end the link (peer_link_end()) looks at
 * is_ending before it goes on; the link itself stays until the loop turns.
 */
#ifndef GRADD_CONTROL_PEER_LINK_INTERNAL_H
#define GRADD_CONTROL_PEER_LINK_INTERNAL_H

#include "control/peer_link.h"
#include "control/peers.h"

/* ---- peer_link.c */

/* Among the peers' links, without a socket. NULL: no memory. */
struct peer_link *peer_link_new(struct peers *peers);
void peer_link_set_state(struct peer_link *link, enum peer_link_state state);
/* Be called for these events of link->fd. False: no memory. */
bool peer_link_watch(struct peer_link *link, unsigned events);
/* From the loop: tell the users, keep the rest to be shown. */
void peer_link_report_end(struct peer_link *link);

/* ---- peer_link_open.c */

/* CONNECTING, SECURING: the socket has something. */
void peer_link_open_on_socket(struct peer_link *link);
/* CONNECTING: dial the next address, or give up the one being dialled. SECURING, GREETING: it took
 * too long; a link that was dialled tries again, another one ends. */
void peer_link_open_on_timer(struct peer_link *link);

/* ---- peer_link_greeting.c */

void peer_link_push_hello(struct peer_link *link);
/* GREETING: what comes is its PeerHello, or ends it. */
void peer_link_on_greeting(struct peer_link *link, const Pb__Envelope *envelope);

/* ---- peer_link_heartbeat.c */

/* UP: from now on it has to prove that it lives. */
void peer_link_start_heartbeat(struct peer_link *link);
/* UP, timer: alive, silent or needless? */
void peer_link_beat(struct peer_link *link);
void peer_link_on_ping(struct peer_link *link, const Pb__Ping *ping);
void peer_link_on_pong(struct peer_link *link, const Pb__Pong *pong);

/* ---- peer_link_io.c */

/* Queue a message in any state with TLS; sent from the loop. Trouble ends the link. */
void peer_link_queue(struct peer_link *link, const Pb__Envelope *envelope);
/* Send what the socket takes. */
void peer_link_flush(struct peer_link *link);
/* Read until the socket is empty, or for a while; each frame is handed on by state. */
void peer_link_receive(struct peer_link *link);
/* Wake up for what there is to do next. */
void peer_link_update_watch(struct peer_link *link);
/* Close it, with what was read and queued. Idempotent. */
void peer_link_drop_socket(struct peer_link *link);

#endif
