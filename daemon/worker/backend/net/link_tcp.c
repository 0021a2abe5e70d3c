/* SPDX-License-Identifier: Apache-2.0 */
/* Plain TCP. The maker has proved who is at the other end; the bytes are not encrypted. */
#include "worker/backend/net/link.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* -errno, or 0 for "not now". */
static ssize_t failure(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
}

static ssize_t tcp_send(struct link *link, const struct iovec *iov, int n_iov)
{
    const struct msghdr message = {.msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n_iov};
    ssize_t n = sendmsg(link->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n <= 0)
        return n < 0 ? failure() : 0;
    link->sent_bytes += (uint64_t)n;
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
    struct link *link = calloc(1, sizeof *link);
    if (!link) {
        close(take_fd);
        return NULL;
    }
    link->ops = &tcp_ops;
    link->fd = take_fd;
    int flags = fcntl(take_fd, F_GETFL), one = 1;
    if (flags >= 0)
        fcntl(take_fd, F_SETFL, flags | O_NONBLOCK);
    setsockopt(take_fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* fails on Unix sockets */
    return link;
}
