/* SPDX-License-Identifier: Apache-2.0 */
#include "launch.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "link.h"
#include "private.h"
#include "ranks.h"

/* Seconds. */
static const double grace_s = 5;   /* from SIGTERM to SIGKILL */
static const double start_s = 15;  /* for the private daemon to listen */
static const double close_s = 10;  /* for the private daemon to end */
static const double flush_s = 2;   /* for the console to take what is left, after Ctrl-C */
static const double burst_s = 0.2; /* signals this close are one: timeout(1) sends two */
static const double tick_s = 0.02; /* between looks at processes that are not our children */

enum launch_state {
    LAUNCH_STARTING, /* the private daemon does not listen yet; there are no ranks */
    LAUNCH_RUNNING,  /* ranks run, or have ended well */
    LAUNCH_ENDING,   /* ranks have been asked to end; at kill_at they are killed */
    LAUNCH_SWEEPING, /* no rank lives; processes that they left behind are made to end */
    LAUNCH_CLOSING,  /* only the private daemon lives, and has been asked to end */
    LAUNCH_FLUSHING, /* no process lives; the console has not taken all lines yet */
    LAUNCH_DONE,
};

struct launch {
    const struct args *args;
    enum launch_state state;
    int exit_code;
    int signal_fd;
    const sigset_t *rank_mask;
    bool is_interrupted, is_killing;
    double timeout_at, kill_at; /* monotonic seconds; INFINITY: never */
    double interrupted_at;      /* valid when is_interrupted */
    struct sink sinks[2];       /* stdout and stderr; the second is unused when they are one */
    struct sink *messages;      /* the one that leads to stderr */
    struct ranks_output output;
    struct ranks ranks;
    struct environment environment;
    char job[64], library[4096];
    bool has_daemon; /* a private one, not reaped yet */
    struct private_daemon daemon;
    struct stream daemon_output;
    struct pollfd *polled;
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ------------------------------------------------------------------ what is said */

__attribute__((format(printf, 2, 3))) static void say(struct launch *l, const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    sink_push(l->messages, "gradrun: ", text, strlen(text));
}

#define say_verbose(l, ...)                                                                        \
    do {                                                                                           \
        if ((l)->args->is_verbose)                                                                 \
            say(l, __VA_ARGS__);                                                                   \
    } while (0)

static unsigned n_living(const struct launch *l)
{
    return l->ranks.n_started - l->ranks.n_over;
}

static void say_who_failed(struct launch *l, const struct rank *rank)
{
    char how[64];
    ending_describe(rank->ending, how, sizeof how);
    say(l, "rank %u (pid %d) %s%s", rank->rank, (int)rank->pid, how,
        n_living(l) > 0 ? "; ending the other ranks" : "");
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
        say(l, "rank %u (pid %d) %s", rank->rank, (int)rank->pid, how);
    }
}

/* ------------------------------------------------------------------ making an end */

static struct descendants left_behind(const struct launch *l)
{
    return (struct descendants){.except = l->has_daemon ? l->daemon.pid : 0};
}

/* Ask every rank, and everything that ranks have started, to end. */
static void begin_ending(struct launch *l, int exit_code)
{
    if (l->exit_code == 0)
        l->exit_code = exit_code;
    if (l->state > LAUNCH_RUNNING)
        return;
    l->state = LAUNCH_ENDING;
    l->kill_at = now_s() + grace_s;
    ranks_signal_groups(&l->ranks, SIGTERM);
    /* A stopped process takes the signal only when it goes on. */
    ranks_signal_groups(&l->ranks, SIGCONT);
    struct descendants which = left_behind(l);
    which.groups = l->ranks.groups;
    which.n_groups = l->ranks.n_started;
    descendants_signal(&which, SIGTERM);
}

static void kill_all(struct launch *l)
{
    ranks_signal_groups(&l->ranks, SIGKILL);
    struct descendants which = left_behind(l);
    if (l->state == LAUNCH_CLOSING)
        which.except = 0;
    descendants_signal(&which, SIGKILL);
}

static void begin_sweeping(struct launch *l)
{
    struct descendants which = left_behind(l);
    bool is_first_request = l->state == LAUNCH_RUNNING;
    l->state = LAUNCH_SWEEPING;
    size_t n = descendants_signal(&which, is_first_request ? SIGTERM : 0);
    if (n > 0)
        say_verbose(l, "ending %zu process(es) that the ranks left behind", n);
    if (is_first_request)
        l->kill_at = now_s() + grace_s;
}

static void begin_closing(struct launch *l)
{
    ranks_reap(&l->ranks);
    l->state = LAUNCH_CLOSING;
    l->is_killing = false;
    l->kill_at = now_s() + close_s;
    if (l->has_daemon)
        private_stop(&l->daemon);
}

static void begin_flushing(struct launch *l)
{
    while (waitpid(-1, NULL, WNOHANG) > 0)
        continue;
    for (unsigned i = 0; i < l->ranks.n; i++) {
        stream_drain(&l->ranks.list[i].out);
        stream_drain(&l->ranks.list[i].err);
    }
    if (l->daemon_output.fd >= 0)
        stream_drain(&l->daemon_output);
    l->state = LAUNCH_FLUSHING;
    l->kill_at = l->is_interrupted ? now_s() + flush_s : INFINITY;
}

/* ------------------------------------------------------------------ beginning */

static unsigned free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_bound = fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
                    getsockname(fd, (struct sockaddr *)&address, &length) == 0;
    if (fd >= 0)
        close(fd);
    return is_bound ? ntohs(address.sin_port) : 0;
}

static void start_ranks(struct launch *l)
{
    char error[512];
    l->state = LAUNCH_RUNNING;
    if (l->args->timeout_s > 0)
        l->timeout_at = now_s() + l->args->timeout_s;
    l->environment.master_port = free_port();
    int rc = ranks_start(&l->ranks, l->args->command, &l->environment, &l->output, l->rank_mask,
                         error, sizeof error);
    if (rc < 0) {
        say(l, "%s", error);
        begin_ending(l, rc == -ENOENT   ? LAUNCH_EXIT_NOT_FOUND
                        : rc == -EACCES ? LAUNCH_EXIT_CANNOT_RUN
                                        : LAUNCH_EXIT_FAILED);
        return;
    }
    for (unsigned i = 0; i < l->ranks.n; i++)
        say_verbose(l, "rank %u is pid %d", i, (int)l->ranks.list[i].pid);
}

static void start_private(struct launch *l)
{
    char program[4096], error[512];
    private_find_program(program, sizeof program);
    struct private_options options = {
        .program = program,
        .log_level = l->args->is_verbose ? "info" : "warning",
        .settings = l->args->settings,
        .mask = l->rank_mask,
    };
    if (private_start(&l->daemon, &options, error, sizeof error) < 0) {
        say(l, "%s", error);
        begin_ending(l, LAUNCH_EXIT_FAILED);
        return;
    }
    l->has_daemon = true;
    stream_init(&l->daemon_output, l->daemon.output, "[gradd] ", l->messages, NULL);
    l->environment.socket = l->daemon.socket;
    l->kill_at = now_s() + start_s;
    say_verbose(l, "job %s: %u ranks, private daemon %s (pid %d) at %s", l->environment.job,
                l->args->n_ranks, program, (int)l->daemon.pid, l->daemon.socket);
}

/* Decide which daemon to use, and begin. */
static void begin(struct launch *l)
{
    const char *socket = link_socket_path(l->args->socket);
    char reason[1024];
    if (l->args->n_ranks == 1 && !l->args->is_private && !l->args->socket) {
        say_verbose(l, "job %s: 1 rank, which needs no daemon", l->environment.job);
        start_ranks(l);
    } else if (l->args->is_private) {
        start_private(l);
    } else if (daemon_answers(socket, l->signal_fd, reason, sizeof reason)) {
        l->environment.socket = socket;
        say_verbose(l, "job %s: %u ranks, the daemon at %s", l->environment.job, l->args->n_ranks,
                    socket);
        start_ranks(l);
    } else if (l->args->socket) {
        say(l, "%s", reason);
        begin_ending(l, LAUNCH_EXIT_FAILED);
    } else {
        if (strcmp(socket, LINK_DEFAULT_SOCKET) != 0 || l->args->is_verbose)
            say(l, "%s", reason);
        start_private(l);
    }
}

/* ------------------------------------------------------------------ events */

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
        start_ranks(l);
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
        say(l, "the private daemon (pid %d) %s before it was ready", (int)l->daemon.pid, how);
        begin_ending(l, LAUNCH_EXIT_FAILED);
    } else if (l->state < LAUNCH_CLOSING || ending_exit_code(ending) != 0) {
        say(l, "the private daemon (pid %d) %s", (int)l->daemon.pid, how);
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
        begin_ending(l, ending_exit_code(failed->ending));
    check_daemon(l);
    bool is_known = ranks_has_pid(&l->ranks, pid) || (l->has_daemon && pid == l->daemon.pid);
    if (!is_known)
        waitpid(pid, NULL, WNOHANG); /* an orphan that we have inherited */
}

static void on_end_signal(struct launch *l, int signal)
{
    if (l->is_interrupted && now_s() < l->interrupted_at + burst_s)
        return;
    if (l->state == LAUNCH_FLUSHING) {
        l->state = LAUNCH_DONE;
    } else if (l->is_interrupted) {
        say(l, "SIG%s again; killing everything", sigabbrev_np(signal));
        l->kill_at = 0;
    } else {
        l->is_interrupted = true;
        l->interrupted_at = now_s();
        if (n_living(l) > 0)
            say(l, "SIG%s; ending %u rank(s) (again: kill at once)", sigabbrev_np(signal),
                n_living(l));
        begin_ending(l, 128 + signal);
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

static void on_time(struct launch *l)
{
    double now = now_s();
    if (now >= l->timeout_at && l->state == LAUNCH_RUNNING) {
        say(l, "--timeout of %g s passed; ending all ranks", l->args->timeout_s);
        begin_ending(l, LAUNCH_EXIT_TIMEOUT);
    }
    if (now < l->kill_at)
        return;
    if (l->state >= LAUNCH_FLUSHING) {
        l->state = LAUNCH_DONE;
        return;
    }
    if (l->state == LAUNCH_STARTING) {
        say(l, "the private daemon (pid %d) was not ready within %g s", (int)l->daemon.pid,
            start_s);
        begin_ending(l, LAUNCH_EXIT_FAILED);
        return;
    }
    if (!l->is_killing)
        say_verbose(l, "killing what has not ended");
    l->is_killing = true;
    kill_all(l);
}

/* Go on to the next state while what the present one waits for has happened. */
static void advance(struct launch *l)
{
    struct descendants which = left_behind(l);
    if (l->state == LAUNCH_RUNNING || l->state == LAUNCH_ENDING)
        if (n_living(l) == 0)
            begin_sweeping(l);
    if (l->state == LAUNCH_SWEEPING && descendants_signal(&which, 0) == 0)
        begin_closing(l);
    which = left_behind(l);
    if (l->state == LAUNCH_CLOSING && !l->has_daemon) {
        /* Workers of a daemon that died are ours now. */
        if (descendants_signal(&which, SIGKILL) == 0)
            begin_flushing(l);
    }
    if (l->state == LAUNCH_FLUSHING && (sink_is_empty(&l->sinks[0]) || l->sinks[0].error) &&
        (sink_is_empty(&l->sinks[1]) || l->sinks[1].error))
        l->state = LAUNCH_DONE;
}

/* ------------------------------------------------------------------ the loop */

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

static int poll_ms(const struct launch *l)
{
    double at = l->kill_at;
    if (l->state == LAUNCH_RUNNING && l->timeout_at < at)
        at = l->timeout_at;
    double left = at - now_s();
    bool has_strangers = l->state == LAUNCH_SWEEPING ||
                         (l->is_killing && l->state < LAUNCH_FLUSHING) ||
                         (l->state == LAUNCH_CLOSING && !l->has_daemon);
    if (has_strangers && (left > tick_s || left < 0))
        left = tick_s;
    if (left <= 0)
        return 0;
    return left > 1e6 ? -1 : (int)(left * 1000) + 1;
}

/* A console that fails is reported once; the job goes on without it. */
static void flush_sinks(struct launch *l)
{
    static const char *const names[] = {"standard output", "standard error"};
    for (int i = 0; i < 2; i++) {
        int rc = sink_flush(&l->sinks[i]);
        if (rc < 0 && rc != -EPIPE)
            say(l, "%s: %s; further output is dropped, the job goes on", names[i], strerror(-rc));
    }
}

static void report_logs(struct launch *l)
{
    for (unsigned i = 0; i < l->ranks.n; i++) {
        struct rank_log *log = &l->ranks.list[i].log;
        if (log->error)
            say(l, "%s: %s; this rank's log ends here, the job goes on", log->path,
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
    if (poll(l->polled, n + 4, poll_ms(l)) < 0)
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
    begin(l);
    while (l->state != LAUNCH_DONE) {
        on_time(l);
        advance(l);
        report_logs(l);
        flush_sinks(l);
        if (l->state == LAUNCH_FLUSHING)
            advance(l);
        if (l->state != LAUNCH_DONE)
            wait_and_handle(l);
    }
    flush_sinks(l);
}

/* ------------------------------------------------------------------ setting up */

static int watch_signals(struct launch *l)
{
    static const int watched[] = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT,
                                  SIGCHLD, SIGTSTP, SIGUSR1, SIGUSR2};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof watched / sizeof watched[0]; i++)
        sigaddset(&set, watched[i]);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    l->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return l->signal_fd < 0 ? -errno : 0;
}

static void set_up_output(struct launch *l)
{
    bool is_one = sink_is_same_file(1, 2);
    sink_init(&l->sinks[0], 1);
    if (is_one)
        l->sinks[1] = (struct sink){.fd = -1};
    else
        sink_init(&l->sinks[1], 2);
    l->messages = is_one ? &l->sinks[0] : &l->sinks[1];
    l->output.dir = l->args->output_dir;
    if (!l->args->is_quiet) {
        l->output.out = &l->sinks[0];
        l->output.err = l->messages;
    }
}

static void set_up_environment(struct launch *l)
{
    uint32_t number = 0;
    if (getrandom(&number, sizeof number, 0) < 0)
        number = (uint32_t)time(NULL);
    snprintf(l->job, sizeof l->job, "gradrun-%d-%08x", (int)getpid(), number);
    build_tree_path("../lib/libgradd.so.0", l->library, sizeof l->library);
    l->environment = (struct environment){
        .job = l->args->job ? l->args->job : l->job,
        .library = l->library[0] ? l->library : NULL,
        .n_ranks = l->args->n_ranks,
        .exports = l->args->exports,
    };
}

static int set_up(struct launch *l, char *error, size_t bytes)
{
    int rc = watch_signals(l);
    if (rc < 0)
        return snprintf(error, bytes, "cannot watch signals: %s", strerror(-rc)), rc;
    set_up_output(l);
    set_up_environment(l);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        return snprintf(error, bytes, "cannot become a subreaper: %s", strerror(errno)), -errno;
    l->polled = calloc(2 * (size_t)l->args->n_ranks + 5, sizeof *l->polled);
    if (!l->polled)
        return snprintf(error, bytes, "out of memory"), -ENOMEM;
    return ranks_init(&l->ranks, l->args->n_ranks, &l->output, error, bytes);
}

static void tear_down(struct launch *l)
{
    ranks_deinit(&l->ranks);
    stream_deinit(&l->daemon_output);
    sink_deinit(&l->sinks[0]);
    sink_deinit(&l->sinks[1]);
    if (l->signal_fd >= 0)
        close(l->signal_fd);
    free(l->polled);
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
    if (set_up(&l, error, sizeof error) < 0) {
        fprintf(stderr, "gradrun: %s\n", error);
        l.exit_code = LAUNCH_EXIT_FAILED;
    } else {
        run(&l);
    }
    tear_down(&l);
    return l.exit_code;
}
