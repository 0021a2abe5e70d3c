/* SPDX-License-Identifier: Apache-2.0 */
/*
 * On the coordinator: the figures of the other nodes' workers, asked for when somebody looks. A
 * node that does not answer in time is told of by its number, with what it said the last time: the
 * one that is asked about is often the one that hangs.
 *
 * Thread: loop. Invariant: a round ends once, by the last answer or by its time limit; what begins
 * while one is under way is answered by its end.
 */
#ifndef GRADD_STATS_ROUND_H
#define GRADD_STATS_ROUND_H

#include <stdbool.h>
#include <stdint.h>

#include "base/loop.h"
#include "wire.h"

struct stats_round;

/* The figures are in; seq is that of the last stats_round_begin(). */
typedef void stats_round_fn(void *data, uint64_t seq);

/* NULL: out of memory. */
struct stats_round *stats_round_new(struct loop *loop, uint32_t n_nodes);
void stats_round_free(struct stats_round *round); /* NULL-safe */

/* fn follows, perhaps inside stats_round_end_if_done(). True: the nodes are to be asked. */
bool stats_round_begin(struct stats_round *round, uint64_t seq, stats_round_fn *fn, void *data);
/* This node has been asked, or can not be asked though it has a part in the job. */
void stats_round_await(struct stats_round *round, uint32_t node);
void stats_round_miss(struct stats_round *round, uint32_t node);
/* The node's answer. It is copied; without memory the node stays awaited. */
void stats_round_take(struct stats_round *round, uint32_t node, const Pb__StatsReply *reply);
/* Nothing comes from this node any more. */
void stats_round_drop(struct stats_round *round, uint32_t node);
void stats_round_end_if_done(struct stats_round *round);

/* What the node said last, or NULL. */
const Pb__JobStats *stats_round_figures(const struct stats_round *round, uint32_t node);
/* It did not answer in the last round. */
bool stats_round_is_silent(const struct stats_round *round, uint32_t node);

#endif
