/* SPDX-License-Identifier: Apache-2.0 */
#include "launch_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "descriptors.h"
#include "frame.h"

void launch_start_ranks(struct launch *l)
{
    char error[512];
    l->state = LAUNCH_RUNNING;
    if (l->args->timeout_s > 0)
        l->timeout_at = launch_now_s() + l->args->timeout_s;
    int rc = ranks_start(&l->ranks, l->args->command, &l->environment, &l->output, l->rank_mask,
                         error, sizeof error);
    if (rc < 0) {
        launch_say(l, "%s", error);
        launch_begin_ending(l, rc == -ENOENT   ? LAUNCH_EXIT_NOT_FOUND
                               : rc == -EACCES ? LAUNCH_EXIT_CANNOT_RUN
                                               : LAUNCH_EXIT_FAILED);
        return;
    }
    if (l->is_paused)
        ranks_signal_groups(&l->ranks, SIGSTOP);
    l->role->on_started(l);
}

void launch_start_private(struct launch *l, const char *address, const char *key)
{
    char program[4096], error[512];
    private_find_program(program, sizeof program);
    struct private_options options = {
        .program = program,
        .log_level = l->args->is_verbose ? "info" : "warning",
        .settings = l->args->settings,
        .address = address,
        .key = key,
        .mask = l->rank_mask,
    };
    if (private_start(&l->daemon, &options, error, sizeof error) < 0) {
        launch_say(l, "%s", error);
        launch_begin_ending(l, LAUNCH_EXIT_FAILED);
        return;
    }
    l->has_daemon = true;
    stream_init(&l->daemon_output, l->daemon.output, "[gradd] ", l->console.err, NULL);
    l->daemon_output.show = l->output.show;
    l->daemon_output.rank = FRAME_FROM_DAEMON;
    l->daemon_output.which = 2;
    l->environment.socket = l->daemon.socket;
    l->kill_at = launch_now_s() + LAUNCH_START_S;
    launch_say_verbose(l, "job %s: %u ranks, private daemon %s (pid %d) at %s", l->environment.job,
                       l->ranks.n, program, (int)l->daemon.pid, l->daemon.socket);
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
        .n_hosts = 1,
        .exports = l->args->exports,
    };
}

/* Two pipes and a log for each rank; signals, the daemon and its pipes, what is being started. */
static int reserve_descriptors(const struct launch *l, char *error, size_t bytes)
{
    char what[32];
    unsigned n = l->args->n_ranks;
    snprintf(what, sizeof what, "%u rank%s", n, n == 1 ? "" : "s");
    return descriptors_reserve(n * (l->output.dir ? 3 : 2) + 24, what, error, bytes);
}

int launch_set_up(struct launch *l, const struct place *places, char *error, size_t bytes)
{
    int rc = reserve_descriptors(l, error, bytes);
    if (rc < 0)
        return rc;
    rc = l->signal_fd = signals_watch();
    if (rc < 0)
        return snprintf(error, bytes, "cannot watch signals: %s", strerror(-rc)), rc;
    set_up_environment(l);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
        return snprintf(error, bytes, "cannot become a subreaper: %s", strerror(errno)), -errno;
    l->polled = calloc(2 * (size_t)l->args->n_ranks + 7, sizeof *l->polled);
    if (!l->polled)
        return snprintf(error, bytes, "out of memory"), -ENOMEM;
    return ranks_init(&l->ranks, l->args->n_ranks, places, &l->output, error, bytes);
}

void launch_tear_down(struct launch *l)
{
    ranks_deinit(&l->ranks);
    stream_deinit(&l->daemon_output);
    console_deinit(&l->console);
    if (l->signal_fd >= 0)
        close(l->signal_fd);
    free(l->polled);
}
