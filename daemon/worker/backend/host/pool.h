/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that execute the pieces of strip lists. Thread: loop; the pieces run on pool threads.
 *
 * One list runs at a time. Its pieces are dealt in equal shares, the same for equal lists, so that
 * a thread meets its own part of a tensor again in its caches (measured: 1.8 times as fast at 16
 * MiB). A thread takes pieces from its share's atomic counter, then from the others': one that
 * loses its core holds back one piece and no more. The counters and the count of finished pieces
 * are the only shared mutable words: a piece's writes are released by the finishing increment and
 * acquired by whoever sees the last one.
 */
#ifndef GRADD_POOL_H
#define GRADD_POOL_H

#include "base/loop.h"
#include "worker/backend/host/strip.h"

struct pool;
typedef void pool_done_fn(void *data);

/* NULL: no memory, descriptors or threads. */
struct pool *pool_new(struct loop *loop, unsigned n_threads, pool_done_fn *done, void *data);
/* Waits for the list that runs. NULL-safe. */
void pool_free(struct pool *pool);

/* Start a list (sealed, borrowed until done). No list may be running. done() comes from the loop.
 */
void pool_start(struct pool *pool, const struct strip_list *list);

/* Run a list on this thread and n_threads - 1 others; returns when it is done. */
void pool_run(struct pool *pool, const struct strip_list *list);

bool pool_is_busy(const struct pool *pool);
unsigned pool_n_threads(const struct pool *pool);

#endif
