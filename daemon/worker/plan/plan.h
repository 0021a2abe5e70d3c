/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan: which ops are ready, and which have failed. Ranks submit requests by name in any
 * order; the plan matches them, checks that they agree, keeps groups together, knows process sets
 * and ranks that have joined out of data, and finds what has waited too long.
 *
 * Pure: values in, decisions out. No sockets, clock, threads or log; the caller passes the time.
 * Thread: loop.
 *
 * Invariants: a request that plan_submit() accepted comes out of plan_next() exactly once, within
 * one plan_op; ops come out in the order in which they were decided; the ops of a group come out
 * next to each other. A rank that submits late to an op that has already failed gets that failure.
 */
#ifndef GRADD_PLAN_H
#define GRADD_PLAN_H

#include "worker/plan/signature.h"

struct plan;

struct plan_limits {
    uint32_t max_entries;   /* ops waiting or owed, all ranks together */
    uint64_t stall_warn_ns; /* 0: never */
    uint64_t op_timeout_ns; /* 0: never */
};

/* One rank's part of an op. */
struct plan_part {
    void *request; /* the caller's record; NULL: this rank is absent (joined, or not in the set) */
    uint64_t arrived_ns;
    uint64_t count;
    uint64_t out_capacity;
    const uint64_t *counts; /* all-to-all: what it gives to each rank; the caller's to fill in */
};

/* A decided op, owned by the plan until plan_op_done(). */
struct plan_op {
    const char *name;
    uint32_t set;
    struct signature signature; /* of the first rank that submitted */
    int status;                 /* GRADD_OK: run it; else a gradd_status: tell every part */
    const char *text;           /* of a failure */
    uint32_t n_ranks;           /* of the process set */
    const uint32_t *ranks;      /* the set's global ranks, ascending */
    struct plan_part *parts;    /* indexed like ranks */
    uint32_t n_joined;          /* parts that are absent because their rank is out of data */
    uint64_t first_ns;          /* arrival of the first part */
    uint64_t ready_ns;          /* arrival of the last */
    uint32_t n_following;       /* ops of its group that come out of plan_next() after it */
    uint64_t result;            /* GRADD_SET_ADD: the set's id; GRADD_JOIN: the last rank */
    /* The caller's: number of the answer that the op's nodes give together about NaN; 0: none. */
    uint64_t finite_check;
    uint64_t number; /* the caller's: among the ops that run on several nodes; 0: none */
};

/* A request that has waited longer than stall_warn. Valid during the callback. */
struct plan_stall {
    const char *name;
    enum gradd_kind kind;
    uint64_t waited_ns;
    const uint32_t *missing, *present; /* global ranks */
    uint32_t n_missing, n_present;
    bool is_new; /* not reported by an earlier plan_check() */
};
typedef void plan_stall_fn(void *data, const struct plan_stall *stall);

/* label: how failure sentences begin, such as "job train7". NULL: out of memory. */
struct plan *plan_new(const char *label, uint32_t n_ranks, const struct plan_limits *limits);
void plan_free(struct plan *plan);

/*
 * Where a rank runs, for sentences: "rank 1 (node a, pid 7)". Default: "rank 1".
 */
void plan_describe_rank(struct plan *plan, uint32_t rank, const char *text);

/*
 * Rank submits a request. The signature is copied. 0: accepted. Else a gradd_status, *out_text has
 * the sentence (valid until the next call) and the request will not come out of plan_next().
 */
int plan_submit(struct plan *plan, uint32_t rank, uint32_t set, const char *name,
                const struct signature *signature, void *request, uint64_t now_ns,
                const char **out_text);

/* The next decided op, or NULL. */
struct plan_op *plan_next(struct plan *plan);

/*
 * The op runs on several nodes and may end on one before another: its name is free from now on.
 * Idempotent; plan_op_done() is still owed.
 */
void plan_op_detach(struct plan *plan, struct plan_op *op);

/*
 * The op has ended (ran, or its failure was told): its name is free again on its ranks, the
 * memory goes back to the plan.
 */
void plan_op_done(struct plan *plan, struct plan_op *op);

/* The rank will submit nothing more: ops that need it fail now and in future, with this sentence.
 */
void plan_rank_left(struct plan *plan, uint32_t rank, int status, const char *text);

/* Every op that still waits for a rank fails, and so does every later submission. */
void plan_fail_all(struct plan *plan, int status, const char *text);

/*
 * Report stalls, fail what passed op_timeout. Returns when to call again (absolute ns), or 0 when
 * nothing waits.
 */
uint64_t plan_check(struct plan *plan, uint64_t now_ns, plan_stall_fn *on_stall, void *data);

/* The stalls of now, for statistics: nothing is failed, nothing counts as reported. */
void plan_list_stalls(const struct plan *plan, uint64_t now_ns, plan_stall_fn *on_stall,
                      void *data);

/* Ops that some rank waits for. */
uint32_t plan_n_waiting(const struct plan *plan);

/* Ranks of a set (0: all); 0 when there is no such set. Borrowed until the set is removed. */
uint32_t plan_set_ranks(const struct plan *plan, uint32_t set, const uint32_t **out_ranks);

#endif
