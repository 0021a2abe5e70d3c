/* SPDX-License-Identifier: Apache-2.0 */
/* The main() of a test program: one case per test, verdict as the exit status. */
#ifndef TEST_RUN_SUITE_H
#define TEST_RUN_SUITE_H

#include <check.h>
#include <stddef.h>

/* Around each test set_up() and tear_down() run, in its process. timeout_s of 0: check's own. */
static inline int run_suite_with(const char *name, const TTest *const *tests, size_t n_tests,
                                 SFun set_up, SFun tear_down, double timeout_s)
{
    Suite *suite = suite_create(name);
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, set_up, tear_down);
    if (timeout_s > 0)
        tcase_set_timeout(tcase, timeout_s);
    for (size_t i = 0; i < n_tests; i++)
        tcase_add_test(tcase, tests[i]);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}

static inline int run_suite(const char *name, const TTest *const *tests, size_t n_tests)
{
    return run_suite_with(name, tests, n_tests, NULL, NULL, 0);
}

#endif
