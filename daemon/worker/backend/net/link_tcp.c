/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plain TCP. The maker has proved who is at the other end; the bytes are not encrypted.
 *
 * The kernel would take several MiB into the socket, and their pages would leave the cache before
 * they are received: on one machine, or over a short cable, that costs more than half as much again
 * (tests/bench/RESULTS.md). So little may be under way at first; when the product of bandwidth and
 * delay needs more, the kernel gets its way again.
 */
#include "worker/backend/net/link.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/tcp.h> /* netinet/tcp.h has an older struct tcp_info */
#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    SHORT_BYTES = 128 * 1024, /* the kernel doubles it, and counts its own overhead */
    LOOK_BYTES = 1024 * 1024, /* how often to look whether that is enough: after so many bytes */
};

#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72 /* Linux 5.14 */
#endif

struct tcp_link {
    struct link link; /* first */
    bool is_short;
    uint64_t look_at; /* sent_bytes */
};

/* -errno, or 0 for "not now". */
static ssize_t failure(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
}

/* As much as the kernel finds right. */
static void lengthen(struct tcp_link *tcp)
{
    const int unlocked = 0, most = INT_MAX / 2;
    tcp->is_short = false;
    if (setsockopt(tcp->link.fd, SOL_SOCKET, SO_BUF_LOCK, &unlocked, sizeof unlocked) < 0)
        setsockopt(tcp->link.fd, SOL_SOCKET, SO_SNDBUF, &most, sizeof most);
}

/* Bytes under way = rate * delay. */
static void look(struct tcp_link *tcp)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    tcp->look_at = tcp->link.sent_bytes + LOOK_BYTES;
    if (getsockopt(tcp->link.fd, IPPROTO_TCP, TCP_INFO, &info, &size) < 0 ||
        size < offsetof(struct tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate)
        return;
    uint64_t bytes = info.tcpi_delivery_rate / 1000000 * info.tcpi_min_rtt;
    if (bytes > SHORT_BYTES / 2)
        lengthen(tcp);
}

static ssize_t tcp_send(struct link *link, const struct iovec *iov, int n_iov)
{
    const struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n_iov};
    ssize_t n = sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n <= 0)
        return n < 0 ? failure() : 0;
    link->sent_bytes += (uint64_t)n;
    struct tcp_link *tcp = (struct tcp_link *)link;
    if (tcp->is_short && link->sent_bytes >= tcp->look_at)
        look(tcp);
    return n;
}

static ssize_t tcp_receive(struct link *link, const struct iovec *iov, int n_iov)
{
    struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n_iov};
    ssize_t n = recvmsg(link->fd, &message, MSG_DONTWAIT);
    if (n <= 0)
        return n < 0 ? failure() : -EPIPE;
    link->received_bytes += (uint64_t)n;
    return n;
}

static void tcp_free(struct link *link)
{
    close(link->fd);
    free(link);
}

static const struct link_ops tcp_ops = {
    .name = "tcp",
    .send = tcp_send,
    .receive = tcp_receive,
    .free = tcp_free,
};

struct link *link_tcp_new(int take_fd)
{
    struct tcp_link *tcp = calloc(1, sizeof *tcp);
    if (!tcp) {
        close(take_fd);
        return NULL;
    }
    tcp->link.ops = &tcp_ops;
    tcp->link.fd = take_fd;
    int flags = fcntl(take_fd, F_GETFL), one = 1, few = SHORT_BYTES;
    if (flags >= 0)
        fcntl(take_fd, F_SETFL, flags | O_NONBLOCK);
    /* The first fails on Unix sockets, which are left as they are. */
    tcp->is_short = setsockopt(take_fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0 &&
                    setsockopt(take_fd, SOL_SOCKET, SO_SNDBUF, &few, sizeof few) == 0;
    return &tcp->link;
}
