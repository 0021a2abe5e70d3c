/* SPDX-License-Identifier: Apache-2.0 */
/* Every kind of collective, lowered to strips and run piece by piece in a random order. */
#include <stdlib.h>
#include <string.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "worker/backend/host/strip.h"

/* Like require(), without check's write to a pipe for each of many elements. */
#define require(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            ck_abort_msg("line %d: %s", __LINE__, #condition);                                     \
    } while (0)

enum { N = 3, COUNT = 50000 }; /* more than two pieces of float32 */

static float *in[N], *out[N];
static struct backend_part parts[N];
static struct strip_list list;

static void setup(void)
{
    for (int r = 0; r < N; r++) {
        in[r] = malloc(COUNT * sizeof(float));
        out[r] = calloc(N * COUNT, sizeof(float));
        for (int i = 0; i < COUNT; i++)
            in[r][i] = (float)((r + 1) * 1000 + i % 997);
        parts[r] = (struct backend_part){
            .in.base = (uint8_t *)in[r], .out.base = (uint8_t *)out[r], .count = COUNT};
    }
    strip_list_init(&list);
}

static void teardown(void)
{
    for (int r = 0; r < N; r++) {
        free(in[r]);
        free(out[r]);
    }
    strip_list_deinit(&list);
}

static struct backend_op op_of(enum gradd_kind kind)
{
    return (struct backend_op){
        .kind = kind,
        .dtype = GRADD_F32,
        .redop = GRADD_SUM,
        .prescale = 1,
        .postscale = 1,
        .n_ranks = N,
        .parts = parts,
        .end = COUNT,
    };
}

/* Every piece exactly once, in an order that no thread would take. */
static void run(const struct backend_op *op)
{
    strip_list_clear(&list);
    ck_assert_int_eq(strip_list_add(&list, op), 0);
    strip_list_seal(&list);
    for (uint64_t piece = list.n_pieces; piece-- > 0;)
        strip_list_run_piece(&list, piece);
}

static float sum_at(int i)
{
    return in[0][i] + in[1][i] + in[2][i];
}

START_TEST(all_reduce_gives_the_sum_to_all)
{
    struct backend_op op = op_of(GRADD_ALLREDUCE);
    setup();
    run(&op);
    ck_assert_uint_ge(list.n_pieces, 3);
    for (int r = 0; r < N; r++)
        for (int i = 0; i < COUNT; i++)
            require(out[r][i] == sum_at(i));
    teardown();
}
END_TEST

START_TEST(slice_touches_nothing_outside)
{
    struct backend_op op = op_of(GRADD_ALLREDUCE);
    setup();
    op.begin = 1001;
    op.end = 40001;
    run(&op);
    require(out[0][1000] == 0 && out[0][40001] == 0);
    require(out[0][1001] == sum_at(1001) && out[2][40000] == sum_at(40000));
    teardown();
}
END_TEST

START_TEST(ring_wraps_within_a_piece)
{
    struct backend_op op = op_of(GRADD_ALLREDUCE);
    setup();
    /* Rank 1 streams through a ring of 1000 elements, slice by slice. */
    float *ring = malloc(1000 * sizeof *ring);
    parts[1].in = parts[1].out = (struct backend_span){(uint8_t *)ring, 1000 * sizeof(float)};
    for (int begin = 0; begin < COUNT; begin += 777) {
        op.begin = (uint64_t)begin;
        op.end = begin + 777 < COUNT ? (uint64_t)begin + 777 : COUNT;
        for (uint64_t i = op.begin; i < op.end; i++)
            ring[i % 1000] = in[1][i];
        run(&op);
        for (uint64_t i = op.begin; i < op.end; i++) {
            require(ring[i % 1000] == sum_at((int)i));
            require(out[0][i] == sum_at((int)i));
        }
    }
    free(ring);
    teardown();
}
END_TEST

START_TEST(joined_rank_counts_as_zero)
{
    struct backend_op op = op_of(GRADD_ALLREDUCE);
    setup();
    parts[1] = (struct backend_part){0};
    op.n_joined = 1;
    run(&op);
    require(out[0][7] == in[0][7] + in[2][7]);
    op.redop = GRADD_PROD;
    run(&op);
    require(out[2][7] == 0);
    teardown();
}
END_TEST

START_TEST(broadcast_copies_the_root)
{
    struct backend_op op = op_of(GRADD_BROADCAST);
    setup();
    op.root = 1;
    parts[1].out = parts[1].in; /* in place at the root */
    run(&op);
    ck_assert_int_eq(memcmp(out[0], in[1], COUNT * sizeof(float)), 0);
    ck_assert_int_eq(memcmp(out[2], in[1], COUNT * sizeof(float)), 0);
    teardown();
}
END_TEST

/* libgradd refuses that; another client may not. */
START_TEST(an_output_that_overlaps_its_input_is_copied_all_the_same)
{
    struct backend_op op = op_of(GRADD_BROADCAST);
    setup();
    memcpy(out[1] + 1, in[1], 1000 * sizeof(float));
    parts[1].in.base = (uint8_t *)(out[1] + 1);
    op.root = 1;
    op.end = 1000; /* one piece */
    run(&op);
    for (int i = 0; i < 1000; i++)
        require(out[0][i] == in[1][i] && out[1][i] == in[1][i]);
    teardown();
}
END_TEST

START_TEST(all_gather_concatenates_uneven_parts)
{
    struct backend_op op = op_of(GRADD_ALLGATHER);
    setup();
    parts[0].count = 20001;
    parts[1].count = 0;
    parts[2].count = 33333;
    run(&op);
    for (int r = 0; r < N; r++) {
        ck_assert_int_eq(memcmp(out[r], in[0], 20001 * sizeof(float)), 0);
        ck_assert_int_eq(memcmp(out[r] + 20001, in[2], 33333 * sizeof(float)), 0);
        require(out[r][20001 + 33333] == 0);
    }
    teardown();
}
END_TEST

START_TEST(reduce_scatter_gives_each_rank_its_part)
{
    const uint64_t counts[N] = {10, 0, COUNT - 10};
    struct backend_op op = op_of(GRADD_REDUCE_SCATTER);
    setup();
    op.counts = counts;
    run(&op);
    require(out[0][0] == sum_at(0) && out[0][9] == sum_at(9) && out[0][10] == 0);
    require(out[1][0] == 0);
    require(out[2][0] == sum_at(10) && out[2][COUNT - 11] == sum_at(COUNT - 1));
    teardown();
}
END_TEST

START_TEST(all_to_all_sends_each_part_to_its_rank)
{
    const uint64_t counts[N][N] = {{1, 2, 3}, {0, 0, 40000}, {5, 0, 1}};
    struct backend_op op = op_of(GRADD_ALLTOALL);
    setup();
    for (int r = 0; r < N; r++)
        parts[r].counts = counts[r];
    run(&op);
    for (int to = 0; to < N; to++) {
        const float *at = out[to];
        for (int from = 0; from < N; from++) {
            uint64_t skip = 0;
            for (int i = 0; i < to; i++)
                skip += counts[from][i];
            ck_assert_int_eq(memcmp(at, in[from] + skip, counts[from][to] * sizeof(float)), 0);
            at += counts[from][to];
        }
        require(*at == 0);
    }
    teardown();
}
END_TEST

START_TEST(batch_of_many_ops_runs_every_piece)
{
    enum { OPS = 100 };
    struct backend_part many[OPS][N];
    struct backend_op ops[OPS];
    setup();
    for (int k = 0; k < OPS; k++) {
        for (int r = 0; r < N; r++) {
            many[k][r] = parts[r];
            many[k][r].in.base = (uint8_t *)(in[r] + k * 500);
            many[k][r].out.base = (uint8_t *)(out[r] + k * 500);
        }
        ops[k] = op_of(GRADD_ALLREDUCE);
        ops[k].parts = many[k];
        ops[k].end = k % 7 ? 500 : 0; /* some ops have no elements */
        ck_assert_int_eq(strip_list_add(&list, &ops[k]), 0);
    }
    strip_list_seal(&list);
    for (uint64_t piece = 0; piece < list.n_pieces; piece++)
        strip_list_run_piece(&list, piece);
    for (int i = 0; i < OPS * 500; i++)
        require(out[1][i] == (i / 500 % 7 ? sum_at(i) : 0));
    teardown();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        all_reduce_gives_the_sum_to_all,
        slice_touches_nothing_outside,
        ring_wraps_within_a_piece,
        joined_rank_counts_as_zero,
        broadcast_copies_the_root,
        an_output_that_overlaps_its_input_is_copied_all_the_same,
        all_gather_concatenates_uneven_parts,
        reduce_scatter_gives_each_rank_its_part,
        all_to_all_sends_each_part_to_its_rank,
        batch_of_many_ops_runs_every_piece,
    };
    return run_suite("strip", tests, sizeof tests / sizeof *tests);
}
