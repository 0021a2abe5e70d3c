/* SPDX-License-Identifier: Apache-2.0 */
/* The pool runs every piece once, alone or with the loop's help, list after list (run under TSan).
 */
#include <stdlib.h>
#include <string.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "worker/backend/host/pool.h"

enum { COUNT = 300000 };

static struct loop *loop;
static struct pool *pool;
static struct strip_list list;
static int n_done;
static float *data[2];

static void on_done(void *unused)
{
    (void)unused;
    n_done++;
}

static void setup(unsigned n_threads)
{
    struct backend_part parts[2];
    struct backend_op op = {.kind = GRADD_ALLREDUCE,
                            .dtype = GRADD_F32,
                            .redop = GRADD_SUM,
                            .prescale = 1,
                            .postscale = 1,
                            .n_ranks = 2,
                            .parts = parts,
                            .end = COUNT};
    for (int r = 0; r < 2; r++) {
        data[r] = malloc(COUNT * sizeof(float));
        for (int i = 0; i < COUNT; i++)
            data[r][i] = 1;
        parts[r] = (struct backend_part){
            .in.base = (uint8_t *)data[r], .out.base = (uint8_t *)data[r], .count = COUNT};
    }
    loop = loop_new();
    n_done = 0;
    pool = pool_new(loop, n_threads, on_done, NULL);
    ck_assert_ptr_nonnull(pool);
    strip_list_init(&list);
    ck_assert_int_eq(strip_list_add(&list, &op), 0);
    strip_list_seal(&list);
}

static void teardown(void)
{
    pool_free(pool);
    strip_list_deinit(&list);
    loop_free(loop);
    free(data[0]);
    free(data[1]);
}

static void expect_all(float value)
{
    for (int i = 0; i < COUNT; i++)
        if (data[0][i] != value || data[1][i] != value)
            ck_abort_msg("element %d is %g, not %g", i, (double)data[0][i], (double)value);
}

START_TEST(started_list_is_done_once)
{
    setup(3);
    float value = 1;
    for (int i = 1; i <= 12; i++) {
        pool_start(pool, &list);
        ck_assert(pool_is_busy(pool));
        while (n_done < i)
            loop_step(loop, true);
        value *= 2; /* in place: a piece run twice or never shows */
        ck_assert(!pool_is_busy(pool));
        ck_assert_int_eq(n_done, i);
        expect_all(value);
    }
    teardown();
}
END_TEST

START_TEST(run_list_is_done_on_return)
{
    for (unsigned n_threads = 1; n_threads <= 3; n_threads++) {
        setup(n_threads);
        float value = 1;
        for (int i = 0; i < 12; i++) {
            pool_run(pool, &list);
            value *= 2;
            expect_all(value);
        }
        ck_assert_int_eq(n_done, 0);
        teardown();
    }
}
END_TEST

START_TEST(started_and_run_lists_alternate)
{
    setup(2);
    float value = 1;
    for (int i = 1; i <= 8; i++) {
        pool_start(pool, &list);
        while (n_done < i)
            loop_step(loop, true);
        pool_run(pool, &list);
        value *= 4;
        expect_all(value);
    }
    teardown();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        started_list_is_done_once,
        run_list_is_done_on_return,
        started_and_run_lists_alternate,
    };
    return run_suite("pool", tests, sizeof tests / sizeof *tests);
}
