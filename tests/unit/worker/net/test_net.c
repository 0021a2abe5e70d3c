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

int main(void)
{
    const TTest *const tests[] = {
        every_kind_and_type_between_nodes,
        every_operator_and_type_between_nodes,
    };
    return run_suite("net", tests, sizeof tests / sizeof tests[0]);
}
