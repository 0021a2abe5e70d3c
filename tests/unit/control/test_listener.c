/* SPDX-License-Identifier: Apache-2.0 */
/* The listening socket: whose file is replaced, and what happens when descriptors run out. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/log.h"
#include "control/listener.h"
#include "run_suite.h"

static char dir[64], path[80];

static void setup(void)
{
    strcpy(dir, "/tmp/gradd-test-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/s", dir);
}

static void teardown(void)
{
    unlink(path);
    rmdir(dir);
}

static int connect_to_path(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

START_TEST(the_mode_is_what_was_asked_for)
{
    int fd;
    ck_assert_int_eq(listener_bind(path, 0640, &fd), 0);
    struct stat status;
    ck_assert_int_eq(stat(path, &status), 0);
    ck_assert_uint_eq(status.st_mode & 0777, 0640);
    close(fd);
}
END_TEST

START_TEST(a_file_that_nobody_answers_on_is_replaced)
{
    int fd;
    ck_assert_int_eq(listener_bind(path, 0666, &fd), 0);
    close(fd);
    ck_assert_int_eq(listener_bind(path, 0666, &fd), 0);
    int client = connect_to_path();
    ck_assert_int_ge(client, 0);
    close(client);
    close(fd);
}
END_TEST

START_TEST(a_file_that_somebody_answers_on_is_left_alone)
{
    int first, second = -1;
    ck_assert_int_eq(listener_bind(path, 0666, &first), 0);
    ck_assert_int_eq(listener_bind(path, 0666, &second), -EADDRINUSE);
    int client = connect_to_path();
    ck_assert_int_ge(client, 0);
    close(client);
    close(first);
}
END_TEST

START_TEST(a_file_that_is_no_socket_is_left_alone)
{
    int file = open(path, O_CREAT | O_WRONLY, 0600), fd;
    ck_assert_int_eq(write(file, "x", 1), 1);
    close(file);
    ck_assert_int_eq(listener_bind(path, 0666, &fd), -EADDRINUSE);
    struct stat status;
    ck_assert_int_eq(stat(path, &status), 0);
    ck_assert_int_eq(status.st_size, 1);
}
END_TEST

START_TEST(a_path_too_long_is_an_error)
{
    char text[200];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    int fd;
    ck_assert_int_eq(listener_bind(text, 0666, &fd), -ENAMETOOLONG);
}
END_TEST

static unsigned n_accepted;

static void on_connection(void *owner, int take_fd)
{
    (void)owner;
    n_accepted++;
    close(take_fd);
}

/* Without a descriptor the client is turned away, the loop rests, and then goes on. */
START_TEST(running_out_of_descriptors_pauses_and_recovers)
{
    log_init("test", LOG_LEVEL_ERROR - 1);
    int fd;
    ck_assert_int_eq(listener_bind(path, 0666, &fd), 0);
    struct loop *loop = loop_new();
    struct listener *listener = listener_new(loop, fd, on_connection, NULL);
    ck_assert_ptr_nonnull(listener);
    int client = connect_to_path(), next = connect_to_path();
    struct rlimit before, none;
    getrlimit(RLIMIT_NOFILE, &before);
    none = before;
    int probe = dup(STDIN_FILENO);
    close(probe);
    none.rlim_cur = (rlim_t)probe;
    setrlimit(RLIMIT_NOFILE, &none);
    ck_assert_int_eq(loop_step(loop, true), 0);
    ck_assert_uint_eq(n_accepted, 0);
    char byte;
    ck_assert_int_eq(recv(client, &byte, 1, 0), 0);
    /* Paused: nothing is ready although a client waits. */
    ck_assert_int_eq(loop_step(loop, false), 0);
    ck_assert_uint_eq(n_accepted, 0);
    setrlimit(RLIMIT_NOFILE, &before);
    while (n_accepted == 0)
        ck_assert_int_eq(loop_step(loop, true), 0);
    close(client);
    close(next);
    listener_free(listener);
    loop_free(loop);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        the_mode_is_what_was_asked_for,
        a_file_that_nobody_answers_on_is_replaced,
        a_file_that_somebody_answers_on_is_left_alone,
        a_file_that_is_no_socket_is_left_alone,
        a_path_too_long_is_an_error,
        running_out_of_descriptors_pauses_and_recovers,
    };
    return run_suite_with("listener", tests, sizeof tests / sizeof *tests, setup, teardown, 0);
}
