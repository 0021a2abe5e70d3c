/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's sessions, jobs and admin replies, with clients and workers who lie. Workers are
 * doubles (worker_double.c): their messages are data too, for a worker runs with its job's rights.
 *
 * A record's `who`: 0-7 that client (connected on first use) sends a frame; 8-15 raw bytes; 16-23
 * that client's connection ends; 24 a worker is ready; 25 one dies; 26 one speaks (the bytes are
 * an envelope); 27 the daemon drains; 28 it aborts; else the loop turns.
 */
#include <unistd.h>

#include "daemon_scene.h"
#include "records.h"
#include "worker_double.h"

enum { N_CLIENTS = 8, TURNS = 3 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct scene {
    struct daemon *daemon;
    int client[N_CLIENTS]; /* -1: not connected */
};

static void open_scene(struct scene *scene)
{
    scene->daemon = daemon_scene_open();
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
    if (scene->client[i] < 0)
        scene->client[i] = daemon_scene_connect(scene->daemon);
    return scene->client[i];
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
        daemon_scene_worker_speaks(record);
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

static void close_scene(struct scene *scene)
{
    daemon_scene_close(scene->daemon);
    for (int i = 0; i < N_CLIENTS; i++)
        if (scene->client[i] >= 0)
            close(scene->client[i]);
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
