/* SPDX-License-Identifier: Apache-2.0 */
/* The key of the cluster: which files are taken, which refused, and that both ways give one key. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "control/cluster_key.h"
#include "run_suite.h"

static char directory[] = "/tmp/gradd-key-XXXXXX";
static char path[64], error[512];
static struct cluster_key key;
static const char secret[] = "0123456789abcdef0123456789abcdef";

static int read_with(const char *text, mode_t mode)
{
    unlink(path);
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    ck_assert_int_eq(fchmod(fd, mode), 0);
    close(fd);
    key = (struct cluster_key){.is_set = false};
    *error = '\0';
    return cluster_key_read_file(&key, path, error, sizeof error);
}

START_TEST(a_file_for_its_owner_only_is_taken)
{
    ck_assert_msg(read_with(secret, 0400) == 0, "%s", error);
    ck_assert(key.is_set);
    ck_assert_int_eq(read_with(secret, 0600), 0);
}
END_TEST

START_TEST(a_file_that_others_may_use_is_refused)
{
    static const mode_t modes[] = {0440, 0404, 0460, 0602, 0410};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        ck_assert_int_eq(read_with(secret, modes[i]), -EPERM);
        ck_assert(!key.is_set);
        ck_assert_ptr_nonnull(strstr(error, "chmod 0400"));
    }
}
END_TEST

START_TEST(a_short_key_is_refused)
{
    ck_assert_int_eq(read_with("0123456789abcdef0123456789abcde\n", 0400), -EINVAL);
    ck_assert_ptr_nonnull(strstr(error, "at least 32 bytes, this one 31"));
    ck_assert_int_eq(read_with("", 0400), -EINVAL);
}
END_TEST

START_TEST(what_is_no_regular_file_is_refused)
{
    unlink(path);
    ck_assert_int_eq(mkfifo(path, 0400), 0);
    ck_assert_int_eq(cluster_key_read_file(&key, path, error, sizeof error), -EINVAL);
    unlink(path);
    ck_assert_int_eq(cluster_key_read_file(&key, path, error, sizeof error), -ENOENT);
    ck_assert_ptr_nonnull(strstr(error, "cluster_key_file"));
}
END_TEST

START_TEST(a_pipe_and_a_file_with_a_newline_give_the_same_key)
{
    struct cluster_key piped = {.is_set = false};
    int ends[2];
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(write(ends[1], secret, strlen(secret)), (ssize_t)strlen(secret));
    close(ends[1]);
    ck_assert_int_eq(cluster_key_read_fd(&piped, ends[0], error, sizeof error), 0);
    ck_assert_int_eq(fcntl(ends[0], F_GETFD), -1);
    ck_assert_int_eq(read_with("0123456789abcdef0123456789abcdef\n", 0400), 0);
    ck_assert_mem_eq(piped.key, key.key, sizeof key.key);
    ck_assert_int_eq(read_with("0123456789abcdef0123456789abcdeg", 0400), 0);
    ck_assert_mem_ne(piped.key, key.key, sizeof key.key);
}
END_TEST

int main(void)
{
    if (!mkdtemp(directory))
        return 1;
    snprintf(path, sizeof path, "%s/key", directory);
    const TTest *const tests[] = {
        a_file_for_its_owner_only_is_taken,
        a_file_that_others_may_use_is_refused,
        a_short_key_is_refused,
        what_is_no_regular_file_is_refused,
        a_pipe_and_a_file_with_a_newline_give_the_same_key,
    };
    int rc = run_suite("cluster_key", tests, sizeof tests / sizeof *tests);
    unlink(path);
    rmdir(directory);
    return rc;
}
