/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "cluster_state.h"
#include "front.h"

double cluster_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

bool cluster_all(const struct cluster *c, enum remote_state state)
{
    for (unsigned i = 0; i < c->hosts->n; i++)
        if (c->remotes[i].state < state)
            return false;
    return true;
}

/* Their last words first: they may explain the end. */
static void collect(struct cluster *c)
{
    for (unsigned i = 0; i < c->hosts->n; i++) {
        struct remote *remote = &c->remotes[i];
        if (remote->pid <= 0 || !process_poll(remote->pid, &remote->ending))
            continue;
        while (cluster_hear(c, remote))
            continue;
        remote_hear_words(remote);
        process_reap(remote->pid);
        remote->pid = 0;
        cluster_on_gone(c, remote);
    }
    /* What a remote shell left behind is ours to reap (subreaper), not to wait for. */
    for (siginfo_t info = {0};
         waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid > 0;
         info = (siginfo_t){0}) {
        bool is_known = false;
        for (unsigned i = 0; i < c->hosts->n; i++)
            is_known |= c->remotes[i].pid == info.si_pid || c->remotes[i].lookup.pid == info.si_pid;
        if (is_known)
            break; /* ended just now: the next SIGCHLD */
        waitpid(info.si_pid, NULL, WNOHANG);
    }
}

static void send_to_all(struct cluster *c, struct message message)
{
    for (unsigned i = 0; i < c->hosts->n; i++)
        if (cluster_is_listening(&c->remotes[i]))
            cluster_send(c, &c->remotes[i], message);
}

static void flush_remotes(struct cluster *c)
{
    for (unsigned i = 0; i < c->hosts->n; i++)
        if (c->remotes[i].to.fd >= 0)
            sink_flush(&c->remotes[i].to); /* a broken one is noticed by its process's end */
}

/* The ranks stop with who waits for us. We go on: agents that hear nothing end everything. */
static void pause_ranks(struct cluster *c, bool is_paused)
{
    if (c->is_paused != is_paused && c->state == CLUSTER_RUNNING)
        send_to_all(
            c, (struct message){.kind = FRAME_SIGNAL, .signal = is_paused ? SIGSTOP : SIGCONT});
    c->is_paused = is_paused;
}

static void on_signals(struct cluster *c)
{
    struct signalfd_siginfo info;
    while (read(c->signal_fd, &info, sizeof info) == sizeof info) {
        switch (info.ssi_signo) {
        case SIGCHLD:
            collect(c);
            break;
        case SIGTSTP:
        case SIGCONT:
            pause_ranks(c, info.ssi_signo == SIGTSTP);
            break;
        case SIGUSR1:
        case SIGUSR2:
            send_to_all(c, (struct message){.kind = FRAME_SIGNAL, .signal = info.ssi_signo});
            break;
        default:
            cluster_on_end_signal(c, (int)info.ssi_signo);
        }
    }
}

/* Whoever reads our output has gone: let the ranks know, as a pipe would. */
static void mute(struct cluster *c)
{
    const struct sink *sinks[] = {NULL, c->console.out, c->console.err};
    for (uint32_t i = 1; i <= 2; i++) {
        if (sinks[i]->error != EPIPE || c->is_muted[i] || c->logs || c->state != CLUSTER_RUNNING)
            continue;
        c->is_muted[i] = true;
        send_to_all(c, (struct message){.kind = FRAME_MUTE, .stream = i});
    }
}

/* One piece at a time, so that a rank which does not read holds nothing up. */
static void pass_input(struct cluster *c)
{
    static char data[16 * 1024];
    ssize_t n = read(0, data, sizeof data);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    c->input = n > 0 ? INPUT_SENT : INPUT_NONE;
    cluster_send(
        c, &c->remotes[0],
        (struct message){.kind = FRAME_INPUT, .text = data, .text_bytes = n > 0 ? (size_t)n : 0});
}

static void report_logs(struct cluster *c)
{
    for (unsigned i = 0; c->logs && i < c->n_ranks; i++) {
        if (c->logs[i].error)
            cluster_say(c, "%s: %s; this rank's log ends here, the job goes on", c->logs[i].path,
                        strerror(c->logs[i].error));
        c->logs[i].error = 0;
    }
}

static void wait_and_handle(struct cluster *c)
{
    unsigned n = c->hosts->n;
    bool is_hearing = c->state >= CLUSTER_ENDING ||
                      (sink_has_room(c->console.out) && sink_has_room(c->console.err));
    bool is_looking = cluster_is_looking(c);
    struct pollfd *rest = c->polled + 4 * n;
    for (unsigned i = 0; i < n; i++) {
        struct remote *remote = &c->remotes[i];
        struct pollfd *p = c->polled + 4 * i;
        bool is_early = is_looking && remote->state == REMOTE_CONNECTING;
        p[0] = (struct pollfd){is_hearing && !is_early ? remote->from.fd : -1, POLLIN, 0};
        p[1] = (struct pollfd){remote->err, POLLIN, 0};
        p[2] = (struct pollfd){sink_is_empty(&remote->to) || remote->to.error ? -1 : remote->to.fd,
                               POLLOUT, 0};
        p[3] = (struct pollfd){remote->lookup.fd, POLLIN, 0};
        if (!is_hearing)
            remote->heard_at = cluster_now_s(); /* it is us who do not listen */
    }
    rest[0] = (struct pollfd){c->signal_fd, POLLIN, 0};
    console_poll(&c->console, rest + 1);
    bool is_reading = c->input == INPUT_WANTED && c->state == CLUSTER_RUNNING &&
                      cluster_is_listening(&c->remotes[0]);
    rest[3] = (struct pollfd){is_reading ? 0 : -1, POLLIN, 0};
    if (poll(c->polled, 4 * (nfds_t)n + 4, cluster_poll_ms(c)) < 0)
        return;
    for (unsigned i = 0; i < n; i++) {
        if (c->polled[4 * i].revents)
            cluster_hear(c, &c->remotes[i]);
        if (c->polled[4 * i + 1].revents)
            remote_hear_words(&c->remotes[i]);
        if (c->polled[4 * i + 3].revents && c->remotes[i].lookup.fd >= 0)
            lookup_read(&c->remotes[i].lookup);
    }
    if (rest[3].revents)
        pass_input(c);
    if (rest[0].revents)
        on_signals(c);
}

static void ping(struct cluster *c)
{
    if (cluster_now_s() < c->ping_at)
        return;
    c->ping_at = cluster_now_s() + AGENT_PING_S;
    if (!c->args->is_check)
        send_to_all(c, (struct message){.kind = FRAME_PING});
}

static void drive(struct cluster *c)
{
    cluster_begin(c);
    while (c->state != CLUSTER_DONE) {
        cluster_advance(c);
        ping(c);
        mute(c);
        report_logs(c);
        flush_remotes(c);
        console_flush(&c->console);
        if (c->state == CLUSTER_FLUSHING)
            cluster_advance(c);
        if (c->state != CLUSTER_DONE)
            wait_and_handle(c);
    }
    console_flush(&c->console);
}

/* The placed hosts of this run, for the body that front_run() calls. */
static struct hosts run_hosts;

static int run(const struct args *args, const sigset_t *rank_mask)
{
    struct cluster c = {
        .args = args,
        .mask = rank_mask,
        .hosts = &run_hosts,
        .signal_fd = -1,
        .timeout_at = INFINITY,
        .give_up_at = INFINITY,
        .names_slow_at = INFINITY,
        .names_end_at = INFINITY,
        .console = {.sinks = {{.fd = -1}, {.fd = -1}}},
    };
    char error[512];
    if (cluster_set_up(&c, error, sizeof error) < 0) {
        fprintf(stderr, "gradrun: %s\n", error);
        c.exit_code = LAUNCH_EXIT_FAILED;
    } else {
        drive(&c);
    }
    cluster_tear_down(&c);
    return c.exit_code;
}

/* ssh would go on without it, and fail for another reason. It takes ~ and %d for what it knows, and
 * a public key alone for one that its agent has. */
static int check_identity(const char *file, char *error, size_t bytes)
{
    char public[4096];
    if (!file || file[0] == '~' || strchr(file, '%') || access(file, R_OK) == 0)
        return 0;
    int rc = -errno, n = snprintf(public, sizeof public, "%s.pub", file);
    if (n < (int)sizeof public && access(public, R_OK) == 0)
        return 0;
    snprintf(error, bytes, "--ssh-identity-file %s: %s", file, strerror(-rc));
    return rc;
}

static int read_hosts(const struct args *args, char *error, size_t bytes)
{
    char here[32];
    snprintf(here, sizeof here, "localhost:%u", args->n_ranks);
    int rc = args->host_file
                 ? hosts_read(&run_hosts, args->host_file, error, bytes)
                 : hosts_parse_list(&run_hosts, args->hosts ? args->hosts : here, error, bytes);
    return rc < 0 ? rc : hosts_place(&run_hosts, args->n_ranks, error, bytes);
}

/* All ranks are on this host, so that it is a run like one without hosts. */
static int run_here(const struct args *args)
{
    struct args here = *args;
    here.n_ranks = hosts_n_ranks(&run_hosts);
    return front_run(launch_run, &here);
}

int cluster_main(const struct args *args)
{
    char error[512];
    int code = LAUNCH_EXIT_USAGE;
    if (check_identity(args->identity_file, error, sizeof error) < 0 ||
        read_hosts(args, error, sizeof error) < 0)
        fprintf(stderr, "gradrun: %s\n", error);
    else if (run_hosts.n == 1 && host_is_local(&run_hosts.list[0]) && !args->is_check)
        code = run_here(args);
    else
        code = front_run(run, args);
    hosts_deinit(&run_hosts);
    return code;
}
