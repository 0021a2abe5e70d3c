/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the daemon's descriptors are shared out: how many connections it may serve so that what it
 * needs besides, and what strangers at the port for other nodes may take, is still there.
 *
 * Thread: loop. Invariant: sessions up to the limit, administrators, visitors, links and workers
 * together take no more than the process may open.
 */
#ifndef GRADD_CONTROL_DESCRIPTORS_H
#define GRADD_CONTROL_DESCRIPTORS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    DESCRIPTORS_ADMINS = 32, /* connections beyond max_sessions, for administrators */
    DESCRIPTORS_SESSIONS_MAX = 65536,
};

/* Raise the limit of this process as far as it may. Returns it. */
uint64_t descriptors_raise_limit(void);

/* Descriptors that are not for max_sessions. has_peers: other nodes are listened for. */
uint64_t descriptors_reserved(bool has_peers);
/* Connections that `limit` descriptors allow; at least one. */
unsigned descriptors_sessions(uint64_t limit, bool has_peers);

#endif
