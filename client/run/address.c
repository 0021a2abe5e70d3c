/* SPDX-License-Identifier: Apache-2.0 */
#include "address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

union any_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* A numeric address with a port. Its length, or 0. */
static socklen_t parse(const char *text, unsigned port, union any_address *out)
{
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM}, *found;
    memset(out, 0, sizeof *out);
    if (getaddrinfo(text, NULL, &hints, &found) != 0)
        return 0;
    socklen_t length = found->ai_addrlen <= sizeof *out ? found->ai_addrlen : 0;
    memcpy(out, found->ai_addr, length);
    freeaddrinfo(found);
    if (out->any.sa_family == AF_INET)
        out->v4.sin_port = htons((uint16_t)port);
    else
        out->v6.sin6_port = htons((uint16_t)port);
    return length;
}

static bool print(const struct sockaddr *address, socklen_t length, char out[ADDRESS_BYTES])
{
    return getnameinfo(address, length, out, ADDRESS_BYTES, NULL, 0, NI_NUMERICHOST) == 0;
}

static unsigned port_of(const union any_address *address)
{
    return ntohs(address->any.sa_family == AF_INET ? address->v4.sin_port : address->v6.sin6_port);
}

static bool is_loopback(const union any_address *a)
{
    if (a->any.sa_family == AF_INET)
        return ntohl(a->v4.sin_addr.s_addr) >> 24 == 127;
    return IN6_IS_ADDR_LOOPBACK(&a->v6.sin6_addr);
}

bool address_is_numeric(const char *text)
{
    union any_address a;
    return parse(text, 0, &a) > 0;
}

bool address_is_loopback(const char *address)
{
    union any_address a;
    return parse(address, 0, &a) > 0 && is_loopback(&a);
}

bool address_is_own(const char *address)
{
    union any_address a;
    socklen_t length = parse(address, 0, &a);
    int fd = length ? socket(a.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;
    bool is_any = length && (a.any.sa_family == AF_INET ? a.v4.sin_addr.s_addr == INADDR_ANY
                                                        : IN6_IS_ADDR_UNSPECIFIED(&a.v6.sin6_addr));
    /* Only an address of ours can be bound. */
    bool is_own = fd >= 0 && !is_any && bind(fd, &a.any, length) == 0;
    if (fd >= 0)
        close(fd);
    return is_own;
}

bool address_resolve(const char *name, char out[ADDRESS_BYTES])
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    bool has_one = false;
    if (getaddrinfo(name, NULL, &hints, &found) != 0)
        return false;
    for (struct addrinfo *a = found; a; a = a->ai_next) {
        bool is_last_resort = is_loopback((const union any_address *)(const void *)a->ai_addr);
        if (has_one && is_last_resort)
            continue;
        char text[ADDRESS_BYTES];
        if (!print(a->ai_addr, a->ai_addrlen, text))
            continue;
        memcpy(out, text, sizeof text);
        has_one = true;
        if (!is_last_resort)
            break;
    }
    freeaddrinfo(found);
    return has_one;
}

bool address_towards(const char *other, char out[ADDRESS_BYTES])
{
    union any_address a, own;
    socklen_t length = parse(other, 9, &a), own_length = sizeof own;
    int fd = length ? socket(a.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;
    /* Connecting a datagram socket sends nothing; it asks the routing table. */
    bool is_found = fd >= 0 && connect(fd, &a.any, length) == 0 &&
                    getsockname(fd, &own.any, &own_length) == 0 && print(&own.any, own_length, out);
    if (fd >= 0)
        close(fd);
    return is_found;
}

int address_listen(const char *address, unsigned *out_port)
{
    union any_address a;
    socklen_t length = parse(address, 0, &a);
    if (!length)
        return -EINVAL;
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (bind(fd, &a.any, length) < 0 || listen(fd, 64) < 0 ||
        getsockname(fd, &a.any, &length) < 0) {
        int rc = -errno;
        close(fd);
        return rc;
    }
    *out_port = port_of(&a);
    return fd;
}

unsigned address_free_port(const char *address)
{
    unsigned port = 0;
    int fd = address_listen(address, &port);
    if (fd < 0)
        return 0;
    close(fd);
    return port;
}

int address_try(const char *address, unsigned port, int timeout_ms)
{
    union any_address a;
    socklen_t length = parse(address, port, &a), error_length = sizeof(int);
    if (!length)
        return -EINVAL;
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    int error = connect(fd, &a.any, length) < 0 ? errno : 0;
    if (error == EINPROGRESS) {
        struct pollfd p = {fd, POLLOUT, 0};
        int n = poll(&p, 1, timeout_ms);
        if (n == 0)
            error = ETIMEDOUT;
        else if (n < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_length) < 0)
            error = errno;
    }
    close(fd);
    return -error;
}

void address_join(const char *address, unsigned port, char *out, size_t bytes)
{
    snprintf(out, bytes, strchr(address, ':') ? "[%s]:%u" : "%s:%u", address, port);
}
