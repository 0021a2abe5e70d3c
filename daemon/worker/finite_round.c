/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/finite_round.h"

#include <stdlib.h>
#include <string.h>

#include <uthash.h>

enum part {
    PART_NONE,
    PART_AWAITED,
    PART_COUNTED,
};

struct round {
    uint64_t number;
    uint32_t n_awaited;
    struct nonfinite whole;
    UT_hash_handle hh;
    uint8_t parts[]; /* enum part, by node */
};

struct finite_rounds {
    uint32_t n_nodes, size;
    const uint32_t *node_of;
    uint64_t last;
    struct round *by_number;
    bool *nodes; /* [n_nodes]: of the round that ended last */
};

struct finite_rounds *finite_rounds_new(uint32_t n_nodes, const uint32_t *node_of, uint32_t size)
{
    struct finite_rounds *rounds = calloc(1, sizeof *rounds);
    if (!rounds)
        return NULL;
    rounds->n_nodes = n_nodes;
    rounds->size = size;
    rounds->node_of = node_of;
    rounds->nodes = calloc(n_nodes, sizeof *rounds->nodes);
    if (!rounds->nodes) {
        free(rounds);
        return NULL;
    }
    return rounds;
}

void finite_rounds_free(struct finite_rounds *rounds)
{
    if (!rounds)
        return;
    struct round *round, *next, *all = rounds->by_number;
    HASH_CLEAR(hh, rounds->by_number);
    HASH_ITER(hh, all, round, next)
    free(round);
    free(rounds->nodes);
    free(rounds);
}

bool finite_is_local(const struct finite_rounds *rounds, const uint32_t *ranks, uint32_t n_ranks)
{
    for (uint32_t i = 1; i < n_ranks; i++)
        if (rounds->node_of[ranks[i]] != rounds->node_of[ranks[0]])
            return false;
    return true;
}

uint64_t finite_rounds_begin(struct finite_rounds *rounds, const uint32_t *ranks, uint32_t n_ranks)
{
    struct round *round = calloc(1, sizeof *round + rounds->n_nodes);
    if (!round)
        return 0;
    round->number = ++rounds->last;
    for (uint32_t i = 0; i < n_ranks; i++) {
        uint8_t *part = &round->parts[rounds->node_of[ranks[i]]];
        round->n_awaited += *part == PART_NONE;
        *part = PART_AWAITED;
    }
    HASH_ADD(hh, rounds->by_number, number, sizeof round->number, round);
    return round->number;
}

static void add(struct nonfinite *whole, const struct nonfinite *counted)
{
    if (counted->count && (!whole->count || counted->rank < whole->rank))
        *whole = *counted;
}

enum finite_take finite_rounds_take(struct finite_rounds *rounds, uint32_t node, uint64_t number,
                                    const struct nonfinite *counted, struct nonfinite *out,
                                    const bool **out_nodes)
{
    struct round *round;
    HASH_FIND(hh, rounds->by_number, &number, sizeof number, round);
    if (!round || round->parts[node] != PART_AWAITED ||
        (counted->count &&
         (counted->rank >= rounds->size || rounds->node_of[counted->rank] != node)))
        return FINITE_WRONG;
    round->parts[node] = PART_COUNTED;
    add(&round->whole, counted);
    if (--round->n_awaited > 0)
        return FINITE_WAITS;
    for (uint32_t i = 0; i < rounds->n_nodes; i++)
        rounds->nodes[i] = round->parts[i] != PART_NONE;
    *out = round->whole;
    *out_nodes = rounds->nodes;
    HASH_DEL(rounds->by_number, round);
    free(round);
    return FINITE_DONE;
}
