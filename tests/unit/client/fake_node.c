/* SPDX-License-Identifier: Apache-2.0 */
/* The test's own daemon and worker: see fake_node.h. */
#include "fake_node.h"

#include <check.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { EPOCH = 5, PATIENCE_MS = 10000 };

static void link_open(struct fake_link *link, int fd)
{
    link->fd = fd;
    wire_in_init(&link->in);
    wire_out_init(&link->out, 16 << 20);
}

void fake_hang_up(struct fake_link *link)
{
    if (link->fd < 0)
        return;
    close(link->fd);
    link->fd = -1;
    wire_in_deinit(&link->in);
    wire_out_deinit(&link->out);
}

void fake_open(struct fake_node *node)
{
    *node = (struct fake_node){.daemon.fd = -1, .worker.fd = -1, .worker_end = -1};
    snprintf(node->directory, sizeof node->directory, "/tmp/gradd-test-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(node->directory));
    snprintf(node->socket, sizeof node->socket, "%s/gradd.sock", node->directory);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, node->socket);
    node->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(node->listener, (struct sockaddr *)&address, sizeof address), 0);
    ck_assert_int_eq(listen(node->listener, 4), 0);
}

void fake_close(struct fake_node *node)
{
    fake_hang_up(&node->daemon);
    fake_hang_up(&node->worker);
    if (node->worker_end >= 0)
        close(node->worker_end);
    close(node->listener);
    unlink(node->socket);
    rmdir(node->directory);
}

static void await(int fd, short events)
{
    struct pollfd poll_fd = {.fd = fd, .events = events};
    int n = poll(&poll_fd, 1, PATIENCE_MS);
    ck_assert_msg(n == 1, "nothing came within %d ms", PATIENCE_MS);
}

void fake_next(struct fake_link *link, struct wire_frame *out)
{
    int rc;
    while ((rc = wire_in_next(&link->in, out)) == 0) {
        ck_assert_msg(!link->in.is_eof, "the library hung up, a frame was expected");
        await(link->fd, POLLIN);
        rc = wire_in_read(&link->in, link->fd);
        ck_assert_msg(rc == 0, "reading failed: %s", strerror(-rc));
    }
    ck_assert_int_eq(rc, 1);
}

const Pb__Envelope *fake_expect(struct fake_link *link, Pb__Envelope__BodyCase kind, int *out_fd)
{
    struct wire_frame frame;
    fake_next(link, &frame);
    ck_assert_msg(frame.envelope->body_case == kind, "frame %d came, %d was expected",
                  frame.envelope->body_case, kind);
    ck_assert_uint_eq(frame.n_fds, out_fd ? 1 : 0);
    if (out_fd)
        *out_fd = frame.fds[0];
    return frame.envelope;
}

void fake_expect_nothing(struct fake_link *link)
{
    struct wire_frame frame;
    ck_assert_int_eq(wire_in_read(&link->in, link->fd), 0);
    ck_assert_int_eq(wire_in_next(&link->in, &frame), 0);
}

void fake_send(struct fake_link *link, const Pb__Envelope *envelope, int fd)
{
    ck_assert_int_eq(wire_out_push(&link->out, envelope, &fd, fd >= 0), 0);
    while (wire_out_flush(&link->out, link->fd) == 1)
        await(link->fd, POLLOUT);
}

/* ------------------------------------------------------------------ joining */

static void *init_thread(void *arg)
{
    struct fake_node *node = arg;
    node->status = gradd_init(&node->options, &node->g);
    if (node->status < 0)
        snprintf(node->error, sizeof node->error, "%s", gradd_error());
    return NULL;
}

void fake_start_join(struct fake_node *node, int rank, int size)
{
    node->options = (struct gradd_options){
        .struct_size = sizeof node->options,
        .socket = node->socket,
        .job = "job",
        .rank = rank,
        .size = size,
        .local_rank = rank,
    };
    node->g = NULL;
    ck_assert_int_eq(pthread_create(&node->joiner, NULL, init_thread, node), 0);
    await(node->listener, POLLIN);
    link_open(&node->daemon, accept4(node->listener, NULL, NULL, SOCK_CLOEXEC));
    ck_assert_int_ge(node->daemon.fd, 0);
}

void fake_end_join(struct fake_node *node)
{
    ck_assert_int_eq(pthread_join(node->joiner, NULL), 0);
}

void fake_join(struct fake_node *node, uint32_t max_in_flight, uint64_t memory_bytes)
{
    fake_start_join(node, 0, 2);
    fake_expect(&node->daemon, PB__ENVELOPE__BODY_HELLO, NULL);
    Pb__HelloReply reply = PB__HELLO_REPLY__INIT;
    reply.protocol = WIRE_PROTOCOL_MAX;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_HELLO_REPLY;
    envelope.hello_reply = &reply;
    fake_send(&node->daemon, &envelope, -1);
    fake_expect(&node->daemon, PB__ENVELOPE__BODY_JOIN, NULL);
    int pair[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    Pb__Joined joined = PB__JOINED__INIT;
    joined.epoch = EPOCH;
    joined.size = joined.local_size = 2;
    joined.n_nodes = 1;
    joined.max_in_flight = max_in_flight;
    joined.memory_bytes = memory_bytes;
    joined.device_path = node->has_device_path;
    joined.order = node->device_order;
    pb__envelope__init(&envelope);
    envelope.body_case = PB__ENVELOPE__BODY_JOINED;
    envelope.joined = &joined;
    fake_send(&node->daemon, &envelope, pair[1]);
    close(pair[1]);
    link_open(&node->worker, pair[0]);
    fake_end_join(node);
    ck_assert_msg(node->status == GRADD_OK, "%s", node->error);
}

/* ------------------------------------------------------------------ the worker's words */

static void send_batch(struct fake_node *node, Pb__CompletionBatch *batch)
{
    batch->epoch = EPOCH;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_COMPLETION_BATCH;
    envelope.completion_batch = batch;
    fake_send(&node->worker, &envelope, -1);
}

void fake_complete(struct fake_node *node, uint64_t id, int status, const char *text)
{
    Pb__Completion completion = PB__COMPLETION__INIT, *list[] = {&completion};
    completion.id = id;
    completion.code = (uint32_t)-status;
    completion.text = (char *)(uintptr_t)text;
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.n_completions = 1;
    batch.completions = list;
    send_batch(node, &batch);
}

void fake_progress(struct fake_node *node, uint64_t id, uint64_t done)
{
    Pb__Progress progress = PB__PROGRESS__INIT, *list[] = {&progress};
    progress.id = id;
    progress.done = done;
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.n_progress = 1;
    batch.progress = list;
    send_batch(node, &batch);
}

void fake_enqueued(struct fake_node *node, uint64_t id)
{
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.n_enqueued = 1;
    batch.enqueued = &id;
    send_batch(node, &batch);
}

void fake_answer_queue(struct fake_node *node, uint32_t queue, int status, const char *text)
{
    Pb__QueueReply reply = PB__QUEUE_REPLY__INIT;
    reply.queue = queue;
    reply.code = (uint32_t)-status;
    reply.text = (char *)(uintptr_t)text;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_QUEUE_REPLY;
    envelope.queue_reply = &reply;
    fake_send(&node->worker, &envelope, -1);
}

void fake_answer_region(struct fake_node *node, uint32_t region, int status, const char *text)
{
    Pb__RegionReply reply = PB__REGION_REPLY__INIT;
    reply.region = region;
    reply.code = (uint32_t)-status;
    reply.text = (char *)(uintptr_t)text;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_REGION_REPLY;
    envelope.region_reply = &reply;
    fake_send(&node->worker, &envelope, -1);
}

void fake_fail_epoch(struct fake_link *link, int status, const char *text)
{
    Pb__EpochFailed failed = PB__EPOCH_FAILED__INIT;
    failed.epoch = EPOCH;
    failed.code = (uint32_t)-status;
    failed.text = (char *)(uintptr_t)text;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_EPOCH_FAILED;
    envelope.epoch_failed = &failed;
    fake_send(link, &envelope, -1);
}
