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
    uint64_t device_ops, staged_ops; /* of those: on device memory, and copied through ours */
    double wait_us, run_us;          /* means over recent ops */
};

/* Where ops come from and go back to: a plan, or what a coordinator has sent. */
struct exec_source {
    struct plan_op *(*next)(void *data); /* NULL: none now, or the end of a batch */
    void (*done)(void *data, struct plan_op *op);
    void *data;
    size_t batch_max;     /* ops that run as one at most */
    uint64_t batch_bytes; /* bytes after which a batch takes no further op */
};

struct exec_ops {
    /* Ops have ended outside exec_turn(): send what was queued. */
    void (*on_flush)(void *data);
    /* All inputs of the op are here, whatever node their ranks are on. NULL: no op is like that. */
    bool (*is_central)(void *data, const struct plan_op *op);
    /* These ops are about to run: so many of them, from the first on, do as one batch here and
     * elsewhere; the rest is asked for again. 0: they can not, and exec_abort() was told why. NULL:
     * nobody wants to know. */
    size_t (*on_batch)(void *data, struct plan_op *const *ops, size_t n);
    /* The op, which has a finite_check, has run here: so many NaN and infinite elements has the
     * lowest rank of this node that has any. True: exec_counted() follows, perhaps from inside. */
    bool (*on_counted)(void *data, const struct plan_op *op, uint32_t rank, uint64_t count);
};

/* ops is borrowed for good. NULL: out of memory. */
struct exec *exec_new(const struct exec_source *source, const struct exec_ops *ops, void *data);
/* Until then nothing runs. node_of, by rank, NULL: all ranks are here. Both are borrowed. */
void exec_set_backend(struct exec *exec, const struct backend_ops *ops, struct backend *backend,
                      const uint32_t *node_of);
/*
 * The backend of ops on device memory; without one they fail. Such ops and others that start
 * together run as a batch each: ops on devices before those on the host.
 */
void exec_set_device_backend(struct exec *exec, const struct backend_ops *ops,
                             struct backend *backend);
/* Nothing may be running. NULL-safe. */
void exec_free(struct exec *exec);

/* Run what is ready, tell what has failed. Completions are queued on members, not flushed. */
void exec_turn(struct exec *exec);
/* A request of this run has become ready further. */
void exec_feed(struct exec *exec, void *run);
/* The answer of all nodes to this finite_check; the op ends. False: no op waits for it. */
bool exec_counted(struct exec *exec, uint64_t finite_check, uint32_t rank, uint64_t count);
/* Fail every op that has started but waits for a rank's data: the rank will not come back. */
void exec_abort(struct exec *exec, int status, const char *text);
/*
 * Report ops that have started but wait for a rank's data for stall_warn, as plan_check() reports
 * those that wait for a rank; fail those that waited op_timeout. 0: never.
 */
void exec_check(struct exec *exec, uint64_t now_ns, uint64_t stall_warn_ns, uint64_t op_timeout_ns,
                plan_stall_fn *on_stall, void *data);
/* The same stalls for statistics: nothing fails, nothing counts as reported. */
void exec_list_stalls(const struct exec *exec, uint64_t now_ns, uint64_t stall_warn_ns,
                      plan_stall_fn *on_stall, void *data);
/* An op was broken by a lost link, and waits for exec_abort() to say why. */
bool exec_has_broken(const struct exec *exec);
bool exec_has_starved(const struct exec *exec);
bool exec_is_idle(const struct exec *exec);
const struct exec_stats *exec_stats(const struct exec *exec);

#endif
