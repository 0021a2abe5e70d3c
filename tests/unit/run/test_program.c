/* SPDX-License-Identifier: Apache-2.0 */
/* Why a command cannot be run: what exec() does not tell apart. */
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "run_suite.h"

static char directory[] = "/tmp/test-program-XXXXXX";

static const char *explained(const char *name, int rc)
{
    static char text[8192];
    program_explain(name, rc, text, sizeof text);
    return text;
}

static void make(const char *name, mode_t mode)
{
    int fd = open(name, O_WRONLY | O_CREAT, 0600);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(fchmod(fd, mode), 0);
    close(fd);
}

START_TEST(a_missing_program_is_told_from_a_forgotten_directory)
{
    char expected[128];
    ck_assert_str_eq(explained("nowhere-to-be-found", -ENOENT), "there is no such program in PATH");
    snprintf(expected, sizeof expected, "there is no such file, seen from %s", directory);
    ck_assert_str_eq(explained("./nowhere", -ENOENT), expected);
    ck_assert_str_eq(explained("/nowhere", -ENOENT), "there is no such file");
    make("trainer", 0755);
    ck_assert_str_eq(explained("trainer", -ENOENT),
                     "it is not in PATH; for the one in this directory: ./trainer");
    unlink("trainer");
}
END_TEST

START_TEST(a_missing_interpreter_is_no_missing_file)
{
    make("trainer", 0755);
    ck_assert_ptr_nonnull(strstr(explained("./trainer", -ENOENT), "interpreter"));
    unlink("trainer");
}
END_TEST

START_TEST(what_may_not_be_run_is_told_apart)
{
    make("trainer", 0644);
    ck_assert_ptr_nonnull(strstr(explained("./trainer", -EACCES), "chmod +x"));
    ck_assert_int_eq(chmod("trainer", 0755), 0);
    ck_assert_str_eq(explained("./trainer", -EACCES), "Permission denied");
    ck_assert_str_eq(explained("./", -EACCES), "it is a directory");
    ck_assert_ptr_nonnull(strstr(explained("./trainer", -E2BIG), "too long"));
    unlink("trainer");
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_missing_program_is_told_from_a_forgotten_directory,
        a_missing_interpreter_is_no_missing_file,
        what_may_not_be_run_is_told_apart,
    };
    if (!mkdtemp(directory) || chdir(directory) < 0)
        return 1;
    int rc = run_suite("program", tests, sizeof tests / sizeof *tests);
    rmdir(directory);
    return rc;
}
