/* SPDX-License-Identifier: Apache-2.0 */
/*
 * On the coordinator: NaN and infinite elements of an op's inputs, counted by each of its nodes,
 * become one answer that is the same for all: the lowest rank that has any, and how many.
 *
 * Pure. Invariant: an op's answer comes out once, when the last of its nodes has counted; a node
 * counts once, and only for its own ranks.
 */
#ifndef GRADD_FINITE_ROUND_H
#define GRADD_FINITE_ROUND_H

#include <stdbool.h>
#include <stdint.h>

struct finite_rounds;

struct nonfinite {
    uint32_t rank;
    uint64_t count; /* 0: no rank has any */
};

enum finite_take {
    FINITE_DONE = 0, /* *out is the op's answer; its nodes are in out_nodes, its round is over */
    FINITE_WAITS,    /* for other nodes */
    FINITE_WRONG,    /* that node has no part in such an op, has counted, or names others' ranks */
};

/* node_of[rank] is borrowed. NULL: out of memory. */
struct finite_rounds *finite_rounds_new(uint32_t n_nodes, const uint32_t *node_of, uint32_t size);
void finite_rounds_free(struct finite_rounds *rounds); /* NULL-safe */

/* An op of these ranks, which are on two nodes or more, begins. Its number, or 0: out of memory. */
uint64_t finite_rounds_begin(struct finite_rounds *rounds, const uint32_t *ranks, uint32_t n_ranks);
/* These ranks are on one node: it has the answer already. */
bool finite_is_local(const struct finite_rounds *rounds, const uint32_t *ranks, uint32_t n_ranks);

/* What a node has counted. out_nodes[node]: has a part in the op; valid until the next call. */
enum finite_take finite_rounds_take(struct finite_rounds *rounds, uint32_t node, uint64_t number,
                                    const struct nonfinite *counted, struct nonfinite *out,
                                    const bool **out_nodes);

#endif
