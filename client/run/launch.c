/* SPDX-License-Identifier: Apache-2.0 */
#include "launch_state.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Signals this close, in seconds, are one: timeout(1) sends two. */
static const double burst_s = 0.2;

double launch_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

void launch_say(struct launch *l, const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    sink_push(l->messages, "gradrun: ", text, strlen(text));
}

static void say_who_failed(struct launch *l, const struct rank *rank)
{
    char how[64];
    ending_describe(rank->ending, how, sizeof how);
    launch_say(l, "rank %u (pid %d) %s%s", rank->rank, (int)rank->pid, how,
               launch_n_living(l) > 0 ? "; ending the other ranks" : "");
}

/* With --verbose, how the ranks ended that have done so since `was_over` was noted. */
static void say_ends(struct launch *l, const bool *was_over)
{
    for (unsigned i = 0; i < l->ranks.n; i++) {
        const struct rank *rank = &l->ranks.list[i];
        if (!rank->is_over || was_over[i])
            continue;
        char how[64];
        ending_describe(rank->ending, how, sizeof how);
        launch_say(l, "rank %u (pid %d) %s", rank->rank, (int)rank->pid, how);
    }
}

static void on_ready(struct launch *l)
{
    char byte;
    ssize_t n = read(l->daemon.ready, &byte, 1);
    if (n < 0)
        return;
    close(l->daemon.ready);
    l->daemon.ready = -1;
    if (n == 1 && l->state == LAUNCH_STARTING) {
        l->kill_at = INFINITY;
        launch_start_ranks(l);
    }
}

static void check_daemon(struct launch *l)
{
    struct ending ending;
    if (!l->has_daemon || !process_poll(l->daemon.pid, &ending))
        return;
    char how[64];
    ending_describe(ending, how, sizeof how);
    if (l->state == LAUNCH_STARTING) {
        launch_say(l, "the private daemon (pid %d) %s before it was ready", (int)l->daemon.pid,
                   how);
        launch_begin_ending(l, LAUNCH_EXIT_FAILED);
    } else if (l->state < LAUNCH_CLOSING || ending_exit_code(ending) != 0) {
        launch_say(l, "the private daemon (pid %d) %s", (int)l->daemon.pid, how);
    }
    private_finish(&l->daemon);
    l->has_daemon = false;
}

static void on_child(struct launch *l, pid_t pid)
{
    bool *was_over = calloc(l->ranks.n, sizeof *was_over);
    for (unsigned i = 0; was_over && i < l->ranks.n; i++)
        was_over[i] = l->ranks.list[i].is_over;
    struct rank *failed = ranks_collect(&l->ranks);
    bool is_first = failed && l->exit_code == 0;
    if (is_first)
        say_who_failed(l, failed);
    if (l->args->is_verbose && was_over) {
        if (is_first)
            was_over[failed->rank] = true;
        say_ends(l, was_over);
    }
    free(was_over);
    if (is_first)
        launch_begin_ending(l, ending_exit_code(failed->ending));
    check_daemon(l);
    bool is_known = ranks_has_pid(&l->ranks, pid) || (l->has_daemon && pid == l->daemon.pid);
    if (!is_known)
        waitpid(pid, NULL, WNOHANG); /* an orphan that we have inherited */
}

static void on_end_signal(struct launch *l, int signal)
{
    if (l->is_interrupted && launch_now_s() < l->interrupted_at + burst_s)
        return;
    if (l->state == LAUNCH_FLUSHING) {
        l->state = LAUNCH_DONE;
    } else if (l->is_interrupted) {
        launch_say(l, "SIG%s again; killing everything", sigabbrev_np(signal));
        l->kill_at = 0;
    } else {
        l->is_interrupted = true;
        l->interrupted_at = launch_now_s();
        if (launch_n_living(l) > 0)
            launch_say(l, "SIG%s; ending %u rank(s) (again: kill at once)", sigabbrev_np(signal),
                       launch_n_living(l));
        launch_begin_ending(l, 128 + signal);
    }
}

/* Ranks are in groups of their own: what the terminal does to ours is passed on. */
static void on_stop(struct launch *l)
{
    ranks_signal_groups(&l->ranks, SIGSTOP);
    raise(SIGSTOP);
    ranks_signal_groups(&l->ranks, SIGCONT);
}

static void on_signals(struct launch *l)
{
    struct signalfd_siginfo info;
    while (read(l->signal_fd, &info, sizeof info) == sizeof info) {
        switch (info.ssi_signo) {
        case SIGCHLD:
            on_child(l, (pid_t)info.ssi_pid);
            break;
        case SIGTSTP:
            on_stop(l);
            break;
        case SIGUSR1:
        case SIGUSR2:
            ranks_signal(&l->ranks, (int)info.ssi_signo);
            break;
        default:
            on_end_signal(l, (int)info.ssi_signo);
        }
    }
}

/* The stream that belongs to position i: two for each rank, then the daemon's. */
static struct stream *stream_at(struct launch *l, size_t i)
{
    if (i == 2 * (size_t)l->ranks.n)
        return &l->daemon_output;
    struct rank *rank = &l->ranks.list[i / 2];
    return i % 2 ? &rank->err : &rank->out;
}

static size_t n_streams(const struct launch *l)
{
    return 2 * (size_t)l->ranks.n + 1;
}

/* A console that fails is reported once; the job goes on without it. */
static void flush_sinks(struct launch *l)
{
    static const char *const names[] = {"standard output", "standard error"};
    for (int i = 0; i < 2; i++) {
        int rc = sink_flush(&l->sinks[i]);
        if (rc < 0 && rc != -EPIPE)
            launch_say(l, "%s: %s; further output is dropped, the job goes on", names[i],
                       strerror(-rc));
    }
}

static void report_logs(struct launch *l)
{
    for (unsigned i = 0; i < l->ranks.n; i++) {
        struct rank_log *log = &l->ranks.list[i].log;
        if (log->error)
            launch_say(l, "%s: %s; this rank's log ends here, the job goes on", log->path,
                       strerror(log->error));
        log->error = 0;
    }
}

static void wait_and_handle(struct launch *l)
{
    size_t n = n_streams(l);
    for (size_t i = 0; i < n; i++) {
        struct stream *stream = stream_at(l, i);
        l->polled[i] = (struct pollfd){stream_wants_input(stream) ? stream->fd : -1, POLLIN, 0};
    }
    struct pollfd *rest = l->polled + n;
    rest[0] = (struct pollfd){l->signal_fd, POLLIN, 0};
    rest[1] = (struct pollfd){l->has_daemon ? l->daemon.ready : -1, POLLIN, 0};
    for (int i = 0; i < 2; i++)
        rest[2 + i] =
            (struct pollfd){sink_is_empty(&l->sinks[i]) ? -1 : l->sinks[i].fd, POLLOUT, 0};
    if (poll(l->polled, n + 4, launch_poll_ms(l)) < 0)
        return;
    for (size_t i = 0; i < n; i++)
        if (l->polled[i].revents)
            stream_read(stream_at(l, i));
    if (rest[1].revents)
        on_ready(l);
    if (rest[0].revents)
        on_signals(l);
}

static void run(struct launch *l)
{
    launch_begin(l);
    while (l->state != LAUNCH_DONE) {
        launch_check_time(l);
        launch_advance(l);
        report_logs(l);
        flush_sinks(l);
        if (l->state == LAUNCH_FLUSHING)
            launch_advance(l);
        if (l->state != LAUNCH_DONE)
            wait_and_handle(l);
    }
    flush_sinks(l);
}

int launch_run(const struct args *args, const sigset_t *rank_mask)
{
    struct launch l = {.args = args,
                       .rank_mask = rank_mask,
                       .signal_fd = -1,
                       .timeout_at = INFINITY,
                       .kill_at = INFINITY,
                       .daemon_output = {.fd = -1},
                       .sinks = {{.fd = -1}, {.fd = -1}}};
    char error[512];
    if (launch_set_up(&l, error, sizeof error) < 0) {
        fprintf(stderr, "gradrun: %s\n", error);
        l.exit_code = LAUNCH_EXIT_FAILED;
    } else {
        run(&l);
    }
    launch_tear_down(&l);
    return l.exit_code;
}
