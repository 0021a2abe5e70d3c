/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From "host:port" to addresses, without making the loop wait: numbers at once, names by a thread.
 *
 * Thread: loop. Invariant: at most LOOKUPS_MAX threads ask for names, whatever clients send; who
 * asks for a name that is being looked up shares the answer.
 */
#ifndef GRADD_CONTROL_RESOLVE_H
#define GRADD_CONTROL_RESOLVE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/loop.h"

enum {
    RESOLVE_HOST_MAX = 255,
    RESOLVE_TEXT_MAX = 80, /* "[address]:port" */
    RESOLVE_ADDRESSES_MAX = 8,
    LOOKUPS_MAX = 8,
};

struct peer_address {
    struct sockaddr_storage socket;
    socklen_t bytes;
};

struct resolved {
    unsigned n_addresses; /* 0: see error */
    struct peer_address addresses[RESOLVE_ADDRESSES_MAX];
    char error[128]; /* "Name or service not known" */
};

struct resolver;
struct resolution; /* one question */

/* result: NULL-free, valid during the call. The question is over. */
typedef void resolve_fn(void *owner, const struct resolved *result);

/* "host", "host:port", "[v6]:port"; a bare IPv6 address has no port. False: not of that form. */
bool resolve_split(const char *text, uint16_t default_port, char out_host[RESOLVE_HOST_MAX + 1],
                   uint16_t *out_port);
/* A numeric address. False: it is a name. */
bool resolve_number(const char *host, uint16_t port, struct peer_address *out_address);

/* "10.0.0.1" or "fe80::1"; an IPv4 address within IPv6 is shown as IPv4. */
void resolve_format_host(const struct peer_address *address, char *out_text, size_t size);
/* The same with the port: "10.0.0.1:7010", "[::1]:7010". */
void resolve_format(const struct peer_address *address, char *out_text, size_t size);
uint16_t resolve_port(const struct peer_address *address);
bool resolve_is_loopback(const struct peer_address *address);
bool resolve_is_same_host(const struct peer_address *a, const struct peer_address *b);

struct resolver *resolver_new(struct loop *loop);
/* Questions must be cancelled before. Threads that still wait for a name server end by themselves.
 */
void resolver_free(struct resolver *resolver);

/* fn follows from the loop, never inside. NULL: too many names are being looked up, or no memory.
 */
struct resolution *resolve_start(struct resolver *resolver, const char *host, uint16_t port,
                                 resolve_fn *fn, void *owner);
void resolve_cancel(struct resolution *resolution); /* NULL-safe */

#endif
