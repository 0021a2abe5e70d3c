/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer_visitor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "control/peer_tls.h"

static const uint64_t LIMIT_NS = UINT64_C(5) * 1000000000;

enum visitor_state {
    VISITOR_SILENT,  /* has not sent a byte */
    VISITOR_HELLO,   /* a data connection, in its hello */
    VISITOR_EARLY,   /* names an epoch that does not run here; it may be about to begin */
    VISITOR_PROVING, /* has our answer; its proof is awaited */
};

struct visitor {
    TAILQ_ENTRY(visitor) link;
    struct peers *peers;
    enum visitor_state state;
    int fd;
    struct watch *watch, *limit;
    struct peer_address address;
    uint64_t since_ns;
    uint8_t hello_bytes[LINK_HELLO_BYTES];
    uint8_t answer[LINK_ANSWER_BYTES];
    uint8_t proof[LINK_PROOF_BYTES];
    size_t n_read; /* of the hello or of the proof */
    struct link_hello hello;
};

/* ------------------------------------------------------------------ life */

static void visitor_free(struct visitor *visitor)
{
    TAILQ_REMOVE(&visitor->peers->visitors, visitor, link);
    visitor->peers->n_visitors--;
    watch_free(visitor->watch);
    watch_free(visitor->limit);
    if (visitor->fd >= 0)
        close(visitor->fd);
    free(visitor);
}

void peer_visitors_free(struct peers *peers)
{
    struct visitor *visitor, *next;
    for (visitor = TAILQ_FIRST(&peers->visitors); visitor; visitor = next) {
        next = TAILQ_NEXT(visitor, link);
        visitor_free(visitor);
    }
}

/* It goes, with a line in the log. */
static void turn_away(struct visitor *visitor, const char *why)
{
    char from[RESOLVE_TEXT_MAX];
    resolve_format(&visitor->address, from, sizeof from);
    peers_log(visitor->peers, LOG_LEVEL_NOTICE, "connection from %s refused: %s", from, why);
    visitor_free(visitor);
}

static void on_limit(void *data)
{
    static const char *const reasons[] = {
        [VISITOR_SILENT] = "it sent nothing in 5 s",
        [VISITOR_HELLO] = "its hello was not complete in 5 s",
        [VISITOR_EARLY] = "it names an epoch that does not run here",
        [VISITOR_PROVING] = "it sent no proof in 5 s",
    };
    struct visitor *visitor = data;
    turn_away(visitor, reasons[visitor->state]);
}

/* ------------------------------------------------------------------ a data connection */

/* Read up to n bytes in all and no more. 1: complete, 0: not yet, -1: the visitor is gone. */
static int read_exactly(struct visitor *visitor, uint8_t *bytes, size_t n)
{
    while (visitor->n_read < n) {
        ssize_t got = recv(visitor->fd, bytes + visitor->n_read, n - visitor->n_read, MSG_DONTWAIT);
        if (got > 0) {
            visitor->n_read += (size_t)got;
            continue;
        }
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN)
            return 0;
        turn_away(visitor, got == 0 ? "it was closed before it proved itself" : strerror(errno));
        return -1;
    }
    visitor->n_read = 0;
    return 1;
}

static void answer_hello(struct visitor *visitor)
{
    struct peers *peers = visitor->peers;
    const uint8_t *secret = peers->ops->find_secret(peers->owner, &visitor->hello);
    if (!secret) {
        visitor->state = VISITOR_EARLY;
        watch_set(visitor->watch, 0);
        return;
    }
    uint8_t nonce[LINK_NONCE_BYTES];
    int rc = link_random(nonce, sizeof nonce);
    if (rc == 0)
        rc = link_server_answer(secret, visitor->hello_bytes, nonce, visitor->answer);
    /* 48 bytes fit any socket that is still empty. */
    if (rc == 0 && send(visitor->fd, visitor->answer, sizeof visitor->answer,
                        MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof visitor->answer)
        rc = -EPIPE;
    if (rc < 0) {
        turn_away(visitor, strerror(-rc));
        return;
    }
    visitor->state = VISITOR_PROVING;
    watch_set(visitor->watch, WATCH_READ);
}

static void on_hello(struct visitor *visitor)
{
    char why[96];
    switch (link_hello_unpack(visitor->hello_bytes, &visitor->hello)) {
    case 0:
        answer_hello(visitor);
        break;
    case -EPROTONOSUPPORT:
        snprintf(why, sizeof why, "a data connection of version %u, this daemon knows %d",
                 visitor->hello.version, LINK_VERSION);
        turn_away(visitor, why);
        break;
    default:
        turn_away(visitor, "neither TLS nor the hello of a data connection");
    }
}

static void on_proof(struct visitor *visitor)
{
    struct peers *peers = visitor->peers;
    /* The epoch may have ended meanwhile. */
    const uint8_t *secret = peers->ops->find_secret(peers->owner, &visitor->hello);
    if (!secret) {
        turn_away(visitor, "its epoch has ended");
        return;
    }
    if (link_check_client(secret, visitor->hello_bytes, visitor->answer, visitor->proof) < 0) {
        turn_away(visitor, "it does not know the secret of its epoch");
        return;
    }
    peers->ops->on_data_link(peers->owner, &visitor->hello, visitor->fd);
    visitor_free(visitor);
}

/* ------------------------------------------------------------------ arriving */

/* False: the visitor is gone. */
static bool on_first_byte(struct visitor *visitor)
{
    uint8_t byte;
    ssize_t n = recv(visitor->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (n <= 0) {
        turn_away(visitor, "it was closed without a word");
        return false;
    }
    if (byte == 'G') {
        visitor->state = VISITOR_HELLO;
        return true;
    }
    if (byte == PEER_TLS_FIRST_BYTE) {
        struct peers *peers = visitor->peers;
        struct peer_address address = visitor->address;
        int fd = visitor->fd;
        visitor->fd = -1;
        watch_free(visitor->watch);
        visitor->watch = NULL;
        visitor_free(visitor);
        peer_link_accept(peers, fd, &address);
    } else {
        turn_away(visitor, "neither TLS nor the hello of a data connection");
    }
    return false;
}

static void on_readable(void *data, int fd, unsigned events)
{
    (void)fd;
    (void)events;
    struct visitor *visitor = data;
    if (visitor->state == VISITOR_SILENT && !on_first_byte(visitor))
        return;
    if (visitor->state == VISITOR_HELLO) {
        if (read_exactly(visitor, visitor->hello_bytes, sizeof visitor->hello_bytes) == 1)
            on_hello(visitor);
    } else if (visitor->state == VISITOR_PROVING) {
        if (read_exactly(visitor, visitor->proof, sizeof visitor->proof) == 1)
            on_proof(visitor);
    }
}

/* Links that have not proved themselves count as visitors too. */
static unsigned count_strangers(const struct peers *peers)
{
    unsigned n = peers->n_visitors;
    const struct peer_link *link;
    TAILQ_FOREACH(link, &peers->links, link)
    n += !link->is_dialled && !link->is_ending &&
         (link->state == PEER_SECURING || link->state == PEER_GREETING);
    return n;
}

/* Who has said nothing, else who came first. */
static struct visitor *choose_visitor(const struct peers *peers)
{
    struct visitor *visitor;
    TAILQ_FOREACH(visitor, &peers->visitors, link)
    if (visitor->state == VISITOR_SILENT)
        return visitor;
    return TAILQ_FIRST(&peers->visitors);
}

/* The first that has not shown that it knows the key. */
static struct peer_link *choose_link(const struct peers *peers)
{
    struct peer_link *link;
    TAILQ_FOREACH(link, &peers->links, link)
    if (!link->is_dialled && !link->is_ending && link->state == PEER_SECURING)
        return link;
    return NULL;
}

/* Under a flood one that has said nothing makes room, else the oldest: who is honest needs a
 * moment only, and whoever waits shall not keep the others out. */
static bool make_room(struct peers *peers)
{
    if (count_strangers(peers) < VISITORS_MAX)
        return true;
    struct visitor *visitor = choose_visitor(peers);
    struct peer_link *link = choose_link(peers);
    bool is_silent = visitor && visitor->state == VISITOR_SILENT;
    if (visitor && (is_silent || !link || visitor->since_ns <= link->since_ns))
        turn_away(visitor, is_silent ? "too many connections that say nothing"
                                     : "too many connections that do not prove who they are");
    else if (link)
        peer_link_end(link, "too many connections that do not prove who they are");
    return visitor || link;
}

void peer_visitor_new(struct peers *peers, int take_fd)
{
    struct visitor *visitor = make_room(peers) ? calloc(1, sizeof *visitor) : NULL;
    if (!visitor) {
        peers_log(peers, LOG_LEVEL_NOTICE,
                  "connection refused: %u others have not proved who "
                  "they are",
                  VISITORS_MAX);
        close(take_fd);
        return;
    }
    visitor->peers = peers;
    visitor->fd = take_fd;
    visitor->since_ns = clock_now_ns();
    visitor->address.bytes = sizeof visitor->address.socket;
    getpeername(take_fd, (struct sockaddr *)&visitor->address.socket, &visitor->address.bytes);
    TAILQ_INSERT_TAIL(&peers->visitors, visitor, link);
    peers->n_visitors++;
    visitor->watch = watch_fd(peers->loop, take_fd, WATCH_READ, on_readable, visitor);
    visitor->limit = watch_timer(peers->loop, on_limit, visitor);
    if (visitor->watch && visitor->limit)
        watch_arm(visitor->limit, LIMIT_NS);
    else
        visitor_free(visitor);
}

void peer_visitors_retry(struct peers *peers)
{
    struct visitor *visitor, *next;
    for (visitor = TAILQ_FIRST(&peers->visitors); visitor; visitor = next) {
        next = TAILQ_NEXT(visitor, link);
        if (visitor->state == VISITOR_EARLY)
            answer_hello(visitor);
    }
}
