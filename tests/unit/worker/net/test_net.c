/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives over two to five nodes in one process against a plain reference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "cluster.h"
#include "worker/backend/net/schedule.h"
#include "worker/plan/signature.h"

static const enum gradd_dtype dtypes[] = {GRADD_I8,  GRADD_U8,  GRADD_I32, GRADD_I64,
                                          GRADD_F16, GRADD_F32, GRADD_F64, GRADD_BF16};
static const uint32_t uneven[CLUSTER_NODES_MAX] = {2, 1, 4, 1, 3, 1, 1, 1};
static const uint32_t single[CLUSTER_NODES_MAX] = {1, 1, 1, 1, 1, 1, 1, 1};

static struct cluster cluster;

static struct collective *new_collective(enum gradd_kind kind, enum gradd_dtype dtype)
{
    struct collective *c = calloc(1, sizeof *c);
    c->kind = kind;
    c->dtype = dtype;
    c->prescale = c->postscale = 1;
    c->n_ranks = cluster.n_ranks;
    for (uint32_t i = 0; i < c->n_ranks; i++)
        c->ranks[i] = i;
    return c;
}

static void set_counts(struct collective *c, uint64_t count)
{
    for (uint32_t i = 0; i < c->n_ranks; i++) {
        const uint64_t mine = count ? count + i * 3 % 5 : 0;
        c->count[i] = count;
        if (c->kind == GRADD_ALLGATHER)
            c->count[i] = mine;
        if (c->kind == GRADD_REDUCE_SCATTER)
            c->counts[0][i] = mine / c->n_ranks;
        for (uint32_t j = 0; c->kind == GRADD_ALLTOALL && j < c->n_ranks; j++)
            c->counts[i][j] = (mine + 7 * i + j) / c->n_ranks * ((i + j) % 4 != 3);
    }
    for (uint32_t i = 0; i < c->n_ranks; i++) {
        uint64_t sum = 0;
        for (uint32_t j = 0; j < c->n_ranks; j++)
            sum += c->kind == GRADD_ALLTOALL ? c->counts[i][j] : c->counts[0][j];
        if (c->kind == GRADD_ALLTOALL || c->kind == GRADD_REDUCE_SCATTER)
            c->count[i] = sum;
    }
}

static double tolerance_of(const struct collective *c)
{
    const bool divides = c->redop == GRADD_AVG || c->prescale != 1 || c->postscale != 1;
    if (!divides || c->dtype == GRADD_I8 || c->dtype == GRADD_U8 || c->dtype == GRADD_I32 ||
        c->dtype == GRADD_I64)
        return 0;
    return c->dtype == GRADD_BF16  ? 0.05
           : c->dtype == GRADD_F16 ? 0.01
           : cluster.wire          ? 0.05
                                   : 1e-5;
}

static void run_one(struct collective *c, unsigned seed)
{
    collective_prepare(c, &cluster, seed);
    cluster_run(&cluster, &c, 1);
    cluster_wait(&cluster);
    for (uint32_t a = 0; a < cluster.n_nodes; a++)
        ck_assert_msg(cluster.nodes[a].n_failed == 0, "%s", cluster.nodes[a].text);
    collective_check(c, tolerance_of(c));
    collective_free(c);
    free(c);
}

static void run_all_kinds(uint64_t count)
{
    for (int kind = GRADD_ALLREDUCE; kind <= GRADD_ALLTOALL; kind++) {
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            struct collective *c = new_collective((enum gradd_kind)kind, dtypes[d]);
            c->root = c->n_ranks - 1;
            set_counts(c, count);
            run_one(c, (unsigned)(count + d));
        }
    }
}

static void run_all_redops(uint64_t count, enum gradd_kind kind)
{
    for (int redop = GRADD_SUM; redop <= GRADD_AVG; redop++) {
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            struct collective *c = new_collective(kind, dtypes[d]);
            c->redop = (enum gradd_redop)redop;
            c->in_place = kind == GRADD_ALLREDUCE && d % 2 == 0;
            c->shift = d % 3 == 0 ? 4 : 0;
            c->checks_finite = d % 2 == 1;
            c->prescale = d % 4 == 1 && redop != GRADD_PROD ? 2 : 1;
            c->postscale = d % 4 == 2 ? 0.5 : 1;
            set_counts(c, count);
            run_one(c, (unsigned)(count + d));
        }
    }
}

static const uint64_t sizes[] = {0, 1, 13, 4099, 70001};

START_TEST(every_kind_and_type_between_nodes)
{
    for (uint32_t n = 2; n <= 5; n++) {
        cluster_start(&cluster, n, n % 2 ? uneven : single, 1 + n % 3, 0, CLUSTER_SOCKETS, 0);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            run_all_kinds(sizes[i]);
        cluster_stop(&cluster);
    }
}
END_TEST

START_TEST(every_operator_and_type_between_nodes)
{
    for (uint32_t n = 2; n <= 4; n++) {
        cluster_start(&cluster, n, n % 2 ? single : uneven, n, 0, CLUSTER_SOCKETS, 0);
        run_all_redops(29, GRADD_ALLREDUCE);
        run_all_redops(40001, GRADD_ALLREDUCE);
        run_all_redops(5003, GRADD_REDUCE_SCATTER);
        cluster_stop(&cluster);
    }
}
END_TEST

/* ------------------------------------------------------------------ fused batches */

static unsigned next_random(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void choose_ranks(struct collective *c, unsigned *state)
{
    c->n_ranks = 0;
    for (uint32_t r = 0; r < cluster.n_ranks; r++)
        if (next_random(state) % 3)
            c->ranks[c->n_ranks++] = r;
    if (c->n_ranks == 0)
        c->ranks[c->n_ranks++] = next_random(state) % cluster.n_ranks;
}

static struct collective *random_collective(unsigned *state)
{
    static const uint64_t counts[] = {0, 1, 5, 100, 3000, 9001, 40000};
    const unsigned kind = next_random(state) % 10;
    struct collective *c =
        new_collective(kind <= GRADD_ALLTOALL ? (enum gradd_kind)kind : GRADD_ALLREDUCE,
                       dtypes[next_random(state) % 8]);
    if (next_random(state) % 3 == 0)
        choose_ranks(c, state);
    c->root = next_random(state) % c->n_ranks;
    c->redop = (enum gradd_redop)(next_random(state) % 5);
    c->shift = next_random(state) % 8;
    c->in_place = c->kind == GRADD_ALLREDUCE && next_random(state) % 2;
    for (uint32_t i = 0; c->kind == GRADD_ALLREDUCE && i < c->n_ranks; i++)
        c->is_joined[i] = next_random(state) % 12 == 0;
    set_counts(c, counts[next_random(state) % 7]);
    collective_prepare(c, &cluster, *state);
    return c;
}

/* Several batches on their way at once, each of several ops of any kind among any ranks. */
static void run_random_batches(unsigned seed, size_t n_batches)
{
    enum { OPS_MAX = 7 };
    struct collective *all[8][OPS_MAX];
    size_t n_ops[8];
    for (size_t b = 0; b < n_batches; b++) {
        n_ops[b] = 1 + next_random(&seed) % OPS_MAX;
        for (size_t i = 0; i < n_ops[b]; i++)
            all[b][i] = random_collective(&seed);
        cluster_run(&cluster, all[b], n_ops[b]);
    }
    cluster_wait(&cluster);
    for (size_t b = 0; b < n_batches; b++) {
        for (size_t i = 0; i < n_ops[b]; i++) {
            collective_check(all[b][i], tolerance_of(all[b][i]));
            collective_free(all[b][i]);
            free(all[b][i]);
        }
    }
}

START_TEST(batches_of_any_ops_among_any_ranks)
{
    for (uint32_t n = 2; n <= 5; n++) {
        cluster_start(&cluster, n, uneven, 1 + n % 2, 0, CLUSTER_SOCKETS, 0);
        for (unsigned seed = 0; seed < 6; seed++)
            run_random_batches(seed * 77 + n, 8);
        cluster_stop(&cluster);
    }
}
END_TEST

START_TEST(links_may_be_tcp_or_tls)
{
    for (int kind = CLUSTER_TCP; kind <= CLUSTER_TLS; kind++) {
        for (uint32_t n = 2; n <= 3; n++) {
            cluster_start(&cluster, n, uneven, 2, 0, (enum cluster_links)kind, 0);
            run_all_kinds(70001);
            run_random_batches(n, 8);
            cluster_stop(&cluster);
        }
    }
}
END_TEST

/* ------------------------------------------------------------------ sums */

/* Values that no type adds exactly: only the order and the roundings make results the same. */
static void fill_with_fractions(struct collective *c, unsigned seed)
{
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        for (uint64_t i = 0; i < c->count[r]; i++) {
            const float x = (float)(next_random(&seed) % 100000) / 7919.0f + 0.01f;
            memcpy(c->in[r] + i * sizeof x, &x, sizeof x);
            c->values[r][i] = (double)x;
        }
    }
}

static struct collective *new_fractions(uint64_t count, unsigned seed)
{
    struct collective *c = new_collective(GRADD_ALLREDUCE, GRADD_F32);
    set_counts(c, count);
    collective_prepare(c, &cluster, seed);
    fill_with_fractions(c, seed);
    return c;
}

START_TEST(half_wires_lose_precision_and_nothing_else)
{
    static const int wires[] = {GRADD_F16, GRADD_BF16};
    for (size_t w = 0; w < 2; w++) {
        for (uint32_t n = 2; n <= 4; n++) {
            cluster_start(&cluster, n, uneven, 1, wires[w], CLUSTER_SOCKETS, 0);
            for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                struct collective *c = new_fractions(sizes[i], (unsigned)i);
                cluster_run(&cluster, &c, 1);
                cluster_wait(&cluster);
                collective_check(c, n * (wires[w] == GRADD_F16 ? 0x1p-10 : 0x1p-7));
                collective_free(c);
                free(c);
            }
            run_all_kinds(4099);
            run_all_redops(20001, GRADD_ALLREDUCE);
            run_all_redops(4099, GRADD_REDUCE_SCATTER);
            cluster_stop(&cluster);
        }
    }
}
END_TEST

START_TEST(half_wire_halves_the_bytes)
{
    uint64_t sent[2];
    for (int half = 0; half < 2; half++) {
        struct net_link_stats stats;
        cluster_start(&cluster, 2, single, 1, half ? GRADD_BF16 : 0, CLUSTER_SOCKETS, 0);
        struct collective *c = new_fractions(100000, 3);
        cluster_run(&cluster, &c, 1);
        cluster_wait(&cluster);
        ck_assert_uint_eq(net_stats(cluster.nodes[0].net, &stats, 1), 1);
        ck_assert_uint_eq(stats.node, 1);
        ck_assert_uint_eq(stats.sent_bytes, stats.received_bytes);
        sent[half] = stats.sent_bytes;
        collective_free(c);
        free(c);
        cluster_stop(&cluster);
    }
    ck_assert_uint_ge(sent[0], 400000);
    ck_assert_uint_lt(sent[0], 401000);
    ck_assert_uint_lt(sent[1], 201000);
}
END_TEST

START_TEST(fusion_changes_no_sum)
{
    enum { N = 9 };
    static const uint64_t counts[N] = {10, 50000, 3, 9000, 70001, 1, 30000, 7000, 100};
    struct collective *alone[N], *fused[N];
    cluster_start(&cluster, 4, uneven, 2, 0, CLUSTER_SOCKETS, 0);
    for (size_t i = 0; i < N; i++) {
        alone[i] = new_fractions(counts[i], (unsigned)i);
        fused[i] = new_fractions(counts[i], (unsigned)i);
        cluster_run(&cluster, &alone[i], 1);
        cluster_wait(&cluster);
    }
    cluster_run(&cluster, fused, N);
    cluster_wait(&cluster);
    for (size_t i = 0; i < N; i++) {
        collective_check(fused[i], 1e-5);
        ck_assert(memcmp(alone[i]->out[0], fused[i]->out[0], counts[i] * sizeof(float)) == 0);
        collective_free(alone[i]);
        collective_free(fused[i]);
        free(alone[i]);
        free(fused[i]);
    }
    cluster_stop(&cluster);
}
END_TEST

START_TEST(half_averages_do_not_overflow)
{
    cluster_start(&cluster, 3, uneven, 1, 0, CLUSTER_SOCKETS, 0);
    for (uint64_t count = 100; count <= 100000; count *= 1000) {
        struct collective *c = new_collective(GRADD_ALLREDUCE, GRADD_F16);
        c->redop = GRADD_AVG;
        set_counts(c, count);
        collective_prepare(c, &cluster, 1);
        for (uint32_t r = 0; r < c->n_ranks; r++) {
            for (uint64_t i = 0; i < count; i++) {
                c->in[r][2 * i] = 0x00; /* 0x7800: 32768; the sum of two does not fit */
                c->in[r][2 * i + 1] = 0x78;
                c->values[r][i] = 32768;
            }
        }
        cluster_run(&cluster, &c, 1);
        cluster_wait(&cluster);
        collective_check(c, 0.01);
        collective_free(c);
        free(c);
    }
    cluster_stop(&cluster);
}
END_TEST

START_TEST(every_bad_input_is_counted_once)
{
    for (uint32_t n = 2; n <= 3; n++) {
        for (uint64_t count = 100; count <= 100000; count *= 1000) {
            cluster_start(&cluster, n, uneven, 1, 0, CLUSTER_SOCKETS, 0);
            struct collective *c = new_collective(GRADD_ALLREDUCE, GRADD_F32);
            c->checks_finite = true;
            set_counts(c, count);
            collective_prepare(c, &cluster, 1);
            for (uint64_t i = 0; i < count; i += 10)
                memset(c->in[1] + i * 4, 0xff, 4);
            cluster_run(&cluster, &c, 1);
            cluster_wait(&cluster);
            /* Ranks 0 and 1 are on node 0, with counters 0 and 1 there. */
            ck_assert_uint_eq(c->nonfinite[0][0], 0);
            ck_assert_uint_eq(c->nonfinite[0][1], count / 10);
            ck_assert_uint_eq(c->nonfinite[1][0], 0);
            collective_free(c);
            free(c);
            cluster_stop(&cluster);
        }
    }
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        every_kind_and_type_between_nodes,
        every_operator_and_type_between_nodes,
        batches_of_any_ops_among_any_ranks,
        links_may_be_tcp_or_tls,
        half_wires_lose_precision_and_nothing_else,
        half_wire_halves_the_bytes,
        fusion_changes_no_sum,
        half_averages_do_not_overflow,
        every_bad_input_is_counted_once,
    };
    return run_suite("net", tests, sizeof tests / sizeof tests[0]);
}
