/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon to be fuzzed: as its main() makes it, but without sockets of its own, without other
 * nodes, and with doubles for workers (worker_double.h). What goes wrong here aborts.
 */
#ifndef FUZZ_DAEMON_SCENE_H
#define FUZZ_DAEMON_SCENE_H

#include "control/daemon.h"
#include "records.h"

struct daemon *daemon_scene_open(void);

/* As the daemon's own end; other nodes are let go where jobs.peers is set. No worker may be left.
 */
void daemon_scene_close(struct daemon *daemon);

/* A new session; the client's end of its socket. */
int daemon_scene_connect(struct daemon *daemon);

/* The record as a message in a frame, which lives as long as *in. NULL: it is none. */
const Pb__Envelope *daemon_scene_parse(const struct record *record, struct wire_in *in);

/* The record's message is said by a worker, which its length chooses. */
void daemon_scene_worker_speaks(const struct record *record);

#endif
