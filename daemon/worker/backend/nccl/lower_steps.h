/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the lowering of every kind is made of: steps, scratch memory, and where ranks are. Included
 * by lower*.c only.
 *
 * Pure. Thread: any.
 */
#ifndef GRADD_LOWER_STEPS_H
#define GRADD_LOWER_STEPS_H

#include "worker/backend/nccl/lower.h"

/* An op while it is lowered. */
struct lowering {
    struct lower_list *list;
    const struct backend_op *op;
    const struct lower_map *map;
    size_t size; /* of an element */
    bool failed; /* out of memory */
};

static inline uint64_t lower_at(const struct backend_span *span, uint64_t shift)
{
    return (uint64_t)(uintptr_t)span->base + shift;
}

static inline uint32_t lower_local_of(const struct lowering *l, uint32_t gpu)
{
    return l->map->local_of[gpu];
}

/* Every rank has a GPU of its own. */
static inline bool lower_is_exclusive(const struct lower_map *map)
{
    return map->n_gpus == map->n_ranks;
}

static inline bool lower_is_float(enum gradd_dtype dtype)
{
    return dtype == GRADD_F16 || dtype == GRADD_F32 || dtype == GRADD_F64 || dtype == GRADD_BF16;
}

/* Sums of these may not fit into the type: the average needs all inputs in one place. */
static inline bool lower_is_small_average(const struct backend_op *op)
{
    return op->redop == GRADD_AVG && !lower_is_float(op->dtype) && op->dtype != GRADD_I64;
}

/* A step; after memory ran out, one that is nowhere. */
struct lower_step *lower_add(struct lowering *l, enum lower_phase phase, enum lower_kind kind,
                             uint32_t local);
/* One more of a reduction's addresses. */
void lower_add_address(struct lowering *l, uint64_t address);
/* Nothing when there is nothing to copy. */
void lower_copy(struct lowering *l, enum lower_phase phase, uint32_t local, uint64_t from,
                uint64_t to, uint64_t count);
/* What lower_take_scratch() takes. */
uint64_t lower_padded(uint64_t bytes);
/* So many elements of scratch memory on the GPU. */
uint64_t lower_take_scratch(struct lowering *l, uint32_t local, uint64_t count);
/* Zeros at this address, which is returned. */
uint64_t lower_zeros(struct lowering *l, enum lower_phase phase, uint32_t local, uint64_t at,
                     uint64_t count);
/* LOWER_NO_GPU: the rank is on another node, or has none. */
uint32_t lower_local_of_rank(const struct lowering *l, uint32_t i);
/* False: nobody on the GPU wants the result. */
bool lower_first_out(const struct lowering *l, uint32_t local, uint64_t *out);
/* The first input on a GPU. */
uint64_t lower_only_input(const struct lowering *l, uint32_t local, uint64_t shift);
bool lower_has_equal_counts(const struct backend_op *op);
/* Of a reduce-scatter. */
uint64_t lower_total_count(const struct backend_op *op);

/* ---- the kinds: lower_reduce.c, lower_move.c ---- */
void lower_allreduce(struct lowering *l);
void lower_reduce_scatter(struct lowering *l);
void lower_broadcast(struct lowering *l);
void lower_allgather(struct lowering *l);
void lower_alltoall(struct lowering *l);

#endif
