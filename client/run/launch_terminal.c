/* SPDX-License-Identifier: Apache-2.0 */
/* A run on this node that a person looks at: lines and sentences on the console. */
#include "launch_state.h"

#include <stdio.h>
#include <string.h>

#include "address.h"
#include "link.h"

static void say(struct launch *l, const char *text)
{
    sink_push(l->console.err, "gradrun: ", text, strlen(text));
}

static void start_ranks(struct launch *l)
{
    l->environment.master_port = address_free_port("127.0.0.1");
    launch_start_ranks(l);
}

static void on_ready(struct launch *l, unsigned peer_port)
{
    start_ranks(l);
}

static void on_started(struct launch *l)
{
    for (unsigned i = 0; i < l->ranks.n; i++)
        launch_say_verbose(l, "rank %u is pid %d", i, (int)l->ranks.list[i].pid);
}

static void say_end(struct launch *l, const struct rank *rank, const char *what_follows)
{
    char how[64];
    ending_describe(rank->ending, how, sizeof how);
    launch_say(l, "rank %u (pid %d) %s%s", rank->place.rank, (int)rank->pid, how, what_follows);
}

static void on_over(struct launch *l, const bool *was_over, const struct rank *failed)
{
    if (failed)
        say_end(l, failed, launch_n_living(l) > 0 ? "; ending the other ranks" : "");
    for (unsigned i = 0; i < l->ranks.n && l->args->is_verbose; i++) {
        const struct rank *rank = &l->ranks.list[i];
        if (rank->is_over && !was_over[i] && rank != failed)
            say_end(l, rank, "");
    }
}

static void ignore_code(struct launch *l, int exit_code)
{
}

static void ignore(struct launch *l)
{
}

static void begin(struct launch *l)
{
    const char *socket = link_socket_path(l->args->socket);
    char reason[1024];
    if (l->args->n_ranks == 1 && !l->args->is_private && !l->args->socket) {
        launch_say_verbose(l, "job %s: 1 rank, which needs no daemon", l->environment.job);
        start_ranks(l);
    } else if (l->args->is_private) {
        launch_start_private(l, NULL, NULL);
    } else if (daemon_answers(socket, l->signal_fd, reason, sizeof reason)) {
        l->environment.socket = socket;
        launch_say_verbose(l, "job %s: %u ranks, the daemon at %s", l->environment.job,
                           l->args->n_ranks, socket);
        start_ranks(l);
    } else if (l->args->socket) {
        launch_say(l, "%s", reason);
        launch_begin_ending(l, LAUNCH_EXIT_FAILED);
    } else {
        if (strcmp(socket, LINK_DEFAULT_SOCKET) != 0 || l->args->is_verbose)
            launch_say(l, "%s", reason);
        launch_start_private(l, NULL, NULL);
    }
}

static void set_up_output(struct launch *l)
{
    console_init(&l->console);
    l->output.dir = l->args->output_dir;
    if (!l->args->is_quiet) {
        l->output.out = l->console.out;
        l->output.err = l->console.err;
    }
}

int launch_run(const struct args *args, const sigset_t *rank_mask)
{
    static const struct launch_role role = {
        .begin = begin,
        .say = say,
        .on_ready = on_ready,
        .on_started = on_started,
        .on_over = on_over,
        .on_ending = ignore_code,
        .on_input = ignore,
        .on_flushing = ignore,
    };
    struct launch l = {LAUNCH_INIT, .args = args, .role = &role, .rank_mask = rank_mask};
    char error[512];
    set_up_output(&l);
    if (launch_set_up(&l, NULL, error, sizeof error) < 0) {
        fprintf(stderr, "gradrun: %s\n", error);
        l.exit_code = LAUNCH_EXIT_FAILED;
    } else {
        launch_drive(&l);
    }
    launch_tear_down(&l);
    return l.exit_code;
}
