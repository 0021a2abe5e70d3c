/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of execution share: exec.c (batches and turns), exec_run.c (one op, slice by
 * slice), exec_end.c (how ops end) and exec_stalls.c (ops that wait for a rank's data).
 *
 * Thread: loop. Invariant: every run is on the list that its state names, in one batch while it
 * runs, or spare; from exec_open_run() to its end it holds its plan_op, which it then gives back.
 */
#ifndef GRADD_EXEC_INTERNAL_H
#define GRADD_EXEC_INTERNAL_H

#include <stdatomic.h>
#include <sys/queue.h>

#include "worker/exec.h"

enum run_state {
    RUN_STARTABLE, /* on exec->startable */
    RUN_RUNNING,   /* in a batch */
    RUN_STARVED,   /* on exec->starved: a rank has not fed enough */
    RUN_COUNTING,  /* on exec->counting: it has run, other nodes still count its NaN */
    RUN_BROKEN,    /* on exec->broken: something is lost; the epoch's failure ends it in words */
};

/* An op being executed. Recycled. */
struct run {
    struct backend_op op; /* first: batches hold pointers to it */
    struct plan_op *plan_op;
    struct backend_part *parts;
    _Atomic uint64_t *nonfinite; /* as many as parts */
    uint32_t parts_capacity;
    uint64_t done;       /* elements */
    uint64_t starved_ns; /* since when, while RUN_STARVED */
    bool is_stalled;     /* reported by exec_check() */
    bool is_central;     /* runs on this node alone, for ranks of others too */
    enum run_state state;
    TAILQ_ENTRY(run) link; /* startable, starved, counting, broken or spare */
    SLIST_ENTRY(run) in_all;
};
TAILQ_HEAD(run_list, run);

struct exec {
    struct exec_source source;
    const struct exec_ops *ops;
    void *data;
    const struct backend_ops *backend_ops;
    struct backend *backend; /* NULL: not yet */
    const struct backend_ops *device_ops;
    struct backend *device_backend; /* NULL: none */
    const uint32_t *node_of;
    struct plan_op **batch_ops; /* scratch for on_batch() */
    size_t batch_ops_capacity;
    struct run_list startable, starved, counting, broken, spare;
    size_t n_startable, n_running;
    SLIST_HEAD(, batch) spare_batches, all_batches;
    SLIST_HEAD(, run) all_runs;
    bool is_turning;
    int aborted; /* exec_abort(): a status for runs that starve from now on */
    char abort_text[512];
    struct exec_stats stats;
};

/* ---- exec_run.c */

/* The op goes on startable or starved, or ends at once: it can not run, or there is no memory. */
void exec_open_run(struct exec *exec, struct plan_op *op);
/* Into a batch: from what has run to what every rank has made ready. */
void exec_begin_slice(struct exec *exec, struct run *run);
/* The batch is over; op.status says how. The op goes on, ends, or waits for words. */
void exec_end_slice(struct exec *exec, struct run *run);
void exec_free_run(struct run *run);

/* ---- exec_end.c */

/* On no list any more. All requests are completed, after the other nodes' counts if the op has a
 * finite_check. */
void exec_end_run(struct exec *exec, struct run *run, int status, const char *text);
/* An op that has no run fails. */
void exec_refuse_op(struct exec *exec, struct plan_op *op, int status, const char *text);

#endif
