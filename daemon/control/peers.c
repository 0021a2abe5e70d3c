/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peers.h"

#include <errno.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/words.h"
#include "control/listener.h"
#include "control/peer_visitor.h"
#include "control/tcp_owner.h"

enum {
    BACKLOG = 512,
    LOST_SHOWN_MAX = 64,
};

/* ------------------------------------------------------------------ words */

void peers_log(struct peers *peers, enum log_level level, const char *format, ...)
{
    unsigned n_dropped;
    if (!log_limit_allows(&peers->lines, &n_dropped))
        return;
    if (n_dropped)
        log_notice("peer", "%u line%s about other nodes suppressed", n_dropped, words_s(n_dropped));
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_line(level, "peer", NULL, "%s", text);
}

/* ------------------------------------------------------------------ the port */

static int bind_address(const struct peer_address *address, int *out_fd)
{
    int on = 1, off = 0;
    int fd = socket(address->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->socket.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, (const struct sockaddr *)&address->socket, address->bytes) < 0 ||
        listen(fd, BACKLOG) < 0) {
        int rc = -errno;
        close(fd);
        return rc;
    }
    *out_fd = fd;
    return 0;
}

static int bind_host(const char *host, uint16_t port, int *out_fd)
{
    struct peer_address address;
    return resolve_number(host, port, &address) ? bind_address(&address, out_fd) : -EINVAL;
}

/* Where the configuration says; without a key, on the loopback interface. */
static int open_port(const struct peers *peers, int *out_fd)
{
    const char *host = peers->config->peer_address;
    uint16_t port = (uint16_t)peers->config->peer_port;
    struct peer_address address;
    int rc;
    if (*host && !resolve_number(host, port, &address)) {
        log_error("peer", "peer_address = %s is not a numeric address", host);
        return -EINVAL;
    }
    if (*host && !peers->key.is_set && !resolve_is_loopback(&address)) {
        log_error("peer",
                  "peer_address = %s is not the loopback interface: other nodes need a key "
                  "(cluster_key_file)",
                  host);
        return -EACCES;
    }
    if (*host)
        rc = bind_address(&address, out_fd);
    else if (!peers->key.is_set)
        rc = bind_host("127.0.0.1", port, out_fd);
    else if ((rc = bind_host("::", port, out_fd)) == -EAFNOSUPPORT || rc == -EADDRNOTAVAIL)
        rc = bind_host("0.0.0.0", port, out_fd);
    if (rc < 0)
        log_error("peer", "port %u (peer_port) can not be listened on: %s", port, strerror(-rc));
    return rc;
}

static void on_connection(void *data, int take_fd)
{
    peer_visitor_new(data, take_fd);
}

static int listen_on(struct peers *peers, int take_fd)
{
    peers->listening.bytes = sizeof peers->listening.socket;
    if (getsockname(take_fd, (struct sockaddr *)&peers->listening.socket, &peers->listening.bytes) <
        0) {
        close(take_fd);
        return -errno;
    }
    if (!peers->key.is_set && !resolve_is_loopback(&peers->listening)) {
        char text[RESOLVE_TEXT_MAX];
        resolve_format(&peers->listening, text, sizeof text);
        log_error("peer", "other nodes need a key (cluster_key_file) to be listened for on %s",
                  text);
        close(take_fd);
        return -EACCES;
    }
    peers->listener = listener_new(peers->loop, take_fd, on_connection, peers);
    return peers->listener ? 0 : -ENOMEM;
}

int peers_start(struct peers *peers, bool listens, int take_listen_fd)
{
    TAILQ_INIT(&peers->links);
    TAILQ_INIT(&peers->visitors);
    peers->resolver = resolver_new(peers->loop);
    int rc = peers->resolver ? link_random(peers->node_id, sizeof peers->node_id) : -ENOMEM;
    if (rc < 0) {
        if (take_listen_fd >= 0)
            close(take_listen_fd);
        return rc;
    }
    int fd = take_listen_fd;
    if (fd < 0 && listens)
        rc = open_port(peers, &fd);
    return rc == 0 && fd >= 0 ? listen_on(peers, fd) : rc;
}

void peers_stop(struct peers *peers)
{
    if (!peers->resolver)
        return;
    struct peer_link *link;
    listener_free(peers->listener);
    peers->listener = NULL;
    peer_visitors_free(peers);
    while ((link = TAILQ_FIRST(&peers->links)))
        peer_link_free(link);
    resolver_free(peers->resolver);
    peers->resolver = NULL;
    explicit_bzero(&peers->key, sizeof peers->key);
}

bool peers_is_listening(const struct peers *peers)
{
    return peers->listener != NULL;
}

uint16_t peers_port(const struct peers *peers)
{
    return peers->listener ? resolve_port(&peers->listening) : (uint16_t)peers->config->peer_port;
}

void peers_on_epoch(struct peers *peers)
{
    peer_visitors_retry(peers);
}

/* ------------------------------------------------------------------ who is who */

static bool is_any(const struct peer_address *address)
{
    static const uint8_t zero[16];
    if (address->socket.ss_family == AF_INET)
        return ((const struct sockaddr_in *)&address->socket)->sin_addr.s_addr == 0;
    return memcmp(&((const struct sockaddr_in6 *)&address->socket)->sin6_addr, zero, 16) == 0;
}

/* An interface of this machine has the address. */
static bool is_own(const struct peer_address *address)
{
    struct ifaddrs *all;
    bool is_found = resolve_is_loopback(address);
    if (is_found || getifaddrs(&all) < 0)
        return is_found;
    for (const struct ifaddrs *one = all; one && !is_found; one = one->ifa_next) {
        if (!one->ifa_addr ||
            (one->ifa_addr->sa_family != AF_INET && one->ifa_addr->sa_family != AF_INET6))
            continue;
        struct peer_address own = {.bytes = one->ifa_addr->sa_family == AF_INET
                                                ? sizeof(struct sockaddr_in)
                                                : sizeof(struct sockaddr_in6)};
        memcpy(&own.socket, one->ifa_addr, own.bytes);
        is_found = resolve_is_same_host(&own, address);
    }
    freeifaddrs(all);
    return is_found;
}

bool peers_is_self(const struct peers *peers, const struct resolved *targets)
{
    for (unsigned i = 0; i < targets->n_addresses; i++) {
        const struct peer_address *target = &targets->addresses[i];
        if (resolve_port(target) != peers_port(peers))
            continue;
        bool is_ours = !peers->listener || is_any(&peers->listening)
                           ? is_own(target)
                           : resolve_is_same_host(target, &peers->listening);
        if (is_ours)
            return true;
    }
    return false;
}

static void address_of(int fd, int (*get)(int, struct sockaddr *, socklen_t *),
                       struct peer_address *out)
{
    *out = (struct peer_address){.bytes = sizeof out->socket};
    get(fd, (struct sockaddr *)&out->socket, &out->bytes);
}

static int get_local(int fd, struct sockaddr *address, socklen_t *bytes)
{
    return getsockname(fd, address, bytes);
}

static int get_remote(int fd, struct sockaddr *address, socklen_t *bytes)
{
    return getpeername(fd, address, bytes);
}

bool peers_may_talk(const struct peers *peers, int fd, char *out_error, size_t size)
{
    if (peers->key.is_set)
        return true;
    struct peer_address local, remote;
    address_of(fd, get_local, &local);
    address_of(fd, get_remote, &remote);
    if (!resolve_is_loopback(&local) || !resolve_is_loopback(&remote)) {
        snprintf(out_error, size, "another machine, and there is no key (cluster_key_file)");
        return false;
    }
    uid_t uid;
    if (!tcp_owner(&remote, &local, &uid)) {
        snprintf(out_error, size, "its user can not be found, and there is no key");
        return false;
    }
    if (uid == 0 || uid == geteuid())
        return true;
    snprintf(out_error, size, "a process of uid %u, and there is no key (cluster_key_file)",
             (unsigned)uid);
    return false;
}

/* ------------------------------------------------------------------ dialling */

static bool has_target(const struct peer_link *link, const struct resolved *targets)
{
    for (unsigned i = 0; i < targets->n_addresses; i++)
        if (resolve_is_same_host(&link->address, &targets->addresses[i]) &&
            resolve_port(&link->address) == resolve_port(&targets->addresses[i]))
            return true;
    return false;
}

/* Of links that are over, those to the same place are of no interest any more, nor are too many. */
static void forget_lost(struct peers *peers, const struct resolved *targets)
{
    unsigned n = 0;
    struct peer_link *link;
    TAILQ_FOREACH_REVERSE(link, &peers->links, peer_links, link)
    {
        if (link->state != PEER_LOST)
            continue;
        if (++n > LOST_SHOWN_MAX || (link->is_dialled && has_target(link, targets)))
            peer_link_forget(link);
    }
}

/* Those that may be dialled: a name can have addresses of this machine and others. */
static struct resolved choose_targets(const struct peers *peers, const struct resolved *targets)
{
    struct resolved chosen = {.n_addresses = 0};
    for (unsigned i = 0; i < targets->n_addresses; i++)
        if (peers->key.is_set || resolve_is_loopback(&targets->addresses[i]))
            chosen.addresses[chosen.n_addresses++] = targets->addresses[i];
    return chosen;
}

struct peer_link *peers_dial(struct peers *peers, const struct resolved *targets, char *out_error,
                             size_t size)
{
    struct peer_link *link;
    TAILQ_FOREACH(link, &peers->links, link)
    if (link->is_dialled && link->state != PEER_LOST && !link->is_ending &&
        has_target(link, targets))
        return link;
    if (!peers->listener) {
        snprintf(out_error, size,
                 "this daemon does not listen for other nodes, which the job's data needs: give it "
                 "a key (cluster_key_file)");
        return NULL;
    }
    const struct resolved chosen = choose_targets(peers, targets);
    if (chosen.n_addresses == 0) {
        snprintf(out_error, size,
                 "this daemon has no key (cluster_key_file) and speaks to daemons on this machine "
                 "only");
        return NULL;
    }
    forget_lost(peers, targets);
    link = peer_link_dial(peers, &chosen);
    if (!link)
        snprintf(out_error, size, "the daemon is out of memory");
    return link;
}
