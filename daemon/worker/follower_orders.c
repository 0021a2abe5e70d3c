/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the coordinator has decided: batches to execute, handed out in its order, and requests that
 * end otherwise.
 */
#include <limits.h>
#include <string.h>

#include "worker/backend/nccl/nccl.h"
#include "worker/central.h"
#include "worker/follower_internal.h"
#include "worker/stats.h"

static bool apply_sets(struct follower *f, const struct plan_op *op)
{
    const struct signature *s = &op->signature;
    if (s->kind == GRADD_SET_ADD) {
        f->sets.next_id = (uint32_t)op->result; /* the coordinator's numbers */
        return process_sets_ranks_valid(&f->sets, s->counts, s->n_counts) &&
               process_sets_add(&f->sets, s->counts, s->n_counts);
    }
    if (s->kind == GRADD_SET_REMOVE) {
        struct process_set *set = process_sets_find(&f->sets, (uint32_t)s->root);
        if (set && set->id != 0)
            process_sets_remove(&f->sets, set);
    }
    return true;
}

static const char *take_batch(struct follower *f, const Pb__ExecuteBatch *batch)
{
    if (batch->seq != ++f->seq)
        return "sent a batch out of order";
    for (size_t i = 0; i < batch->n_ops; i++) {
        struct follower_op *op = follower_op_new(f, batch->ops[i]);
        if (op && !apply_sets(f, &op->op)) {
            follower_op_drop(op);
            op = NULL;
        }
        if (!op)
            return "sent a batch that does not fit this node's requests";
        op->op.number = ++f->n_ops;
        op->is_last = i + 1 == batch->n_ops;
        TAILQ_INSERT_TAIL(&f->ops, op, link);
    }
    return NULL;
}

static const char *take_refusal(struct follower *f, const Pb__RemoteFailure *failure)
{
    if (failure->code == 0 || failure->code > INT_MAX)
        return "refused requests without a failure";
    for (size_t i = 0; i < failure->n_requests && i < failure->n_ranks; i++) {
        struct request *request = follower_take_request(f, failure->requests[i], failure->ranks[i]);
        if (request)
            member_complete(request, -(int)failure->code, failure->text, NULL);
    }
    return NULL;
}

static const char *take_comm(struct follower *f, const Pb__CommBegin *begin)
{
    struct backend *nccl = f->epoch->device;
    const bool fits =
        nccl && begin->n_ranks > 0 && begin->n_ranks == begin->n_comm_rank &&
        nccl_comm_begin(nccl, begin->ranks, begin->comm_rank, (uint32_t)begin->n_ranks, begin->size,
                        begin->unique_id.data, begin->unique_id.len);
    return fits ? NULL : "began a communicator that does not fit this node";
}

static const char *take_count(struct follower *f, const Pb__NonfiniteCount *counted)
{
    const bool is_awaited =
        exec_counted(f->epoch->exec, counted->finite_check, counted->rank, counted->count);
    return is_awaited || f->failed ? NULL : "answered a count that it was not asked for";
}

/* An op of which every rank's data went to the coordinator. */
static const char *take_result(struct follower *f, const Pb__RemoteResult *result)
{
    struct request *request = follower_take_request(f, result->request, result->rank);
    if (!request || !central_awaits(request, result->data.len)) {
        if (request)
            follower_drop_request(request);
        return "sent a result that does not fit this node's requests";
    }
    memcpy(request->part.out.base, result->data.data, result->data.len);
    member_complete(request, GRADD_OK, "", NULL);
    return NULL;
}

static void push_stats(void *data, Pb__StatsReply *reply)
{
    follower_push(data, PB__ENVELOPE__BODY_STATS_REPLY, reply);
}

const char *follower_take(struct follower *f, const Pb__Envelope *envelope)
{
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_EXECUTE_BATCH:
        return take_batch(f, envelope->execute_batch);
    case PB__ENVELOPE__BODY_COMM_BEGIN:
        return take_comm(f, envelope->comm_begin);
    case PB__ENVELOPE__BODY_REMOTE_FAILURE:
        return take_refusal(f, envelope->remote_failure);
    case PB__ENVELOPE__BODY_NONFINITE_COUNT:
        return take_count(f, envelope->nonfinite_count);
    case PB__ENVELOPE__BODY_STATS_REQUEST:
        stats_reply(f->epoch, f->epoch->setup->quota, envelope->stats_request->seq, push_stats, f);
        return NULL;
    case PB__ENVELOPE__BODY_REMOTE_RESULT:
        return take_result(f, envelope->remote_result);
    default:
        return "sent a message that a node does not know";
    }
}

struct plan_op *follower_next(struct follower *f)
{
    if (f->is_at_end) {
        f->is_at_end = false;
        return NULL;
    }
    struct follower_op *op = TAILQ_FIRST(&f->ops);
    if (!op)
        return NULL;
    TAILQ_REMOVE(&f->ops, op, link);
    f->is_at_end = op->is_last;
    return &op->op;
}

void follower_op_done(struct follower *f, struct plan_op *op)
{
    follower_op_free((struct follower_op *)op);
}
