/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pool of op records.
 *
 * Invariant: a record's address never changes (blocks are not moved), and an id names at most one
 * op for the life of the context: the generation in its upper bits only grows.
 */
#include "op.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "region.h"

struct op *op_at(const struct op_pool *pool, uint32_t slot)
{
    return slot / OP_BLOCK < pool->n_blocks ? &pool->blocks[slot / OP_BLOCK][slot % OP_BLOCK]
                                            : NULL;
}

void op_pool_deinit(struct op_pool *pool)
{
    struct op *op;
    for (uint32_t slot = 0; (op = op_at(pool, slot)); slot++) {
        free(op->counts);
        free(op->text);
    }
    for (size_t i = 0; i < pool->n_blocks; i++)
        free(pool->blocks[i]);
    free(pool->blocks);
    *pool = (struct op_pool){0};
}

static int grow(struct op_pool *pool)
{
    if ((pool->n_blocks + 1) * OP_BLOCK > (size_t)1 << OP_SLOT_BITS)
        return -ENOMEM;
    struct op **blocks = realloc(pool->blocks, (pool->n_blocks + 1) * sizeof(struct op *));
    if (!blocks)
        return -ENOMEM;
    pool->blocks = blocks;
    struct op *block = calloc(OP_BLOCK, sizeof *block);
    if (!block)
        return -ENOMEM;
    uint32_t first = (uint32_t)pool->n_blocks * OP_BLOCK;
    pool->blocks[pool->n_blocks++] = block;
    for (uint32_t i = OP_BLOCK; i-- > 0;) {
        block[i].slot = first + i;
        block[i].next = pool->free;
        pool->free = &block[i];
    }
    return 0;
}

struct op *op_new(struct op_pool *pool)
{
    if (!pool->free && grow(pool) < 0)
        return NULL;
    struct op *op = pool->free;
    pool->free = op->next;
    *op = (struct op){
        .slot = op->slot,
        .state = OP_PREPARED,
        .counts = op->counts,
        .counts_capacity = op->counts_capacity,
    };
    return op;
}

void op_free(struct op_pool *pool, struct op *op)
{
    free(op->text);
    op->text = NULL;
    op->state = OP_FREE;
    op->next = pool->free;
    pool->free = op;
}

void op_start(struct op_pool *pool, struct op *op)
{
    op->id = ++pool->generation << OP_SLOT_BITS | op->slot;
    op->state = OP_RUNNING;
    pool->n_running++;
    pool->bytes_running += op->in_bytes + op->out_bytes;
}

struct op *op_find(const struct op_pool *pool, int64_t id)
{
    if (id <= 0)
        return NULL;
    struct op *op = op_at(pool, (uint32_t)id & ((1u << OP_SLOT_BITS) - 1));
    return op && op->id == id && op->state >= OP_RUNNING ? op : NULL;
}

static void count_use(const struct lane *lane, int change)
{
    if (lane->region && !lane->user)
        lane->region->n_uses += (unsigned)change;
}

void op_hold_regions(struct op *op)
{
    count_use(&op->in, 1);
    count_use(&op->out, 1);
    op->holds_regions = true;
}

void op_drop_regions(struct op *op)
{
    if (!op->holds_regions)
        return;
    count_use(&op->in, -1);
    count_use(&op->out, -1);
    op->holds_regions = false;
}

int op_set_counts(struct op *op, const uint64_t *counts, size_t n)
{
    if (n > op->counts_capacity) {
        uint64_t *grown = realloc(op->counts, n * sizeof *grown);
        if (!grown)
            return -ENOMEM;
        op->counts = grown;
        op->counts_capacity = n;
    }
    if (n)
        memcpy(op->counts, counts, n * sizeof *counts);
    op->n_counts = n;
    return 0;
}
