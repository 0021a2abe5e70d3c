/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/follower.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/clock.h"
#include "spin.h"
#include "worker/central.h"
#include "worker/backend/nccl/nccl.h"
#include "worker/epoch.h"
#include "worker/plan/process_set.h"
#include "worker/stats.h"

enum { QUEUE_BYTES = 64 * 1024 * 1024, SUBMITS_MAX = 64 };

struct name {
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

struct follower {
    struct epoch *epoch;
    struct conn *conn; /* NULL: not attached, or over */
    struct name *names;
    uint32_t n_names;
    struct request *pending; /* by remote id: sent, not answered */
    uint64_t last_remote_id;
    uint64_t seq, n_ops; /* as the coordinator counts batches and their ops */
    struct process_sets sets;
    TAILQ_HEAD(, follower_op) ops;
    bool is_at_end; /* the op handed out last was the last of its batch */
    bool *is_heard; /* by rank: has submitted since the last flush */
    uint32_t n_heard;
    struct watch *flush_timer; /* armed: what is queued waits a turn for the others */
    bool has_yielded;          /* to them, for this flush */
    struct spin spin;
    int failed;
    char failed_text[512];
};

static const struct conn_ops coordinator_conn_ops;

static void on_flush_timer(void *data);

struct follower *follower_new(struct epoch *epoch)
{
    struct follower *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->epoch = epoch;
    TAILQ_INIT(&f->ops);
    f->is_heard = calloc(epoch->size, sizeof *f->is_heard);
    f->flush_timer = watch_timer(epoch->setup->loop, on_flush_timer, f);
    if (process_sets_init(&f->sets, epoch->size) < 0 || !f->is_heard || !f->flush_timer) {
        follower_free(f);
        return NULL;
    }
    return f;
}

static void op_free(struct follower_op *op)
{
    free(op->op.parts);
    free(op->ranks);
    free(op->counts);
    free(op);
}

void follower_free(struct follower *f)
{
    if (!f)
        return;
    conn_free(f->conn);
    struct follower_op *op;
    while ((op = TAILQ_FIRST(&f->ops))) {
        TAILQ_REMOVE(&f->ops, op, link);
        op_free(op);
    }
    struct name *name, *next, *names = f->names;
    HASH_CLEAR(hh, f->names);
    HASH_ITER(hh, names, name, next)
    {
        free(name->text);
        free(name);
    }
    process_sets_deinit(&f->sets);
    watch_free(f->flush_timer);
    free(f->is_heard);
    free(f);
}

int follower_attach(struct follower *f, int take_fd)
{
    f->conn = conn_new(f->epoch->setup->loop, take_fd, QUEUE_BYTES, &coordinator_conn_ops, f);
    if (!f->conn)
        return -ENOMEM;
    conn_set_manual_flush(f->conn);
    return 0;
}

/* Some of this node's ranks have submitted, others not. */
static bool is_partial(const struct follower *f)
{
    return f->n_heard > 0 && f->n_heard < f->epoch->n_added - f->epoch->n_gone;
}

static void flush_now(struct follower *f)
{
    if (f->has_yielded && is_partial(f))
        spin_failed(&f->spin);
    else if (f->has_yielded)
        spin_succeeded(&f->spin);
    f->has_yielded = false;
    watch_disarm(f->flush_timer);
    if (f->n_heard > 0)
        memset(f->is_heard, 0, f->epoch->size * sizeof *f->is_heard);
    f->n_heard = 0;
    if (f->conn)
        conn_flush(f->conn);
}

/* All that had come has been looked at. */
static void on_flush_timer(void *data)
{
    struct follower *f = data;
    if (!f->has_yielded && is_partial(f) && spin_begins(&f->spin)) {
        f->has_yielded = true;
        sched_yield();
        watch_arm(f->flush_timer, 0);
        return;
    }
    flush_now(f);
}

/*
 * The ranks of a node tend to submit at the same time, and one message to another node costs less
 * than one for each: let the others run once, and look whether they have come.
 */
void follower_flush(struct follower *f)
{
    if (!is_partial(f))
        flush_now(f);
    else if (!watch_is_armed(f->flush_timer))
        watch_arm(f->flush_timer, 0);
}

void follower_close(struct follower *f)
{
    if (f->conn)
        conn_close(f->conn, "");
}

uint32_t follower_set_ranks(const struct follower *f, uint32_t set, const uint32_t **out_ranks)
{
    const struct process_set *found = process_sets_find(&f->sets, set);
    *out_ranks = found ? found->ranks : NULL;
    return found ? found->n_ranks : 0;
}

/* ------------------------------------------------------------------ to the coordinator */

static void push(struct follower *f, Pb__Envelope__BodyCase body_case, void *body)
{
    if (!f->conn)
        return;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.remote_submit_batch = body; /* the members of the union are all pointers */
    conn_push(f->conn, &envelope);
}

/* Put the name's id into the message, and the name itself the first time. */
static struct name *set_name(struct follower *f, const char *text, Pb__RemoteSubmit *submit)
{
    struct name *name;
    HASH_FIND_STR(f->names, text, name);
    if (name) {
        submit->name_id = name->id;
        return name;
    }
    submit->name = (char *)text;
    name = f->n_names < FOLLOWER_NAMES_MAX ? calloc(1, sizeof *name) : NULL;
    if (name && (name->text = strdup(text))) {
        name->id = ++f->n_names;
        submit->name_id = name->id;
        HASH_ADD_KEYPTR(hh, f->names, name->text, strlen(name->text), name);
        return name;
    }
    free(name);
    return NULL;
}

/* What the request's memory is good for. */
static void note_submitted(struct request *request, const struct process_set *set,
                           const struct signature *s)
{
    request->submitted.kind = s->kind;
    request->submitted.dtype = s->dtype;
    request->submitted.root = s->root;
    request->submitted.count = s->count;
    request->submitted.out_count = s->out_capacity;
    request->submitted.n_counts = s->n_counts;
    request->submitted.is_device = s->is_device;
    for (uint32_t i = 0; s->kind == GRADD_REDUCE_SCATTER && i < set->n_ranks; i++)
        if (set->ranks[i] == request->member->rank)
            request->submitted.out_count = i < s->n_counts ? s->counts[i] : 0;
}

int follower_submit(struct follower *f, const struct member *member, uint32_t set, const char *name,
                    const struct signature *s, struct request *request, const char **out_text)
{
    if (f->failed) {
        *out_text = f->failed_text;
        return f->failed;
    }
    const struct process_set *found = process_sets_find(&f->sets, set);
    if (!name[0] || strlen(name) > PLAN_NAME_MAX || !found) { /* an empty one stands for an id */
        *out_text = found ? "a name must have 1 to 255 bytes" : "there is no such process set";
        return GRADD_ERR_INVALID;
    }
    Pb__RemoteSubmit submit = PB__REMOTE_SUBMIT__INIT, *pointer = &submit;
    const struct name *known = set_name(f, name, &submit);
    request->name = known ? known->text : "";
    note_submitted(request, found, s);
    f->n_heard += !f->is_heard[member->rank];
    f->is_heard[member->rank] = true;
    request->remote_id = ++f->last_remote_id;
    HASH_ADD(hh_remote, f->pending, remote_id, sizeof request->remote_id, request);
    submit.rank = member->rank;
    submit.request = request->remote_id;
    submit.set = set;
    submit.kind = s->kind;
    submit.dtype = s->dtype;
    submit.redop = s->redop;
    submit.root = s->root;
    submit.count = s->count;
    submit.out_capacity = s->out_capacity;
    submit.prescale = s->prescale == 1 ? 0 : s->prescale;
    submit.postscale = s->postscale == 1 ? 0 : s->postscale;
    submit.counts = (uint64_t *)s->counts;
    submit.n_counts = s->n_counts;
    submit.dims = (uint64_t *)s->dims;
    submit.n_dims = s->n_dims;
    submit.group = (char *)s->group;
    submit.group_size = s->group_size;
    submit.is_device = s->is_device;
    submit.check_finite = request->check_finite;
    if (central_offers(f->epoch->layout, s, request)) {
        submit.data.data = request->part.in.base;
        submit.data.len = request->bytes;
    }
    Pb__RemoteSubmitBatch batch = PB__REMOTE_SUBMIT_BATCH__INIT;
    batch.submits = &pointer;
    batch.n_submits = 1;
    push(f, PB__ENVELOPE__BODY_REMOTE_SUBMIT_BATCH, &batch);
    return 0;
}

void follower_rank_left(struct follower *f, uint32_t rank, const char *text)
{
    Pb__RemoteRankLeft left = PB__REMOTE_RANK_LEFT__INIT;
    left.rank = rank;
    left.text = (char *)text;
    push(f, PB__ENVELOPE__BODY_REMOTE_RANK_LEFT, &left);
    flush_now(f);
}

void follower_count(struct follower *f, uint64_t finite_check, uint32_t rank, uint64_t count)
{
    Pb__NonfiniteCount message = PB__NONFINITE_COUNT__INIT;
    message.finite_check = finite_check;
    message.rank = rank;
    message.count = count;
    push(f, PB__ENVELOPE__BODY_NONFINITE_COUNT, &message);
}

void follower_set_device(struct follower *f, uint32_t rank, const uint8_t *uuid)
{
    Pb__RemoteDevice device = PB__REMOTE_DEVICE__INIT;
    device.rank = rank;
    device.device = (ProtobufCBinaryData){CUDA_UUID_BYTES, (uint8_t *)uuid};
    push(f, PB__ENVELOPE__BODY_REMOTE_DEVICE, &device);
}

static void push_stats(void *data, Pb__StatsReply *reply)
{
    push(data, PB__ENVELOPE__BODY_STATS_REPLY, reply);
}

/* ------------------------------------------------------------------ from the coordinator */

/* The request is answered: no longer pending. NULL: there is none of that id and rank. */
static struct request *take_pending(struct follower *f, uint64_t id, uint32_t rank)
{
    struct request *request;
    HASH_FIND(hh_remote, f->pending, &id, sizeof id, request);
    if (!request || request->member->rank != rank)
        return NULL;
    HASH_DELETE(hh_remote, f->pending, request);
    request->remote_id = 0;
    return request;
}

static bool is_counted(int kind)
{
    return kind == GRADD_ALLGATHER || kind == GRADD_ALLTOALL;
}

/* Do n counts give away `count` elements? */
static bool add_up_to(const uint64_t *counts, size_t n, uint64_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        if (__builtin_add_overflow(sum, counts[i], &sum))
            return false;
    return sum == count;
}

/* An all-to-all gives to each rank what this one has said, and that is all it has. */
static bool fits_counts(const struct request *request, const struct plan_part *part, uint32_t n)
{
    return request->submitted.n_counts == n &&
           memcmp(request->part.counts, part->counts, n * sizeof *part->counts) == 0 &&
           add_up_to(part->counts, n, part->count);
}

/* The op is what this rank has submitted: nothing outside of its memory is touched. */
static bool fits(const struct request *request, const struct follower_op *op, uint32_t i)
{
    const struct signature *s = &op->op.signature;
    const struct plan_part *part = &op->op.parts[i];
    if (request->submitted.kind != (uint32_t)s->kind ||
        request->submitted.is_device != s->is_device)
        return false;
    if (s->kind > GRADD_ALLTOALL)
        return true; /* without data */
    if (request->submitted.dtype != (uint32_t)s->dtype || request->submitted.count != part->count)
        return false;
    switch (s->kind) {
    case GRADD_BROADCAST:
        return request->submitted.root == s->root;
    case GRADD_REDUCE_SCATTER:
        return request->submitted.out_count == s->counts[i];
    case GRADD_ALLTOALL:
        return fits_counts(request, part, op->op.n_ranks);
    default:
        return true; /* what arrives is compared with out_capacity before the op starts */
    }
}

static bool fill_parts(struct follower *f, struct follower_op *op, const Pb__Execute *message)
{
    struct plan_op *plan_op = &op->op;
    const struct layout *layout = f->epoch->layout;
    const bool is_alltoall = message->kind == GRADD_ALLTOALL;
    for (uint32_t i = 0; i < plan_op->n_ranks; i++) {
        const Pb__ExecutePart *from = message->parts[i];
        struct plan_part *part = &plan_op->parts[i];
        uint32_t rank = plan_op->ranks[i];
        part->count = is_counted(message->kind) ? from->count : message->count;
        part->out_capacity = UINT64_MAX; /* of other nodes' ranks: they check it */
        part->arrived_ns = plan_op->first_ns;
        if (is_alltoall) {
            if (from->n_counts != plan_op->n_ranks)
                return false;
            uint64_t *counts = op->counts + (size_t)i * plan_op->n_ranks;
            memcpy(counts, from->counts, from->n_counts * sizeof *counts);
            part->counts = counts;
        }
        if (from->request == 0) {
            plan_op->n_joined++;
        } else if (layout->node_of[rank] == layout->node_rank) {
            struct request *request = take_pending(f, from->request, rank);
            if (!request)
                return false;
            part->request = request;
            part->out_capacity = request->submitted.out_count;
            if (!fits(request, op, i))
                return false;
            plan_op->name = request->name;
        }
    }
    return true;
}

static bool are_ranks(const struct follower *f, const uint32_t *ranks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (ranks[i] >= f->epoch->size || (i > 0 && ranks[i] <= ranks[i - 1]))
            return false;
    return n > 0;
}

static bool is_sane(const struct follower *f, const Pb__Execute *message, const uint32_t *ranks,
                    uint32_t n)
{
    if (message->kind > GRADD_JOIN || !are_ranks(f, ranks, n) || message->n_parts != n)
        return false;
    if (message->kind > GRADD_ALLTOALL)
        return true; /* without data */
    const size_t bytes = dtype_bytes(message->dtype);
    if (bytes == 0 || message->redop > GRADD_AVG || message->count > INT64_MAX / bytes)
        return false;
    /* A reduce-scatter gives away all that there is. */
    return message->kind != GRADD_REDUCE_SCATTER ||
           (message->n_counts == n && add_up_to(message->counts, n, message->count));
}

/* NULL: a message that makes no sense, or no memory. */
static struct follower_op *op_new(struct follower *f, const Pb__Execute *message)
{
    const uint32_t *ranks = message->ranks;
    uint32_t n = (uint32_t)message->n_ranks;
    if (message->set == 0)
        n = follower_set_ranks(f, 0, &ranks);
    size_t n_counts = message->kind == GRADD_ALLTOALL ? (size_t)n * n : message->n_counts;
    if (!ranks || !is_sane(f, message, ranks, n))
        return NULL;
    struct follower_op *op = calloc(1, sizeof *op);
    if (!op)
        return NULL;
    op->ranks = calloc(n, sizeof *op->ranks);
    op->op.parts = calloc(n, sizeof *op->op.parts);
    op->counts = calloc(n_counts + 1, sizeof *op->counts);
    if (!op->ranks || !op->op.parts || !op->counts) {
        op_free(op);
        return NULL;
    }
    memcpy(op->ranks, ranks, n * sizeof *ranks);
    if (message->kind != GRADD_ALLTOALL && message->n_counts)
        memcpy(op->counts, message->counts, message->n_counts * sizeof *op->counts);
    struct plan_part *parts = op->op.parts;
    op->op = (struct plan_op){
        .name = "",
        .set = message->set,
        .signature =
            {
                .kind = message->kind,
                .dtype = message->dtype,
                .redop = message->redop,
                .root = message->root,
                .count = message->count,
                .prescale = message->prescale == 0 ? 1 : message->prescale,
                .postscale = message->postscale == 0 ? 1 : message->postscale,
                .counts = op->counts,
                .n_counts = message->n_counts,
                .group = "",
                .is_device = message->is_device,
            },
        .status = GRADD_OK,
        .text = "",
        .n_ranks = n,
        .ranks = op->ranks,
        .parts = parts,
        .first_ns = clock_now_ns(),
        .result = message->result,
        .finite_check = message->finite_check,
    };
    op->op.ready_ns = op->op.first_ns;
    return op;
}

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

static void protest(struct follower *f, const char *text)
{
    conn_close(f->conn, text);
}

static void drop_request(struct request *request)
{
    member_complete(request, GRADD_ERR_PROTOCOL,
                    "the coordinator's worker runs another op than was submitted", NULL);
}

/* The op is not what its requests were; NULL-safe. */
static void drop_op(struct follower_op *op)
{
    for (uint32_t i = 0; op && i < op->op.n_ranks; i++)
        if (op->op.parts[i].request)
            drop_request(op->op.parts[i].request);
    if (op)
        op_free(op);
}

static void on_execute(struct follower *f, const Pb__ExecuteBatch *batch)
{
    if (batch->seq != ++f->seq) {
        protest(f, "sent a batch out of order");
        return;
    }
    for (size_t i = 0; i < batch->n_ops; i++) {
        struct follower_op *op = op_new(f, batch->ops[i]);
        if (!op || !fill_parts(f, op, batch->ops[i]) || !apply_sets(f, &op->op)) {
            drop_op(op);
            protest(f, "sent a batch that does not fit this node's requests");
            return;
        }
        op->op.number = ++f->n_ops;
        op->is_last = i + 1 == batch->n_ops;
        TAILQ_INSERT_TAIL(&f->ops, op, link);
    }
}

static void on_refusal(struct follower *f, const Pb__RemoteFailure *failure)
{
    if (failure->code == 0 || failure->code > INT_MAX) {
        protest(f, "refused requests without a failure");
        return;
    }
    for (size_t i = 0; i < failure->n_requests && i < failure->n_ranks; i++) {
        struct request *request = take_pending(f, failure->requests[i], failure->ranks[i]);
        if (request)
            member_complete(request, -(int)failure->code, failure->text, NULL);
    }
}

static void on_comm_begin(struct follower *f, const Pb__CommBegin *begin)
{
    struct backend *nccl = f->epoch->device;
    if (!nccl || begin->n_ranks == 0 || begin->n_ranks != begin->n_comm_rank ||
        !nccl_comm_begin(nccl, begin->ranks, begin->comm_rank, (uint32_t)begin->n_ranks,
                         begin->size, begin->unique_id.data, begin->unique_id.len))
        protest(f, "began a communicator that does not fit this node");
}

static void on_counted(struct follower *f, const Pb__NonfiniteCount *counted)
{
    if (!exec_counted(f->epoch->exec, counted->finite_check, counted->rank, counted->count) &&
        !f->failed)
        protest(f, "answered a count that it was not asked for");
}

/* An op of which every rank's data went to the coordinator. */
static void on_result(struct follower *f, const Pb__RemoteResult *result)
{
    struct request *request = take_pending(f, result->request, result->rank);
    if (!request) {
        protest(f, "sent a result that does not fit this node's requests");
        return;
    }
    if (!central_awaits(request, result->data.len)) {
        drop_request(request);
        protest(f, "sent a result that does not fit this node's requests");
        return;
    }
    memcpy(request->part.out.base, result->data.data, result->data.len);
    member_complete(request, GRADD_OK, "", NULL);
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
    op_free((struct follower_op *)op);
}

void follower_fail_all(struct follower *f, int status, const char *text)
{
    if (!f->failed) {
        f->failed = status;
        snprintf(f->failed_text, sizeof f->failed_text, "%s", text);
    }
    struct request *request, *next;
    HASH_ITER(hh_remote, f->pending, request, next)
    {
        HASH_DELETE(hh_remote, f->pending, request);
        request->remote_id = 0;
        member_complete(request, status, text, NULL);
    }
}

/* ------------------------------------------------------------------ the connection */

static void on_frame(void *owner, struct conn *conn, struct wire_frame *frame)
{
    struct follower *f = owner;
    const Pb__Envelope *envelope = frame->envelope;
    if (envelope->body_case == PB__ENVELOPE__BODY_EXECUTE_BATCH)
        on_execute(f, envelope->execute_batch);
    else if (envelope->body_case == PB__ENVELOPE__BODY_COMM_BEGIN)
        on_comm_begin(f, envelope->comm_begin);
    else if (envelope->body_case == PB__ENVELOPE__BODY_REMOTE_FAILURE)
        on_refusal(f, envelope->remote_failure);
    else if (envelope->body_case == PB__ENVELOPE__BODY_NONFINITE_COUNT)
        on_counted(f, envelope->nonfinite_count);
    else if (envelope->body_case == PB__ENVELOPE__BODY_STATS_REQUEST)
        stats_reply(f->epoch, f->epoch->setup->quota, envelope->stats_request->seq, push_stats, f);
    else if (envelope->body_case == PB__ENVELOPE__BODY_REMOTE_RESULT)
        on_result(f, envelope->remote_result);
    else
        protest(f, "sent a message that a node does not know");
}

static void on_batch_end(void *owner, struct conn *conn)
{
    struct follower *f = owner;
    epoch_turn(f->epoch);
}

static void on_closed(void *owner, struct conn *conn, const char *reason)
{
    struct follower *f = owner;
    char text[300];
    snprintf(text, sizeof text, "%s",
             reason[0] ? reason : "the worker there closed the connection");
    conn_free(conn);
    f->conn = NULL;
    if (!f->epoch->is_retired)
        epoch_link_lost(f->epoch, 0, text);
}

static const struct conn_ops coordinator_conn_ops = {
    .on_frame = on_frame,
    .on_batch_end = on_batch_end,
    .on_closed = on_closed,
};
