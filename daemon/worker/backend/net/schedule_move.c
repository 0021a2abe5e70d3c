/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The schedule of broadcast, all-gather, reduce-scatter and all-to-all.
 *
 * What one node owes another is a flow: a list of pieces, the same on both ends. All flows are cut
 * into chunks of the same size, and the k-th chunks of all flows make cell k.
 */
#include "worker/backend/net/schedule_build.h"

#include <stdlib.h>
#include <string.h>

#include "worker/plan/signature.h"

/* What this node owes each other (out), is owed (in), and keeps (in both at its own position). */
struct flows {
    struct flow in[SCHEDULE_NODES_MAX], out[SCHEDULE_NODES_MAX];
};

static uint32_t position_of(const struct builder *b, uint32_t node)
{
    uint32_t position = 0;
    while (position < b->n && b->nodes[position] != node)
        position++;
    return position;
}

static void flow_add(struct builder *b, struct flow *flow, const struct schedule_piece *piece)
{
    if (piece->count == 0 || !builder_reserve(b, &b->flow_pieces, b->n_flow_pieces,
                                              &b->flow_capacity, sizeof *b->flow_pieces))
        return;
    b->flow_pieces[b->n_flow_pieces++] = (struct flow_piece){.piece = *piece};
    if (flow->last)
        b->flow_pieces[flow->last - 1].next = b->n_flow_pieces;
    else
        flow->first = b->n_flow_pieces;
    flow->last = b->n_flow_pieces;
}

/* Cut the next chunk off: at most so many bytes on the wire. */
static struct schedule_pieces flow_cut(struct builder *b, struct flow *flow, uint32_t bytes)
{
    struct schedule_pieces range = builder_open_range(b);
    while (flow->first && !b->is_out_of_memory) {
        const struct flow_piece *whole = &b->flow_pieces[flow->first - 1];
        const uint32_t size = schedule_wire_bytes(b->ops[whole->piece.op], b->view->wire);
        const uint32_t used = schedule_align(range.bytes);
        const uint64_t room = used < bytes ? (bytes - used) / size : 0;
        struct schedule_piece piece = whole->piece;
        if (room == 0)
            break;
        piece.begin += flow->taken;
        piece.at += flow->taken;
        piece.count -= flow->taken;
        if (piece.count > room) {
            piece.count = room;
            flow->taken += room;
        } else {
            flow->taken = 0;
            flow->first = whole->next;
        }
        builder_add_piece(b, &range, &piece);
    }
    return range;
}

static bool has_more(const struct builder *b, const struct flows *flows)
{
    for (uint32_t p = 0; p < b->n; p++)
        if (flows->in[p].first || flows->out[p].first)
            return true;
    return false;
}

/* Every flow directly. `own` of cell k is chunk k of what this node keeps. */
static void build_exchange(struct builder *b, struct flows *flows, enum schedule_action action,
                           uint32_t bytes)
{
    struct schedule_pieces out[SCHEDULE_NODES_MAX];
    for (uint32_t block = 0; has_more(b, flows) && !b->is_out_of_memory; block++) {
        flows->out[b->me] = (struct flow){0};
        builder_begin_cell(b, action, block, 0, flow_cut(b, &flows->in[b->me], bytes));
        for (uint32_t p = 0; p < b->n; p++)
            out[p] = flow_cut(b, &flows->out[p], bytes);
        for (uint32_t p = 0; p < b->n; p++)
            if (p != b->me)
                builder_receive(b, p, block, flow_cut(b, &flows->in[p], bytes));
        for (uint32_t i = 1; i < b->n; i++)
            builder_send(b, (b->me + i) % b->n, block, out[(b->me + i) % b->n]);
        builder_end_cell(b);
    }
}

/* ------------------------------------------------------------------ broadcast */

/* Each node passes on to the next what came from the one before. */
static void build_chain(struct builder *b, uint32_t root, struct flow *flow, uint32_t bytes)
{
    const uint32_t distance = (b->me + b->n - root) % b->n;
    for (uint32_t block = 0; flow->first && !b->is_out_of_memory; block++) {
        struct schedule_pieces pieces = flow_cut(b, flow, bytes);
        builder_begin_cell(b, SCHEDULE_COPY, block, 0,
                           distance == 0 ? pieces : (struct schedule_pieces){0});
        if (distance > 0) {
            builder_relay(b);
            builder_receive(b, (b->me + b->n - 1) % b->n, block, pieces);
        }
        if (distance + 1 < b->n)
            builder_send(b, (b->me + 1) % b->n, block, pieces);
        builder_end_cell(b);
    }
}

static void build_broadcast(struct builder *b, uint32_t index, struct flows *flows)
{
    const struct backend_op *op = b->ops[index];
    const uint32_t root = position_of(b, op->parts[op->root].node);
    const struct schedule_piece all = {.op = index,
                                       .from = op->root,
                                       .to = SCHEDULE_ALL,
                                       .begin = op->begin,
                                       .at = op->begin,
                                       .count = op->end - op->begin};
    flow_add(b, &flows->in[root], &all);
    if (b->n > 2 && all.count * dtype_bytes(op->dtype) > SCHEDULE_CHAIN_BYTES) {
        build_chain(b, root, &flows->in[root], SCHEDULE_CHUNK_BYTES);
        return;
    }
    for (uint32_t p = 0; p < b->n && b->me == root; p++)
        if (p != b->me)
            flow_add(b, &flows->out[p], &all);
    build_exchange(b, flows, SCHEDULE_COPY, SCHEDULE_CHUNK_BYTES);
}

/* ------------------------------------------------------------------ all-gather */

static enum schedule_action allgather_action(uint32_t step, uint32_t n)
{
    return SCHEDULE_COPY;
}

static void build_allgather_ring(struct builder *b, struct flows *flows, uint32_t bytes)
{
    uint32_t n_blocks = 0;
    b->n_ranges = 0;
    while (has_more(b, flows) && !b->is_out_of_memory) {
        for (uint32_t p = 0; p < b->n; p++)
            builder_add_range(b, flow_cut(b, &flows->in[p], bytes));
        n_blocks++;
    }
    builder_ring(b, n_blocks, b->n, allgather_action);
}

static void build_allgather(struct builder *b, uint32_t index, struct flows *flows)
{
    const struct backend_op *op = b->ops[index];
    const uint32_t size = (uint32_t)dtype_bytes(op->dtype);
    uint64_t at = 0;
    for (uint32_t i = 0; i < op->n_ranks; i++)
        at += op->parts[i].count;
    const bool is_ring = b->n > 2 && at * size > SCHEDULE_CHAIN_BYTES;
    at = 0;
    for (uint32_t i = 0; i < op->n_ranks; at += op->parts[i].count, i++) {
        const uint32_t from = position_of(b, op->parts[i].node);
        const struct schedule_piece piece = {
            .op = index, .from = i, .to = SCHEDULE_ALL, .at = at, .count = op->parts[i].count};
        flow_add(b, &flows->in[from], &piece);
        for (uint32_t p = 0; p < b->n && from == b->me && !is_ring; p++)
            if (p != b->me)
                flow_add(b, &flows->out[p], &piece);
    }
    if (is_ring)
        build_allgather_ring(b, flows, SCHEDULE_CHUNK_BYTES);
    else
        build_exchange(b, flows, SCHEDULE_COPY, builder_exchange_bytes(b));
}

/* ------------------------------------------------------------------ reduce-scatter, all-to-all */

/* Every node sends to node q its sum of q's part, so all flows to q are alike. */
static void build_reduce_scatter(struct builder *b, uint32_t index, struct flows *flows)
{
    const struct backend_op *op = b->ops[index];
    uint64_t begin = 0;
    for (uint32_t i = 0; i < op->n_ranks; begin += op->counts[i], i++) {
        const uint32_t to = position_of(b, op->parts[i].node);
        const struct schedule_piece piece = {
            .op = index, .to = i, .begin = begin, .count = op->counts[i]};
        if (to != b->me)
            flow_add(b, &flows->out[to], &piece);
        for (uint32_t p = 0; p < b->n && to == b->me; p++)
            flow_add(b, &flows->in[p], &piece);
    }
    build_exchange(b, flows, SCHEDULE_SCATTER, builder_exchange_bytes(b));
}

static void add_alltoall_pair(struct builder *b, struct flows *flows,
                              const struct schedule_piece *piece)
{
    const struct backend_op *op = b->ops[piece->op];
    const uint32_t from = position_of(b, op->parts[piece->from].node);
    const uint32_t to = position_of(b, op->parts[piece->to].node);
    if (to == b->me)
        flow_add(b, &flows->in[from], piece);
    else if (from == b->me)
        flow_add(b, &flows->out[to], piece);
}

static void build_alltoall(struct builder *b, uint32_t index, struct flows *flows)
{
    const struct backend_op *op = b->ops[index];
    if (!builder_reserve(b, &b->offsets, op->n_ranks, &b->offset_capacity, sizeof *b->offsets))
        return;
    memset(b->offsets, 0, op->n_ranks * sizeof *b->offsets);
    for (uint32_t from = 0; from < op->n_ranks; from++) {
        uint64_t begin = 0;
        for (uint32_t to = 0; to < op->n_ranks && op->parts[from].counts; to++) {
            const uint64_t count = op->parts[from].counts[to];
            const struct schedule_piece piece = {.op = index,
                                                 .from = from,
                                                 .to = to,
                                                 .begin = begin,
                                                 .at = b->offsets[to],
                                                 .count = count};
            if (count > 0)
                add_alltoall_pair(b, flows, &piece);
            begin += count;
            b->offsets[to] += count;
        }
    }
    build_exchange(b, flows, SCHEDULE_COPY, builder_exchange_bytes(b));
}

void builder_move(struct builder *b, uint32_t op)
{
    struct flows flows;
    memset(&flows, 0, sizeof flows);
    b->n_flow_pieces = 0;
    switch (b->ops[op]->kind) {
    case GRADD_BROADCAST:
        build_broadcast(b, op, &flows);
        return;
    case GRADD_ALLGATHER:
        build_allgather(b, op, &flows);
        return;
    case GRADD_REDUCE_SCATTER:
        build_reduce_scatter(b, op, &flows);
        return;
    case GRADD_ALLTOALL:
        build_alltoall(b, op, &flows);
        return;
    default:
        return;
    }
}
