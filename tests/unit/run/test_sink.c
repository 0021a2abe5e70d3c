/* SPDX-License-Identifier: Apache-2.0 */
/* The console: whole lines, no blocking on a reader that pauses, one report of a failure. */
#include "sink.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "run_suite.h"

START_TEST(a_full_pipe_makes_nobody_wait_and_loses_nothing)
{
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    struct sink sink;
    sink_init(&sink, fds[1]);
    ck_assert_int_eq(fcntl(fds[1], F_GETFL) & O_NONBLOCK, 0);
    char line[1000];
    memset(line, 'x', sizeof line);
    line[sizeof line - 1] = '\n';
    size_t n_lines = 0;
    while (sink_has_room(&sink)) {
        sink_push(&sink, "[0] ", line, sizeof line);
        ck_assert_int_eq(sink_flush(&sink), 0);
        n_lines++;
    }
    ck_assert(!sink_is_empty(&sink));
    size_t n_read = 0, expected = n_lines * (sizeof line + 4);
    while (n_read < expected) {
        char data[65536];
        ssize_t n = read(fds[0], data, sizeof data);
        ck_assert_int_gt(n, 0);
        n_read += (size_t)n;
        ck_assert_int_eq(sink_flush(&sink), 0);
    }
    ck_assert(sink_is_empty(&sink));
    sink_deinit(&sink);
    close(fds[0]);
    close(fds[1]);
}
END_TEST

START_TEST(a_line_without_end_gets_a_newline)
{
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    struct sink sink;
    sink_init(&sink, fds[1]);
    sink_push(&sink, "[1] ", "last", 4);
    sink_push(&sink, "[2] ", "10%\r", 4);
    sink_push(&sink, "[3] ", "", 0);
    ck_assert_int_eq(sink_flush(&sink), 0);
    char data[64] = "";
    ck_assert_int_eq(read(fds[0], data, sizeof data - 1), 17);
    ck_assert_str_eq(data, "[1] last\n[2] 10%\r");
    sink_deinit(&sink);
    close(fds[0]);
    close(fds[1]);
}
END_TEST

START_TEST(a_failure_is_reported_once_and_the_rest_dropped)
{
    int fd = open("/dev/full", O_WRONLY | O_CLOEXEC);
    ck_assert_int_ge(fd, 0);
    struct sink sink;
    sink_init(&sink, fd);
    sink_push(&sink, "", "a\n", 2);
    ck_assert_int_eq(sink_flush(&sink), -ENOSPC);
    sink_push(&sink, "", "b\n", 2);
    ck_assert_int_eq(sink_flush(&sink), 0);
    ck_assert(sink_is_empty(&sink));
    ck_assert(sink_has_room(&sink));
    sink_deinit(&sink);
    close(fd);
}
END_TEST

START_TEST(a_closed_reader_is_epipe)
{
    signal(SIGPIPE, SIG_IGN);
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    struct sink sink;
    sink_init(&sink, fds[1]);
    close(fds[0]);
    sink_push(&sink, "", "a\n", 2);
    ck_assert_int_eq(sink_flush(&sink), -EPIPE);
    ck_assert_int_eq(sink.error, EPIPE);
    sink_deinit(&sink);
    close(fds[1]);
}
END_TEST

START_TEST(descriptors_of_one_file_are_recognised)
{
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    int copy = dup(fds[1]), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    ck_assert(sink_is_same_file(fds[1], copy));
    ck_assert(!sink_is_same_file(fds[1], null));
    close(copy);
    close(null);
    close(fds[0]);
    close(fds[1]);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_full_pipe_makes_nobody_wait_and_loses_nothing, a_line_without_end_gets_a_newline,
        a_failure_is_reported_once_and_the_rest_dropped, a_closed_reader_is_epipe,
        descriptors_of_one_file_are_recognised,
    };
    return run_suite("sink", tests, sizeof tests / sizeof *tests);
}
