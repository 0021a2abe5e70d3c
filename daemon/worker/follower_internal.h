/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of a follower share: follower.c (life and connection), follower_submit.c (what
 * goes to the coordinator, and when), follower_op.c (one op as the coordinator says it, held
 * against what this node has submitted) and follower_orders.c (what the coordinator has decided).
 *
 * Thread: loop. Invariant: a request is pending from its submission until one answer takes it: an
 * op that runs, a result, a refusal, or the end of the epoch. It is then completed exactly once.
 */
#ifndef GRADD_FOLLOWER_INTERNAL_H
#define GRADD_FOLLOWER_INTERNAL_H

#include <sys/queue.h>

#include "spin.h"
#include "worker/epoch.h"
#include "worker/follower.h"
#include "worker/plan/process_set.h"

/* Of an op, which the coordinator knows by id. */
struct follower_name {
    uint32_t id;
    char *text;
    UT_hash_handle hh;
};

/* An op as the coordinator says it; memory of its own. */
struct follower_op {
    struct plan_op op; /* first */
    uint32_t *ranks;
    uint64_t *counts; /* of reduce-scatter; then those of each part of an all-to-all */
    bool is_last;     /* of its batch */
    TAILQ_ENTRY(follower_op) link;
};
TAILQ_HEAD(follower_ops, follower_op);

struct follower {
    struct epoch *epoch;
    struct conn *conn; /* NULL: not attached, or over */
    struct follower_name *names;
    uint32_t n_names;
    struct request *pending; /* by remote id: sent, not answered */
    uint64_t last_remote_id;
    uint64_t seq, n_ops; /* as the coordinator counts batches and their ops */
    struct process_sets sets;
    struct follower_ops ops; /* decided, not handed out yet */
    bool is_at_end;          /* the op handed out last was the last of its batch */
    bool *is_heard;          /* by rank: has submitted since the last flush */
    uint32_t n_heard;
    struct watch *flush_timer; /* armed: what is queued waits a turn for the others */
    bool has_yielded;          /* to them, for this flush */
    struct spin spin;
    int failed;
    char failed_text[512];
};

/* ---- follower.c */

/* Queue a message of this kind for the coordinator; dropped when it is gone. */
void follower_push(struct follower *follower, Pb__Envelope__BodyCase body_case, void *body);

/* ---- follower_submit.c */

int follower_submit_init(struct follower *follower); /* 0 or -ENOMEM; then deinit too */
void follower_submit_deinit(struct follower *follower);
/* Send what is queued, whoever has not submitted yet. */
void follower_flush_now(struct follower *follower);
/* The request is answered: no longer pending. NULL: there is none of that number and rank. */
struct request *follower_take_request(struct follower *follower, uint64_t number, uint32_t rank);

/* ---- follower_op.c */

/* The op that the message means, with the requests of this node's ranks. NULL: it makes no sense,
 * it is not what they have submitted, or no memory; requests that it named have failed. */
struct follower_op *follower_op_new(struct follower *follower, const Pb__Execute *message);
void follower_op_free(struct follower_op *op);
/* It will not run: its requests fail. */
void follower_op_drop(struct follower_op *op);
/* The coordinator's answer is for something else than was submitted. */
void follower_drop_request(struct request *request);

/* ---- follower_orders.c */

/* Take one message. Returns why an honest coordinator does not send it, or NULL. */
const char *follower_take(struct follower *follower, const Pb__Envelope *envelope);

#endif
