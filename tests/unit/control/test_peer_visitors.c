/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strangers at the port for other nodes: with another version, garbage, silence, in floods; and
 * data connections, of which only those that prove themselves are passed on.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "control/peer_tls.h"
#include "peers_rig.h"
#include "run_suite.h"

/* ------------------------------------------------------------------ strangers */

/* Somebody with the key who speaks by hand. */
struct speaker {
    int fd;
    struct peer_tls *tls;
    struct wire_in in;
};

static void speaker_start(struct speaker *speaker, const struct node *node)
{
    speaker->fd = node_visit(node);
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
        int fd = node_visit(&a);
        ck_assert_int_gt(send(fd, words[i], strlen(words[i]), MSG_NOSIGNAL), 0);
        shutdown(fd, SHUT_WR);
        await_close(fd);
    }
    node_dial(&b, &a);
    TURN_UNTIL(a.n_up == 1);
    ck_assert_uint_eq(a.n_lost, 0);
    ck_assert_uint_eq(a.peers.n_visitors, 0);
}
END_TEST

START_TEST(a_flood_of_silent_connections_leaves_room)
{
    int fds[300];
    for (size_t i = 0; i < 300; i++) {
        fds[i] = node_visit(&a);
        loop_step(loop, false);
    }
    node_dial(&b, &a);
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
        fds[i] = node_visit(&a);
        ck_assert_int_gt(send(fds[i], word, strlen(word), MSG_NOSIGNAL), 0);
        loop_step(loop, false);
    }
    struct peer_link *link = node_dial(&b, &a);
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
    int fd = node_visit(node);
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
    int replay = node_visit(&a);
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
    return run_suite_with("peer_visitors", tests, sizeof tests / sizeof *tests, rig_set_up,
                          rig_tear_down, 30);
}
