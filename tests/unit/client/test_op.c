/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Op records: ids grow, and never name a later op.
 */
#include <stdlib.h>

#include "op.h"
#include "run_suite.h"

START_TEST(a_recycled_record_has_a_greater_id_and_the_old_id_is_dead)
{
    struct op_pool pool = {0};
    int64_t last = 0;
    for (int i = 0; i < 1000; i++) {
        struct op *op = op_new(&pool);
        ck_assert_ptr_nonnull(op);
        op_start(&pool, op);
        ck_assert_int_gt(op->id, last);
        ck_assert_ptr_eq(op_find(&pool, op->id), op);
        ck_assert_ptr_null(op_find(&pool, last));
        last = op->id;
        op_free(&pool, op);
        ck_assert_ptr_null(op_find(&pool, last));
    }
    ck_assert_uint_eq(pool.n_blocks, 1);
    op_pool_deinit(&pool);
}
END_TEST

START_TEST(records_keep_their_address_while_the_pool_grows)
{
    enum { N = 1000 };
    struct op_pool pool = {0};
    struct op *ops[N];
    for (int i = 0; i < N; i++) {
        ops[i] = op_new(&pool);
        op_start(&pool, ops[i]);
    }
    for (int i = 0; i < N; i++)
        ck_assert_ptr_eq(op_find(&pool, ops[i]->id), ops[i]);
    ck_assert_ptr_null(op_find(&pool, INT64_MAX));
    ck_assert_ptr_null(op_find(&pool, -1));
    ck_assert_ptr_null(op_find(&pool, 0));
    op_pool_deinit(&pool);
}
END_TEST

int main(void)
{
    const TTest *tests[] = {a_recycled_record_has_a_greater_id_and_the_old_id_is_dead,
                            records_keep_their_address_while_the_pool_grows};
    return run_suite("client/op", tests, sizeof tests / sizeof *tests);
}
