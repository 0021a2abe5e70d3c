/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A link: a reliable, ordered byte stream between two workers. All that the ring knows of a
 * transport; another one (UCX, RDMA) is one more file with this table.
 *
 * Thread: the net thread, except link_free(). Never blocks.
 */
#ifndef GRADD_LINK_H
#define GRADD_LINK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

struct link;

struct link_ops {
    const char *name; /* "tcp", "tls" */
    /* Bytes moved, 0: not now (poll the fd), -errno: over (-EPIPE: the peer closed). */
    ssize_t (*send)(struct link *link, const struct iovec *iov, int n_iov);
    ssize_t (*receive)(struct link *link, const struct iovec *iov, int n_iov);
    void (*free)(struct link *link);
};

struct link {
    const struct link_ops *ops;
    int fd; /* to poll; owned */
    uint64_t sent_bytes, received_bytes;
    short wants; /* POLLIN/POLLOUT that the last call asked for beyond the obvious (TLS) */
};

/* take_fd: a connected, proved TCP socket; made non-blocking, NODELAY and TCP_USER_TIMEOUT are the
 * maker's. NULL: out of memory (the fd is closed). */
struct link *link_tcp_new(int take_fd);

/* The same under TLS 1.3 with the epoch's secret as pre-shared key; the handshake runs inside the
 * first sends and receives. is_server: the side that accepted the connection. */
struct link *link_tls_new(int take_fd, const uint8_t secret[32], int is_server);

#endif
