/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer_link_internal.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "control/peer_tls.h"

static const uint64_t STEP_LIMIT_NS = UINT64_C(5) * 1000000000; /* connect, TLS, greeting: each */
static const uint64_t RETRY_NS = UINT64_C(250) * 1000000;

/* ------------------------------------------------------------------ TCP */

static void note_address(struct peer_link *link, const struct peer_address *address)
{
    link->address = *address;
    resolve_format(address, link->address_text, sizeof link->address_text);
    if (!*link->version)
        snprintf(link->name, sizeof link->name, "%s", link->address_text);
}

/* The attempt failed: the next address at once, all of them again in a moment. */
static void dial_next(struct peer_link *link)
{
    peer_link_drop_socket(link);
    peer_link_set_state(link, PEER_CONNECTING);
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

static void dial(struct peer_link *link)
{
    const struct peer_address *target = &link->targets.addresses[link->next_target++];
    peer_link_set_state(link, PEER_CONNECTING);
    note_address(link, target);
    link->fd = socket(target->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int rc = link->fd < 0 ? -errno : 0;
    if (rc == 0 && connect(link->fd, (const struct sockaddr *)&target->socket, target->bytes) < 0 &&
        errno != EINPROGRESS)
        rc = -errno;
    if (rc == 0 && !peer_link_watch(link, WATCH_WRITE))
        rc = -ENOMEM;
    if (rc == 0) {
        watch_arm(link->timer, STEP_LIMIT_NS);
        return;
    }
    snprintf(link->error, sizeof link->error, "%s", strerror(-rc));
    dial_next(link);
}

struct peer_link *peer_link_dial(struct peers *peers, const struct resolved *targets)
{
    struct peer_link *link = peer_link_new(peers);
    if (!link)
        return NULL;
    link->is_dialled = true;
    link->targets = *targets;
    peer_link_set_state(link, PEER_CONNECTING);
    note_address(link, &targets->addresses[0]);
    watch_arm(link->timer, 0);
    return link;
}

/* ------------------------------------------------------------------ TLS */

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
    peer_link_set_state(link, PEER_GREETING);
    watch_arm(link->timer, STEP_LIMIT_NS);
    if (!link->is_dialled)
        peer_link_push_hello(link); /* who dialled first hears whom it has reached */
    peer_link_receive(link);
}

static void begin_tls(struct peer_link *link)
{
    peer_link_set_state(link, PEER_SECURING);
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

struct peer_link *peer_link_accept(struct peers *peers, int take_fd,
                                   const struct peer_address *address)
{
    struct peer_link *link = peer_link_new(peers);
    if (!link) {
        close(take_fd);
        return NULL;
    }
    link->fd = take_fd;
    note_address(link, address);
    if (!peer_link_watch(link, WATCH_READ)) {
        peer_link_free(link);
        return NULL;
    }
    begin_tls(link);
    return link;
}

/* ------------------------------------------------------------------ events */

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

void peer_link_open_on_socket(struct peer_link *link)
{
    if (link->state == PEER_CONNECTING)
        on_connected(link);
    else
        secure(link);
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

void peer_link_open_on_timer(struct peer_link *link)
{
    if (link->state == PEER_GREETING)
        give_up_step(link, "no PeerHello in 5 s");
    else if (link->state == PEER_SECURING)
        give_up_step(link, "TLS did not stand in 5 s");
    else if (link->fd >= 0)
        give_up_step(link, "no answer in 5 s");
    else
        dial(link);
}
