/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/plan/process_set.h"

#include <errno.h>
#include <stdlib.h>

static void set_free(struct process_set *set)
{
    free(set->ranks);
    free(set->index_of);
    free(set);
}

int process_sets_init(struct process_sets *sets, uint32_t n_world)
{
    *sets = (struct process_sets){.n_world = n_world};
    uint64_t *all = calloc(n_world, sizeof *all);
    if (!all)
        return -ENOMEM;
    for (uint32_t r = 0; r < n_world; r++)
        all[r] = r;
    struct process_set *world = process_sets_add(sets, all, n_world);
    free(all);
    return world ? 0 : -ENOMEM;
}

void process_sets_deinit(struct process_sets *sets)
{
    struct process_set *set, *next, *all = sets->by_id;
    HASH_CLEAR(hh, sets->by_id);
    HASH_ITER(hh, all, set, next)
    set_free(set);
}

struct process_set *process_sets_find(const struct process_sets *sets, uint32_t id)
{
    struct process_set *set;
    HASH_FIND(hh, sets->by_id, &id, sizeof id, set);
    return set && !set->is_dead ? set : NULL;
}

struct process_set *process_sets_find_ranks(const struct process_sets *sets, const uint64_t *ranks,
                                            size_t n)
{
    for (struct process_set *set = sets->by_id; set; set = set->hh.next) {
        bool is_same = !set->is_dead && set->n_ranks == n;
        for (size_t i = 0; is_same && i < n; i++)
            is_same = set->ranks[i] == ranks[i];
        if (is_same)
            return set;
    }
    return NULL;
}

bool process_sets_ranks_valid(const struct process_sets *sets, const uint64_t *ranks, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ranks[i] >= sets->n_world || (i > 0 && ranks[i] <= ranks[i - 1]))
            return false;
    return n > 0;
}

struct process_set *process_sets_add(struct process_sets *sets, const uint64_t *ranks, size_t n)
{
    struct process_set *set = calloc(1, sizeof *set);
    if (!set)
        return NULL;
    set->n_ranks = (uint32_t)n;
    set->ranks = calloc(n, sizeof *set->ranks);
    set->index_of = calloc(sets->n_world, sizeof *set->index_of);
    if (!set->ranks || !set->index_of) {
        set_free(set);
        return NULL;
    }
    for (uint32_t r = 0; r < sets->n_world; r++)
        set->index_of[r] = -1;
    for (size_t i = 0; i < n; i++) {
        set->ranks[i] = (uint32_t)ranks[i];
        set->index_of[ranks[i]] = (int32_t)i;
    }
    set->id = sets->next_id++;
    HASH_ADD(hh, sets->by_id, id, sizeof set->id, set);
    return set;
}

static void free_if_unused(struct process_sets *sets, struct process_set *set)
{
    if (!set->is_dead || set->n_entries > 0)
        return;
    HASH_DEL(sets->by_id, set);
    set_free(set);
}

void process_sets_remove(struct process_sets *sets, struct process_set *set)
{
    set->is_dead = true;
    free_if_unused(sets, set);
}

void process_set_release_entry(struct process_sets *sets, struct process_set *set)
{
    set->n_entries--;
    free_if_unused(sets, set);
}
