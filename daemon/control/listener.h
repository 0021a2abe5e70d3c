/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The socket on which the daemon listens, and accepting on it.
 *
 * Thread: loop. Invariant: running out of descriptors stops accepting for a moment and never spins.
 */
#ifndef GRADD_CONTROL_LISTENER_H
#define GRADD_CONTROL_LISTENER_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/loop.h"

struct listener;

/* fd is taken by the callback. */
typedef void listener_fn(void *owner, int take_fd);

/*
 * Listen on a Unix socket at path. The file of a daemon that is gone is replaced; one that somebody
 * answers on is not (-EADDRINUSE). 0 with *out_fd, or -errno.
 */
int listener_bind(const char *path, mode_t mode, int *out_fd);

/* Accept on fd (taken, even on failure: NULL). */
struct listener *listener_new(struct loop *loop, int take_fd, listener_fn *fn, void *owner);
void listener_free(struct listener *listener);

#endif
