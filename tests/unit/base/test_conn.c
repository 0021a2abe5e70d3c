/* SPDX-License-Identifier: Apache-2.0 */
/* A connection whose messages carry descriptors, when there is none left for the copy. */
#include <errno.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/conn.h"
#include "run_suite.h"

static unsigned n_frames, n_closed;

static void on_frame(void *owner, struct conn *conn, struct wire_frame *frame)
{
    (void)owner;
    (void)conn;
    n_frames++;
    ck_assert_uint_eq(frame->n_fds, 0);
}

static void on_closed(void *owner, struct conn *conn, const char *reason)
{
    (void)owner;
    (void)conn;
    (void)reason;
    n_closed++;
}

static const struct conn_ops ops = {.on_frame = on_frame, .on_closed = on_closed};

START_TEST(a_message_that_finds_no_descriptor_is_not_sent_and_ends_nothing)
{
    int ends[2];
    struct loop *loop = loop_new();
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    struct conn *from = conn_new(loop, ends[0], 1 << 20, &ops, NULL);
    struct conn *to = conn_new(loop, ends[1], 1 << 20, &ops, NULL);
    ck_assert(from && to);
    Pb__Ping ping = PB__PING__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_PING;
    envelope.ping = &ping;

    struct rlimit before, none;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    int free_fd = dup(STDIN_FILENO);
    ck_assert_int_ge(free_fd, 0);
    close(free_fd);
    none = before;
    none.rlim_cur = (rlim_t)free_fd;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    int rc = conn_push_fd(from, &envelope, STDIN_FILENO);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &before), 0);

    ck_assert_int_eq(rc, -EMFILE);
    ck_assert(!conn_is_closing(from));
    ck_assert_int_eq(conn_push(from, &envelope), 0);
    while (n_frames == 0 && n_closed == 0)
        ck_assert_int_eq(loop_step(loop, true), 0);
    ck_assert_uint_eq(n_frames, 1);
    ck_assert_uint_eq(n_closed, 0);
    conn_free(from);
    conn_free(to);
    loop_free(loop);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_message_that_finds_no_descriptor_is_not_sent_and_ends_nothing,
    };
    return run_suite("conn", tests, sizeof tests / sizeof tests[0]);
}
