/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What plain TCP sockets do between hosts, in two forms, each rank a process with --rank:
 *
 * exchange: two ranks send each other the whole tensor at the same time, over --streams
 *           connections; nothing is summed. What the network and the kernel allow.
 * server:   one unsharded parameter server. Rank 0 receives every other rank's tensor, sums, and
 *           sends the sum back to each; as a stream, so that both directions are busy at once.
 *
 * One thread a process, non-blocking sockets. float32 sums only.
 */
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

enum { MAX_PEERS = 64, CALL_BYTES = 256 << 10, CONNECT_S = 20 };

/* A part of the tensor on its way, both directions. */
struct flow {
    int fd;
    char *send, *receive; /* the first bytes of this part */
    size_t bytes;
    size_t n_sent, n_received;
    size_t may_send; /* up to here */
    /* server: the last bytes received that are no whole element yet */
    char partial[sizeof(float)];
    size_t n_partial;
};

struct peer {
    const struct bench_options *options;
    bool is_exchange;
    void *tensor, *other, *piece;
    struct flow flows[MAX_PEERS];
    unsigned n_flows;
};

/* ------------------------------------------------------------------ moving */

static bool would_block(ssize_t n)
{
    return n < 0 && (errno == EAGAIN || errno == EINTR);
}

static void flow_send(struct flow *f)
{
    size_t left = f->may_send - f->n_sent;
    if (left == 0)
        return;
    ssize_t n = send(f->fd, f->send + f->n_sent, left < CALL_BYTES ? left : CALL_BYTES,
                     MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0)
        f->n_sent += (size_t)n;
    else if (!would_block(n))
        err(EXIT_FAILURE, "send");
}

/* @return bytes that came, 0: none yet. */
static size_t flow_receive(struct flow *f, void *into)
{
    size_t left = f->bytes - f->n_received;
    if (left == 0)
        return 0;
    ssize_t n = recv(f->fd, into, left < CALL_BYTES ? left : CALL_BYTES, MSG_DONTWAIT);
    if (n == 0)
        errx(EXIT_FAILURE, "the other side has ended");
    if (n < 0 && !would_block(n))
        err(EXIT_FAILURE, "recv");
    f->n_received += n > 0 ? (size_t)n : 0;
    return n > 0 ? (size_t)n : 0;
}

static void flow_start(struct flow *f, char *send, char *receive, size_t bytes, size_t may_send)
{
    f->send = send;
    f->receive = receive;
    f->bytes = bytes;
    f->n_sent = f->n_received = f->n_partial = 0;
    f->may_send = may_send;
}

/* Block until something can move. @return whether all flows are through. */
static bool wait_ready(struct peer *p)
{
    struct pollfd fds[MAX_PEERS];
    bool is_over = true;
    for (unsigned i = 0; i < p->n_flows; i++) {
        const struct flow *f = &p->flows[i];
        short events = f->n_received < f->bytes ? POLLIN : 0;
        events |= f->n_sent < f->may_send ? POLLOUT : 0;
        fds[i] = (struct pollfd){.fd = f->fd, .events = events};
        is_over &= f->n_sent == f->bytes && f->n_received == f->bytes;
    }
    if (!is_over && poll(fds, p->n_flows, -1) < 0 && errno != EINTR)
        err(EXIT_FAILURE, "poll");
    return is_over;
}

/* Send all of `out` and receive as much into `in`, divided over the connections. */
static void exchange(struct peer *p, char *out, char *in, size_t bytes)
{
    size_t begin = 0;
    for (unsigned i = 0; i < p->n_flows; i++) {
        size_t end = bytes * (i + 1) / p->n_flows;
        flow_start(&p->flows[i], out + begin, in + begin, end - begin, end - begin);
        begin = end;
    }
    while (!wait_ready(p)) {
        for (unsigned i = 0; i < p->n_flows; i++) {
            flow_send(&p->flows[i]);
            flow_receive(&p->flows[i], p->flows[i].receive + p->flows[i].n_received);
        }
    }
}

/* ------------------------------------------------------------------ server */

/* Add the n bytes that a client has just sent to the sum, element by element. */
static void add_piece(struct flow *f, const char *piece, size_t n)
{
    float *sum = (float *)(void *)(f->receive + (f->n_received - n - f->n_partial));
    size_t at = 0;
    if (f->n_partial) {
        while (f->n_partial < sizeof(float) && at < n)
            f->partial[f->n_partial++] = piece[at++];
        if (f->n_partial < sizeof(float))
            return;
        float value;
        memcpy(&value, f->partial, sizeof value);
        *sum++ += value;
        f->n_partial = 0;
    }
    size_t n_whole = (n - at) / sizeof(float);
    for (size_t i = 0; i < n_whole; i++) {
        float value;
        memcpy(&value, piece + at + i * sizeof value, sizeof value);
        sum[i] += value;
    }
    at += n_whole * sizeof(float);
    f->n_partial = n - at;
    memcpy(f->partial, piece + at, n - at);
}

static void serve(struct peer *p, char *tensor, size_t bytes)
{
    for (unsigned i = 0; i < p->n_flows; i++)
        flow_start(&p->flows[i], tensor, tensor, bytes, 0);
    while (!wait_ready(p)) {
        size_t complete = bytes;
        for (unsigned i = 0; i < p->n_flows; i++) {
            struct flow *f = &p->flows[i];
            size_t n = flow_receive(f, p->piece);
            add_piece(f, p->piece, n);
            size_t whole = f->n_received - f->n_partial;
            complete = whole < complete ? whole : complete;
        }
        for (unsigned i = 0; i < p->n_flows; i++) {
            p->flows[i].may_send = complete;
            flow_send(&p->flows[i]);
        }
    }
}

static void move(struct peer *p, void *tensor, void *other, size_t bytes)
{
    if (p->is_exchange)
        exchange(p, tensor, other, bytes);
    else if (p->options->rank == 0)
        serve(p, tensor, bytes);
    else
        exchange(p, tensor, tensor, bytes); /* what comes back has long been sent */
}

/* ------------------------------------------------------------------ hooks */

static void allreduce(void *context, size_t bytes)
{
    struct peer *p = context;
    move(p, p->tensor, p->other, bytes);
}

static size_t sum(void *context, size_t value)
{
    struct peer *p = context;
    float mine = (float)value, theirs = 0;
    move(p, &mine, &theirs, sizeof mine);
    return (size_t)(mine + theirs);
}

static void barrier(void *context)
{
    sum(context, 0);
}

/* ------------------------------------------------------------------ connections */

static struct sockaddr_in resolve(const char *address)
{
    char host[256];
    const char *colon = address ? strrchr(address, ':') : NULL;
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found;
    if (!colon || (size_t)(colon - address) >= sizeof host)
        errx(2, "--address HOST:PORT is needed");
    snprintf(host, sizeof host, "%.*s", (int)(colon - address), address);
    int status = getaddrinfo(host, colon + 1, &hints, &found);
    if (status != 0)
        errx(EXIT_FAILURE, "%s: %s", address, gai_strerror(status));
    struct sockaddr_in result;
    memcpy(&result, found->ai_addr, sizeof result);
    freeaddrinfo(found);
    return result;
}

static void add_flow(struct peer *p, int fd)
{
    int one = 1;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) < 0)
        err(EXIT_FAILURE, "TCP_NODELAY");
    p->flows[p->n_flows++].fd = fd;
}

static void accept_all(struct peer *p, const struct sockaddr_in *address, unsigned n)
{
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) < 0 ||
        bind(listener, (const struct sockaddr *)address, sizeof *address) < 0 ||
        listen(listener, MAX_PEERS) < 0)
        err(EXIT_FAILURE, "%s", p->options->address);
    for (unsigned i = 0; i < n; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            err(EXIT_FAILURE, "accept");
        add_flow(p, fd);
    }
    close(listener);
}

/* Rank 0 may not listen yet. */
static void connect_one(struct peer *p, const struct sockaddr_in *address)
{
    const struct timespec pause = {.tv_nsec = 10000000};
    for (unsigned i = 0; i < CONNECT_S * 100; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            err(EXIT_FAILURE, "socket");
        if (connect(fd, (const struct sockaddr *)address, sizeof *address) == 0) {
            add_flow(p, fd);
            return;
        }
        close(fd);
        nanosleep(&pause, NULL);
    }
    errx(EXIT_FAILURE, "%s does not answer", p->options->address);
}

static void connect_all(struct peer *p)
{
    const struct bench_options *options = p->options;
    struct sockaddr_in address = resolve(options->address);
    unsigned streams = p->is_exchange ? options->streams : 1;
    unsigned n = options->rank > 0 ? streams : p->is_exchange ? streams : options->ranks - 1;
    if (n > MAX_PEERS)
        errx(2, "too many connections");
    if (options->rank == 0)
        accept_all(p, &address, n);
    for (unsigned i = 0; options->rank > 0 && i < n; i++)
        connect_one(p, &address);
}

int main(int argc, char **argv)
{
    struct bench_options options;
    struct peer p = {.options = &options};
    bench_parse(&options, argc, argv);
    const char *algorithm = options.algorithm ? options.algorithm : "exchange";
    p.is_exchange = strcmp(algorithm, "exchange") == 0;
    if (!p.is_exchange && strcmp(algorithm, "server") != 0)
        errx(2, "--algorithm: exchange or server");
    if (options.rank < 0 || options.rank >= (int)options.ranks)
        errx(2, "--rank, below --ranks, is needed");
    if (options.dtype != GRADD_F32 || options.redop != GRADD_SUM)
        errx(2, "only float32 sums");
    if (p.is_exchange && (options.ranks != 2 || options.check))
        errx(2, "exchange: two ranks, and nothing to check");
    p.tensor = bench_memory(bench_max_size(&options));
    p.other = p.is_exchange ? bench_memory(bench_max_size(&options)) : NULL;
    p.piece = bench_memory(CALL_BYTES);
    connect_all(&p);

    struct bench_collective collective = {
        .program = "socket",
        .variant = algorithm,
        .rank = options.rank,
        .ranks = (int)options.ranks,
        .tensors = &p.tensor,
        .n_tensors = 1,
        .context = &p,
        .allreduce = allreduce,
        .barrier = barrier,
        .sum = sum,
    };
    return bench_run(&options, &collective);
}
