/* SPDX-License-Identifier: Apache-2.0 */
/* Links between two daemons: how they come up, end and come again, with a key and without. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "peers_rig.h"
#include "run_suite.h"

/* ------------------------------------------------------------------ links */

START_TEST(two_nodes_with_one_key_talk)
{
    struct peer_link *link = node_dial(&a, &b);
    TURN_UNTIL(a.n_up == 1 && b.n_up == 1);
    ck_assert_str_eq(a.up->name, "b");
    ck_assert_str_eq(b.up->name, "a");
    ck_assert_str_eq(b.up->version, GRADD_VERSION);
    ck_assert_uint_eq(b.up->port, peers_port(&a.peers));
    push_leave(link, 5);
    push_leave(link, 6);
    push_leave(b.up, 7);
    TURN_UNTIL(a.n_messages == 1 && b.n_messages == 2);
    ck_assert_uint_eq(a.last_epoch, 7);
    ck_assert_uint_eq(b.last_epoch, 6);
    ck_assert_ptr_eq(node_dial(&a, &b), link); /* one link is enough */
    TURN_UNTIL(link->ping_seq > 3);
    ck_assert(link->rtt_us > 0);
    ck_assert_uint_eq(a.n_lost + b.n_lost, 0);
}
END_TEST

START_TEST(a_node_confirms_that_it_is_there)
{
    a.config.peer_heartbeat_ms = a.config.peer_dead_ms = 10000;
    struct peer_link *link = node_dial(&a, &b);
    TURN_UNTIL(a.n_answers == 1);
    ck_assert(peer_link_confirm(link, link->ping_ns));
    uint64_t since = link->ping_ns + 1;
    ck_assert(!peer_link_confirm(link, since));
    ck_assert(!peer_link_confirm(link, since)); /* and asks no second time */
    ck_assert_uint_eq(link->ping_seq, 2);
    TURN_UNTIL(a.n_answers == 2);
    ck_assert(peer_link_confirm(link, since));
}
END_TEST

START_TEST(who_ends_a_link_is_told_to_both)
{
    node_dial(&a, &b);
    TURN_UNTIL(a.n_up == 1 && b.n_up == 1);
    peer_link_end(a.up, "enough");
    ck_assert_uint_eq(a.n_lost, 0); /* never inside */
    TURN_UNTIL(a.n_lost == 1 && b.n_lost == 1);
    ck_assert_str_eq(a.why, "enough");
    ck_assert_str_eq(b.why, "its daemon closed the connection");
}
END_TEST

START_TEST(another_key_is_told_in_words_and_tried_once)
{
    node_stop(&b);
    node_start(&b, "b", 2);
    node_dial(&a, &b);
    TURN_UNTIL(a.n_lost == 1);
    ck_assert_str_eq(a.why, "its cluster key is another one");
    ck_assert_uint_eq(a.n_up + b.n_up, 0);
    ck_assert_uint_eq(b.n_lost, 0);
}
END_TEST

START_TEST(a_daemon_that_is_not_there_yet_is_tried_again)
{
    struct resolved target = node_address(&b);
    uint16_t port = peers_port(&b.peers);
    char error[256];
    node_stop(&b);
    struct peer_link *link = peers_dial(&a.peers, &target, error, sizeof error);
    TURN_UNTIL(*link->error);
    ck_assert_str_eq(link->error, "Connection refused");
    ck_assert_uint_eq(a.n_lost, 0);
    node_start_at(&b, "b", 1, port);
    TURN_UNTIL(a.n_up == 1);
    /* Nobody waits any more: it is given up. */
    a.is_used = false;
    node_stop(&b);
    TURN_UNTIL(a.n_lost == 1);
    link = peers_dial(&a.peers, &target, error, sizeof error);
    TURN_UNTIL(a.n_lost == 2);
    ck_assert_str_eq(a.why, "Connection refused");
}
END_TEST

START_TEST(a_link_to_itself_is_found_out)
{
    node_dial(&a, &a);
    TURN_UNTIL(a.n_self == 1 && a.n_lost == 1);
    struct resolved own = node_address(&a), other = node_address(&b);
    ck_assert(peers_is_self(&a.peers, &own));
    ck_assert(!peers_is_self(&a.peers, &other));
}
END_TEST

START_TEST(a_daemon_that_connects_anew_replaces_its_older_link)
{
    node_dial(&a, &b);
    TURN_UNTIL(a.n_up == 1 && b.n_up == 1);
    struct peer_link *older = b.up;
    a.up->fd = dup(a.up->fd); /* what a broken network hides: the end of the connection */
    peer_link_end(a.up, "gone");
    TURN_UNTIL(a.n_lost == 1);
    node_dial(&a, &b);
    TURN_UNTIL(b.n_up == 2);
    ck_assert_uint_eq(b.n_lost, 1);
    ck_assert_int_eq(older->state, PEER_LOST);
    ck_assert_int_eq(b.up->state, PEER_UP);
}
END_TEST

static struct peer_link *dial_address(struct node *from, const char *host, uint16_t port)
{
    char error[256];
    struct resolved target = {.n_addresses = 1};
    ck_assert(resolve_number(host, port, &target.addresses[0]));
    return peers_dial(&from->peers, &target, error, sizeof error);
}

START_TEST(two_addresses_of_one_daemon_are_two_links)
{
    node_stop(&b);
    node_start_on(&b, "b", 1, "0.0.0.0", 0);
    /* Of two jobs; at the same time, and one after the other. */
    struct peer_link *first = dial_address(&a, "127.0.0.1", peers_port(&b.peers));
    struct peer_link *second = dial_address(&a, "127.0.0.2", peers_port(&b.peers));
    TURN_UNTIL(b.n_up == 2);
    struct peer_link *third = dial_address(&a, "127.0.0.3", peers_port(&b.peers));
    TURN_UNTIL(b.n_up == 3);
    push_leave(first, 5);
    push_leave(second, 6);
    push_leave(third, 7);
    TURN_UNTIL(b.n_messages == 3);
    ck_assert_uint_eq(a.n_lost + b.n_lost, 0);
}
END_TEST

/* ------------------------------------------------------------------ without a key */

START_TEST(without_a_key_only_this_machine_is_spoken_to)
{
    node_stop(&a);
    node_stop(&b);
    node_start(&a, "a", 0);
    node_start(&b, "b", 0);
    node_dial(&a, &b);
    TURN_UNTIL(a.n_up == 1 && b.n_up == 1);
    struct resolved far = {.n_addresses = 1};
    char error[256];
    ck_assert(resolve_number("192.0.2.1", 7010, &far.addresses[0]));
    ck_assert_ptr_null(peers_dial(&a.peers, &far, error, sizeof error));
    ck_assert_ptr_nonnull(strstr(error, "no key (cluster_key_file)"));
    /* A name of which only some addresses are of this machine. */
    struct resolved both = {.n_addresses = 2, .addresses = {far.addresses[0]}};
    ck_assert(resolve_number("127.0.0.1", 1, &both.addresses[1]));
    struct peer_link *link = peers_dial(&a.peers, &both, error, sizeof error);
    ck_assert_ptr_nonnull(link);
    ck_assert_uint_eq(link->targets.n_addresses, 1);
    ck_assert(resolve_is_loopback(&link->targets.addresses[0]));
}
END_TEST

START_TEST(without_a_key_only_the_loopback_interface_is_listened_on)
{
    node_stop(&a);
    memset(&a.peers, 0, sizeof a.peers);
    a.peers.loop = loop;
    a.peers.config = &a.config;
    a.peers.ops = &node_ops;
    a.peers.owner = &a;
    snprintf(a.config.peer_address, sizeof a.config.peer_address, "0.0.0.0");
    log_set_level(LOG_LEVEL_ERROR - 1); /* it is expected to complain */
    ck_assert_int_eq(peers_start(&a.peers, true, -1), -EACCES);
    peers_stop(&a.peers);
    a.config.peer_address[0] = '\0';
    ck_assert_int_eq(peers_start(&a.peers, true, -1), 0);
    ck_assert(resolve_is_loopback(&a.peers.listening));
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        two_nodes_with_one_key_talk,
        a_node_confirms_that_it_is_there,
        who_ends_a_link_is_told_to_both,
        another_key_is_told_in_words_and_tried_once,
        a_daemon_that_is_not_there_yet_is_tried_again,
        a_link_to_itself_is_found_out,
        a_daemon_that_connects_anew_replaces_its_older_link,
        two_addresses_of_one_daemon_are_two_links,
        without_a_key_only_this_machine_is_spoken_to,
        without_a_key_only_the_loopback_interface_is_listened_on,
    };
    return run_suite_with("peers", tests, sizeof tests / sizeof *tests, rig_set_up, rig_tear_down,
                          30);
}
