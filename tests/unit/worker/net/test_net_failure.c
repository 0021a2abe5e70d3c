/* SPDX-License-Identifier: Apache-2.0 */
/* What a net backend does when a peer closes, sends something else, or says nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "cluster.h"
#include "worker/backend/net/lane.h"

static const uint32_t single[CLUSTER_NODES_MAX] = {1, 1, 1, 1, 1, 1, 1, 1};

static struct cluster cluster;
static struct collective *op;

/* Real nodes and, behind them, one that the test plays; an all-reduce is under way. */
static void start(uint32_t n_nodes, enum cluster_links links, uint64_t count)
{
    cluster_start(&cluster, n_nodes, single, 1, 0, links, 1);
    op = calloc(1, sizeof *op);
    op->dtype = GRADD_F32;
    op->prescale = op->postscale = 1;
    op->n_ranks = n_nodes;
    for (uint32_t i = 0; i < n_nodes; i++) {
        op->ranks[i] = i;
        op->count[i] = count;
    }
    collective_prepare(op, &cluster, 1);
    cluster_run(&cluster, &op, 1);
}

static void stop(void)
{
    cluster_stop(&cluster);
    collective_free(op);
    free(op);
}

static void wait_lost(uint32_t node)
{
    while (cluster.nodes[node].n_lost == 0)
        ck_assert_int_eq(loop_step(cluster.nodes[node].loop, true), 0);
}

/* The first message that node 0 sends to the played one: what it expects back in turn. */
static size_t read_message(int fd, uint8_t *message, size_t bytes)
{
    size_t n = 0;
    while (n < bytes) {
        ssize_t got = recv(fd, message + n, bytes - n, 0);
        ck_assert_int_gt(got, 0);
        n += (size_t)got;
    }
    return n;
}

static void send_all(int fd, const void *data, size_t bytes)
{
    ck_assert_int_eq(send(fd, data, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
}

START_TEST(played_peer_is_believed_when_it_follows_the_schedule)
{
    uint8_t message[LANE_HEADER_BYTES + 40];
    start(2, CLUSTER_SOCKETS, 10);
    int fd = cluster.nodes[0].peer_fds[1];
    read_message(fd, message, sizeof message);
    send_all(fd, message, sizeof message); /* its own input, back */
    cluster_wait(&cluster);
    ck_assert_uint_eq(cluster.nodes[0].n_failed, 0);
    for (uint64_t i = 0; i < 10; i++)
        ck_assert(collective_result(op, 0, i) == 2 * op->values[0][i]);
    stop();
}
END_TEST

START_TEST(peer_that_closes_ends_the_batches)
{
    for (int links = CLUSTER_SOCKETS; links <= CLUSTER_TLS; links++) {
        start(2, (enum cluster_links)links, 100000);
        cluster_run(&cluster, &op, 1);
        shutdown(cluster.nodes[0].peer_fds[1], SHUT_RDWR);
        cluster_wait(&cluster);
        wait_lost(0);
        ck_assert_uint_eq(cluster.nodes[0].n_failed, 2);
        ck_assert_int_eq(cluster.nodes[0].status, GRADD_ERR_RANK_LOST);
        ck_assert_uint_eq(cluster.nodes[0].n_lost, 1);
        ck_assert_uint_eq(cluster.nodes[0].lost_node, 1);
        ck_assert_ptr_nonnull(strstr(cluster.nodes[0].text, "node 1"));
        /* And so do those that come later, at once. */
        cluster_run(&cluster, &op, 1);
        ck_assert_uint_eq(cluster.nodes[0].n_waiting, 0);
        ck_assert_uint_eq(cluster.nodes[0].n_failed, 3);
        stop();
    }
}
END_TEST

START_TEST(peer_that_closes_in_the_middle_of_a_chunk)
{
    uint8_t message[LANE_HEADER_BYTES + 40];
    for (size_t bytes = 1; bytes < sizeof message; bytes += 13) {
        start(2, CLUSTER_SOCKETS, 10);
        int fd = cluster.nodes[0].peer_fds[1];
        read_message(fd, message, sizeof message);
        send_all(fd, message, bytes);
        shutdown(fd, SHUT_RDWR);
        wait_lost(0);
        ck_assert_uint_eq(cluster.nodes[0].n_failed, 1);
        ck_assert_int_eq(cluster.nodes[0].status, GRADD_ERR_RANK_LOST);
        stop();
    }
}
END_TEST

START_TEST(node_that_dies_ends_the_ring)
{
    start(4, CLUSTER_SOCKETS, 300000);
    for (uint32_t a = 0; a < 3; a++)
        shutdown(cluster.nodes[a].peer_fds[3], SHUT_RDWR);
    /* Its neighbours notice. Node 1 has no business with it and is told by its daemon. */
    wait_lost(0);
    wait_lost(2);
    net_abort(cluster.nodes[1].net, GRADD_ERR_RANK_LOST, "node 3 is lost");
    cluster_wait(&cluster);
    for (uint32_t a = 0; a < 3; a++)
        ck_assert_uint_eq(cluster.nodes[a].n_failed, 1);
    ck_assert_uint_eq(cluster.nodes[1].n_lost, 0);
    ck_assert_str_eq(cluster.nodes[1].text, "node 3 is lost");
    stop();
}
END_TEST

/* Each byte of the header matters. */
START_TEST(another_message_than_expected_gives_no_sum)
{
    uint8_t message[LANE_HEADER_BYTES + 40];
    for (size_t i = 0; i < LANE_HEADER_BYTES; i++) {
        start(2, CLUSTER_SOCKETS, 10);
        int fd = cluster.nodes[0].peer_fds[1];
        read_message(fd, message, sizeof message);
        message[i] ^= 0x10;
        send_all(fd, message, sizeof message);
        wait_lost(0);
        ck_assert_uint_eq(cluster.nodes[0].n_failed, 1);
        ck_assert_int_eq(cluster.nodes[0].status, GRADD_ERR_RANK_LOST);
        ck_assert_ptr_nonnull(
            strstr(cluster.nodes[0].text, i < 4 ? "no message of a collective" : "is due"));
        stop();
    }
}
END_TEST

/* What it sends next looks like that op's. */
START_TEST(an_op_that_one_node_does_not_run_gets_no_other_ones_data)
{
    for (uint64_t count = 10; count <= 300000; count += 299990) {
        struct collective *ops = calloc(2, sizeof *ops);
        cluster_start(&cluster, 2, single, 1, 0, CLUSTER_SOCKETS, 0);
        struct backend *net = cluster.nodes[1].net;
        for (unsigned i = 0; i < 2; i++) {
            struct collective *c = &ops[i];
            c->dtype = GRADD_F32;
            c->prescale = c->postscale = 1;
            c->n_ranks = 2;
            c->ranks[1] = 1;
            c->count[0] = c->count[1] = count;
            collective_prepare(c, &cluster, i);
            c->ops[0].number = c->ops[1].number = 1 + i;
            cluster.nodes[1].net = i == 0 ? NULL : net;
            cluster_run(&cluster, &c, 1);
        }
        wait_lost(0);
        wait_lost(1);
        cluster_wait(&cluster);
        ck_assert_uint_eq(cluster.nodes[0].n_failed, 2);
        ck_assert_uint_eq(cluster.nodes[1].n_failed, 1);
        cluster_stop(&cluster);
        for (unsigned i = 0; i < 2; i++)
            collective_free(&ops[i]);
        free(ops);
    }
}
END_TEST

START_TEST(peer_without_the_secret_is_lost)
{
    uint8_t garbage[4096];
    memset(garbage, 0x42, sizeof garbage);
    start(2, CLUSTER_TLS, 10);
    send_all(cluster.nodes[0].peer_fds[1], garbage, sizeof garbage);
    wait_lost(0);
    ck_assert_int_eq(cluster.nodes[0].status, GRADD_ERR_RANK_LOST);
    stop();
}
END_TEST

START_TEST(abort_does_not_wait_for_a_silent_peer)
{
    start(3, CLUSTER_SOCKETS, 3000000);
    cluster_run(&cluster, &op, 1);
    for (uint32_t a = 0; a < 2; a++)
        net_abort(cluster.nodes[a].net, GRADD_ERR_TIMEOUT, "time is up");
    cluster_wait(&cluster);
    for (uint32_t a = 0; a < 2; a++) {
        ck_assert_uint_eq(cluster.nodes[a].n_failed, 2);
        ck_assert_int_eq(cluster.nodes[a].status, GRADD_ERR_TIMEOUT);
        ck_assert_str_eq(cluster.nodes[a].text, "time is up");
        ck_assert_uint_eq(cluster.nodes[a].n_lost, 0);
    }
    stop();
}
END_TEST

static void wait_received(uint64_t bytes)
{
    struct net_link_stats stats = {0};
    while (stats.received_bytes < bytes)
        ck_assert_uint_eq(net_stats(cluster.nodes[0].net, &stats, 1), 1);
}

/* Looks a second apart until the node has been found stalled for two; while its thread works it is
 * not. */
static struct net_stall find_stall(uint64_t *now_ns)
{
    static const uint64_t second = 1000000000;
    struct net_stall stall = {0};
    while (stall.waited_ns < 2 * second)
        if (!net_find_stall(cluster.nodes[0].net, *now_ns += second, &stall))
            stall.waited_ns = 0;
    ck_assert_uint_eq(stall.waited_ns, 2 * second); /* since the look that saw it at work */
    ck_assert_uint_eq(stall.node, 1);
    return stall;
}

START_TEST(silent_peer_is_found_by_looking_and_each_byte_is_progress)
{
    uint8_t message[LANE_HEADER_BYTES + 40];
    uint64_t now_ns = 1;
    start(2, CLUSTER_SOCKETS, 10);
    struct backend *net = cluster.nodes[0].net;
    int fd = cluster.nodes[0].peer_fds[1];
    read_message(fd, message, sizeof message);
    struct net_stall stall = find_stall(&now_ns);
    ck_assert_str_eq(stall.text, "stream 0: 0 of 64 bytes of a message received");
    ck_assert(!stall.is_sure); /* it may wait for another node */
    for (size_t sent = 0; sent < 60; sent += 20) {
        char expected[100];
        snprintf(expected, sizeof expected, "stream 0: %zu of 64 bytes of a message received",
                 sent + 20);
        send_all(fd, message + sent, 20);
        wait_received(sent + 20);
        ck_assert(!net_find_stall(net, now_ns += 1000000000000, &stall)); /* it has moved */
        stall = find_stall(&now_ns);
        ck_assert_str_eq(stall.text, expected);
        ck_assert(stall.is_sure);
    }
    send_all(fd, message + 60, 4);
    cluster_wait(&cluster);
    ck_assert_uint_eq(cluster.nodes[0].n_failed, 0);
    ck_assert(!net_is_busy(net));
    ck_assert(!net_find_stall(net, now_ns += 1000000000000, &stall));
    /* And an op that begins later has its own time. */
    cluster_run(&cluster, &op, 1);
    ck_assert(net_is_busy(net));
    ck_assert(!net_find_stall(net, now_ns += 1000000000000, &stall));
    stop();
}
END_TEST

START_TEST(peer_that_takes_nothing_is_found_and_can_be_given_up)
{
    uint64_t now_ns = 1;
    start(2, CLUSTER_SOCKETS, 3000000);
    struct net_stall stall = find_stall(&now_ns);
    ck_assert(stall.is_sure);
    ck_assert_ptr_nonnull(strstr(stall.text, "bytes not acknowledged"));
    net_give_up(cluster.nodes[0].net, 1, stall.text);
    wait_lost(0);
    cluster_wait(&cluster);
    ck_assert_uint_eq(cluster.nodes[0].n_failed, 1);
    ck_assert_int_eq(cluster.nodes[0].status, GRADD_ERR_RANK_LOST);
    ck_assert_uint_eq(cluster.nodes[0].lost_node, 1);
    ck_assert_str_eq(cluster.nodes[0].text, stall.text);
    ck_assert(!net_find_stall(cluster.nodes[0].net, now_ns, &stall));
    stop();
}
END_TEST

START_TEST(freed_under_way_calls_nobody_back)
{
    start(2, CLUSTER_SOCKETS, 3000000);
    backend_net.free(cluster.nodes[0].net);
    cluster.nodes[0].net = NULL;
    ck_assert_uint_eq(cluster.nodes[0].n_waiting, 1);
    stop();
}
END_TEST

START_TEST(nodes_meet_again_after_a_failure)
{
    start(2, CLUSTER_SOCKETS, 1000);
    shutdown(cluster.nodes[0].peer_fds[1], SHUT_RDWR);
    wait_lost(0);
    stop();
    start(2, CLUSTER_SOCKETS, 10);
    uint8_t message[LANE_HEADER_BYTES + 40];
    read_message(cluster.nodes[0].peer_fds[1], message, sizeof message);
    send_all(cluster.nodes[0].peer_fds[1], message, sizeof message);
    cluster_wait(&cluster);
    ck_assert_uint_eq(cluster.nodes[0].n_failed, 0);
    stop();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        played_peer_is_believed_when_it_follows_the_schedule,
        peer_that_closes_ends_the_batches,
        peer_that_closes_in_the_middle_of_a_chunk,
        node_that_dies_ends_the_ring,
        another_message_than_expected_gives_no_sum,
        an_op_that_one_node_does_not_run_gets_no_other_ones_data,
        peer_without_the_secret_is_lost,
        abort_does_not_wait_for_a_silent_peer,
        silent_peer_is_found_by_looking_and_each_byte_is_progress,
        peer_that_takes_nothing_is_found_and_can_be_given_up,
        freed_under_way_calls_nobody_back,
        nodes_meet_again_after_a_failure,
    };
    return run_suite("net_failure", tests, sizeof tests / sizeof tests[0]);
}
