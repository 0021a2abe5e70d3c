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
    l->role->say(l, text);
}

static void on_ready(struct launch *l)
{
    unsigned peer_port;
    if (!private_on_ready(&l->daemon, &peer_port) || l->state != LAUNCH_STARTING)
        return;
    l->kill_at = INFINITY;
    l->role->on_ready(l, peer_port);
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
    const struct rank *failed = ranks_collect(&l->ranks);
    if (l->exit_code != 0)
        failed = NULL; /* not the first */
    if (was_over)
        l->role->on_over(l, was_over, failed);
    free(was_over);
    if (failed)
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

/* Ranks are in groups of their own: what the terminal does to ours is passed on. We go on: a
 * stopped process could not end them. */
static void pause_ranks(struct launch *l, bool is_paused)
{
    if (l->is_paused != is_paused && l->state == LAUNCH_RUNNING)
        ranks_signal_groups(&l->ranks, is_paused ? SIGSTOP : SIGCONT);
    l->is_paused = is_paused;
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
        case SIGCONT:
            pause_ranks(l, info.ssi_signo == SIGTSTP);
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

static void report_logs(struct launch *l)
{
    for (unsigned i = 0; l->ranks.logs && i < l->ranks.n; i++) {
        struct rank_log *log = &l->ranks.logs[i];
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
    rest[2] = (struct pollfd){l->input_fd, POLLIN, 0};
    rest[3] = (struct pollfd){l->feed_fd, POLLOUT, 0};
    console_poll(&l->console, rest + 4);
    if (poll(l->polled, n + 6, launch_poll_ms(l)) < 0)
        return;
    for (size_t i = 0; i < n; i++)
        if (l->polled[i].revents)
            stream_read(stream_at(l, i));
    if (rest[1].revents)
        on_ready(l);
    if (rest[2].revents || rest[3].revents)
        l->role->on_input(l);
    if (rest[0].revents)
        on_signals(l);
}

void launch_drive(struct launch *l)
{
    l->role->begin(l);
    while (l->state != LAUNCH_DONE) {
        launch_check_time(l);
        launch_advance(l);
        report_logs(l);
        console_flush(&l->console);
        if (l->state == LAUNCH_FLUSHING)
            launch_advance(l);
        if (l->state != LAUNCH_DONE)
            wait_and_handle(l);
    }
    console_flush(&l->console);
}
