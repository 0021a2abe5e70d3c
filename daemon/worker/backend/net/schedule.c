/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule's frame: which ops go together, and what cells and rings are made of. */
#include "worker/backend/net/schedule.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "worker/backend/net/schedule_build.h"
#include "worker/plan/signature.h"

enum class {
    CLASS_NOTHING, /* no data, or nothing for this node */
    CLASS_LOCAL,
    CLASS_DIRECT,
    CLASS_RING,
    CLASS_MOVE,
};

struct node_set {
    uint64_t words[SCHEDULE_NODES_MAX / 64];
};

struct sorted_op {
    struct node_set nodes;
    enum class class;
    bool is_taken;
};

struct schedule_scratch {
    struct builder builder;
    struct sorted_op *sorted;
    uint32_t sorted_capacity;
    uint32_t *group;
    uint32_t group_capacity;
};

uint32_t schedule_wire_bytes(const struct backend_op *op, int wire)
{
    const bool is_reduced = op->kind == GRADD_ALLREDUCE || op->kind == GRADD_REDUCE_SCATTER;
    const bool is_integer =
        op->dtype == GRADD_I8 || op->dtype == GRADD_U8 || op->dtype == GRADD_I32;
    if (is_reduced && is_integer && op->redop == GRADD_AVG)
        return sizeof(int64_t);
    if (is_reduced && wire && op->dtype == GRADD_F32)
        return sizeof(uint16_t);
    return (uint32_t)dtype_bytes(op->dtype);
}

uint32_t schedule_align(uint32_t bytes)
{
    return (bytes + 7) / 8 * 8;
}

uint32_t schedule_streams(const struct schedule_view *view, uint32_t node)
{
    const bool is_neighbour = (view->node_rank + 1) % view->n_nodes == node ||
                              (node + 1) % view->n_nodes == view->node_rank;
    return is_neighbour ? view->n_streams : 1;
}

/* ------------------------------------------------------------------ builder */

bool builder_reserve(struct builder *b, void *array, uint32_t n, uint32_t *capacity, size_t size)
{
    if (n < *capacity)
        return true;
    uint32_t more = *capacity ? 2 * *capacity : 64;
    while (more <= n)
        more *= 2;
    void *old;
    memcpy(&old, array, sizeof old); /* whatever type the pointer has */
    void *grown = realloc(old, more * size);
    if (!grown) {
        b->is_out_of_memory = true;
        return false;
    }
    memcpy(array, &grown, sizeof grown);
    *capacity = more;
    return true;
}

struct schedule_pieces builder_open_range(const struct builder *b)
{
    return (struct schedule_pieces){.first = b->schedule->n_pieces};
}

void builder_add_piece(struct builder *b, struct schedule_pieces *range,
                       const struct schedule_piece *piece)
{
    struct schedule *s = b->schedule;
    if (!builder_reserve(b, &s->pieces, s->n_pieces, &s->piece_capacity, sizeof *s->pieces))
        return;
    s->pieces[s->n_pieces++] = *piece;
    range->n++;
    range->bytes = schedule_align(range->bytes) +
                   (uint32_t)piece->count * schedule_wire_bytes(b->ops[piece->op], b->view->wire);
}

void builder_add_range(struct builder *b, struct schedule_pieces range)
{
    if (builder_reserve(b, &b->ranges, b->n_ranges, &b->range_capacity, sizeof *b->ranges))
        b->ranges[b->n_ranges++] = range;
}

void builder_begin_cell(struct builder *b, enum schedule_action action, uint32_t block,
                        uint32_t step, struct schedule_pieces own)
{
    struct schedule *s = b->schedule;
    if (builder_reserve(b, &s->cells, s->n_cells, &s->cell_capacity, sizeof *s->cells))
        s->cells[s->n_cells] = (struct schedule_cell){.action = action,
                                                      .block = block,
                                                      .step = step,
                                                      .own = own,
                                                      .first_message = s->n_messages};
}

void builder_relay(struct builder *b)
{
    if (!b->is_out_of_memory)
        b->schedule->cells[b->schedule->n_cells].is_relay = true;
}

static uint32_t mix(uint32_t hash, uint64_t value)
{
    uint64_t x = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(x >> 32 ^ x);
}

/* Both ends must mean the same elements of the same op. */
static uint32_t digest_of(const struct builder *b, struct schedule_pieces pieces)
{
    uint32_t hash = (uint32_t)b->view->wire;
    for (uint32_t i = 0; i < pieces.n; i++) {
        const struct schedule_piece *piece = &b->schedule->pieces[pieces.first + i];
        const struct backend_op *op = b->ops[piece->op];
        hash = mix(hash, (uint64_t)op->kind << 16 | (uint64_t)op->dtype << 8 | (uint64_t)op->redop);
        hash = mix(hash, op->number);
        hash = mix(hash, piece->begin);
        hash = mix(hash, piece->at);
        hash = mix(hash, piece->count);
        hash = mix(hash, (uint64_t)piece->from << 32 | piece->to);
    }
    return hash;
}

static bool add_message(struct builder *b, uint32_t position, uint32_t stream_index, uint32_t step,
                        struct schedule_pieces pieces)
{
    struct schedule *s = b->schedule;
    if (pieces.bytes == 0 || b->is_out_of_memory ||
        !builder_reserve(b, &s->messages, s->n_messages, &s->message_capacity, sizeof *s->messages))
        return false;
    uint32_t node = b->nodes[position];
    s->messages[s->n_messages++] = (struct schedule_message){
        .cell = s->n_cells,
        .node = node,
        .stream = stream_index % schedule_streams(b->view, node),
        .pieces = pieces,
        .step = step,
        .digest = digest_of(b, pieces),
    };
    return true;
}

void builder_receive(struct builder *b, uint32_t position, uint32_t stream_index,
                     struct schedule_pieces pieces)
{
    struct schedule *s = b->schedule;
    uint32_t step = b->is_out_of_memory ? 0 : s->cells[s->n_cells].step;
    if (add_message(b, position, stream_index, step > 0 ? step - 1 : 0, pieces))
        s->cells[s->n_cells].n_in++;
}

void builder_send(struct builder *b, uint32_t position, uint32_t stream_index,
                  struct schedule_pieces pieces)
{
    struct schedule *s = b->schedule;
    uint32_t step = b->is_out_of_memory ? 0 : s->cells[s->n_cells].step;
    if (add_message(b, position, stream_index, step, pieces))
        s->cells[s->n_cells].n_out++;
}

void builder_end_cell(struct builder *b)
{
    struct schedule *s = b->schedule;
    if (b->is_out_of_memory)
        return;
    struct schedule_cell *cell = &s->cells[s->n_cells];
    if (cell->n_in + cell->n_out == 0 && cell->own.n == 0)
        return;
    cell->n_in_left = cell->n_in;
    cell->n_out_left = cell->n_out;
    s->n_cells++;
}

static void ring_cell(struct builder *b, uint32_t block, uint32_t step, uint32_t n_steps,
                      enum schedule_action action)
{
    uint32_t segment = (b->me + b->n - step % b->n) % b->n;
    struct schedule_pieces pieces = b->ranges[block * b->n + segment];
    if (pieces.bytes == 0)
        return;
    builder_begin_cell(b, action, block, step, step == 0 ? pieces : (struct schedule_pieces){0});
    if (step > 0) {
        builder_relay(b);
        builder_receive(b, (b->me + b->n - 1) % b->n, block, pieces);
    }
    if (step + 1 < n_steps)
        builder_send(b, (b->me + 1) % b->n, block, pieces);
    builder_end_cell(b);
}

void builder_ring(struct builder *b, uint32_t n_blocks, uint32_t n_steps,
                  enum schedule_action (*action)(uint32_t step, uint32_t n))
{
    if (n_blocks == 0 || b->is_out_of_memory)
        return;
    assert(n_steps > 0);
    const uint32_t stride = (n_steps + SCHEDULE_SLOT - 1) / SCHEDULE_SLOT;
    const uint32_t n_slots = (n_blocks - 1) * stride + n_steps;
    for (uint32_t slot = 0; slot < n_slots; slot++) {
        uint32_t first = slot < n_steps ? 0 : (slot - n_steps) / stride + 1;
        for (uint32_t block = first; block < n_blocks && block * stride <= slot; block++) {
            uint32_t step = slot - block * stride;
            ring_cell(b, block, step, n_steps, action(step, b->n));
        }
    }
}

uint32_t builder_exchange_bytes(const struct builder *b)
{
    assert(b->n > 1);
    uint32_t bytes = 4 * SCHEDULE_CHUNK_BYTES / (b->n - 1);
    if (bytes > SCHEDULE_CHUNK_BYTES)
        return SCHEDULE_CHUNK_BYTES;
    return bytes < 4096 ? 4096 : bytes / 64 * 64;
}

/* ------------------------------------------------------------------ groups */

static uint32_t count_nodes(const struct node_set *set)
{
    uint32_t n = 0;
    for (size_t i = 0; i < SCHEDULE_NODES_MAX / 64; i++)
        n += (uint32_t)__builtin_popcountll(set->words[i]);
    return n;
}

static bool has_node(const struct node_set *set, uint32_t node)
{
    return set->words[node / 64] >> (node % 64) & 1;
}

static struct sorted_op sort_op(const struct builder *b, const struct backend_op *op)
{
    struct sorted_op sorted = {.class = CLASS_NOTHING};
    switch (op->kind) {
    case GRADD_ALLREDUCE:
    case GRADD_BROADCAST:
    case GRADD_ALLGATHER:
    case GRADD_REDUCE_SCATTER:
    case GRADD_ALLTOALL:
        break;
    case GRADD_BARRIER:
    case GRADD_SET_ADD:
    case GRADD_SET_REMOVE:
    case GRADD_JOIN:
        return sorted;
    }
    for (uint32_t i = 0; i < op->n_ranks; i++)
        sorted.nodes.words[op->parts[i].node / 64] |= (uint64_t)1 << (op->parts[i].node % 64);
    const uint32_t n = count_nodes(&sorted.nodes);
    if (!has_node(&sorted.nodes, b->view->node_rank))
        return sorted;
    if (n == 1)
        sorted.class = CLASS_LOCAL;
    else if (op->kind != GRADD_ALLREDUCE)
        sorted.class = CLASS_MOVE;
    else if (n == 2 || (op->end - op->begin) * dtype_bytes(op->dtype) <= SCHEDULE_DIRECT_BYTES)
        sorted.class = CLASS_DIRECT;
    else
        sorted.class = CLASS_RING;
    return sorted;
}

static void choose_nodes(struct builder *b, const struct node_set *set)
{
    b->n = 0;
    for (uint32_t node = 0; node < b->view->n_nodes; node++) {
        if (!has_node(set, node))
            continue;
        if (node == b->view->node_rank)
            b->me = b->n;
        b->nodes[b->n++] = node;
    }
}

/* All later ops of the same class among the same nodes; one by one where they do not share. */
static uint32_t take_group(struct schedule_scratch *scratch, uint32_t first, uint32_t n_ops)
{
    struct sorted_op *sorted = scratch->sorted;
    const bool is_shared = sorted[first].class == CLASS_DIRECT || sorted[first].class == CLASS_RING;
    uint32_t n = 0;
    for (uint32_t i = first; i < n_ops; i++) {
        if (sorted[i].is_taken || sorted[i].class != sorted[first].class ||
            memcmp(&sorted[i].nodes, &sorted[first].nodes, sizeof sorted[i].nodes) != 0)
            continue;
        sorted[i].is_taken = true;
        scratch->group[n++] = i;
        if (!is_shared)
            break;
    }
    return n;
}

static void build_group(struct builder *b, enum class class, const uint32_t *group, uint32_t n)
{
    struct schedule *s = b->schedule;
    switch (class) {
    case CLASS_NOTHING:
        return;
    case CLASS_LOCAL:
        if (builder_reserve(b, &s->local, s->n_local, &s->local_capacity, sizeof *s->local))
            s->local[s->n_local++] = group[0];
        return;
    case CLASS_DIRECT:
        builder_direct(b, group, n);
        return;
    case CLASS_RING:
        builder_reduce_ring(b, group, n);
        return;
    case CLASS_MOVE:
        builder_move(b, group[0]);
        return;
    }
}

void schedule_init(struct schedule *schedule)
{
    *schedule = (struct schedule){0};
}

void schedule_deinit(struct schedule *schedule)
{
    struct schedule_scratch *scratch = schedule->scratch;
    if (scratch) {
        free(scratch->builder.ranges);
        free(scratch->builder.flow_pieces);
        free(scratch->builder.offsets);
        free(scratch->sorted);
        free(scratch->group);
        free(scratch);
    }
    free(schedule->cells);
    free(schedule->messages);
    free(schedule->pieces);
    free(schedule->local);
    schedule_init(schedule);
}

int schedule_build(struct schedule *schedule, const struct schedule_view *view,
                   struct backend_op *const *ops, uint32_t n_ops)
{
    schedule->n_cells = schedule->n_messages = schedule->n_pieces = schedule->n_local = 0;
    if (!schedule->scratch && !(schedule->scratch = calloc(1, sizeof *schedule->scratch)))
        return -ENOMEM;
    struct schedule_scratch *scratch = schedule->scratch;
    struct builder *b = &scratch->builder;
    b->schedule = schedule;
    b->view = view;
    b->ops = ops;
    b->is_out_of_memory = false;
    if (!builder_reserve(b, &scratch->sorted, n_ops, &scratch->sorted_capacity,
                         sizeof *scratch->sorted) ||
        !builder_reserve(b, &scratch->group, n_ops, &scratch->group_capacity,
                         sizeof *scratch->group))
        return -ENOMEM;
    for (uint32_t i = 0; i < n_ops; i++)
        scratch->sorted[i] = sort_op(b, ops[i]);
    for (uint32_t i = 0; i < n_ops && !b->is_out_of_memory; i++) {
        if (scratch->sorted[i].is_taken || scratch->sorted[i].class == CLASS_NOTHING)
            continue;
        uint32_t n = take_group(scratch, i, n_ops);
        choose_nodes(b, &scratch->sorted[i].nodes);
        build_group(b, scratch->sorted[i].class, scratch->group, n);
    }
    return b->is_out_of_memory ? -ENOMEM : 0;
}
