/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer_link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "control/peer_tls.h"
#include "control/peers.h"
#include "gradd/types.h"

enum {
    QUEUE_BYTES = 16 << 20,
    READ_BYTES = 16 << 10, /* a TLS record */
    READS_PER_TURN = 64,
};

static const uint64_t MS = 1000000;
static const uint64_t STEP_LIMIT_NS = UINT64_C(5) * 1000000000; /* connect, TLS, greeting: each */
static const uint64_t RETRY_NS = UINT64_C(250) * 1000000;
static const uint64_t IDLE_LIMIT_NS = UINT64_C(60) * 1000000000; /* of a link nobody uses */
static const uint64_t SHOW_LOST_NS = UINT64_C(600) * 1000000000;

static void on_socket(void *data, int fd, unsigned events);
static void on_timer(void *data);
static void on_soon(void *data);
static void dial_next(struct peer_link *link);
static void flush(struct peer_link *link);

const char *peer_link_state_name(const struct peer_link *link)
{
    static const char *const names[] = {
        [PEER_CONNECTING] = "connecting",
        [PEER_SECURING] = "connecting",
        [PEER_GREETING] = "connecting",
        [PEER_UP] = "up",
        [PEER_LOST] = "lost",
    };
    return names[link->state];
}

void peer_link_host(const struct peer_link *link, char *out_text, size_t size)
{
    resolve_format_host(&link->address, out_text, size);
}

/* ------------------------------------------------------------------ life */

static void set_state(struct peer_link *link, enum peer_link_state state)
{
    link->state = state;
    link->since_ns = clock_now_ns();
}

static struct peer_link *link_new(struct peers *peers)
{
    struct peer_link *link = calloc(1, sizeof *link);
    if (!link)
        return NULL;
    link->peers = peers;
    link->fd = -1;
    link->used_ns = clock_now_ns();
    wire_in_init(&link->in);
    wire_out_init(&link->out, QUEUE_BYTES);
    TAILQ_INSERT_TAIL(&peers->links, link, link);
    link->timer = watch_timer(peers->loop, on_timer, link);
    link->soon = watch_timer(peers->loop, on_soon, link);
    if (link->timer && link->soon)
        return link;
    peer_link_free(link);
    return NULL;
}

static void drop_socket(struct peer_link *link)
{
    watch_free(link->watch);
    link->watch = NULL;
    peer_tls_free(link->tls);
    link->tls = NULL;
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    wire_in_deinit(&link->in);
    wire_out_deinit(&link->out);
    wire_in_init(&link->in);
    wire_out_init(&link->out, QUEUE_BYTES);
}

void peer_link_free(struct peer_link *link)
{
    TAILQ_REMOVE(&link->peers->links, link, link);
    if (link->state == PEER_UP && !link->is_ending)
        flush(link);
    drop_socket(link);
    wire_in_deinit(&link->in);
    wire_out_deinit(&link->out);
    watch_free(link->timer);
    watch_free(link->soon);
    free(link);
}

static void note_address(struct peer_link *link, const struct peer_address *address)
{
    link->address = *address;
    resolve_format(address, link->address_text, sizeof link->address_text);
    if (!*link->version)
        snprintf(link->name, sizeof link->name, "%s", link->address_text);
}

struct peer_link *peer_link_dial(struct peers *peers, const struct resolved *targets)
{
    struct peer_link *link = link_new(peers);
    if (!link)
        return NULL;
    link->is_dialled = true;
    link->targets = *targets;
    set_state(link, PEER_CONNECTING);
    note_address(link, &targets->addresses[0]);
    watch_arm(link->timer, 0);
    return link;
}

void peer_link_forget(struct peer_link *link)
{
    if (link->state == PEER_LOST)
        watch_arm(link->timer, 0);
}

void peer_link_end(struct peer_link *link, const char *reason)
{
    if (link->is_ending || link->state == PEER_LOST)
        return;
    link->is_ending = true;
    snprintf(link->error, sizeof link->error, "%s", reason);
    if (link->watch)
        watch_set(link->watch, 0);
    watch_arm(link->soon, 0);
}

/* From the loop: tell the users, keep the rest to be shown. */
static void report_end(struct peer_link *link)
{
    struct peers *peers = link->peers;
    enum peer_link_state before = link->state;
    if (before == PEER_UP || before == PEER_GREETING)
        flush(link); /* the last words */
    drop_socket(link);
    link->is_ending = false;
    set_state(link, PEER_LOST);
    if (before == PEER_UP)
        peers_log(peers, LOG_LEVEL_NOTICE, "node %s (%s): %s", link->name, link->address_text,
                  link->error);
    else
        peers_log(peers, LOG_LEVEL_NOTICE, "%s %s: %s", link->is_dialled ? "to" : "from",
                  link->address_text, link->error);
    /* Strangers are not worth a line of the table. */
    bool is_known = before == PEER_UP || link->is_dialled;
    watch_arm(link->timer, is_known ? SHOW_LOST_NS : 0);
    if (is_known)
        peers->ops->on_lost(peers->owner, link, link->error);
}

/* ------------------------------------------------------------------ sending */

static void update_watch(struct peer_link *link)
{
    bool wants_write = !wire_out_is_empty(&link->out) || peer_tls_wants_write(link->tls);
    watch_set(link->watch, WATCH_READ | (wants_write ? WATCH_WRITE : 0));
}

static void flush(struct peer_link *link)
{
    struct wire_out *out = &link->out;
    while (out->begin < out->end) {
        ssize_t n = peer_tls_write(link->tls, out->data + out->begin, out->end - out->begin);
        if (n == -EAGAIN)
            break;
        if (n < 0) {
            /* What it sent before it went is still read, and its end of stream ends us. */
            wire_out_deinit(out);
            wire_out_init(out, QUEUE_BYTES);
            break;
        }
        out->begin += (size_t)n;
        link->sent_bytes += (uint64_t)n;
    }
}

static void push(struct peer_link *link, const Pb__Envelope *envelope)
{
    int rc = wire_out_push(&link->out, envelope, NULL, 0);
    if (rc == -ENOBUFS)
        peer_link_end(link, "does not read what is sent to it");
    else if (rc < 0)
        peer_link_end(link, strerror(-rc));
    else
        watch_arm(link->soon, 0);
}

void peer_link_push(struct peer_link *link, const Pb__Envelope *envelope)
{
    if (link->state == PEER_UP && !link->is_ending)
        push(link, envelope);
}

static void push_error(struct peer_link *link, int code, const char *text)
{
    Pb__Error error = PB__ERROR__INIT;
    error.code = (uint32_t)-code;
    error.text = (char *)text;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_ERROR;
    envelope.error = &error;
    push(link, &envelope);
    flush(link);
}

static double wall_clock_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void push_hello(struct peer_link *link)
{
    struct peers *peers = link->peers;
    Pb__PeerHello hello = PB__PEER_HELLO__INIT;
    hello.protocol_min = WIRE_PROTOCOL_MIN;
    hello.protocol_max = WIRE_PROTOCOL_MAX;
    hello.version = (char *)GRADD_VERSION;
    hello.node = (char *)peers->node;
    hello.node_id = (ProtobufCBinaryData){sizeof peers->node_id, peers->node_id};
    hello.clock_s = wall_clock_s();
    hello.peer_port = peers_is_listening(peers) ? peers_port(peers) : 0;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_PEER_HELLO;
    envelope.peer_hello = &hello;
    push(link, &envelope);
}

static void push_ping(struct peer_link *link)
{
    Pb__Ping ping = PB__PING__INIT;
    ping.seq = ++link->ping_seq;
    link->ping_ns = clock_now_ns();
    if (!link->unanswered_ns)
        link->unanswered_ns = link->ping_ns;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_PING;
    envelope.ping = &ping;
    push(link, &envelope);
}

static void push_pong(struct peer_link *link, uint64_t seq)
{
    Pb__Pong pong = PB__PONG__INIT;
    pong.seq = seq;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_PONG;
    envelope.pong = &pong;
    push(link, &envelope);
}

/* ------------------------------------------------------------------ receiving */

/* Names and versions are shown on terminals. */
static void copy_printable(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from);
    for (char *c = to; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
}

/*
 * Silence counts, and so does a Ping that is not answered: where only one direction is broken, the
 * other side may still be heard while it retries what it sent before.
 */
static uint64_t last_sign_of_life(const struct peer_link *link)
{
    bool is_one_way = link->unanswered_ns && link->unanswered_ns < link->heard_ns;
    return is_one_way ? link->unanswered_ns : link->heard_ns;
}

static void arm_heartbeat(struct peer_link *link)
{
    const struct config *config = link->peers->config;
    uint64_t now = clock_now_ns();
    uint64_t ping = link->ping_ns + config->peer_heartbeat_ms * MS;
    uint64_t death = last_sign_of_life(link) + config->peer_dead_ms * MS;
    uint64_t next = ping < death ? ping : death;
    watch_arm(link->timer, next > now ? next - now : 0);
}

/* The same daemon, or one that has been started in its place. */
static bool is_same_daemon(const struct peer_link *a, const struct peer_link *b)
{
    return memcmp(a->node_id, b->node_id, PEER_NODE_ID_BYTES) == 0 ||
           (a->port && a->port == b->port && resolve_is_same_host(&a->address, &b->address));
}

/*
 * A daemon dials again only when it has given up the link before: what that one still seems to hold
 * here must not stand in the way of what comes over the new one.
 */
static void replace_older(struct peer_link *link)
{
    struct peer_link *other, *next;
    for (other = TAILQ_FIRST(&link->peers->links); other; other = next) {
        next = TAILQ_NEXT(other, link);
        if (other == link || other->is_dialled || other->state != PEER_UP ||
            !is_same_daemon(other, link))
            continue;
        if (!other->is_ending)
            snprintf(other->error, sizeof other->error, "its daemon has connected anew");
        report_end(other);
    }
}

static void on_hello(struct peer_link *link, const Pb__PeerHello *hello)
{
    struct peers *peers = link->peers;
    char text[400];
    unsigned protocol = wire_protocol_agree(hello->protocol_min, hello->protocol_max,
                                            WIRE_PROTOCOL_MIN, WIRE_PROTOCOL_MAX);
    if (!protocol) {
        snprintf(text, sizeof text,
                 "gradd %.32s on node %.64s speaks protocol %u to %u, gradd %s on node %.64s %d to "
                 "%d: install versions that fit",
                 hello->version, hello->node, hello->protocol_min, hello->protocol_max,
                 GRADD_VERSION, peers->node, WIRE_PROTOCOL_MIN, WIRE_PROTOCOL_MAX);
        push_error(link, GRADD_ERR_PROTOCOL, text);
        peer_link_end(link, text);
        return;
    }
    if (hello->node_id.len != PEER_NODE_ID_BYTES || !*hello->node) {
        peer_link_end(link, "introduced itself without a name or an id");
        return;
    }
    memcpy(link->node_id, hello->node_id.data, PEER_NODE_ID_BYTES);
    copy_printable(link->name, sizeof link->name, hello->node);
    copy_printable(link->version, sizeof link->version, hello->version);
    link->skew_s = hello->clock_s - wall_clock_s();
    if (memcmp(link->node_id, peers->node_id, PEER_NODE_ID_BYTES) == 0) {
        if (link->is_dialled)
            peers->ops->on_self(peers->owner, link);
        peer_link_end(link, "leads back to this daemon");
        return;
    }
    link->port = (uint16_t)hello->peer_port;
    if (!link->is_dialled)
        replace_older(link);
    set_state(link, PEER_UP);
    link->used_ns = link->up_ns = link->since_ns;
    log_info("peer", "node %s (%s, gradd %s) is up", link->name, link->address_text, link->version);
    push_ping(link);
    arm_heartbeat(link);
    peers->ops->on_up(peers->owner, link);
}

static void on_greeting(struct peer_link *link, const Pb__Envelope *envelope)
{
    char text[256];
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_PEER_HELLO:
        on_hello(link, envelope->peer_hello);
        break;
    case PB__ENVELOPE__BODY_ERROR:
        copy_printable(text, sizeof text, envelope->error->text);
        peer_link_end(link, text);
        break;
    default:
        peer_link_end(link, "the first message was not PeerHello");
    }
}

static void on_pong(struct peer_link *link, const Pb__Pong *pong)
{
    /* An older one's answer: at least the last Ping is still on its way. */
    link->unanswered_ns = pong->seq == link->ping_seq ? 0 : link->ping_ns;
    if (pong->seq != link->ping_seq)
        return;
    link->rtt_us = (double)(clock_now_ns() - link->ping_ns) / 1e3;
    link->confirmed_ns = link->ping_ns;
    link->peers->ops->on_answer(link->peers->owner, link);
}

bool peer_link_confirm(struct peer_link *link, uint64_t since_ns)
{
    if (link->confirmed_ns >= since_ns)
        return true;
    if (link->ping_ns < since_ns && link->state == PEER_UP && !link->is_ending)
        push_ping(link);
    return false;
}

static void on_frame(struct peer_link *link, const Pb__Envelope *envelope)
{
    struct peers *peers = link->peers;
    if (link->state == PEER_GREETING) {
        on_greeting(link, envelope);
        return;
    }
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_PING:
        push_pong(link, envelope->ping->seq);
        break;
    case PB__ENVELOPE__BODY_PONG:
        on_pong(link, envelope->pong);
        break;
    default:
        peers->ops->on_message(peers->owner, link, envelope);
    }
}

static void take_frames(struct peer_link *link)
{
    struct wire_frame frame;
    int rc = 0;
    while (!link->is_ending && (rc = wire_in_next(&link->in, &frame)) == 1)
        on_frame(link, frame.envelope);
    if (rc < 0)
        peer_link_end(link, rc == -EPROTO ? link->in.error : strerror(-rc));
}

/* Read until the socket is empty. */
static void receive(struct peer_link *link)
{
    uint8_t bytes[READ_BYTES];
    for (unsigned i = 0; i < READS_PER_TURN && !link->is_ending; i++) {
        ssize_t n = peer_tls_read(link->tls, bytes, sizeof bytes);
        if (n == -EAGAIN)
            return;
        if (n <= 0) {
            peer_link_end(link,
                          n == 0 ? "its daemon closed the connection" : peer_tls_error(link->tls));
            return;
        }
        link->heard_ns = clock_now_ns();
        link->received_bytes += (uint64_t)n;
        int rc = wire_in_feed(&link->in, bytes, (size_t)n);
        if (rc < 0)
            peer_link_end(link, strerror(-rc));
        else
            take_frames(link);
    }
    /* TLS may hold bytes that the socket no longer shows. */
    watch_arm(link->soon, 0);
}

/* ------------------------------------------------------------------ becoming one */

static void set_options(const struct peer_link *link)
{
    int on = 1, idle_s = 5, dead_ms = (int)link->peers->config->peer_dead_ms;
    setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(link->fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(link->fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(link->fd, IPPROTO_TCP, TCP_KEEPINTVL, &on, sizeof on);
    setsockopt(link->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &dead_ms, sizeof dead_ms);
}

static bool may_talk(struct peer_link *link)
{
    char error[160];
    if (peers_may_talk(link->peers, link->fd, error, sizeof error))
        return true;
    peer_link_end(link, error);
    return false;
}

static void secure(struct peer_link *link)
{
    int rc = peer_tls_handshake(link->tls);
    if (rc == -EAGAIN) {
        watch_set(link->watch, peer_tls_wants_write(link->tls) ? WATCH_WRITE : WATCH_READ);
        return;
    }
    if (rc == -ECONNRESET || rc == -EPIPE) {
        snprintf(link->error, sizeof link->error, "%s", peer_tls_error(link->tls));
        if (link->is_dialled)
            dial_next(link);
        else
            peer_link_end(link, "the connection was closed before TLS stood");
        return;
    }
    if (rc < 0) {
        peer_link_end(link, peer_tls_error(link->tls));
        return;
    }
    /* Only now has a process of the other side taken the connection, and has it an owner. */
    if (link->is_dialled && !may_talk(link))
        return;
    set_state(link, PEER_GREETING);
    watch_arm(link->timer, STEP_LIMIT_NS);
    push_hello(link);
    receive(link);
}

static void begin_tls(struct peer_link *link)
{
    set_state(link, PEER_SECURING);
    set_options(link);
    if (!link->is_dialled && !may_talk(link))
        return;
    link->tls = peer_tls_new(link->fd, link->is_dialled ? PEER_TLS_CLIENT : PEER_TLS_SERVER,
                             link->peers->key.key);
    if (!link->tls) {
        peer_link_end(link, "out of memory");
        return;
    }
    watch_arm(link->timer, STEP_LIMIT_NS);
    secure(link);
}

static void on_connected(struct peer_link *link)
{
    int error = 0;
    socklen_t bytes = sizeof error;
    getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error == 0) {
        begin_tls(link);
        return;
    }
    snprintf(link->error, sizeof link->error, "%s", strerror(error));
    dial_next(link);
}

static void dial(struct peer_link *link)
{
    const struct peer_address *target = &link->targets.addresses[link->next_target++];
    set_state(link, PEER_CONNECTING);
    note_address(link, target);
    link->fd = socket(target->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int rc = link->fd < 0 ? -errno : 0;
    if (rc == 0 && connect(link->fd, (const struct sockaddr *)&target->socket, target->bytes) < 0 &&
        errno != EINPROGRESS)
        rc = -errno;
    if (rc == 0 &&
        !(link->watch = watch_fd(link->peers->loop, link->fd, WATCH_WRITE, on_socket, link)))
        rc = -ENOMEM;
    if (rc == 0) {
        watch_arm(link->timer, STEP_LIMIT_NS);
        return;
    }
    snprintf(link->error, sizeof link->error, "%s", strerror(-rc));
    dial_next(link);
}

/* The attempt failed: the next address at once, all of them again in a moment. */
static void dial_next(struct peer_link *link)
{
    drop_socket(link);
    set_state(link, PEER_CONNECTING);
    if (link->next_target < link->targets.n_addresses) {
        watch_arm(link->timer, 0);
        return;
    }
    if (!link->peers->ops->is_used(link->peers->owner, link)) {
        char reason[sizeof link->error];
        snprintf(reason, sizeof reason, "%s", link->error);
        peer_link_end(link, reason);
        return;
    }
    link->next_target = 0;
    watch_arm(link->timer, RETRY_NS);
}

struct peer_link *peer_link_accept(struct peers *peers, int take_fd,
                                   const struct peer_address *address)
{
    struct peer_link *link = link_new(peers);
    if (!link) {
        close(take_fd);
        return NULL;
    }
    link->fd = take_fd;
    note_address(link, address);
    link->watch = watch_fd(peers->loop, take_fd, WATCH_READ, on_socket, link);
    if (!link->watch) {
        peer_link_free(link);
        return NULL;
    }
    begin_tls(link);
    return link;
}

/* ------------------------------------------------------------------ events */

static void on_socket(void *data, int fd, unsigned events)
{
    (void)fd;
    struct peer_link *link = data;
    if (link->is_ending)
        return;
    switch (link->state) {
    case PEER_CONNECTING:
        on_connected(link);
        break;
    case PEER_SECURING:
        secure(link);
        break;
    case PEER_GREETING:
    case PEER_UP:
        if (events & WATCH_WRITE)
            flush(link);
        receive(link);
        if (!link->is_ending)
            update_watch(link);
        break;
    case PEER_LOST:
        break;
    }
}

static void on_soon(void *data)
{
    struct peer_link *link = data;
    if (link->is_ending) {
        report_end(link);
        return;
    }
    if (link->state != PEER_GREETING && link->state != PEER_UP)
        return;
    flush(link);
    receive(link);
    if (!link->is_ending) {
        flush(link);
        update_watch(link);
    }
}

/* Alive, silent or needless? */
static void beat(struct peer_link *link)
{
    const struct config *config = link->peers->config;
    uint64_t now = clock_now_ns();
    receive(link); /* this process itself may have slept */
    if (link->is_ending)
        return;
    if (now >= last_sign_of_life(link) + config->peer_dead_ms * MS) {
        char text[64];
        snprintf(text, sizeof text, "no heartbeat for %.3g s", (double)config->peer_dead_ms / 1000);
        peer_link_end(link, text);
        return;
    }
    if (link->peers->ops->is_used(link->peers->owner, link))
        link->used_ns = now;
    else if (link->is_dialled && now - link->used_ns > IDLE_LIMIT_NS) {
        peer_link_end(link, "closed: no job needs it");
        return;
    }
    if (now - link->ping_ns >= config->peer_heartbeat_ms * MS)
        push_ping(link);
    arm_heartbeat(link);
}

/* A daemon that does not answer may do so later; a stranger may not. */
static void give_up_step(struct peer_link *link, const char *reason)
{
    if (!link->is_dialled) {
        peer_link_end(link, reason);
        return;
    }
    snprintf(link->error, sizeof link->error, "%s", reason);
    dial_next(link);
}

static void on_timer(void *data)
{
    struct peer_link *link = data;
    if (link->is_ending)
        return;
    switch (link->state) {
    case PEER_CONNECTING:
        if (link->fd < 0) {
            dial(link);
        } else {
            snprintf(link->error, sizeof link->error, "no answer in 5 s");
            dial_next(link);
        }
        break;
    case PEER_SECURING:
        give_up_step(link, "TLS did not stand in 5 s");
        break;
    case PEER_GREETING:
        give_up_step(link, "no PeerHello in 5 s");
        break;
    case PEER_UP:
        beat(link);
        break;
    case PEER_LOST:
        peer_link_free(link);
        break;
    }
}
