/* SPDX-License-Identifier: Apache-2.0 */
/* Broadcast, all-gather and all-to-all. */
#include "worker/backend/nccl/lower_steps.h"

/* From one address to every output on the GPU. */
static void spread(struct lowering *l, enum lower_phase phase, uint32_t local, uint64_t from,
                   uint64_t shift, uint64_t count)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (lower_local_of_rank(l, i) == local && l->op->parts[i].out.base)
            lower_copy(l, phase, local, from, lower_at(&l->op->parts[i].out, shift), count);
}

void lower_broadcast(struct lowering *l)
{
    const uint64_t shift = l->op->begin * l->size, count = l->op->end - l->op->begin;
    const uint32_t root = l->map->gpu_of[l->op->root];
    if (count == 0 || root == LOWER_NO_GPU)
        return;
    for (uint32_t gpu = 0; gpu < l->map->n_gpus; gpu++) {
        const uint32_t local = lower_local_of(l, gpu);
        if (local == LOWER_NO_GPU)
            continue;
        const uint64_t source = lower_at(&l->op->parts[l->op->root].in, shift);
        uint64_t buffer = source; /* in place at the root */
        if (gpu != root && lower_first_out(l, local, &buffer))
            buffer += shift;
        else if (gpu != root)
            buffer = lower_take_scratch(l, local, count);
        if (l->map->n_gpus > 1) {
            struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_BROADCAST, local);
            call->peer = root;
            call->from = call->to = buffer;
            call->count = count;
        }
        spread(l, LOWER_AFTER, local, buffer, shift, count);
    }
}

static void allgather_call(struct lowering *l, uint32_t local)
{
    struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_ALL_GATHER, local);
    call->from = lower_only_input(l, local, 0);
    lower_first_out(l, local, &call->to);
    call->count = l->op->parts[0].count;
}

static void allgather_over_gpus(struct lowering *l)
{
    uint64_t at = 0, buffer;
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->parts[i].count, i++) {
        const uint32_t root = l->map->gpu_of[i];
        for (uint32_t gpu = 0; l->op->parts[i].count > 0 && gpu < l->map->n_gpus; gpu++) {
            const uint32_t local = lower_local_of(l, gpu);
            if (local == LOWER_NO_GPU || !lower_first_out(l, local, &buffer))
                continue;
            struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_BROADCAST, local);
            call->peer = root;
            call->to = buffer + at * l->size;
            call->from = gpu == root ? lower_at(&l->op->parts[i].in, 0) : call->to;
            call->count = l->op->parts[i].count;
        }
    }
    for (uint32_t local = 0; local < l->map->n_local; local++)
        if (lower_first_out(l, local, &buffer))
            spread(l, LOWER_AFTER, local, buffer, 0, at);
}

void lower_allgather(struct lowering *l)
{
    const bool is_one_call = lower_is_exclusive(l->map) && lower_has_equal_counts(l->op);
    uint64_t at = 0;
    if (l->map->n_gpus > 1) {
        for (uint32_t local = 0; is_one_call && local < l->map->n_local; local++)
            if (l->op->parts[0].count > 0)
                allgather_call(l, local);
        if (!is_one_call)
            allgather_over_gpus(l);
        return;
    }
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->parts[i].count, i++)
        if (lower_local_of_rank(l, i) != LOWER_NO_GPU)
            spread(l, LOWER_BEFORE, lower_local_of_rank(l, i), lower_at(&l->op->parts[i].in, 0),
                   at * l->size, l->op->parts[i].count);
}

/* One rank's message to another: on both sides in the same place of the same order. */
static void message(struct lowering *l, uint32_t from, uint32_t to, uint64_t in_at, uint64_t out_at)
{
    const struct backend_part *sender = &l->op->parts[from], *receiver = &l->op->parts[to];
    const uint32_t from_gpu = l->map->gpu_of[from], to_gpu = l->map->gpu_of[to];
    const uint64_t count = sender->counts[to];
    if (count == 0 || from_gpu == LOWER_NO_GPU || to_gpu == LOWER_NO_GPU)
        return;
    const uint32_t from_local = lower_local_of(l, from_gpu), to_local = lower_local_of(l, to_gpu);
    if (from_gpu == to_gpu) {
        if (from_local != LOWER_NO_GPU)
            lower_copy(l, LOWER_BEFORE, from_local, lower_at(&sender->in, in_at * l->size),
                       lower_at(&receiver->out, out_at * l->size), count);
        return;
    }
    if (from_local != LOWER_NO_GPU) {
        struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_SEND, from_local);
        call->peer = to_gpu;
        call->from = lower_at(&sender->in, in_at * l->size);
        call->count = count;
    }
    if (to_local != LOWER_NO_GPU) {
        struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_RECV, to_local);
        call->peer = from_gpu;
        call->to = lower_at(&receiver->out, out_at * l->size);
        call->count = count;
    }
}

void lower_alltoall(struct lowering *l)
{
    for (uint32_t to = 0; to < l->op->n_ranks; to++) {
        uint64_t out_at = 0;
        for (uint32_t from = 0; from < l->op->n_ranks; from++) {
            const uint64_t *counts = l->op->parts[from].counts;
            uint64_t in_at = 0;
            for (uint32_t i = 0; i < to; i++)
                in_at += counts[i];
            message(l, from, to, in_at, out_at);
            out_at += counts[to];
        }
    }
}
