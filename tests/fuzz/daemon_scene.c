/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon_scene.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "control/admin.h"
#include "worker_double.h"

static const struct daemon_arguments arguments = {.lifeline_fd = -1, .ready_fd = -1};

static void on_change(void *owner)
{
    (void)owner;
}

static void on_stats(void *owner, struct job *job)
{
    admin_on_stats(owner, job);
}

struct daemon *daemon_scene_open(void)
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
    return daemon;
}

void daemon_scene_close(struct daemon *daemon)
{
    struct session *session;
    while ((session = TAILQ_FIRST(&daemon->sessions))) {
        job_member_leave(&session->member);
        session_free(session);
    }
    if (daemon->jobs.peers)
        peers_stop(daemon->jobs.peers);
    jobs_deinit(&daemon->jobs);
    loop_free(daemon->loop);
    if (worker_double_count() != 0)
        abort();
    free(daemon);
}

int daemon_scene_connect(struct daemon *daemon)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        abort();
    session_new(daemon, ends[0]);
    return ends[1];
}

const Pb__Envelope *daemon_scene_parse(const struct record *record, struct wire_in *in)
{
    struct wire_frame frame;
    uint8_t header[8] = {(uint8_t)record->n, (uint8_t)(record->n >> 8)};
    wire_in_init(in);
    bool is_whole = wire_in_feed(in, header, sizeof header) == 0 &&
                    wire_in_feed(in, record->bytes, record->n) == 0 &&
                    wire_in_next(in, &frame) == 1;
    return is_whole ? frame.envelope : NULL;
}

void daemon_scene_worker_speaks(const struct record *record)
{
    struct wire_in in;
    const Pb__Envelope *envelope = daemon_scene_parse(record, &in);
    if (envelope)
        worker_double_speak(record->n, envelope);
    wire_in_deinit(&in);
}
