/* SPDX-License-Identifier: Apache-2.0 */
#include "launch_state.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "link.h"

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

void launch_start_ranks(struct launch *l)
{
    char error[512];
    l->state = LAUNCH_RUNNING;
    if (l->args->timeout_s > 0)
        l->timeout_at = launch_now_s() + l->args->timeout_s;
    l->environment.master_port = free_port();
    int rc = ranks_start(&l->ranks, l->args->command, &l->environment, &l->output, l->rank_mask,
                         error, sizeof error);
    if (rc < 0) {
        launch_say(l, "%s", error);
        launch_begin_ending(l, rc == -ENOENT   ? LAUNCH_EXIT_NOT_FOUND
                               : rc == -EACCES ? LAUNCH_EXIT_CANNOT_RUN
                                               : LAUNCH_EXIT_FAILED);
        return;
    }
    for (unsigned i = 0; i < l->ranks.n; i++)
        launch_say_verbose(l, "rank %u is pid %d", i, (int)l->ranks.list[i].pid);
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
        launch_say(l, "%s", error);
        launch_begin_ending(l, LAUNCH_EXIT_FAILED);
        return;
    }
    l->has_daemon = true;
    stream_init(&l->daemon_output, l->daemon.output, "[gradd] ", l->messages, NULL);
    l->environment.socket = l->daemon.socket;
    l->kill_at = launch_now_s() + LAUNCH_START_S;
    launch_say_verbose(l, "job %s: %u ranks, private daemon %s (pid %d) at %s", l->environment.job,
                       l->args->n_ranks, program, (int)l->daemon.pid, l->daemon.socket);
}

/* Decide which daemon to use, and begin. */
void launch_begin(struct launch *l)
{
    const char *socket = link_socket_path(l->args->socket);
    char reason[1024];
    if (l->args->n_ranks == 1 && !l->args->is_private && !l->args->socket) {
        launch_say_verbose(l, "job %s: 1 rank, which needs no daemon", l->environment.job);
        launch_start_ranks(l);
    } else if (l->args->is_private) {
        start_private(l);
    } else if (daemon_answers(socket, l->signal_fd, reason, sizeof reason)) {
        l->environment.socket = socket;
        launch_say_verbose(l, "job %s: %u ranks, the daemon at %s", l->environment.job,
                           l->args->n_ranks, socket);
        launch_start_ranks(l);
    } else if (l->args->socket) {
        launch_say(l, "%s", reason);
        launch_begin_ending(l, LAUNCH_EXIT_FAILED);
    } else {
        if (strcmp(socket, LINK_DEFAULT_SOCKET) != 0 || l->args->is_verbose)
            launch_say(l, "%s", reason);
        start_private(l);
    }
}

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

int launch_set_up(struct launch *l, char *error, size_t bytes)
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

void launch_tear_down(struct launch *l)
{
    ranks_deinit(&l->ranks);
    stream_deinit(&l->daemon_output);
    sink_deinit(&l->sinks[0]);
    sink_deinit(&l->sinks[1]);
    if (l->signal_fd >= 0)
        close(l->signal_fd);
    free(l->polled);
}
