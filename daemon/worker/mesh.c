/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/mesh.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/link_proof.h"
#include "worker/backend/net/net.h"

static const uint64_t ms = 1000000, second = 1000000000;
enum {
    RETRY_MS = 50,
    STEP_MS = 5000, /* for each connection attempt */
    KEEPALIVE_S = 1,
};

enum spoke_state {
    SPOKE_AWAITED,    /* the other side connects; the daemon will hand it over */
    SPOKE_PAUSED,     /* waits for the next attempt */
    SPOKE_CONNECTING, /* connect() is in progress, then the hello is sent */
    SPOKE_PROVING,    /* waits for the server's answer */
    SPOKE_UP,         /* fd is ready to be taken */
    SPOKE_TAKEN,
};

/* One connection to be. */
struct spoke {
    struct mesh *mesh;
    uint32_t node, stream;
    enum spoke_state state;
    int fd; /* -1: none */
    struct watch *watch, *timer;
    uint8_t hello[LINK_HELLO_BYTES];
    uint8_t answer[LINK_ANSWER_BYTES];
    size_t n_answer;
};

struct mesh {
    struct loop *loop;
    const struct layout *layout;
    const struct mesh_ops *ops;
    void *data;
    struct spoke *spokes;
    size_t n_spokes, n_up;
    uint64_t dead_ns;
    struct watch *deadline;
    char last_error[200];
    bool is_over; /* up, or reported lost */
};

static void on_timer(void *data);
static void on_deadline(void *data);

/* ------------------------------------------------------------------ which connections there are */

static bool are_neighbours(const struct layout *layout, uint32_t node)
{
    uint32_t n = layout->n_nodes, me = layout->node_rank;
    return node == (me + 1) % n || node == (me + n - 1) % n;
}

static void add_spoke(struct mesh *mesh, uint32_t node, uint32_t stream)
{
    mesh->spokes[mesh->n_spokes++] = (struct spoke){
        .mesh = mesh,
        .node = node,
        .stream = stream,
        .state = node > mesh->layout->node_rank ? SPOKE_PAUSED : SPOKE_AWAITED,
        .fd = -1,
    };
}

static void add_spokes(struct mesh *mesh)
{
    const struct layout *layout = mesh->layout;
    for (uint32_t node = 0; node < layout->n_nodes; node++) {
        if (node == layout->node_rank)
            continue;
        if (node == 0 || layout->node_rank == 0)
            add_spoke(mesh, node, MESH_NEGOTIATION);
        uint32_t n = are_neighbours(layout, node) ? layout->ring_streams : 1;
        for (uint32_t stream = 0; stream < n; stream++)
            add_spoke(mesh, node, stream);
    }
}

struct mesh *mesh_new(struct loop *loop, const struct layout *layout, uint64_t dead_ns,
                      const struct mesh_ops *ops, void *data)
{
    struct mesh *mesh = calloc(1, sizeof *mesh);
    if (!mesh)
        return NULL;
    mesh->loop = loop;
    mesh->layout = layout;
    mesh->dead_ns = dead_ns;
    mesh->ops = ops;
    mesh->data = data;
    mesh->spokes = calloc((size_t)layout->n_nodes * (NET_STREAMS_MAX + 1), sizeof *mesh->spokes);
    mesh->deadline = watch_timer(loop, on_deadline, mesh);
    if (!mesh->spokes || !mesh->deadline) {
        mesh_free(mesh);
        return NULL;
    }
    add_spokes(mesh);
    for (size_t i = 0; i < mesh->n_spokes; i++) {
        mesh->spokes[i].timer = watch_timer(loop, on_timer, &mesh->spokes[i]);
        if (!mesh->spokes[i].timer) {
            mesh_free(mesh);
            return NULL;
        }
    }
    return mesh;
}

static void spoke_close(struct spoke *spoke)
{
    watch_free(spoke->watch);
    spoke->watch = NULL;
    if (spoke->fd >= 0)
        close(spoke->fd);
    spoke->fd = -1;
}

void mesh_free(struct mesh *mesh)
{
    if (!mesh)
        return;
    for (size_t i = 0; mesh->spokes && i < mesh->n_spokes; i++) {
        spoke_close(&mesh->spokes[i]);
        watch_free(mesh->spokes[i].timer);
    }
    watch_free(mesh->deadline);
    free(mesh->spokes);
    free(mesh);
}

/* ------------------------------------------------------------------ ends */

static void mesh_lost(struct mesh *mesh, uint32_t node, const char *text)
{
    if (mesh->is_over)
        return;
    mesh->is_over = true;
    watch_disarm(mesh->deadline);
    mesh->ops->on_lost(mesh->data, node, text);
}

static void on_deadline(void *data)
{
    struct mesh *mesh = data;
    for (size_t i = 0; i < mesh->n_spokes; i++) {
        const struct spoke *spoke = &mesh->spokes[i];
        if (spoke->state == SPOKE_UP)
            continue;
        char text[400];
        snprintf(text, sizeof text, "no data connection with node %s within %.3g s%s%s",
                 mesh->layout->nodes[spoke->node].name, (double)mesh->dead_ns / 1e9,
                 mesh->last_error[0] ? ": " : "", mesh->last_error);
        mesh_lost(mesh, spoke->node, text);
        return;
    }
}

/* Heartbeats prove that daemons hear each other: two nodes that only follow have none between them,
 * so the kernel watches their connections. */
static void set_options(int fd, uint64_t dead_ns)
{
    const int on = 1, probe_s = KEEPALIVE_S;
    const int dead_ms = (int)(dead_ns / ms), n_probes = (int)(dead_ns / second / KEEPALIVE_S) + 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &dead_ms, sizeof dead_ms);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &probe_s, sizeof probe_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_s, sizeof probe_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &n_probes, sizeof n_probes);
}

static void spoke_up(struct spoke *spoke)
{
    struct mesh *mesh = spoke->mesh;
    watch_free(spoke->watch);
    spoke->watch = NULL;
    watch_disarm(spoke->timer);
    set_options(spoke->fd, mesh->dead_ns);
    spoke->state = SPOKE_UP;
    if (++mesh->n_up < mesh->n_spokes || mesh->is_over)
        return;
    mesh->is_over = true;
    watch_disarm(mesh->deadline);
    mesh->ops->on_up(mesh->data);
}

/* ------------------------------------------------------------------ connecting */

static void spoke_retry(struct spoke *spoke, const char *why)
{
    struct mesh *mesh = spoke->mesh;
    const struct layout_node *node = &mesh->layout->nodes[spoke->node];
    snprintf(mesh->last_error, sizeof mesh->last_error, "%s port %u: %s", node->address, node->port,
             why);
    spoke_close(spoke);
    spoke->state = SPOKE_PAUSED;
    watch_arm(spoke->timer, RETRY_MS * ms);
}

static int connect_to(const struct layout_node *node)
{
    char port[16];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST}, *address;
    snprintf(port, sizeof port, "%u", node->port);
    if (getaddrinfo(node->address, port, &hints, &address) != 0)
        return -EINVAL;
    int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int rc = fd < 0 ? -errno : fd;
    if (fd >= 0 && connect(fd, address->ai_addr, address->ai_addrlen) < 0 && errno != EINPROGRESS) {
        rc = -errno;
        close(fd);
    }
    freeaddrinfo(address);
    return rc;
}

static void send_hello(struct spoke *spoke)
{
    const struct layout *layout = spoke->mesh->layout;
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(spoke->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
        spoke_retry(spoke, strerror(error));
        return;
    }
    struct link_hello hello = {
        .version = LINK_VERSION,
        .from_node = (uint16_t)layout->node_rank,
        .to_node = (uint16_t)spoke->node,
        .stream = (uint16_t)spoke->stream,
        .epoch = layout->epoch,
    };
    memcpy(hello.link_id, layout->link_id, sizeof hello.link_id);
    link_random(hello.nonce, sizeof hello.nonce);
    link_hello_pack(&hello, spoke->hello);
    /* A new socket's buffer takes 56 bytes. */
    if (send(spoke->fd, spoke->hello, sizeof spoke->hello, MSG_NOSIGNAL) !=
        (ssize_t)sizeof spoke->hello) {
        spoke_retry(spoke, strerror(errno));
        return;
    }
    spoke->state = SPOKE_PROVING;
    spoke->n_answer = 0;
    watch_set(spoke->watch, WATCH_READ);
}

static void read_answer(struct spoke *spoke)
{
    const struct layout *layout = spoke->mesh->layout;
    ssize_t n = recv(spoke->fd, spoke->answer + spoke->n_answer,
                     sizeof spoke->answer - spoke->n_answer, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) { /* it does not know the epoch yet, or not at all */
        spoke_retry(spoke, n < 0 ? strerror(errno) : "the daemon there closed the connection");
        return;
    }
    spoke->n_answer += (size_t)n;
    if (spoke->n_answer < sizeof spoke->answer)
        return;
    uint8_t proof[LINK_PROOF_BYTES];
    if (link_check_server(layout->secret, spoke->hello, spoke->answer) < 0 ||
        link_client_proof(layout->secret, spoke->hello, spoke->answer, proof) < 0) {
        spoke_retry(spoke, "it does not know the epoch's secret");
        return;
    }
    if (send(spoke->fd, proof, sizeof proof, MSG_NOSIGNAL) != (ssize_t)sizeof proof) {
        spoke_retry(spoke, strerror(errno));
        return;
    }
    spoke_up(spoke);
}

static void on_spoke_event(void *data, int fd, unsigned events)
{
    struct spoke *spoke = data;
    if (spoke->state == SPOKE_CONNECTING)
        send_hello(spoke);
    else if (spoke->state == SPOKE_PROVING)
        read_answer(spoke);
}

static void spoke_connect(struct spoke *spoke)
{
    struct mesh *mesh = spoke->mesh;
    int fd = connect_to(&mesh->layout->nodes[spoke->node]);
    if (fd < 0) {
        spoke_retry(spoke, strerror(-fd));
        return;
    }
    spoke->fd = fd;
    spoke->watch = watch_fd(mesh->loop, fd, WATCH_WRITE, on_spoke_event, spoke);
    if (!spoke->watch) {
        spoke_retry(spoke, strerror(ENOMEM));
        return;
    }
    spoke->state = SPOKE_CONNECTING;
    watch_arm(spoke->timer, STEP_MS * ms);
}

static void on_timer(void *data)
{
    struct spoke *spoke = data;
    if (spoke->mesh->is_over)
        return;
    if (spoke->state == SPOKE_PAUSED)
        spoke_connect(spoke);
    else
        spoke_retry(spoke, "no answer");
}

void mesh_start(struct mesh *mesh)
{
    watch_arm(mesh->deadline, mesh->dead_ns);
    for (size_t i = 0; i < mesh->n_spokes; i++)
        if (mesh->spokes[i].state == SPOKE_PAUSED)
            spoke_connect(&mesh->spokes[i]);
}

/* ------------------------------------------------------------------ handing over */

static struct spoke *find_spoke(struct mesh *mesh, uint32_t node, uint32_t stream)
{
    for (size_t i = 0; i < mesh->n_spokes; i++)
        if (mesh->spokes[i].node == node && mesh->spokes[i].stream == stream)
            return &mesh->spokes[i];
    return NULL;
}

void mesh_arrived(struct mesh *mesh, uint32_t from_node, uint32_t stream, int take_fd)
{
    struct spoke *spoke = find_spoke(mesh, from_node, stream);
    if (!spoke || (spoke->state != SPOKE_AWAITED && spoke->state != SPOKE_UP)) {
        close(take_fd);
        return;
    }
    fcntl(take_fd, F_SETFL, fcntl(take_fd, F_GETFL) | O_NONBLOCK);
    if (spoke->state == SPOKE_UP) { /* the other side lost its first attempt and came again */
        close(spoke->fd);
        spoke->fd = take_fd;
        set_options(spoke->fd, mesh->dead_ns);
        return;
    }
    spoke->fd = take_fd;
    spoke_up(spoke);
}

int mesh_take(struct mesh *mesh, uint32_t node, uint32_t stream)
{
    struct spoke *spoke = find_spoke(mesh, node, stream);
    if (!spoke || spoke->state != SPOKE_UP)
        return -1;
    int fd = spoke->fd;
    spoke->fd = -1;
    spoke->state = SPOKE_TAKEN;
    return fd;
}
