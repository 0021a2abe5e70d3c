/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The way into a job and out of it: what is said, and the words for each refusal.
 */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_node.h"
#include "run_suite.h"

static void send_error(struct fake_link *link, int status, const char *text)
{
    Pb__Error error = PB__ERROR__INIT;
    error.code = (uint32_t)-status;
    error.text = (char *)(uintptr_t)text;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_ERROR;
    envelope.error = &error;
    fake_send(link, &envelope, -1);
}

static void send_hello_reply(struct fake_link *link, unsigned protocol)
{
    Pb__HelloReply reply = PB__HELLO_REPLY__INIT;
    reply.protocol = protocol;
    reply.version = (char *)"9.9";
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_HELLO_REPLY;
    envelope.hello_reply = &reply;
    fake_send(link, &envelope, -1);
}

static int count_fds(void)
{
    int n = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory))
        n++;
    closedir(directory);
    return n;
}

START_TEST(hello_names_the_protocols_and_join_the_identity)
{
    struct fake_node node;
    fake_open(&node);
    fake_start_join(&node, 1, 2);
    const Pb__Hello *hello = fake_expect(&node.daemon, PB__ENVELOPE__BODY_HELLO, NULL)->hello;
    ck_assert_uint_eq(hello->protocol_min, WIRE_PROTOCOL_MIN);
    ck_assert_uint_eq(hello->protocol_max, WIRE_PROTOCOL_MAX);
    ck_assert_str_eq(hello->program, "libgradd");
    ck_assert_str_eq(hello->version, gradd_version());
    send_hello_reply(&node.daemon, WIRE_PROTOCOL_MAX);
    const Pb__Join *join = fake_expect(&node.daemon, PB__ENVELOPE__BODY_JOIN, NULL)->join;
    ck_assert_str_eq(join->job, "job");
    ck_assert_uint_eq(join->rank, 1);
    ck_assert_uint_eq(join->size, 2);
    ck_assert_uint_eq(join->local_rank, 1);
    ck_assert_str_eq(join->source, "arguments");
    ck_assert_uint_eq(join->timeout_ms, 0);
    send_error(&node.daemon, GRADD_ERR_DUPLICATE, "job job: rank 1 has joined already (pid 7)");
    fake_end_join(&node);
    ck_assert_int_eq(node.status, GRADD_ERR_DUPLICATE);
    ck_assert_str_eq(node.error, "job job: rank 1 has joined already (pid 7)");
    fake_close(&node);
}
END_TEST

START_TEST(a_protocol_without_overlap_is_refused_naming_both)
{
    struct fake_node node;
    fake_open(&node);
    fake_start_join(&node, 0, 2);
    fake_expect(&node.daemon, PB__ENVELOPE__BODY_HELLO, NULL);
    send_hello_reply(&node.daemon, 9);
    fake_end_join(&node);
    ck_assert_int_eq(node.status, GRADD_ERR_PROTOCOL);
    ck_assert_ptr_nonnull(strstr(node.error, "gradd 9.9"));
    ck_assert_ptr_nonnull(strstr(node.error, "protocol 9"));
    ck_assert_ptr_nonnull(strstr(node.error, "speaks 1 to 1"));
    fake_close(&node);
}
END_TEST

START_TEST(a_daemon_that_hangs_up_or_talks_garbage_is_reported)
{
    struct fake_node node;
    fake_open(&node);
    fake_start_join(&node, 0, 2);
    fake_hang_up(&node.daemon);
    fake_end_join(&node);
    ck_assert_int_eq(node.status, GRADD_ERR_UNAVAILABLE);
    fake_start_join(&node, 0, 2);
    ck_assert_int_eq(write(node.daemon.fd, "HTTP/1.1 400 Bad", 16), 16);
    fake_end_join(&node);
    ck_assert_int_eq(node.status, GRADD_ERR_PROTOCOL);
    ck_assert_ptr_nonnull(strstr(node.error, "not a gradd frame"));
    fake_close(&node);
}
END_TEST

START_TEST(no_daemon_is_reported_with_the_remedy)
{
    struct gradd_options options = {
        .struct_size = sizeof options, .socket = "/nonexistent/gradd.sock", .size = 2};
    struct gradd *g = NULL;
    ck_assert_int_eq(gradd_init(&options, &g), GRADD_ERR_UNAVAILABLE);
    ck_assert_str_eq(gradd_error(), "no gradd daemon at /nonexistent/gradd.sock (No such file or "
                                    "directory): start it, or run the program under gradrun");
    ck_assert_ptr_null(g);
}
END_TEST

START_TEST(options_that_make_no_sense_are_refused)
{
    struct gradd *g;
    struct gradd_options options = {.struct_size = sizeof options, .rank = 2, .size = 2};
    ck_assert_int_eq(gradd_init(&options, &g), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(gradd_error(), "rank=2 does not fit size=2"));
    options = (struct gradd_options){.struct_size = sizeof options, .size = -1};
    ck_assert_int_eq(gradd_init(&options, &g), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(gradd_error(), "size=-1"));
    options = (struct gradd_options){.struct_size = 3, .size = 1};
    ck_assert_int_eq(gradd_init(&options, &g), GRADD_ERR_INVALID);
    options = (struct gradd_options){.struct_size = sizeof options, .size = 1, .timeout_s = -1};
    ck_assert_int_eq(gradd_init(&options, &g), GRADD_ERR_INVALID);
    ck_assert_int_eq(gradd_init(&options, NULL), GRADD_ERR_INVALID);
}
END_TEST

START_TEST(shutdown_leaves_the_worker_first_and_waits_for_left)
{
    struct fake_node node;
    fake_open(&node);
    int before = count_fds();
    fake_join(&node, 16, 1 << 30);
    ck_assert_uint_eq(gradd_epoch(node.g), 5);
    ck_assert_int_eq(gradd_size(node.g), 2);
    ck_assert_int_eq(gradd_local_size(node.g), 2);
    ck_assert_int_eq(gradd_n_nodes(node.g), 1);
    /* Left may be in the socket before it is asked for: the stream keeps it. */
    Pb__Left left = PB__LEFT__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_LEFT;
    envelope.left = &left;
    fake_send(&node.daemon, &envelope, -1);
    gradd_shutdown(node.g);
    fake_expect(&node.worker, PB__ENVELOPE__BODY_LEAVE, NULL);
    fake_expect(&node.daemon, PB__ENVELOPE__BODY_LEAVE, NULL);
    fake_hang_up(&node.daemon);
    fake_hang_up(&node.worker);
    ck_assert_int_eq(count_fds(), before);
    fake_close(&node);
}
END_TEST

int main(void)
{
    const TTest *tests[] = {
        hello_names_the_protocols_and_join_the_identity,
        a_protocol_without_overlap_is_refused_naming_both,
        a_daemon_that_hangs_up_or_talks_garbage_is_reported,
        no_daemon_is_reported_with_the_remedy,
        options_that_make_no_sense_are_refused,
        shutdown_leaves_the_worker_first_and_waits_for_left,
    };
    return run_suite("client/join", tests, sizeof tests / sizeof *tests);
}
