/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster_state.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "agent.h"

/* Seconds. */
static const double greet_s = 30;    /* for a host to answer at all */
static const double verdict_s = 0.3; /* for news of the same event from other hosts */
static const double end_s = 25;      /* for agents to end: grace, kill, and their daemons */
static const double kill_s = 5;      /* the same after a second Ctrl-C */
static const double flush_s = 2;     /* for the console to take what is left, after Ctrl-C */
static const double burst_s = 0.2;   /* signals this close are one: timeout(1) sends two */

void cluster_begin_ending(struct cluster *c)
{
    if (c->state >= CLUSTER_ENDING)
        return;
    c->state = CLUSTER_ENDING;
    c->give_up_at = cluster_now_s() + end_s;
    cluster_names_stop(c);
    for (unsigned i = 0; i < c->hosts->n; i++) {
        struct remote *remote = &c->remotes[i];
        if (cluster_is_listening(remote)) {
            cluster_send(c, remote, (struct message){.kind = FRAME_END});
        } else if (remote->state == REMOTE_CONNECTING && remote->pid > 0) {
            kill(-remote->pid, SIGTERM);
            sink_deinit(&remote->to); /* for an agent that is about to greet */
            remote->to = (struct sink){.fd = -1};
        }
    }
}

static void kill_all(struct cluster *c)
{
    c->is_killing = true;
    for (unsigned i = 0; i < c->hosts->n; i++) {
        struct remote *remote = &c->remotes[i];
        if (remote->pid > 0)
            kill(-remote->pid, SIGKILL);
    }
}

void cluster_fail(struct cluster *c, const struct remote *remote, int exit_code, const char *format,
                  ...)
{
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    bool is_first = c->state < CLUSTER_ENDING;
    if (is_first || c->args->is_verbose)
        cluster_say(c, "host %s: %s", remote->host->name, text);
    if (is_first && !c->verdict.is_open)
        c->exit_code = exit_code;
    cluster_begin_ending(c);
}

static void pronounce(struct cluster *c)
{
    const struct verdict *v = &c->verdict;
    const struct cluster_rank *rank = &c->ranks[v->rank];
    char how[64];
    ending_describe(v->ending, how, sizeof how);
    cluster_say(c, "rank %u (pid %d on %s) %s%s", v->rank, (int)rank->pid,
                c->hosts->list[rank->host].name, how,
                v->had_others ? "; ending the other ranks" : "");
    c->exit_code = ending_exit_code(v->ending);
    c->verdict.is_open = false;
}

void cluster_on_exited(struct cluster *c, const struct message *m)
{
    struct cluster_rank *rank = &c->ranks[m->rank];
    struct verdict *v = &c->verdict;
    struct ending ending = {.code = (int)(m->code & 255), .signal = (int)(m->signal & 127)};
    char how[64];
    if (rank->is_over)
        return;
    rank->is_over = true;
    c->n_over++;
    ending_describe(ending, how, sizeof how);
    cluster_say_verbose(c, "rank %u (pid %u on %s) %s", m->rank, m->pid,
                        c->hosts->list[rank->host].name, how);
    bool is_failure = ending_exit_code(ending) != 0 && !m->is_asked;
    if (is_failure && c->state == CLUSTER_RUNNING) {
        *v = (struct verdict){.is_open = true,
                              .at = cluster_now_s() + verdict_s,
                              .rank = m->rank,
                              .ending = ending,
                              .had_others = c->n_over < c->n_ranks};
        cluster_begin_ending(c);
    } else if (is_failure && v->is_open && ending.signal && !v->ending.signal) {
        v->rank = m->rank;
        v->ending = ending;
    }
    if (c->n_over == c->n_ranks)
        cluster_begin_ending(c);
}

static void say_lost(struct cluster *c, struct remote *remote)
{
    const struct host *host = remote->host;
    char why[2048], what[64] = "";
    const struct remote_loss loss = {
        .host = host->name,
        .program = c->program,
        .words = remote->words,
        .is_local = remote->is_local,
        .is_ssh = !remote->is_local && !c->args->remote_shell,
        .has_greeted = remote->state != REMOTE_CONNECTING,
        .ending = remote->ending,
    };
    remote_explain(&loss, why, sizeof why);
    if (c->state == CLUSTER_RUNNING && host->n_ranks == 1)
        snprintf(what, sizeof what, "; rank %u is lost, ending the others", host->first_rank);
    else if (c->state == CLUSTER_RUNNING)
        snprintf(what, sizeof what, "; ranks %u to %u are lost, ending the others",
                 host->first_rank, host->first_rank + host->n_ranks - 1);
    cluster_fail(c, remote, LAUNCH_EXIT_FAILED, "%s%s", why, what);
}

void cluster_on_gone(struct cluster *c, struct remote *remote)
{
    bool is_expected = remote->state == REMOTE_DONE || c->is_killing ||
                       (remote->state == REMOTE_CONNECTING && c->state >= CLUSTER_ENDING);
    if (!is_expected)
        say_lost(c, remote);
    remote->state = REMOTE_GONE;
    remote_deinit(remote);
    remote->to = (struct sink){.fd = -1};
}

static unsigned n_living(const struct cluster *c)
{
    unsigned n = 0;
    for (unsigned i = 0; i < c->n_ranks; i++)
        n += c->ranks[i].pid > 0 && !c->ranks[i].is_over;
    return n;
}

void cluster_on_end_signal(struct cluster *c, int signal)
{
    const char *name = sigabbrev_np(signal);
    double now = cluster_now_s();
    if (c->is_interrupted && now < c->interrupted_at + burst_s)
        return;
    if (c->state == CLUSTER_FLUSHING) {
        c->state = CLUSTER_DONE;
    } else if (!c->is_interrupted) {
        c->is_interrupted = true;
        cluster_say(c, "SIG%s; ending %u rank(s) on %u host(s) (again: kill at once)", name,
                    n_living(c), c->hosts->n);
        if (c->exit_code == 0 && !c->verdict.is_open)
            c->exit_code = 128 + signal;
        cluster_begin_ending(c);
    } else {
        cluster_say(c, "SIG%s again; killing everything", name);
        for (unsigned i = 0; i < c->hosts->n; i++)
            if (cluster_is_listening(&c->remotes[i]))
                cluster_send(c, &c->remotes[i], (struct message){.kind = FRAME_KILL});
        c->give_up_at = fmin(c->give_up_at, now + kill_s);
    }
    c->interrupted_at = now;
}

/* The agents had their time. */
static void give_up(struct cluster *c)
{
    for (unsigned i = 0; i < c->hosts->n; i++)
        if (c->remotes[i].state != REMOTE_GONE && !c->is_killing)
            cluster_say(c, "host %s: its agent did not end in time; processes may be left there",
                        c->remotes[i].host->name);
    if (c->exit_code == 0)
        c->exit_code = LAUNCH_EXIT_FAILED;
    kill_all(c);
    c->give_up_at = INFINITY;
}

/* How long a host may be silent now. */
static double patience_s(const struct remote *remote)
{
    if (remote->state == REMOTE_CONNECTING)
        return greet_s;
    return cluster_is_listening(remote) ? AGENT_SILENCE_S : INFINITY;
}

static void check_silence(struct cluster *c, double now)
{
    for (unsigned i = 0; i < c->hosts->n; i++) {
        struct remote *remote = &c->remotes[i];
        if (remote->pid <= 0 || now < remote->heard_at + patience_s(remote))
            continue;
        if (c->state < CLUSTER_ENDING)
            cluster_fail(c, remote, LAUNCH_EXIT_FAILED, "no word from it for %.0f s",
                         patience_s(remote));
        remote->heard_at = INFINITY;
        kill(-remote->pid, SIGKILL);
    }
}

void cluster_advance(struct cluster *c)
{
    double now = cluster_now_s();
    cluster_names_advance(c);
    check_silence(c, now);
    if (now >= c->timeout_at && c->state == CLUSTER_RUNNING) {
        cluster_say(c, "--timeout of %g s passed; ending all ranks", c->args->timeout_s);
        c->exit_code = LAUNCH_EXIT_TIMEOUT;
        cluster_begin_ending(c);
    }
    if (now >= c->give_up_at && c->state == CLUSTER_ENDING)
        give_up(c);
    bool is_over = cluster_all(c, REMOTE_GONE);
    if (c->verdict.is_open && (now >= c->verdict.at || is_over))
        pronounce(c);
    if (is_over && c->state <= CLUSTER_ENDING) {
        c->state = CLUSTER_FLUSHING;
        c->give_up_at = c->is_interrupted ? now + flush_s : INFINITY;
    }
    if (c->state == CLUSTER_FLUSHING && (console_is_empty(&c->console) || now >= c->give_up_at))
        c->state = CLUSTER_DONE;
}

int cluster_poll_ms(const struct cluster *c)
{
    double at = fmin(c->ping_at, c->give_up_at);
    at = fmin(at, fmin(c->names_slow_at, c->names_end_at));
    if (c->state == CLUSTER_RUNNING)
        at = fmin(at, c->timeout_at);
    if (c->verdict.is_open)
        at = fmin(at, c->verdict.at);
    for (unsigned i = 0; i < c->hosts->n; i++)
        if (c->remotes[i].pid > 0)
            at = fmin(at, c->remotes[i].heard_at + patience_s(&c->remotes[i]));
    double left = at - cluster_now_s();
    if (left <= 0)
        return 0;
    return left > 1e6 ? -1 : (int)(left * 1000) + 1;
}
