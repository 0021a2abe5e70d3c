/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/lower_steps.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "worker/plan/signature.h"

void lower_list_init(struct lower_list *list)
{
    *list = (struct lower_list){0};
}

void lower_list_deinit(struct lower_list *list)
{
    for (int i = 0; i < LOWER_PHASES; i++)
        free(list->phases[i].steps);
    free(list->addresses);
    lower_list_init(list);
}

void lower_list_clear(struct lower_list *list)
{
    for (int i = 0; i < LOWER_PHASES; i++)
        list->phases[i].n = 0;
    list->n_addresses = 0;
    memset(list->scratch_bytes, 0, sizeof list->scratch_bytes);
}

uint32_t lower_number_gpus(const uint32_t *keys, uint32_t n_ranks, uint32_t *gpu_of)
{
    uint32_t n_gpus = 0;
    for (uint32_t i = 0; i < n_ranks; i++) {
        uint32_t first = 0;
        while (keys[first] != keys[i])
            first++;
        if (keys[i] == LOWER_NO_GPU)
            gpu_of[i] = LOWER_NO_GPU;
        else
            gpu_of[i] = first < i ? gpu_of[first] : n_gpus++;
    }
    return n_gpus;
}

static void count_nonfinite(struct lowering *l)
{
    uint32_t input = 0;
    const bool is_scattered = l->op->kind == GRADD_REDUCE_SCATTER;
    for (uint32_t i = 0; i < l->op->n_ranks; i++) {
        if (!l->op->parts[i].in.base)
            continue;
        struct lower_step *step =
            lower_add(l, LOWER_BEFORE, LOWER_COUNT, lower_local_of_rank(l, i));
        step->from = lower_at(&l->op->parts[i].in, is_scattered ? 0 : l->op->begin * l->size);
        step->count = is_scattered ? lower_total_count(l->op) : l->op->end - l->op->begin;
        step->peer = input++;
    }
}

uint64_t lower_scratch_max(const struct backend_op *op, const struct lower_map *map)
{
    const size_t size = dtype_bytes(op->dtype);
    if (map->n_gpus <= 1)
        return 0;
    switch (op->kind) {
    case GRADD_ALLREDUCE:
        return lower_padded((op->end - op->begin) * size) *
               (lower_is_small_average(op) ? op->n_ranks : 1);
    case GRADD_REDUCE_SCATTER:
        return lower_padded(lower_total_count(op) * size) *
               (lower_is_small_average(op) ? op->n_ranks : 1);
    case GRADD_BROADCAST:
        return lower_padded((op->end - op->begin) * size);
    default:
        return 0;
    }
}

int lower_op(struct lower_list *list, const struct backend_op *op, const struct lower_map *map)
{
    struct lowering l = {
        .list = list, .op = op, .map = map, .size = dtype_bytes(op->dtype), .failed = false};
    /* Counted first: a reduction in place overwrites its inputs. */
    if (op->nonfinite && lower_is_float(op->dtype) &&
        (op->kind == GRADD_ALLREDUCE || op->kind == GRADD_REDUCE_SCATTER))
        count_nonfinite(&l);
    switch (op->kind) {
    case GRADD_ALLREDUCE:
        lower_allreduce(&l);
        break;
    case GRADD_BROADCAST:
        lower_broadcast(&l);
        break;
    case GRADD_ALLGATHER:
        lower_allgather(&l);
        break;
    case GRADD_REDUCE_SCATTER:
        lower_reduce_scatter(&l);
        break;
    case GRADD_ALLTOALL:
        lower_alltoall(&l);
        break;
    case GRADD_BARRIER:
    case GRADD_SET_ADD:
    case GRADD_SET_REMOVE:
    case GRADD_JOIN:
        break; /* nothing to move */
    }
    return l.failed ? -ENOMEM : 0;
}
