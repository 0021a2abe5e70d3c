/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All-reduce between nodes, the data path alone: every node is a process with a net backend,
 * without daemons or trainers, beside the same bytes moved both ways by plain sockets in the same
 * run.
 *
 *     net [nodes [ranks-per-node [streams [bytes ...]]]]
 *
 * Two nodes as root: two network namespaces with a veth pair. Otherwise: loopback.
 */
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "worker/backend/net/net.h"

enum { NODES_MAX = 8, RANKS_MAX = 8, RAW_BYTES = 256 * 1024, ITERS_MAX = 400, PORT = 17770 };

struct node {
    uint32_t rank, n_nodes, n_ranks, n_streams;
    bool has_veth;
    struct loop *loop;
    struct backend *net;
    struct link *links[NODES_MAX * NET_STREAMS_MAX];
    int raw_next[NET_STREAMS_MAX], raw_previous[NET_STREAMS_MAX];
    uint8_t *memory[RANKS_MAX], *raw;
    bool is_done;
};

/* ------------------------------------------------------------------ set-up */

static struct sockaddr_in address_of(const struct node *node, uint32_t rank)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(node->has_veth ? 0x0a4d0001 + rank : INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)(PORT + rank));
    return address;
}

struct greeting {
    uint32_t rank, stream, is_raw;
};

static int dial(const struct node *node, uint32_t to, uint32_t stream, uint32_t is_raw)
{
    const struct sockaddr_in address = address_of(node, to);
    const struct greeting greeting = {node->rank, stream, is_raw};
    for (int tries = 0; tries < 500; tries++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) {
            if (write(fd, &greeting, sizeof greeting) != sizeof greeting)
                err(1, "greeting");
            return fd;
        }
        close(fd);
        usleep(10000); /* the peer is still starting */
    }
    err(1, "connect to node %u", to);
}

static uint32_t streams_to(const struct node *node, uint32_t other)
{
    const uint32_t n = node->n_nodes;
    return (node->rank + 1) % n == other || (other + 1) % n == node->rank ? node->n_streams : 1;
}

static void take_connection(struct node *node, int listener)
{
    struct greeting greeting;
    int fd = accept(listener, NULL, NULL);
    if (fd < 0 || recv(fd, &greeting, sizeof greeting, MSG_WAITALL) != sizeof greeting)
        err(1, "accept");
    if (greeting.is_raw)
        node->raw_previous[greeting.stream] = fd;
    else
        node->links[greeting.rank * NET_STREAMS_MAX + greeting.stream] = link_tcp_new(fd);
}

static void on_lost(void *data, uint32_t peer, const char *text)
{
    errx(1, "node %u: %s", ((struct node *)data)->rank, text);
}

static void join(struct node *node)
{
    const struct sockaddr_in own = address_of(node, node->rank);
    const int one = 1;
    uint32_t n_expected = node->n_streams;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (const struct sockaddr *)&own, sizeof own) < 0 || listen(listener, 64) < 0)
        err(1, "listen");
    for (uint32_t other = 0; other < node->n_nodes; other++) {
        for (uint32_t s = 0; s < streams_to(node, other) && other != node->rank; s++) {
            if (other < node->rank)
                n_expected++;
            else
                node->links[other * NET_STREAMS_MAX + s] = link_tcp_new(dial(node, other, s, 0));
        }
    }
    for (uint32_t s = 0; s < node->n_streams; s++)
        node->raw_next[s] = dial(node, (node->rank + 1) % node->n_nodes, s, 1);
    while (n_expected-- > 0)
        take_connection(node, listener);
    close(listener);
    const char *text;
    node->loop = loop_new();
    const struct net_setup setup = {.loop = node->loop,
                                    .node_rank = node->rank,
                                    .n_nodes = node->n_nodes,
                                    .ring_streams = node->n_streams,
                                    .links = node->links,
                                    .on_lost = on_lost,
                                    .data = node};
    if (!(node->net = net_new(&setup, &text)))
        errx(1, "%s", text);
}

/* ------------------------------------------------------------------ what is timed */

static void on_done(void *data, struct backend_batch *batch)
{
    ((struct node *)data)->is_done = true;
}

static uint64_t time_net(struct node *node, uint64_t bytes)
{
    struct backend_part parts[NODES_MAX * RANKS_MAX] = {0};
    for (uint32_t i = 0; i < node->n_nodes * node->n_ranks; i++) {
        parts[i].node = i / node->n_ranks;
        parts[i].count = bytes / 4;
        if (parts[i].node == node->rank)
            parts[i].in.base = parts[i].out.base = node->memory[i % node->n_ranks];
    }
    struct backend_op op = {.kind = GRADD_ALLREDUCE,
                            .dtype = GRADD_F32,
                            .prescale = 1,
                            .postscale = 1,
                            .n_ranks = node->n_nodes * node->n_ranks,
                            .parts = parts,
                            .end = bytes / 4};
    struct backend_op *ops[] = {&op};
    struct backend_batch batch = {.ops = ops, .n_ops = 1, .done = on_done, .data = node};
    const uint64_t start = clock_now_ns();
    node->is_done = false;
    backend_net.run(node->net, &batch);
    while (!node->is_done)
        loop_step(node->loop, true);
    return clock_now_ns() - start;
}

static uint64_t rest(uint64_t left, uint64_t bytes)
{
    const uint64_t most = bytes < RAW_BYTES ? bytes : RAW_BYTES;
    return left < most ? left : most;
}

/* Send what a ring must to the next node and receive as much, one thread, without sums. */
static uint64_t time_raw(struct node *node, uint64_t bytes)
{
    const uint32_t n = node->n_nodes, n_streams = node->n_streams;
    const uint64_t each = (2 * (n - 1) * bytes / n + n_streams - 1) / n_streams;
    uint64_t sent[NET_STREAMS_MAX] = {0}, received[NET_STREAMS_MAX] = {0};
    const uint64_t start = clock_now_ns();
    for (;;) {
        struct pollfd fds[2 * NET_STREAMS_MAX];
        bool is_busy = false;
        for (uint32_t s = 0; s < n_streams; s++) {
            fds[2 * s] = (struct pollfd){sent[s] < each ? node->raw_next[s] : -1, POLLOUT, 0};
            fds[2 * s + 1] =
                (struct pollfd){received[s] < each ? node->raw_previous[s] : -1, POLLIN, 0};
            is_busy |= sent[s] < each || received[s] < each;
        }
        if (!is_busy)
            return clock_now_ns() - start;
        poll(fds, 2 * n_streams, -1);
        for (uint32_t s = 0; s < n_streams; s++) {
            uint64_t left = rest(each - sent[s], bytes);
            /* Through the tensor, as the net does; from and into one place would stay in the cache.
             */
            ssize_t moved = fds[2 * s].revents
                                ? send(fds[2 * s].fd, node->raw + sent[s] % (bytes - left + 1),
                                       left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                : 0;
            sent[s] += moved > 0 ? (uint64_t)moved : 0;
            left = rest(each - received[s], bytes);
            moved =
                fds[2 * s + 1].revents
                    ? recv(fds[2 * s + 1].fd, node->memory[0] + received[s] % (bytes - left + 1),
                           left, MSG_DONTWAIT)
                    : 0;
            received[s] += moved > 0 ? (uint64_t)moved : 0;
            if (moved == 0 && fds[2 * s + 1].revents)
                errx(1, "node %u: a peer has ended", node->rank);
        }
    }
}

static int compare_ns(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Of all threads of this node: a ratio that holds on a machine that others use as well. */
static double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void measure(struct node *node, uint64_t bytes)
{
    static uint64_t net_ns[ITERS_MAX], raw_ns[ITERS_MAX];
    double net_cpu_s = 0, raw_cpu_s = 0;
    size_t iters = (256u << 20) / bytes;
    iters = iters < 5 ? 5 : iters > ITERS_MAX ? ITERS_MAX : iters;
    for (uint32_t i = 0; i < node->n_ranks; i++)
        memset(node->memory[i], 0, bytes);
    time_net(node, bytes);
    time_raw(node, bytes);
    for (size_t i = 0; i < iters; i++) {
        const double start = cpu_s();
        net_ns[i] = time_net(node, bytes);
        const double middle = cpu_s();
        raw_ns[i] = time_raw(node, bytes);
        net_cpu_s += middle - start;
        raw_cpu_s += cpu_s() - middle;
    }
    if (node->rank != 0)
        return;
    qsort(net_ns, iters, sizeof *net_ns, compare_ns);
    qsort(raw_ns, iters, sizeof *raw_ns, compare_ns);
    const double net = (double)net_ns[iters / 2], raw = (double)raw_ns[iters / 2];
    const double moved = 2.0 * (node->n_nodes - 1) / node->n_nodes * (double)bytes;
    printf("%10llu B  net %10.1f us %6.3f GB/s   raw %10.1f us %6.3f GB/s   ratio %.2f, by CPU "
           "%.2f\n",
           (unsigned long long)bytes, net / 1e3, moved / net, raw / 1e3, moved / raw, raw / net,
           raw_cpu_s / net_cpu_s);
    fflush(stdout);
}

/* ------------------------------------------------------------------ processes */

static void configure(const char *device, const struct node *node)
{
    char command[160];
    snprintf(command, sizeof command,
             "ip link set lo up && ip addr add 10.77.0.%u/24 dev %s && "
             "ip link set %s up",
             node->rank + 1, device, device);
    if (system(command) != 0)
        errx(1, "%s", command);
}

/* This process in one new namespace, the child in another. */
static pid_t fork_with_veth(struct node *node)
{
    int ready[2], linked[2];
    char command[100], byte = 0;
    if (pipe(ready) < 0 || pipe(linked) < 0 || unshare(CLONE_NEWNET) < 0)
        err(1, "network namespace");
    pid_t child = fork();
    if (child == 0) {
        if (unshare(CLONE_NEWNET) < 0 || write(ready[1], &byte, 1) != 1 ||
            read(linked[0], &byte, 1) != 1)
            err(1, "network namespace");
        node->rank = 1;
        configure("gradd1", node);
        return 0;
    }
    if (read(ready[0], &byte, 1) != 1)
        err(1, "network namespace");
    snprintf(command, sizeof command, "ip link add gradd0 type veth peer name gradd1 netns %d",
             (int)child);
    if (system(command) != 0)
        errx(1, "%s", command);
    configure("gradd0", node);
    if (write(linked[1], &byte, 1) != 1)
        err(1, "network namespace");
    return child;
}

static uint8_t *shared_memory(uint64_t bytes)
{
    void *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        err(1, "memory");
    return memory;
}

int main(int argc, char **argv)
{
    static const char *const defaults[] = {"4", "1024", "65536", "1048576", "16777216", "67108864"};
    static struct node node;
    const char *const *sizes = argc > 4 ? (const char *const *)argv + 4 : defaults;
    const int n_sizes = argc > 4 ? argc - 4 : (int)(sizeof defaults / sizeof *defaults);
    uint64_t most = 0;
    node.n_nodes = argc > 1 ? (uint32_t)atoi(argv[1]) : 2;
    node.n_ranks = argc > 2 ? (uint32_t)atoi(argv[2]) : 1;
    node.n_streams = argc > 3 ? (uint32_t)atoi(argv[3]) : 1;
    if (node.n_nodes < 2 || node.n_nodes > NODES_MAX || node.n_ranks < 1 ||
        node.n_ranks > RANKS_MAX || node.n_streams < 1 || node.n_streams > NET_STREAMS_MAX)
        errx(2, "net [nodes 2-8 [ranks per node 1-8 [streams 1-8 [bytes ...]]]]");
    node.has_veth = node.n_nodes == 2 && geteuid() == 0 && !getenv("BENCH_LOOPBACK");
    if (node.has_veth)
        fork_with_veth(&node);
    for (uint32_t i = 1; i < node.n_nodes && !node.has_veth && node.rank == 0; i++)
        if (fork() == 0)
            node.rank = i;
    join(&node);
    for (int i = 0; i < n_sizes; i++)
        most = strtoull(sizes[i], NULL, 10) > most ? strtoull(sizes[i], NULL, 10) : most;
    for (uint32_t i = 0; i < node.n_ranks; i++)
        node.memory[i] = shared_memory(most);
    node.raw = shared_memory(most);
    if (node.rank == 0)
        printf("%u nodes x %u ranks, %u streams, %s\n", node.n_nodes, node.n_ranks, node.n_streams,
               node.has_veth ? "veth" : "loopback");
    for (int i = 0; i < n_sizes; i++)
        measure(&node, strtoull(sizes[i], NULL, 10));
    backend_net.free(node.net);
    while (node.rank == 0 && wait(NULL) > 0)
        ;
    return 0;
}
