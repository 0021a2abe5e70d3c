/* SPDX-License-Identifier: Apache-2.0 */
/* What the agents say, and what follows from it. Nothing of it is trusted to make sense. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "cluster_state.h"

/* More than this much unwritten output is dropped while everything ends and nobody reads. */
enum { OUTPUT_MAX = 4 * 1024 * 1024 };

static void on_ready(struct cluster *c, struct remote *remote, const struct message *m)
{
    if (remote->state != REMOTE_GREETED)
        return;
    remote->state = REMOTE_READY;
    remote->port = m->port;
    remote->master_port = m->master_port;
    snprintf(remote->address, sizeof remote->address, "%s", m->text);
    if (c->state != CLUSTER_PREPARING || !cluster_all(c, REMOTE_READY))
        return;
    const struct remote *unreachable = cluster_find_unreachable(c);
    if (unreachable)
        cluster_fail(c, unreachable, LAUNCH_EXIT_FAILED,
                     "the other hosts cannot reach it at %s, and no other address of it is known: "
                     "name it by an address instead",
                     unreachable->address);
    else if (c->args->is_check)
        cluster_check_begin(c);
    else
        cluster_start(c);
}

static void on_started(struct cluster *c, struct remote *remote, const struct message *m)
{
    c->ranks[m->rank].pid = (pid_t)m->pid;
    cluster_say_verbose(c, "rank %u is pid %u on %s", m->rank, m->pid, remote->host->name);
}

static void on_output(struct cluster *c, struct remote *remote, const struct message *m)
{
    char prefix[HOSTS_NAME_MAX + 32];
    bool is_daemon = m->rank == FRAME_FROM_DAEMON;
    struct sink *sink = m->stream == 1 ? c->console.out : c->console.err;
    if (is_daemon)
        snprintf(prefix, sizeof prefix, "[gradd@%s] ", remote->host->name);
    else if (c->args->is_verbose)
        snprintf(prefix, sizeof prefix, "[%u@%s] ", m->rank, remote->host->name);
    else
        snprintf(prefix, sizeof prefix, "[%u] ", m->rank);
    if ((is_daemon || !c->args->is_quiet) && sink->end - sink->begin < OUTPUT_MAX)
        sink_push(sink, prefix, m->text, m->text_bytes);
    if (c->logs && !is_daemon)
        rank_log_write(&c->logs[m->rank], m->text, m->text_bytes);
}

static void on_say(struct cluster *c, struct remote *remote, const struct message *m)
{
    /* Once everything ends, complaints of other hosts are consequences. */
    if (c->state < CLUSTER_ENDING || c->args->is_verbose)
        cluster_say(c, "host %s: %.*s", remote->host->name, (int)m->text_bytes, m->text);
}

static void on_ending(struct cluster *c, struct remote *remote, const struct message *m)
{
    /* Of a rank that failed we have heard already; else the agent has said why. */
    if (c->verdict.is_open || c->state >= CLUSTER_ENDING)
        return;
    c->exit_code = m->code > 0 && m->code < 256 ? (int)m->code : LAUNCH_EXIT_FAILED;
    cluster_begin_ending(c);
}

static void on_done(struct cluster *c, struct remote *remote, const struct message *m)
{
    remote->state = REMOTE_DONE;
    sink_deinit(&remote->to);
    remote->to = (struct sink){.fd = -1};
}

static void on_taken(struct cluster *c, struct remote *remote, const struct message *m)
{
    if (c->input == INPUT_SENT && remote->index == 0)
        c->input = INPUT_WANTED;
}

static void on_exited(struct cluster *c, struct remote *remote, const struct message *m)
{
    cluster_on_exited(c, m);
}

static void on_pong(struct cluster *c, struct remote *remote, const struct message *m)
{
    if (c->args->is_check)
        cluster_check_clock(c, remote, m);
}

static const struct handler {
    enum frame_kind kind;
    bool has_rank; /* that must be one of this host */
    void (*handle)(struct cluster *c, struct remote *remote, const struct message *m);
} handlers[] = {
    {FRAME_READY, false, on_ready},
    {FRAME_STARTED, true, on_started},
    {FRAME_OUTPUT, true, on_output},
    {FRAME_SAY, false, on_say},
    {FRAME_EXITED, true, on_exited},
    {FRAME_ENDING, false, on_ending},
    {FRAME_TAKEN, false, on_taken},
    {FRAME_PONG, false, on_pong},
    {FRAME_RESULT, false, cluster_check_result},
    {FRAME_DONE, false, on_done},
};

static int handle(struct cluster *c, struct remote *remote, struct frame *frame)
{
    struct message m;
    if (frame_get_message(frame, &m) < 0)
        return -EPROTO;
    for (size_t i = 0; i < sizeof handlers / sizeof handlers[0]; i++) {
        const struct handler *h = &handlers[i];
        if (h->kind != m.kind)
            continue;
        bool is_daemon = m.kind == FRAME_OUTPUT && m.rank == FRAME_FROM_DAEMON;
        if (h->has_rank && !is_daemon &&
            (m.rank >= c->n_ranks || c->ranks[m.rank].host != remote->index))
            return -EPROTO;
        h->handle(c, remote, &m);
        return 0;
    }
    return -EPROTO;
}

static void on_nonsense(struct cluster *c, struct remote *remote)
{
    cluster_fail(c, remote, LAUNCH_EXIT_FAILED,
                 "its agent speaks nonsense; is it of another "
                 "version?");
    kill(-remote->pid, SIGKILL);
    inbox_deinit(&remote->from);
}

static void greet(struct cluster *c, struct remote *remote)
{
    char error[512];
    int rc = remote_greet(remote, error, sizeof error);
    if (rc < 0) {
        cluster_fail(c, remote, LAUNCH_EXIT_FAILED, "%s", error);
        return;
    }
    if (rc == 0)
        return;
    if (c->state >= CLUSTER_ENDING)
        return; /* too late: it has been told to end by the end of its input */
    remote->state = REMOTE_GREETED;
    cluster_give_job(c, remote);
}

bool cluster_hear(struct cluster *c, struct remote *remote)
{
    struct frame frame;
    int rc = inbox_read(&remote->from), found = 0;
    if (rc <= 0) {
        if (rc < 0) {
            close(remote->from.fd);
            remote->from.fd = -1;
        }
        return false;
    }
    remote->heard_at = cluster_now_s();
    if (remote->state == REMOTE_CONNECTING)
        greet(c, remote);
    while (found >= 0 && remote->state != REMOTE_CONNECTING &&
           (found = inbox_next(&remote->from, &frame)) > 0)
        if (handle(c, remote, &frame) < 0)
            found = -EPROTO;
    if (found < 0)
        on_nonsense(c, remote);
    return found >= 0;
}
