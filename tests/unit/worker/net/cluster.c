/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster.h"

#include <arpa/inet.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <check.h>

#include "worker/plan/signature.h"
#include "worker/reduce/convert.h"

#define require(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            ck_abort_msg("line %d: %s", __LINE__, #condition);                                     \
    } while (0)

enum { GUARD_BYTES = 64, GUARD = 0xa5 };

/* A batch on one node. */
struct run {
    struct backend_batch batch;
    struct cluster_node *node;
    struct run *next; /* of those that are not done */
};

/* ------------------------------------------------------------------ nodes */

static void connect_tcp(int fds[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    require(listener >= 0 && bind(listener, (struct sockaddr *)&address, sizeof address) == 0);
    require(listen(listener, 1) == 0);
    require(getsockname(listener, (struct sockaddr *)&address, &bytes) == 0);
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    require(connect(fds[0], (struct sockaddr *)&address, sizeof address) == 0);
    fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    require(fds[1] >= 0);
    close(listener);
}

static struct link *make_link(int fd, enum cluster_links links, int is_server)
{
    static const uint8_t secret[32] = {1, 2, 3};
    struct link *link =
        links == CLUSTER_TLS ? link_tls_new(fd, secret, is_server) : link_tcp_new(fd);
    require(link != NULL);
    return link;
}

static void on_lost(void *data, uint32_t node, const char *text)
{
    struct cluster_node *self = data;
    self->n_lost++;
    self->lost_node = node;
    snprintf(self->text, sizeof self->text, "%s", text);
}

static bool is_neighbour(uint32_t a, uint32_t b, uint32_t n)
{
    return (a + 1) % n == b || (b + 1) % n == a;
}

void cluster_start(struct cluster *cluster, uint32_t n_nodes, const uint32_t *ranks_of,
                   uint32_t n_streams, int wire, enum cluster_links kind, uint32_t n_played)
{
    static struct link *links[CLUSTER_NODES_MAX][CLUSTER_NODES_MAX * NET_STREAMS_MAX];
    memset(links, 0, sizeof links);
    *cluster = (struct cluster){.n_nodes = n_nodes, .wire = wire};
    const uint32_t n_real = n_nodes - n_played;
    for (uint32_t a = 0; a < n_nodes; a++) {
        for (uint32_t i = 0; i < ranks_of[a]; i++)
            cluster->node_of[cluster->n_ranks++] = a;
        for (uint32_t b = a + 1; b < n_nodes && a < n_real; b++) {
            uint32_t n = is_neighbour(a, b, n_nodes) ? n_streams : 1;
            for (uint32_t s = 0; s < n; s++) {
                int fds[2];
                if (kind == CLUSTER_SOCKETS)
                    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
                else
                    connect_tcp(fds);
                links[a][b * NET_STREAMS_MAX + s] = make_link(fds[0], kind, 0);
                if (b < n_real)
                    links[b][a * NET_STREAMS_MAX + s] = make_link(fds[1], kind, 1);
                else
                    cluster->nodes[a].peer_fds[b] = fds[1];
            }
        }
    }
    for (uint32_t a = 0; a < n_real; a++) {
        struct cluster_node *node = &cluster->nodes[a];
        const char *text = NULL;
        node->loop = loop_new();
        const struct net_setup setup = {.loop = node->loop,
                                        .node_rank = a,
                                        .n_nodes = n_nodes,
                                        .ring_streams = n_streams,
                                        .links = links[a],
                                        .wire = wire,
                                        .on_lost = on_lost,
                                        .data = node};
        node->net = net_new(&setup, &text);
        require(node->net != NULL);
    }
}

void cluster_stop(struct cluster *cluster)
{
    for (uint32_t a = 0; a < cluster->n_nodes; a++) {
        struct cluster_node *node = &cluster->nodes[a];
        backend_net.free(node->net);
        loop_free(node->loop);
        while (node->runs) { /* freed under way */
            struct run *run = node->runs;
            node->runs = run->next;
            free(run->batch.ops);
            free(run);
        }
        for (uint32_t b = 0; b < cluster->n_nodes; b++)
            if (node->peer_fds[b] > 0)
                close(node->peer_fds[b]);
        *node = (struct cluster_node){0};
    }
}

/* ------------------------------------------------------------------ values */

static double load(enum gradd_dtype dtype, const uint8_t *base, uint64_t i)
{
    union {
        int8_t i8;
        uint8_t u8;
        int32_t i32;
        int64_t i64;
        uint16_t half;
        float f32;
        double f64;
    } x;
    float widened;
    memcpy(&x, base + i * dtype_bytes(dtype), dtype_bytes(dtype));
    switch (dtype) {
    case GRADD_I8:
        return x.i8;
    case GRADD_U8:
        return x.u8;
    case GRADD_I32:
        return x.i32;
    case GRADD_I64:
        return (double)x.i64;
    case GRADD_F32:
        return (double)x.f32;
    case GRADD_F64:
        return x.f64;
    case GRADD_F16:
    case GRADD_BF16:
        break;
    }
    convert_widen(dtype, &x.half, &widened, 1);
    return (double)widened;
}

static void store(enum gradd_dtype dtype, uint8_t *base, uint64_t i, double value)
{
    union {
        int64_t i64;
        uint16_t half;
        float f32;
        double f64;
    } x = {0};
    const float narrow = (float)value;
    if (dtype == GRADD_F32)
        x.f32 = narrow;
    else if (dtype == GRADD_F64)
        x.f64 = value;
    else if (dtype == GRADD_F16 || dtype == GRADD_BF16)
        convert_narrow(dtype, &narrow, &x.half, 1);
    else
        x.i64 = (int64_t)value; /* little-endian: the low bytes */
    memcpy(base + i * dtype_bytes(dtype), &x, dtype_bytes(dtype));
}

static uint8_t *make_memory(struct collective *c, size_t index, uint64_t count)
{
    const size_t bytes = count * dtype_bytes(c->dtype);
    uint8_t *memory = malloc(bytes + 2 * GUARD_BYTES + c->shift);
    require(memory != NULL);
    memset(memory, GUARD, bytes + 2 * GUARD_BYTES + c->shift);
    c->memory[index] = memory;
    return memory + GUARD_BYTES + c->shift;
}

/* Small enough for every type, and for a product of many. */
static double value_of(const struct collective *c, unsigned seed, uint32_t index, uint64_t i)
{
    uint64_t x = (seed + index * 7919u + i) * 0x9e3779b97f4a7c15u >> 40;
    return c->redop == GRADD_PROD ? 1 + (double)(x % 8 == 0) * (index % 4 == 0) : (double)(x % 6);
}

static void describe(struct collective *c, const struct cluster *cluster, uint32_t node)
{
    struct backend_op *op = &c->ops[node];
    *op = (struct backend_op){
        .kind = c->kind,
        .dtype = c->dtype,
        .redop = c->redop,
        .prescale = c->prescale,
        .postscale = c->postscale,
        .n_ranks = c->n_ranks,
        .root = c->root,
        .parts = c->parts[node],
        .counts = c->counts[0],
        .nonfinite = c->checks_finite ? c->nonfinite[node] : NULL,
    };
    if (c->kind == GRADD_ALLREDUCE || c->kind == GRADD_BROADCAST)
        op->end = c->count[0];
    for (uint32_t i = 0; i < c->n_ranks; i++) {
        struct backend_part *part = &c->parts[node][i];
        *part = (struct backend_part){
            .node = cluster->node_of[c->ranks[i]], .count = c->count[i], .counts = c->counts[i]};
        op->n_joined += c->is_joined[i];
        if (part->node == node && !c->is_joined[i]) {
            part->in.base = c->in[i];
            part->out.base = c->out[i];
        }
    }
}

static uint64_t out_count_of(const struct collective *c, uint32_t index)
{
    uint64_t n = 0;
    switch (c->kind) {
    case GRADD_ALLGATHER:
        for (uint32_t i = 0; i < c->n_ranks; i++)
            n += c->count[i];
        return n;
    case GRADD_REDUCE_SCATTER:
        return c->counts[0][index];
    case GRADD_ALLTOALL:
        for (uint32_t i = 0; i < c->n_ranks; i++)
            n += c->counts[i][index];
        return n;
    default:
        return c->count[0];
    }
}

void collective_prepare(struct collective *c, const struct cluster *cluster, unsigned seed)
{
    for (uint32_t i = 0; i < c->n_ranks; i++) {
        c->out_count[i] = out_count_of(c, i);
        c->values[i] = calloc(c->count[i] + 1, sizeof(double));
        c->out[i] = make_memory(c, 2 * i, c->out_count[i]);
        c->in[i] = c->in_place ? c->out[i] : make_memory(c, 2 * i + 1, c->count[i]);
        for (uint64_t k = 0; k < c->count[i]; k++) {
            c->values[i][k] = value_of(c, seed, i, k);
            if (c->kind != GRADD_BROADCAST || i == c->root || !c->in_place)
                store(c->dtype, c->in[i], k, c->values[i][k]);
        }
    }
    for (uint32_t node = 0; node < cluster->n_nodes; node++)
        describe(c, cluster, node);
}

void collective_free(struct collective *c)
{
    for (uint32_t i = 0; i < c->n_ranks; i++) {
        free(c->memory[2 * i]);
        free(c->memory[2 * i + 1]);
        free(c->values[i]);
    }
}

/* ------------------------------------------------------------------ reference */

static bool is_integer(enum gradd_dtype dtype)
{
    return dtype == GRADD_I8 || dtype == GRADD_U8 || dtype == GRADD_I32 || dtype == GRADD_I64;
}

static double reduce_all(const struct collective *c, uint64_t i)
{
    double result = 0;
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        double x = c->is_joined[r] ? 0 : c->values[r][i] * c->prescale;
        if (is_integer(c->dtype))
            x = trunc(x);
        if (r == 0)
            result = x;
        else if (c->redop == GRADD_PROD)
            result *= x;
        else if (c->redop == GRADD_MAX)
            result = fmax(result, x);
        else if (c->redop == GRADD_MIN)
            result = fmin(result, x);
        else
            result += x;
    }
    if (c->redop == GRADD_AVG)
        result /= c->n_ranks;
    if (is_integer(c->dtype))
        result = trunc(result);
    result *= c->postscale;
    return is_integer(c->dtype) ? trunc(result) : result;
}

double collective_expected(const struct collective *c, uint32_t index, uint64_t i)
{
    uint32_t from = 0;
    switch (c->kind) {
    case GRADD_BROADCAST:
        return c->values[c->root][i];
    case GRADD_ALLGATHER:
        for (; i >= c->count[from]; from++)
            i -= c->count[from];
        return c->values[from][i];
    case GRADD_REDUCE_SCATTER:
        for (uint32_t r = 0; r < index; r++)
            i += c->counts[0][r];
        return reduce_all(c, i);
    case GRADD_ALLTOALL:
        for (; i >= c->counts[from][index]; from++)
            i -= c->counts[from][index];
        for (uint32_t r = 0; r < index; r++)
            i += c->counts[from][r];
        return c->values[from][i];
    default:
        return reduce_all(c, i);
    }
}

double collective_result(const struct collective *c, uint32_t index, uint64_t i)
{
    return load(c->dtype, c->out[index], i);
}

static void check_guards(const struct collective *c, uint32_t index)
{
    const uint8_t *memory = c->memory[2 * index];
    const size_t bytes = c->out_count[index] * dtype_bytes(c->dtype);
    for (size_t i = 0; i < GUARD_BYTES + c->shift; i++)
        require(memory[i] == GUARD);
    for (size_t i = 0; i < GUARD_BYTES; i++)
        require(memory[GUARD_BYTES + c->shift + bytes + i] == GUARD);
}

static void check_nonfinite(const struct collective *c)
{
    for (uint32_t node = 0; c->checks_finite && node < CLUSTER_NODES_MAX; node++)
        for (uint32_t i = 0; i < CLUSTER_RANKS_MAX; i++)
            require(c->nonfinite[node][i] == 0);
}

void collective_check(const struct collective *c, double tolerance)
{
    const bool is_same = c->kind != GRADD_REDUCE_SCATTER && c->kind != GRADD_ALLTOALL;
    int first = -1;
    check_nonfinite(c);
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        check_guards(c, r);
        if (c->is_joined[r])
            continue;
        const size_t bytes = c->out_count[r] * dtype_bytes(c->dtype);
        if (first >= 0 && is_same) {
            require(memcmp(c->out[r], c->out[first], bytes) == 0);
            continue;
        }
        first = (int)r;
        for (uint64_t i = 0; i < c->out_count[r]; i++) {
            const double expected = collective_expected(c, r, i), got = collective_result(c, r, i);
            if (!(fabs(got - expected) <= tolerance * fabs(expected)))
                ck_abort_msg("%s %s %s rank %u element %llu: %g, expected %g", kind_name(c->kind),
                             dtype_name(c->dtype), redop_name(c->redop), r, (unsigned long long)i,
                             got, expected);
        }
    }
}

/* ------------------------------------------------------------------ runs */

static void on_done(void *data, struct backend_batch *batch)
{
    struct run *run = data, **link = &run->node->runs;
    while (*link != run)
        link = &(*link)->next;
    *link = run->next;
    run->node->n_waiting--;
    for (size_t i = 0; i < batch->n_ops; i++) {
        if (batch->ops[i]->status == GRADD_OK)
            continue;
        run->node->status = batch->ops[i]->status;
        run->node->n_failed++;
        if (!run->node->n_lost)
            snprintf(run->node->text, sizeof run->node->text, "%s", batch->ops[i]->text);
        break;
    }
    free(batch->ops);
    free(run);
}

void cluster_run(struct cluster *cluster, struct collective *const *batch, size_t n)
{
    for (uint32_t a = 0; a < cluster->n_nodes; a++) {
        struct cluster_node *node = &cluster->nodes[a];
        if (!node->net)
            continue;
        struct run *run = calloc(1, sizeof *run);
        require(run != NULL);
        run->node = node;
        run->batch = (struct backend_batch){.done = on_done, .data = run};
        run->batch.ops = calloc(n + 1, sizeof(*run->batch.ops));
        for (size_t i = 0; i < n; i++)
            for (uint32_t r = 0; r < batch[i]->n_ranks; r++)
                if (cluster->node_of[batch[i]->ranks[r]] == a) {
                    run->batch.ops[run->batch.n_ops++] = &batch[i]->ops[a];
                    break;
                }
        run->next = node->runs;
        node->runs = run;
        node->n_waiting++;
        backend_net.run(node->net, &run->batch);
    }
}

void cluster_wait(struct cluster *cluster)
{
    for (uint32_t a = 0; a < cluster->n_nodes; a++)
        while (cluster->nodes[a].n_waiting > 0)
            require(loop_step(cluster->nodes[a].loop, true) == 0);
}
