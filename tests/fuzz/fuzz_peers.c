/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The port for other nodes, and what daemons say to each other: strangers who have no key, and
 * nodes who have it and lie, with trainers of this node that join jobs over them. Workers are
 * doubles (worker_double.c).
 *
 * A record's `who`: 0 and 1: that node, connected on first use, sends a frame within TLS; 2: so
 * does the node that this one has dialled; 3-5: raw bytes within TLS; 6-8: that connection ends; 9:
 * a stranger sends bytes; 10: it goes; 16-19: that trainer sends a frame; 20-23: it ends; 24: a
 * worker is ready; 25: one dies; 26: one speaks; else the loop turns.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "control/admin.h"
#include "control/peer_tls.h"
#include "control/peer_visitor.h"
#include "control/rendezvous.h"
#include "daemon_scene.h"
#include "records.h"
#include "worker_double.h"

enum { N_NODES = 3, DIALLED = 2, N_TRAINERS = 4, TURNS = 3, HANDSHAKE_TURNS = 16 };

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct node {
    int fd; /* -1: not connected */
    struct peer_tls *tls;
};

struct scene {
    struct daemon *daemon;
    struct node nodes[N_NODES];
    int stranger, trainer[N_TRAINERS]; /* -1: not connected */
};

/* Where the node that is dialled listens; one for the whole run, as its port is in messages. */
static int listener = -1;
static char coordinator[32];

/* ------------------------------------------------------------------ the scene */

static void on_remote_stats(void *owner, const Pb__RemoteJobReply *reply)
{
    admin_on_remote_stats(owner, reply);
}

static void open_scene(struct scene *scene)
{
    struct daemon *daemon = daemon_scene_open();
    daemon->config.peer_port = 0;
    snprintf(daemon->config.peer_address, sizeof daemon->config.peer_address, "127.0.0.1");
    daemon->jobs.peers = &daemon->peers;
    daemon->jobs.on_remote_stats = on_remote_stats;
    daemon->peers = (struct peers){
        .loop = daemon->loop,
        .config = &daemon->config,
        .node = daemon->node,
        .key = {.is_set = true},
        .ops = &rendezvous_peers_ops,
        .owner = &daemon->jobs,
    };
    if (peers_start(&daemon->peers, true, -1) < 0)
        abort();
    scene->daemon = daemon;
    scene->stranger = -1;
    for (int i = 0; i < N_NODES; i++)
        scene->nodes[i] = (struct node){.fd = -1};
    for (int i = 0; i < N_TRAINERS; i++)
        scene->trainer[i] = -1;
}

static void node_end(struct node *node)
{
    peer_tls_free(node->tls);
    if (node->fd >= 0)
        close(node->fd);
    *node = (struct node){.fd = -1};
}

static void turn(struct scene *scene)
{
    uint8_t trash[4096];
    for (int i = 0; i < TURNS; i++)
        loop_step(scene->daemon->loop, false);
    for (int i = 0; i < N_TRAINERS; i++)
        if (scene->trainer[i] >= 0)
            drain_socket(scene->trainer[i]);
    for (int i = 0; i < N_NODES; i++)
        while (scene->nodes[i].tls && peer_tls_read(scene->nodes[i].tls, trash, sizeof trash) > 0)
            continue;
}

static void close_scene(struct scene *scene)
{
    daemon_scene_close(scene->daemon);
    for (int i = 0; i < N_NODES; i++)
        node_end(&scene->nodes[i]);
    for (int i = 0; i < N_TRAINERS; i++)
        if (scene->trainer[i] >= 0)
            close(scene->trainer[i]);
    if (scene->stranger >= 0)
        close(scene->stranger);
    int waiting;
    while ((waiting = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0)
        close(waiting); /* dialled and not served in this scene */
}

/* ------------------------------------------------------------------ nodes */

static void shake_hands(struct scene *scene, struct node *node)
{
    int rc = -EAGAIN;
    for (int i = 0; i < HANDSHAKE_TURNS && rc == -EAGAIN; i++) {
        rc = peer_tls_handshake(node->tls);
        for (int n = 0; n < TURNS; n++)
            loop_step(scene->daemon->loop, false);
    }
    if (rc < 0)
        node_end(node);
}

/* A socket of ours whose other end the daemon serves. */
static int visit(struct scene *scene)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        abort();
    peer_visitor_new(&scene->daemon->peers, ends[0]);
    return ends[1];
}

/* NULL: it cannot be had now. */
static struct node *connected(struct scene *scene, unsigned i)
{
    static const uint8_t key[PEER_TLS_KEY_BYTES];
    struct node *node = &scene->nodes[i];
    if (node->fd >= 0)
        return node;
    node->fd =
        i == DIALLED ? accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : visit(scene);
    if (node->fd < 0)
        return NULL;
    node->tls = peer_tls_new(node->fd, i == DIALLED ? PEER_TLS_SERVER : PEER_TLS_CLIENT, key);
    if (!node->tls)
        abort();
    shake_hands(scene, node);
    return node->tls ? node : NULL;
}

static void say(struct node *node, const uint8_t *bytes, size_t n)
{
    if (node && n > 0)
        (void)peer_tls_write(node->tls, bytes, n);
}

static void say_frame(struct node *node, const struct record *record)
{
    uint8_t header[8] = {(uint8_t)record->n, (uint8_t)(record->n >> 8)};
    say(node, header, sizeof header);
    say(node, record->bytes, record->n);
}

/* ------------------------------------------------------------------ trainers and workers */

/* A join whose coordinator is elsewhere names the one that the fuzzer plays: names are not to be
 * looked up, nor strangers dialled. */
static void trainer_speaks(struct scene *scene, unsigned i, const struct record *record)
{
    struct wire_in in;
    const Pb__Envelope *said = daemon_scene_parse(record, &in);
    if (scene->trainer[i] < 0)
        scene->trainer[i] = daemon_scene_connect(scene->daemon);
    if (said) {
        Pb__Envelope envelope = *said;
        Pb__Join join = PB__JOIN__INIT;
        char own[32];
        snprintf(own, sizeof own, "127.0.0.1:%u", peers_port(&scene->daemon->peers));
        if (envelope.body_case == PB__ENVELOPE__BODY_JOIN) {
            join = *envelope.join;
            if (*join.coordinator)
                join.coordinator = *join.coordinator == 's' ? own : coordinator;
            envelope.join = &join;
        }
        struct wire_out out;
        wire_out_init(&out, WIRE_FRAME_MAX);
        if (wire_out_push(&out, &envelope, NULL, 0) == 0)
            (void)wire_out_flush(&out, scene->trainer[i]);
        wire_out_deinit(&out);
    }
    wire_in_deinit(&in);
}

static void perform(struct scene *scene, const struct record *record)
{
    unsigned who = record->who;
    switch (who) {
    case 0 ... 2:
        say_frame(connected(scene, who), record);
        break;
    case 3 ... 5:
        say(connected(scene, who - 3), record->bytes, record->n);
        break;
    case 6 ... 8:
        node_end(&scene->nodes[who - 6]);
        break;
    case 9:
        if (scene->stranger < 0)
            scene->stranger = visit(scene);
        (void)send(scene->stranger, record->bytes, record->n, MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
    case 10:
        if (scene->stranger >= 0)
            close(scene->stranger);
        scene->stranger = -1;
        break;
    case 16 ... 19:
        trainer_speaks(scene, who - 16, record);
        break;
    case 20 ... 23:
        if (scene->trainer[who - 20] >= 0)
            close(scene->trainer[who - 20]);
        scene->trainer[who - 20] = -1;
        break;
    case 24:
        worker_double_ready(record->n);
        break;
    case 25:
        worker_double_die(record->n);
        break;
    case 26:
        daemon_scene_worker_speaks(record);
        break;
    default:
        break;
    }
    turn(scene);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    signal(SIGPIPE, SIG_IGN);
    log_init("fuzz", LOG_LEVEL_ERROR);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, bytes) < 0 ||
        listen(listener, 16) < 0 || getsockname(listener, (struct sockaddr *)&address, &bytes) < 0)
        abort();
    snprintf(coordinator, sizeof coordinator, "127.0.0.1:%u", ntohs(address.sin_port));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct scene scene;
    struct record record;
    open_scene(&scene);
    for (int n = 0; n < 64 && record_next(&data, &size, &record); n++)
        perform(&scene, &record);
    close_scene(&scene);
    return 0;
}
