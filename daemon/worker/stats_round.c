/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/stats_round.h"

#include <stdlib.h>

/* Well below the time that the daemons give an answer to gradctl. */
static const uint64_t LIMIT_NS = UINT64_C(400) * 1000000;

struct node_figures {
    Pb__JobStats *stats;
    bool is_awaited, is_silent;
};

struct stats_round {
    struct watch *limit;
    uint32_t n_nodes, n_awaited;
    uint64_t seq;
    stats_round_fn *fn; /* NULL: no round is under way */
    void *data;
    struct node_figures nodes[];
};

static void end(struct stats_round *round)
{
    stats_round_fn *fn = round->fn;
    watch_disarm(round->limit);
    round->fn = NULL;
    if (fn)
        fn(round->data, round->seq);
}

static void on_limit(void *data)
{
    struct stats_round *round = data;
    for (uint32_t i = 0; i < round->n_nodes; i++) {
        round->nodes[i].is_silent |= round->nodes[i].is_awaited;
        round->nodes[i].is_awaited = false;
    }
    round->n_awaited = 0;
    end(round);
}

struct stats_round *stats_round_new(struct loop *loop, uint32_t n_nodes)
{
    struct stats_round *round = calloc(1, sizeof *round + n_nodes * sizeof round->nodes[0]);
    if (!round)
        return NULL;
    round->n_nodes = n_nodes;
    round->limit = watch_timer(loop, on_limit, round);
    if (!round->limit) {
        free(round);
        return NULL;
    }
    return round;
}

void stats_round_free(struct stats_round *round)
{
    if (!round)
        return;
    for (uint32_t i = 0; i < round->n_nodes; i++)
        if (round->nodes[i].stats)
            pb__job_stats__free_unpacked(round->nodes[i].stats, NULL);
    watch_free(round->limit);
    free(round);
}

bool stats_round_begin(struct stats_round *round, uint64_t seq, stats_round_fn *fn, void *data)
{
    bool is_new = !round->fn;
    round->seq = seq;
    round->fn = fn;
    round->data = data;
    if (is_new) {
        for (uint32_t i = 0; i < round->n_nodes; i++)
            round->nodes[i].is_silent = false;
        watch_arm(round->limit, LIMIT_NS);
    }
    return is_new;
}

void stats_round_await(struct stats_round *round, uint32_t node)
{
    round->n_awaited += !round->nodes[node].is_awaited;
    round->nodes[node].is_awaited = true;
}

void stats_round_miss(struct stats_round *round, uint32_t node)
{
    round->nodes[node].is_silent = true;
}

/* No longer awaited; true when it was. */
static bool unawait(struct stats_round *round, uint32_t node)
{
    bool was_awaited = round->nodes[node].is_awaited;
    round->nodes[node].is_awaited = false;
    round->n_awaited -= was_awaited;
    return was_awaited;
}

void stats_round_take(struct stats_round *round, uint32_t node, const Pb__StatsReply *reply)
{
    struct node_figures *figures = &round->nodes[node];
    if (!reply->stats)
        return;
    size_t bytes = pb__job_stats__get_packed_size(reply->stats);
    uint8_t *packed = malloc(bytes + 1);
    Pb__JobStats *copy = NULL;
    if (packed) {
        pb__job_stats__pack(reply->stats, packed);
        copy = pb__job_stats__unpack(NULL, bytes, packed);
        free(packed);
    }
    if (!copy)
        return;
    if (figures->stats)
        pb__job_stats__free_unpacked(figures->stats, NULL);
    figures->stats = copy;
    /* What comes after the limit is the newest that is known, and answers nothing. */
    if (unawait(round, node))
        stats_round_end_if_done(round);
}

void stats_round_drop(struct stats_round *round, uint32_t node)
{
    if (!unawait(round, node))
        return;
    round->nodes[node].is_silent = true;
    stats_round_end_if_done(round);
}

void stats_round_end_if_done(struct stats_round *round)
{
    if (round->fn && round->n_awaited == 0)
        end(round);
}

const Pb__JobStats *stats_round_figures(const struct stats_round *round, uint32_t node)
{
    return round->nodes[node].stats;
}

bool stats_round_is_silent(const struct stats_round *round, uint32_t node)
{
    return round->nodes[node].is_silent;
}
