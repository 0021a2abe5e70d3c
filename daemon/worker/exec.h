/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Execution: takes decided ops from the plan, runs them on the backend, completes their requests.
 *
 * Thread: loop. An op of which some rank streams its data runs in slices, as far as every rank is
 * ready; the others run whole. What became ready in one turn of the loop runs as one batch.
 */
#ifndef GRADD_EXEC_H
#define GRADD_EXEC_H

#include "worker/backend/backend.h"
#include "worker/member.h"
#include "worker/plan/plan.h"

struct exec;

struct exec_stats {
    uint64_t ops, bytes, batches;
    double wait_us, run_us; /* means over recent ops */
};

/* on_flush is called when ops have ended outside exec_turn(). NULL: out of memory. */
struct exec *exec_new(struct plan *plan, const struct backend_ops *ops, struct backend *backend,
                      void (*on_flush)(void *data), void *data);
/* Nothing may be running. NULL-safe. */
void exec_free(struct exec *exec);

/* Run what is ready, tell what has failed. Completions are queued on members, not flushed. */
void exec_turn(struct exec *exec);
/* A request of this run has become ready further. */
void exec_feed(struct exec *exec, void *run);
/* Fail every op that has started but waits for a rank's data: the rank will not come back. */
void exec_abort(struct exec *exec, int status, const char *text);
bool exec_is_idle(const struct exec *exec);
const struct exec_stats *exec_stats(const struct exec *exec);

#endif
