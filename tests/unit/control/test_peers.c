/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two daemons' peers on one loop, over the loopback interface; and strangers at their port: with
 * another key, another version, garbage, silence, or a data connection that is none.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "control/peer_tls.h"
#include "control/peers.h"
#include "run_suite.h"

/* One daemon, as far as its peers are concerned. */
struct node {
    struct peers peers;
    struct config config;
    unsigned n_up, n_lost, n_self, n_answers, n_messages, n_data;
    struct peer_link *up; /* the last one */
    char why[256];
    uint64_t last_epoch; /* of a RemoteLeave */
    bool is_used;
    bool has_epoch;
    uint8_t secret[LINK_SECRET_BYTES];
    int data_fd; /* duplicate of the last one */
};

static struct loop *loop;
static struct node a, b;

static void on_up(void *owner, struct peer_link *link)
{
    struct node *node = owner;
    node->n_up++;
    node->up = link;
}

static void on_lost(void *owner, struct peer_link *link, const char *why)
{
    struct node *node = owner;
    node->n_lost++;
    if (node->up == link)
        node->up = NULL;
    snprintf(node->why, sizeof node->why, "%s", why);
}

static void on_self(void *owner, struct peer_link *link)
{
    (void)link;
    ((struct node *)owner)->n_self++;
}

static void on_answer(void *owner, struct peer_link *link)
{
    (void)link;
    ((struct node *)owner)->n_answers++;
}

static void on_message(void *owner, struct peer_link *link, const Pb__Envelope *envelope)
{
    struct node *node = owner;
    (void)link;
    node->n_messages++;
    if (envelope->body_case == PB__ENVELOPE__BODY_REMOTE_LEAVE)
        node->last_epoch = envelope->remote_leave->epoch;
}

static bool is_used(void *owner, const struct peer_link *link)
{
    (void)link;
    return ((struct node *)owner)->is_used;
}

static const uint8_t *find_secret(void *owner, const struct link_hello *hello)
{
    struct node *node = owner;
    return node->has_epoch && hello->epoch == 3 ? node->secret : NULL;
}

static void on_data_link(void *owner, const struct link_hello *hello, int fd)
{
    struct node *node = owner;
    ck_assert_uint_eq(hello->epoch, 3);
    node->n_data++;
    node->data_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
}

static const struct peers_ops ops = {
    .on_up = on_up,
    .on_lost = on_lost,
    .on_self = on_self,
    .on_answer = on_answer,
    .on_message = on_message,
    .is_used = is_used,
    .find_secret = find_secret,
    .on_data_link = on_data_link,
};

static void start_on(struct node *node, const char *name, uint8_t key, const char *host,
                     uint16_t port)
{
    memset(node, 0, sizeof *node);
    config_init(&node->config);
    node->config.peer_port = port;
    snprintf(node->config.peer_address, sizeof node->config.peer_address, "%s", host);
    node->config.peer_heartbeat_ms = 50;
    node->config.peer_dead_ms = 300;
    node->is_used = true;
    node->data_fd = -1;
    memset(node->secret, 9, sizeof node->secret);
    node->peers.loop = loop;
    node->peers.config = &node->config;
    node->peers.node = name;
    node->peers.ops = &ops;
    node->peers.owner = node;
    node->peers.key.is_set = key != 0;
    memset(node->peers.key.key, key, sizeof node->peers.key.key);
    ck_assert_int_eq(peers_start(&node->peers, true, -1), 0);
}

static void start_at(struct node *node, const char *name, uint8_t key, uint16_t port)
{
    start_on(node, name, key, "127.0.0.1", port);
}

static void start(struct node *node, const char *name, uint8_t key)
{
    start_at(node, name, key, 0);
}

static void setup(void)
{
    signal(SIGPIPE, SIG_IGN);
    log_init("test", LOG_LEVEL_ERROR);
    loop = loop_new();
    start(&a, "a", 1);
    start(&b, "b", 1);
}

static void stop(struct node *node)
{
    peers_stop(&node->peers);
    if (node->data_fd >= 0)
        close(node->data_fd);
}

static void teardown(void)
{
    stop(&a);
    stop(&b);
    loop_free(loop);
}

#define TURN_UNTIL(condition)                                                                      \
    while (!(condition))                                                                           \
    loop_step(loop, true)

static struct resolved address_of(const struct node *node)
{
    return (struct resolved){.n_addresses = 1, .addresses = {node->peers.listening}};
}

static struct peer_link *dial(struct node *from, const struct node *to)
{
    char error[256];
    struct resolved target = address_of(to);
    struct peer_link *link = peers_dial(&from->peers, &target, error, sizeof error);
    ck_assert_msg(link, "%s", error);
    return link;
}

static void push_leave(struct peer_link *link, uint64_t epoch)
{
    Pb__RemoteLeave leave = PB__REMOTE_LEAVE__INIT;
    leave.epoch = epoch;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_REMOTE_LEAVE;
    envelope.remote_leave = &leave;
    peer_link_push(link, &envelope);
}

/* A plain connection to the node's port. */
static int visit(const struct node *node)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct peer_address *address = &node->peers.listening;
    ck_assert_int_eq(connect(fd, (const struct sockaddr *)&address->socket, address->bytes), 0);
    return fd;
}

/* Turn the loop until the other side has closed the connection. */
static void await_close(int fd)
{
    char byte;
    ssize_t n;
    while ((n = recv(fd, &byte, 1, MSG_DONTWAIT)) != 0 && (n > 0 || errno == EAGAIN))
        if (n < 0)
            loop_step(loop, true);
    close(fd);
}

/* ------------------------------------------------------------------ links */

START_TEST(two_nodes_with_one_key_talk)
{
    struct peer_link *link = dial(&a, &b);
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
    ck_assert_ptr_eq(dial(&a, &b), link); /* one link is enough */
    TURN_UNTIL(link->ping_seq > 3);
    ck_assert(link->rtt_us > 0);
    ck_assert_uint_eq(a.n_lost + b.n_lost, 0);
}
END_TEST

START_TEST(a_node_confirms_that_it_is_there)
{
    a.config.peer_heartbeat_ms = a.config.peer_dead_ms = 10000;
    struct peer_link *link = dial(&a, &b);
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
    dial(&a, &b);
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
    stop(&b);
    start(&b, "b", 2);
    dial(&a, &b);
    TURN_UNTIL(a.n_lost == 1);
    ck_assert_str_eq(a.why, "its cluster key is another one");
    ck_assert_uint_eq(a.n_up + b.n_up, 0);
    ck_assert_uint_eq(b.n_lost, 0);
}
END_TEST

START_TEST(a_daemon_that_is_not_there_yet_is_tried_again)
{
    struct resolved target = address_of(&b);
    uint16_t port = peers_port(&b.peers);
    char error[256];
    stop(&b);
    struct peer_link *link = peers_dial(&a.peers, &target, error, sizeof error);
    TURN_UNTIL(*link->error);
    ck_assert_str_eq(link->error, "Connection refused");
    ck_assert_uint_eq(a.n_lost, 0);
    start_at(&b, "b", 1, port);
    TURN_UNTIL(a.n_up == 1);
    /* Nobody waits any more: it is given up. */
    a.is_used = false;
    stop(&b);
    TURN_UNTIL(a.n_lost == 1);
    link = peers_dial(&a.peers, &target, error, sizeof error);
    TURN_UNTIL(a.n_lost == 2);
    ck_assert_str_eq(a.why, "Connection refused");
}
END_TEST

START_TEST(a_link_to_itself_is_found_out)
{
    dial(&a, &a);
    TURN_UNTIL(a.n_self == 1 && a.n_lost == 1);
    struct resolved own = address_of(&a), other = address_of(&b);
    ck_assert(peers_is_self(&a.peers, &own));
    ck_assert(!peers_is_self(&a.peers, &other));
}
END_TEST

START_TEST(a_daemon_that_connects_anew_replaces_its_older_link)
{
    dial(&a, &b);
    TURN_UNTIL(a.n_up == 1 && b.n_up == 1);
    struct peer_link *older = b.up;
    a.up->fd = dup(a.up->fd); /* what a broken network hides: the end of the connection */
    peer_link_end(a.up, "gone");
    TURN_UNTIL(a.n_lost == 1);
    dial(&a, &b);
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
    stop(&b);
    start_on(&b, "b", 1, "0.0.0.0", 0);
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
    stop(&a);
    stop(&b);
    start(&a, "a", 0);
    start(&b, "b", 0);
    dial(&a, &b);
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
    stop(&a);
    memset(&a.peers, 0, sizeof a.peers);
    a.peers.loop = loop;
    a.peers.config = &a.config;
    a.peers.ops = &ops;
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

/* ------------------------------------------------------------------ strangers */

/* Somebody with the key who speaks by hand. */
struct speaker {
    int fd;
    struct peer_tls *tls;
    struct wire_in in;
};

static void speaker_start(struct speaker *speaker, const struct node *node)
{
    speaker->fd = visit(node);
    fcntl(speaker->fd, F_SETFL, O_NONBLOCK);
    speaker->tls = peer_tls_new(speaker->fd, PEER_TLS_CLIENT, node->peers.key.key);
    wire_in_init(&speaker->in);
    int rc;
    while ((rc = peer_tls_handshake(speaker->tls)) == -EAGAIN)
        loop_step(loop, true);
    ck_assert_msg(rc == 0, "%s", peer_tls_error(speaker->tls));
}

static void speaker_stop(struct speaker *speaker)
{
    wire_in_deinit(&speaker->in);
    peer_tls_free(speaker->tls);
    close(speaker->fd);
}

static void say(struct speaker *speaker, const Pb__Envelope *envelope)
{
    struct wire_out out;
    wire_out_init(&out, 1 << 20);
    ck_assert_int_eq(wire_out_push(&out, envelope, NULL, 0), 0);
    ck_assert_int_eq(peer_tls_write(speaker->tls, out.data, out.end), (ssize_t)out.end);
    wire_out_deinit(&out);
}

static void say_hello(struct speaker *speaker, unsigned protocol)
{
    uint8_t id[PEER_NODE_ID_BYTES] = {1, 2, 3};
    Pb__PeerHello hello = PB__PEER_HELLO__INIT;
    hello.protocol_min = hello.protocol_max = protocol;
    hello.version = (char *)"9.9";
    hello.node = (char *)"c\x1b[2J";
    hello.node_id = (ProtobufCBinaryData){sizeof id, id};
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_PEER_HELLO;
    envelope.peer_hello = &hello;
    say(speaker, &envelope);
}

/* The next message that is no Ping. NULL: the connection has ended. */
static const Pb__Envelope *hear(struct speaker *speaker)
{
    static struct wire_frame frame;
    for (;;) {
        while (wire_in_next(&speaker->in, &frame) == 1)
            if (frame.envelope->body_case != PB__ENVELOPE__BODY_PING)
                return frame.envelope;
        uint8_t bytes[4096];
        ssize_t n = peer_tls_read(speaker->tls, bytes, sizeof bytes);
        if (n > 0)
            ck_assert_int_eq(wire_in_feed(&speaker->in, bytes, (size_t)n), 0);
        else if (n != -EAGAIN)
            return NULL;
        else
            loop_step(loop, true);
    }
}

START_TEST(another_version_is_answered_in_words)
{
    struct speaker c;
    speaker_start(&c, &a);
    say_hello(&c, 7);
    ck_assert_int_eq(hear(&c)->body_case, PB__ENVELOPE__BODY_PEER_HELLO);
    const Pb__Envelope *answer = hear(&c);
    ck_assert_int_eq(answer->body_case, PB__ENVELOPE__BODY_ERROR);
    ck_assert_ptr_nonnull(strstr(answer->error->text, "speaks protocol 7 to 7"));
    ck_assert_ptr_nonnull(strstr(answer->error->text, "install versions that fit"));
    ck_assert_ptr_null(hear(&c));
    ck_assert_uint_eq(a.n_up + a.n_lost, 0);
    speaker_stop(&c);
}
END_TEST

START_TEST(nothing_counts_before_the_greeting)
{
    struct speaker c;
    speaker_start(&c, &a);
    Pb__RemoteLeave leave = PB__REMOTE_LEAVE__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_REMOTE_LEAVE;
    envelope.remote_leave = &leave;
    say(&c, &envelope);
    while (hear(&c))
        continue;
    ck_assert_uint_eq(a.n_messages + a.n_up, 0);
    speaker_stop(&c);
}
END_TEST

START_TEST(a_node_that_falls_silent_is_lost)
{
    struct speaker c;
    speaker_start(&c, &a);
    say_hello(&c, WIRE_PROTOCOL_MAX);
    TURN_UNTIL(a.n_up == 1);
    ck_assert_str_eq(a.up->name, "c?[2J");
    TURN_UNTIL(a.n_lost == 1);
    ck_assert_str_eq(a.why, "no heartbeat for 0.3 s");
    speaker_stop(&c);
}
END_TEST

START_TEST(a_message_that_is_none_ends_the_link)
{
    struct speaker c;
    speaker_start(&c, &a);
    say_hello(&c, WIRE_PROTOCOL_MAX);
    TURN_UNTIL(a.n_up == 1);
    static const uint8_t garbage[16] = {0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4};
    ck_assert_int_eq(peer_tls_write(c.tls, garbage, sizeof garbage), (ssize_t)sizeof garbage);
    TURN_UNTIL(a.n_lost == 1);
    speaker_stop(&c);
}
END_TEST

START_TEST(strangers_are_turned_away_and_nothing_else_happens)
{
    static const char *const words[] = {
        "GET / HTTP/1.1\r\n\r\n0123456789012345678901234567890123456789",
        "\x16\x03\x01garbage that looks like TLS for a byte", "hello", "\x16\x03\x03\xff\xff"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        int fd = visit(&a);
        ck_assert_int_gt(send(fd, words[i], strlen(words[i]), MSG_NOSIGNAL), 0);
        shutdown(fd, SHUT_WR);
        await_close(fd);
    }
    dial(&b, &a);
    TURN_UNTIL(a.n_up == 1);
    ck_assert_uint_eq(a.n_lost, 0);
    ck_assert_uint_eq(a.peers.n_visitors, 0);
}
END_TEST

START_TEST(a_flood_of_silent_connections_leaves_room)
{
    int fds[300];
    for (size_t i = 0; i < 300; i++) {
        fds[i] = visit(&a);
        loop_step(loop, false);
    }
    dial(&b, &a);
    TURN_UNTIL(a.n_up == 1);
    ck_assert_uint_le(a.peers.n_visitors, 256);
    for (size_t i = 0; i < 300; i++)
        close(fds[i]);
}
END_TEST

START_TEST(a_flood_that_begins_to_speak_leaves_room)
{
    static const char *const words[] = {"GRADDLNK", "\x16\x03\x01", "\x16"};
    int fds[300];
    for (size_t i = 0; i < 300; i++) {
        const char *word = words[i % 3];
        fds[i] = visit(&a);
        ck_assert_int_gt(send(fds[i], word, strlen(word), MSG_NOSIGNAL), 0);
        loop_step(loop, false);
    }
    struct peer_link *link = dial(&b, &a);
    TURN_UNTIL(a.n_up == 1);
    ck_assert_str_eq(link->error, ""); /* at the first attempt */
    ck_assert_uint_le(a.peers.n_visitors, 256);
    for (size_t i = 0; i < 300; i++)
        close(fds[i]);
}
END_TEST

/* ------------------------------------------------------------------ data connections */

static uint8_t hello_bytes[LINK_HELLO_BYTES];

static int begin_data(const struct node *node, uint64_t epoch)
{
    struct link_hello hello = {.version = LINK_VERSION, .from_node = 1, .epoch = epoch};
    link_random(hello.nonce, sizeof hello.nonce);
    link_hello_pack(&hello, hello_bytes);
    int fd = visit(node);
    ck_assert_int_eq(send(fd, hello_bytes, 10, 0), 10);
    loop_step(loop, true);
    loop_step(loop, false);
    ck_assert_int_eq(send(fd, hello_bytes + 10, sizeof hello_bytes - 10, 0),
                     (ssize_t)sizeof hello_bytes - 10);
    return fd;
}

static void receive_answer(int fd, uint8_t answer[LINK_ANSWER_BYTES])
{
    size_t n = 0;
    while (n < LINK_ANSWER_BYTES) {
        ssize_t got = recv(fd, answer + n, LINK_ANSWER_BYTES - n, MSG_DONTWAIT);
        ck_assert(got > 0 || (got < 0 && errno == EAGAIN));
        if (got > 0)
            n += (size_t)got;
        else
            loop_step(loop, true);
    }
}

START_TEST(a_data_connection_that_proves_itself_is_passed_on_unread)
{
    uint8_t answer[LINK_ANSWER_BYTES], last[LINK_PROOF_BYTES + 4] = {0};
    char rest[8];
    a.has_epoch = true;
    int fd = begin_data(&a, 3);
    receive_answer(fd, answer);
    ck_assert_int_eq(link_check_server(a.secret, hello_bytes, answer), 0);
    ck_assert_int_eq(link_client_proof(a.secret, hello_bytes, answer, last), 0);
    memcpy(last + LINK_PROOF_BYTES, "data", 4);
    ck_assert_int_eq(send(fd, last, sizeof last, 0), (ssize_t)sizeof last);
    TURN_UNTIL(a.n_data == 1);
    ck_assert_int_eq(recv(a.data_fd, rest, sizeof rest, 0), 4);
    ck_assert_mem_eq(rest, "data", 4);
    ck_assert_uint_eq(a.peers.n_visitors, 0);
    close(fd);
}
END_TEST

START_TEST(a_data_connection_without_the_secret_is_refused)
{
    uint8_t answer[LINK_ANSWER_BYTES], wrong[LINK_SECRET_BYTES] = {0}, last[LINK_PROOF_BYTES];
    a.has_epoch = true;
    int fd = begin_data(&a, 3);
    receive_answer(fd, answer);
    ck_assert_int_eq(link_client_proof(wrong, hello_bytes, answer, last), 0);
    ck_assert_int_eq(send(fd, last, sizeof last, 0), (ssize_t)sizeof last);
    await_close(fd);
    /* What another connection proved is worth nothing on this one. */
    fd = begin_data(&a, 3);
    receive_answer(fd, answer);
    ck_assert_int_eq(link_client_proof(a.secret, hello_bytes, answer, last), 0);
    close(fd);
    int replay = visit(&a);
    ck_assert_int_eq(send(replay, hello_bytes, sizeof hello_bytes, 0), (ssize_t)sizeof hello_bytes);
    receive_answer(replay, answer);
    ck_assert_int_eq(send(replay, last, sizeof last, 0), (ssize_t)sizeof last);
    await_close(replay);
    ck_assert_uint_eq(a.n_data, 0);
}
END_TEST

START_TEST(a_data_connection_that_comes_early_waits_for_its_epoch)
{
    uint8_t answer[LINK_ANSWER_BYTES], last[LINK_PROOF_BYTES];
    int fd = begin_data(&a, 3);
    for (int i = 0; i < 5; i++)
        loop_step(loop, false);
    ck_assert_int_eq(recv(fd, answer, 1, MSG_DONTWAIT), -1);
    a.has_epoch = true;
    peers_on_epoch(&a.peers);
    receive_answer(fd, answer);
    ck_assert_int_eq(link_client_proof(a.secret, hello_bytes, answer, last), 0);
    a.has_epoch = false; /* it has failed meanwhile */
    ck_assert_int_eq(send(fd, last, sizeof last, 0), (ssize_t)sizeof last);
    await_close(fd);
    ck_assert_uint_eq(a.n_data, 0);
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
        another_version_is_answered_in_words,
        nothing_counts_before_the_greeting,
        a_node_that_falls_silent_is_lost,
        a_message_that_is_none_ends_the_link,
        strangers_are_turned_away_and_nothing_else_happens,
        a_flood_of_silent_connections_leaves_room,
        a_flood_that_begins_to_speak_leaves_room,
        a_data_connection_that_proves_itself_is_passed_on_unread,
        a_data_connection_without_the_secret_is_refused,
        a_data_connection_that_comes_early_waits_for_its_epoch,
    };
    return run_suite_with("peers", tests, sizeof tests / sizeof *tests, setup, teardown, 30);
}
