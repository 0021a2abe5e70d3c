/* SPDX-License-Identifier: Apache-2.0 */
/* What is deferred: its order, and its end with the loop. */
#include <string.h>

#include "base/loop.h"
#include "run_suite.h"

static struct loop *loop;
static char seen[16];

static void note(void *data)
{
    strncat(seen, data, sizeof seen - strlen(seen) - 1);
}

static void note_and_defer(void *data)
{
    note(data);
    ck_assert_int_eq(loop_defer(loop, note, (char *)"d"), 0);
}

static void open_loop(void)
{
    *seen = '\0';
    loop = loop_new();
    ck_assert_ptr_nonnull(loop);
}

START_TEST(deferred_calls_run_in_order_and_what_they_defer_after_them)
{
    open_loop();
    ck_assert_int_eq(loop_defer(loop, note_and_defer, (char *)"a"), 0);
    ck_assert_int_eq(loop_defer(loop, note, (char *)"b"), 0);
    ck_assert_str_eq(seen, "");
    ck_assert_int_eq(loop_step(loop, false), 0);
    ck_assert_str_eq(seen, "abd");
    loop_free(loop);
}
END_TEST

/* Objects are freed before their loop: what they deferred refers to nothing any more. */
START_TEST(a_freed_loop_runs_nothing)
{
    open_loop();
    ck_assert_int_eq(loop_defer(loop, note, (char *)"a"), 0);
    loop_free(loop);
    ck_assert_str_eq(seen, "");
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        deferred_calls_run_in_order_and_what_they_defer_after_them,
        a_freed_loop_runs_nothing,
    };
    return run_suite("loop", tests, sizeof tests / sizeof *tests);
}
