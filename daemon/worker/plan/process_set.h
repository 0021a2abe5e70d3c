/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Process sets: subsets of a job's ranks that aggregate among themselves. Set 0 is all ranks.
 * Pure. Thread: loop. Ids are never reused within a plan.
 */
#ifndef GRADD_PROCESS_SET_H
#define GRADD_PROCESS_SET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uthash.h>

struct process_set {
    uint32_t id;
    uint32_t n_ranks;
    uint32_t *ranks;    /* ascending global ranks */
    int32_t *index_of;  /* by global rank: index into ranks, or -1 */
    uint32_t n_entries; /* ops that use the set; freed when dead and 0 */
    bool is_dead;
    UT_hash_handle hh;
};

struct process_sets {
    uint32_t n_world;
    uint32_t next_id;
    struct process_set *by_id;
};

/* 0 or -ENOMEM. */
int process_sets_init(struct process_sets *sets, uint32_t n_world);
void process_sets_deinit(struct process_sets *sets);

struct process_set *process_sets_find(const struct process_sets *sets, uint32_t id);
/* The live set with exactly these ranks, or NULL. */
struct process_set *process_sets_find_ranks(const struct process_sets *sets, const uint64_t *ranks,
                                            size_t n);
/* True for ascending, distinct ranks of the world, at least one. */
bool process_sets_ranks_valid(const struct process_sets *sets, const uint64_t *ranks, size_t n);
/* NULL: out of memory. */
struct process_set *process_sets_add(struct process_sets *sets, const uint64_t *ranks, size_t n);
/* No longer found by id; freed when its last entry is released. */
void process_sets_remove(struct process_sets *sets, struct process_set *set);
void process_set_release_entry(struct process_sets *sets, struct process_set *set);

#endif
