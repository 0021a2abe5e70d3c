/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/lower_steps.h"

#include <stdlib.h>

struct lower_step *lower_add(struct lowering *l, enum lower_phase phase, enum lower_kind kind,
                             uint32_t local)
{
    static _Thread_local struct lower_step lost; /* what is written after memory ran out */
    struct lower_steps *steps = &l->list->phases[phase];
    if (steps->n == steps->capacity) {
        size_t capacity = steps->capacity ? 2 * steps->capacity : 64;
        struct lower_step *grown = realloc(steps->steps, capacity * sizeof *grown);
        if (!grown) {
            l->failed = true;
            return &lost;
        }
        steps->steps = grown;
        steps->capacity = capacity;
    }
    struct lower_step *step = &steps->steps[steps->n++];
    *step = (struct lower_step){
        .kind = kind,
        .gpu = local,
        .op = l->op,
        .dtype = l->op->dtype,
        .redop = l->op->redop,
        .prescale = 1,
        .postscale = 1,
    };
    return step;
}

void lower_add_address(struct lowering *l, uint64_t address)
{
    struct lower_list *list = l->list;
    if (list->n_addresses == list->address_capacity) {
        size_t capacity = list->address_capacity ? 2 * list->address_capacity : 64;
        uint64_t *grown = realloc(list->addresses, capacity * sizeof *grown);
        if (!grown) {
            l->failed = true;
            return;
        }
        list->addresses = grown;
        list->address_capacity = capacity;
    }
    list->addresses[list->n_addresses++] = address;
}

void lower_copy(struct lowering *l, enum lower_phase phase, uint32_t local, uint64_t from,
                uint64_t to, uint64_t count)
{
    if (from == to || count == 0)
        return;
    struct lower_step *step = lower_add(l, phase, LOWER_COPY, local);
    step->from = from;
    step->to = to;
    step->count = count * l->size;
}

uint64_t lower_padded(uint64_t bytes)
{
    return (bytes + LOWER_SCRATCH_ALIGN - 1) / LOWER_SCRATCH_ALIGN * LOWER_SCRATCH_ALIGN;
}

uint64_t lower_take_scratch(struct lowering *l, uint32_t local, uint64_t count)
{
    uint64_t *bytes = &l->list->scratch_bytes[local], at = *bytes;
    *bytes += lower_padded(count * l->size);
    return lower_scratch(at);
}

uint64_t lower_zeros(struct lowering *l, enum lower_phase phase, uint32_t local, uint64_t at,
                     uint64_t count)
{
    struct lower_step *step = lower_add(l, phase, LOWER_ZERO, local);
    step->to = at;
    step->count = count * l->size;
    return at;
}

uint32_t lower_local_of_rank(const struct lowering *l, uint32_t i)
{
    const uint32_t gpu = l->map->gpu_of[i];
    return gpu == LOWER_NO_GPU ? LOWER_NO_GPU : l->map->local_of[gpu];
}

/* The first output on a GPU; false: nobody there wants the result. */
bool lower_first_out(const struct lowering *l, uint32_t local, uint64_t *out)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++) {
        if (lower_local_of_rank(l, i) != local || !l->op->parts[i].out.base)
            continue;
        *out = lower_at(&l->op->parts[i].out, 0);
        return true;
    }
    return false;
}

uint64_t lower_only_input(const struct lowering *l, uint32_t local, uint64_t shift)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (lower_local_of_rank(l, i) == local && l->op->parts[i].in.base)
            return lower_at(&l->op->parts[i].in, shift);
    return 0;
}

bool lower_has_equal_counts(const struct backend_op *op)
{
    for (uint32_t i = 1; i < op->n_ranks; i++)
        if ((op->kind == GRADD_ALLGATHER ? op->parts[i].count : op->counts[i]) !=
            (op->kind == GRADD_ALLGATHER ? op->parts[0].count : op->counts[0]))
            return false;
    return true;
}

uint64_t lower_total_count(const struct backend_op *op)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < op->n_ranks; i++)
        total += op->counts[i];
    return total;
}
