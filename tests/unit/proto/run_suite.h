/* SPDX-License-Identifier: Apache-2.0 */
/* The main() of a test program: one case per test, verdict as the exit status. */
#ifndef TEST_RUN_SUITE_H
#define TEST_RUN_SUITE_H

#include <check.h>
#include <stddef.h>

static inline int run_suite(const char *name, const TTest *const *tests, size_t n_tests)
{
    Suite *suite = suite_create(name);
    TCase *tcase = tcase_create(name);
    for (size_t i = 0; i < n_tests; i++)
        tcase_add_test(tcase, tests[i]);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}

#endif
