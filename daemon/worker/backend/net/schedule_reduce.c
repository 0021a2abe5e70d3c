/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The schedule of all-reduces, both ways: whole sums to everybody, or segments around a ring. The
 * order of additions depends on a tensor's size alone: what shares its messages changes no sum.
 */
#include "worker/backend/net/schedule_build.h"

#include <assert.h>

/* ------------------------------------------------------------------ all-reduce, direct */

static void end_exchange(struct builder *b, uint32_t block, struct schedule_pieces *range)
{
    if (range->n > 0) {
        builder_begin_cell(b, SCHEDULE_EXCHANGE, block, 0, *range);
        for (uint32_t p = 0; p < b->n; p++)
            if (p != b->me)
                builder_receive(b, p, block, *range);
        for (uint32_t i = 1; i < b->n; i++) /* each node begins with another one */
            builder_send(b, (b->me + i) % b->n, block, *range);
        builder_end_cell(b);
    }
    *range = builder_open_range(b);
}

/* Small ops share a message; where it is cut changes no sum. */
void builder_direct(struct builder *b, const uint32_t *group, uint32_t n_group)
{
    const uint32_t chunk = builder_exchange_bytes(b);
    struct schedule_pieces range = builder_open_range(b);
    uint32_t block = 0;
    for (uint32_t i = 0; i < n_group; i++) {
        const struct backend_op *op = b->ops[group[i]];
        const uint32_t size = schedule_wire_bytes(op, b->view->wire);
        uint64_t at = op->begin;
        while (at < op->end && !b->is_out_of_memory) {
            uint64_t room = (chunk - schedule_align(range.bytes)) / size, left = op->end - at;
            /* A small op is not worth a cut. */
            if (room == 0 || (room < left && range.bytes > 0 && left * size <= chunk)) {
                end_exchange(b, block++, &range);
                continue;
            }
            struct schedule_piece piece = {.op = group[i],
                                           .to = SCHEDULE_ALL,
                                           .begin = at,
                                           .at = at,
                                           .count = room < left ? room : left};
            builder_add_piece(b, &range, &piece);
            at += piece.count;
        }
    }
    end_exchange(b, block, &range);
}

/* ------------------------------------------------------------------ all-reduce, ring */

/* Elements of a segment: a whole number of cache lines, so that vectors are not cut. */
static uint64_t segment_elements(const struct backend_op *op, uint32_t n)
{
    assert(n > 0);
    uint64_t count = op->end - op->begin;
    return ((count + n - 1) / n + 15) / 16 * 16;
}

/* Part of each segment of an op; several ops share a block when they are short. */
struct strand {
    uint32_t op;
    uint64_t offset, count;
};

enum { STRANDS_MAX = 64 };

static void end_block(struct builder *b, const struct strand *strands, uint32_t n_strands)
{
    for (uint32_t segment = 0; segment < b->n; segment++) {
        struct schedule_pieces range = builder_open_range(b);
        for (uint32_t i = 0; i < n_strands; i++) {
            const struct backend_op *op = b->ops[strands[i].op];
            uint64_t start = op->begin + segment * segment_elements(op, b->n) + strands[i].offset;
            if (start >= op->end)
                continue;
            uint64_t left = op->end - start;
            struct schedule_piece piece = {.op = strands[i].op,
                                           .to = SCHEDULE_ALL,
                                           .begin = start,
                                           .at = start,
                                           .count =
                                               left < strands[i].count ? left : strands[i].count};
            builder_add_piece(b, &range, &piece);
        }
        builder_add_range(b, range);
    }
}

static enum schedule_action allreduce_action(uint32_t step, uint32_t n)
{
    if (step == 0)
        return SCHEDULE_ORIGINATE;
    if (step < n - 1)
        return SCHEDULE_ADD;
    return step == n - 1 ? SCHEDULE_FINISH : SCHEDULE_STORE;
}

void builder_reduce_ring(struct builder *b, const uint32_t *group, uint32_t n_group)
{
    struct strand strands[STRANDS_MAX];
    uint32_t n_strands = 0, n_blocks = 0;
    uint64_t bytes = 0;
    b->n_ranges = 0;
    for (uint32_t i = 0; i < n_group; i++) {
        const struct backend_op *op = b->ops[group[i]];
        const uint32_t size = schedule_wire_bytes(op, b->view->wire);
        const uint64_t segment = segment_elements(op, b->n);
        for (uint64_t at = 0; at < segment && !b->is_out_of_memory;) {
            uint64_t room = (SCHEDULE_CHUNK_BYTES - bytes) / size, left = segment - at;
            bool is_full = room == 0 || n_strands == STRANDS_MAX;
            if (is_full || (room < left && bytes > 0 && left * size <= SCHEDULE_CHUNK_BYTES)) {
                end_block(b, strands, n_strands);
                n_blocks++;
                n_strands = 0;
                bytes = 0;
                continue;
            }
            uint64_t count = room < left ? room : left;
            strands[n_strands++] = (struct strand){group[i], at, count};
            bytes += count * size;
            at += count;
        }
    }
    if (n_strands > 0) {
        end_block(b, strands, n_strands);
        n_blocks++;
    }
    builder_ring(b, n_blocks, 2 * b->n - 1, allreduce_action);
}
