/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One op as the coordinator says it. The coordinator may be wrong, or lie: what this node runs is
 * what its ranks have submitted, and touches nothing outside of their memory.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "worker/follower_internal.h"

void follower_op_free(struct follower_op *op)
{
    free(op->op.parts);
    free(op->ranks);
    free(op->counts);
    free(op);
}

void follower_drop_request(struct request *request)
{
    member_complete(request, GRADD_ERR_PROTOCOL,
                    "the coordinator's worker runs another op than was submitted", NULL);
}

void follower_op_drop(struct follower_op *op)
{
    for (uint32_t i = 0; i < op->op.n_ranks; i++)
        if (op->op.parts[i].request)
            follower_drop_request(op->op.parts[i].request);
    follower_op_free(op);
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
            struct request *request = follower_take_request(f, from->request, rank);
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

/* Without parts. NULL: a message that makes no sense, or no memory. */
static struct follower_op *op_alloc(const struct follower *f, const Pb__Execute *message)
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
        follower_op_free(op);
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

struct follower_op *follower_op_new(struct follower *f, const Pb__Execute *message)
{
    struct follower_op *op = op_alloc(f, message);
    if (!op || fill_parts(f, op, message))
        return op;
    follower_op_drop(op);
    return NULL;
}
