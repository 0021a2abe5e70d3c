/* SPDX-License-Identifier: Apache-2.0 */
#include "control/resolve.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <unistd.h>

enum {
    STACK_BYTES = 256 << 10, /* a name service module may want some */
};

/* ------------------------------------------------------------------ texts */

static bool parse_port(const char *text, uint16_t *out_port)
{
    char *end;
    if (*text < '0' || *text > '9')
        return false;
    unsigned long port = strtoul(text, &end, 10);
    if (*end || port == 0 || port > UINT16_MAX)
        return false;
    *out_port = (uint16_t)port;
    return true;
}

bool resolve_split(const char *text, uint16_t default_port, char out_host[RESOLVE_HOST_MAX + 1],
                   uint16_t *out_port)
{
    const char *begin = text, *end, *port = NULL;
    if (*text == '[') {
        begin++;
        end = strchr(begin, ']');
        if (!end || (end[1] && end[1] != ':'))
            return false;
        port = end[1] ? end + 2 : NULL;
    } else {
        const char *colon = strchr(text, ':');
        bool has_port = colon && !strchr(colon + 1, ':');
        end = has_port ? colon : text + strlen(text);
        port = has_port ? colon + 1 : NULL;
    }
    size_t length = (size_t)(end - begin);
    if (length == 0 || length > RESOLVE_HOST_MAX)
        return false;
    for (const char *c = begin; c < end; c++)
        if (*c <= 0x20 || *c > 0x7e)
            return false;
    *out_port = default_port;
    if (port && !parse_port(port, out_port))
        return false;
    memcpy(out_host, begin, length);
    out_host[length] = '\0';
    return true;
}

static bool take_addresses(const struct addrinfo *info, struct resolved *result)
{
    for (; info && result->n_addresses < RESOLVE_ADDRESSES_MAX; info = info->ai_next) {
        if (info->ai_addrlen > sizeof(struct sockaddr_storage))
            continue;
        struct peer_address *address = &result->addresses[result->n_addresses++];
        memcpy(&address->socket, info->ai_addr, info->ai_addrlen);
        address->bytes = info->ai_addrlen;
    }
    return result->n_addresses > 0;
}

/* May block unless flags has AI_NUMERICHOST. */
static void look_up(const char *host, uint16_t port, int flags, struct resolved *result)
{
    struct addrinfo hints = {.ai_flags = flags | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
    struct addrinfo *info = NULL;
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    int rc = getaddrinfo(host, service, &hints, &info);
    result->n_addresses = 0;
    if (rc != 0)
        snprintf(result->error, sizeof result->error, "%s",
                 rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc));
    else if (!take_addresses(info, result))
        snprintf(result->error, sizeof result->error, "no address");
    if (info)
        freeaddrinfo(info);
}

bool resolve_number(const char *host, uint16_t port, struct peer_address *out_address)
{
    struct resolved result;
    look_up(host, port, AI_NUMERICHOST, &result);
    if (result.n_addresses)
        *out_address = result.addresses[0];
    return result.n_addresses > 0;
}

/* ------------------------------------------------------------------ addresses */

/* The bytes of the host: 4 or 16 of them. */
static size_t host_of(const struct peer_address *address, uint8_t out_bytes[16])
{
    if (address->socket.ss_family == AF_INET) {
        memcpy(out_bytes, &((const struct sockaddr_in *)&address->socket)->sin_addr, 4);
        return 4;
    }
    const struct in6_addr *v6 = &((const struct sockaddr_in6 *)&address->socket)->sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(v6)) {
        memcpy(out_bytes, v6->s6_addr + 12, 4);
        return 4;
    }
    memcpy(out_bytes, v6->s6_addr, 16);
    return 16;
}

void resolve_format_host(const struct peer_address *address, char *out_text, size_t size)
{
    uint8_t bytes[16];
    size_t n = host_of(address, bytes);
    if (size == 0 || !inet_ntop(n == 4 ? AF_INET : AF_INET6, bytes, out_text, (socklen_t)size))
        snprintf(out_text, size, "?");
}

void resolve_format(const struct peer_address *address, char *out_text, size_t size)
{
    char host[INET6_ADDRSTRLEN];
    resolve_format_host(address, host, sizeof host);
    snprintf(out_text, size, strchr(host, ':') ? "[%s]:%u" : "%s:%u", host, resolve_port(address));
}

uint16_t resolve_port(const struct peer_address *address)
{
    return ntohs(address->socket.ss_family == AF_INET
                     ? ((const struct sockaddr_in *)&address->socket)->sin_port
                     : ((const struct sockaddr_in6 *)&address->socket)->sin6_port);
}

bool resolve_is_loopback(const struct peer_address *address)
{
    static const uint8_t v6[16] = {[15] = 1};
    uint8_t bytes[16];
    size_t n = host_of(address, bytes);
    return n == 4 ? bytes[0] == 127 : memcmp(bytes, v6, sizeof v6) == 0;
}

bool resolve_is_same_host(const struct peer_address *a, const struct peer_address *b)
{
    uint8_t bytes_a[16], bytes_b[16];
    size_t n = host_of(a, bytes_a);
    return n == host_of(b, bytes_b) && memcmp(bytes_a, bytes_b, n) == 0;
}

/* ------------------------------------------------------------------ threads */

struct resolution {
    TAILQ_ENTRY(resolution) link;
    struct lookup *lookup;
    resolve_fn *fn;
    void *owner;
};

/* One name that a thread asks for. The thread owns `result` until it has written to the pipe. */
struct lookup {
    LIST_ENTRY(lookup) link;
    struct resolver *resolver;
    char host[RESOLVE_HOST_MAX + 1];
    uint16_t port;
    int pipe; /* to the loop */
    TAILQ_HEAD(, resolution) waiting;
    struct resolved result;
};

struct resolver {
    int pipe[2]; /* threads send the addresses of lookups that are done */
    struct watch *watch;
    LIST_HEAD(, lookup) lookups;
    unsigned n_lookups;
};

static void *run_lookup(void *data)
{
    struct lookup *lookup = data;
    look_up(lookup->host, lookup->port, AI_ADDRCONFIG, &lookup->result);
    ssize_t n;
    do {
        n = write(lookup->pipe, &lookup, sizeof lookup);
    } while (n < 0 && errno == EINTR);
    return NULL;
}

static int start_thread(struct lookup *lookup)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Signals are the loop's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&thread, &attributes, run_lookup, lookup);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -rc;
}

static void answer(struct lookup *lookup)
{
    struct resolution *resolution;
    LIST_REMOVE(lookup, link);
    lookup->resolver->n_lookups--;
    while ((resolution = TAILQ_FIRST(&lookup->waiting))) {
        TAILQ_REMOVE(&lookup->waiting, resolution, link);
        resolution->fn(resolution->owner, &lookup->result);
        free(resolution);
    }
    free(lookup);
}

static void on_done(void *data, int fd, unsigned events)
{
    (void)data;
    (void)events;
    struct lookup *lookup;
    while (read(fd, &lookup, sizeof lookup) == sizeof lookup)
        answer(lookup);
}

struct resolver *resolver_new(struct loop *loop)
{
    struct resolver *resolver = calloc(1, sizeof *resolver);
    if (!resolver)
        return NULL;
    if (pipe2(resolver->pipe, O_CLOEXEC) < 0) {
        free(resolver);
        return NULL;
    }
    fcntl(resolver->pipe[0], F_SETFL, O_NONBLOCK);
    resolver->watch = watch_fd(loop, resolver->pipe[0], WATCH_READ, on_done, resolver);
    if (!resolver->watch) {
        resolver_free(resolver);
        return NULL;
    }
    return resolver;
}

void resolver_free(struct resolver *resolver)
{
    if (!resolver)
        return;
    watch_free(resolver->watch);
    /* What threads still write to stays theirs until the process ends, which is now. */
    if (resolver->n_lookups > 0)
        return;
    close(resolver->pipe[0]);
    close(resolver->pipe[1]);
    free(resolver);
}

static struct lookup *obtain_lookup(struct resolver *resolver, const char *host, uint16_t port)
{
    struct lookup *lookup;
    LIST_FOREACH(lookup, &resolver->lookups, link)
    if (lookup->port == port && strcmp(lookup->host, host) == 0)
        return lookup;
    if (resolver->n_lookups >= LOOKUPS_MAX || !(lookup = calloc(1, sizeof *lookup)))
        return NULL;
    lookup->resolver = resolver;
    lookup->port = port;
    lookup->pipe = resolver->pipe[1];
    snprintf(lookup->host, sizeof lookup->host, "%s", host);
    TAILQ_INIT(&lookup->waiting);
    if (start_thread(lookup) < 0) {
        free(lookup);
        return NULL;
    }
    LIST_INSERT_HEAD(&resolver->lookups, lookup, link);
    resolver->n_lookups++;
    return lookup;
}

struct resolution *resolve_start(struct resolver *resolver, const char *host, uint16_t port,
                                 resolve_fn *fn, void *owner)
{
    struct resolution *resolution = calloc(1, sizeof *resolution);
    struct lookup *lookup = resolution ? obtain_lookup(resolver, host, port) : NULL;
    if (!lookup) {
        free(resolution);
        return NULL;
    }
    resolution->lookup = lookup;
    resolution->fn = fn;
    resolution->owner = owner;
    TAILQ_INSERT_TAIL(&lookup->waiting, resolution, link);
    return resolution;
}

void resolve_cancel(struct resolution *resolution)
{
    if (!resolution)
        return;
    TAILQ_REMOVE(&resolution->lookup->waiting, resolution, link);
    free(resolution);
}
