/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gradd-worker: the data plane of one job on one node. The root object of the process: the channel
 * to the daemon, the epochs, the backend.
 *
 * Thread: loop. When the daemon goes away, the running epoch goes on until its members have left;
 * then the worker ends.
 */
#ifndef GRADD_WORKER_H
#define GRADD_WORKER_H

#include "base/loop.h"

struct worker;

/* take_fd: the channel to the daemon. NULL: out of memory or descriptors. */
struct worker *worker_new(struct loop *loop, int take_fd);
void worker_free(struct worker *worker);

#endif
