/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which user has the other end of a TCP connection within this machine. Thread: any.
 */
#ifndef GRADD_CONTROL_TCP_OWNER_H
#define GRADD_CONTROL_TCP_OWNER_H

#include <stdbool.h>
#include <sys/types.h>

#include "control/resolve.h"

/* Owner of the socket whose own address is `local` and whose peer is `remote`. False: not found. */
bool tcp_owner(const struct peer_address *local, const struct peer_address *remote, uid_t *out_uid);

#endif
