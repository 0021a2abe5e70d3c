/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's sessions, jobs and admin replies, with clients and workers who lie. Workers are
 * doubles (worker_double.c): their messages are data too, for a worker runs with its job's rights.
 *
 * A record's `who`: 0-7 that client (connected on first use) sends a frame; 8-15 raw bytes; 16-23
 * that client's connection ends; 24 a worker is ready; 25 one dies; 26 one speaks (the bytes are
 * an envelope); 27 the daemon drains; 28 it aborts; else the loop turns.
 */
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "control/admin.h"
#include "control/daemon.h"
#include "records.h"
#include "worker_double.h"

enum { N_CLIENTS = 8, TURNS = 3 };

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct scene {
    struct daemon *daemon;
    int client[N_CLIENTS]; /* -1: not connected */
};

static const struct daemon_arguments arguments = {.lifeline_fd = -1, .ready_fd = -1};

static void on_change(void *owner)
{
    (void)owner;
}

static void on_stats(void *owner, struct job *job)
{
    admin_on_stats(owner, job);
}

static void open_scene(struct scene *scene)
{
    struct daemon *daemon = calloc(1, sizeof *daemon);
    if (!daemon || !(daemon->loop = loop_new()))
        abort();
    config_init(&daemon->config);
    daemon->arguments = &arguments;
    daemon->started_ns = clock_now_ns();
    daemon->max_sessions = 64;
    daemon->config.max_jobs_per_uid = 3;
    snprintf(daemon->node, sizeof daemon->node, "node");
    TAILQ_INIT(&daemon->sessions);
    worker_setup_init(&daemon->workers, daemon->loop, &daemon->config, daemon->node);
    daemon->jobs = (struct jobs){
        .loop = daemon->loop,
        .config = &daemon->config,
        .setup = &daemon->workers,
        .node = daemon->node,
        .on_change = on_change,
        .on_stats = on_stats,
        .owner = daemon,
    };
    scene->daemon = daemon;
    for (int i = 0; i < N_CLIENTS; i++)
        scene->client[i] = -1;
}

static void turn(struct scene *scene)
{
    for (int i = 0; i < TURNS; i++)
        loop_step(scene->daemon->loop, false);
    for (int i = 0; i < N_CLIENTS; i++)
        if (scene->client[i] >= 0)
            drain_socket(scene->client[i]);
}

static int client_socket(struct scene *scene, unsigned i)
{
    int ends[2];
    if (scene->client[i] >= 0)
        return scene->client[i];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        abort();
    session_new(scene->daemon, ends[0]);
    return scene->client[i] = ends[1];
}

static void speak(const struct record *record)
{
    struct wire_in in;
    struct wire_frame frame;
    uint8_t header[8] = {(uint8_t)record->n, (uint8_t)(record->n >> 8)};
    wire_in_init(&in);
    if (wire_in_feed(&in, header, sizeof header) == 0 &&
        wire_in_feed(&in, record->bytes, record->n) == 0 && wire_in_next(&in, &frame) == 1)
        worker_double_speak(record->n, frame.envelope);
    wire_in_deinit(&in);
}

static void perform(struct scene *scene, const struct record *record)
{
    unsigned i = record->who % N_CLIENTS;
    switch (record->who) {
    case 0 ... 7:
        send_frame(client_socket(scene, i), record->bytes, record->n);
        break;
    case 8 ... 15:
        (void)send(client_socket(scene, i), record->bytes, record->n, MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
    case 16 ... 23:
        if (scene->client[i] >= 0)
            close(scene->client[i]);
        scene->client[i] = -1;
        break;
    case 24:
        worker_double_ready(record->n);
        break;
    case 25:
        worker_double_die(record->n);
        break;
    case 26:
        speak(record);
        break;
    case 27:
        jobs_drain(&scene->daemon->jobs);
        break;
    case 28:
        jobs_abort(&scene->daemon->jobs, "the fuzzer says so");
        break;
    default:
        break;
    }
    turn(scene);
}

/* As the daemon's own end. */
static void close_scene(struct scene *scene)
{
    struct daemon *daemon = scene->daemon;
    struct session *session;
    while ((session = TAILQ_FIRST(&daemon->sessions))) {
        job_member_leave(&session->member);
        session_free(session);
    }
    jobs_deinit(&daemon->jobs);
    loop_free(daemon->loop);
    for (int i = 0; i < N_CLIENTS; i++)
        if (scene->client[i] >= 0)
            close(scene->client[i]);
    if (worker_double_count() != 0)
        abort();
    free(daemon);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    signal(SIGPIPE, SIG_IGN);
    log_init("fuzz", LOG_LEVEL_ERROR);
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
