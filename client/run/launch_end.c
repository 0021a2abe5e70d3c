/* SPDX-License-Identifier: Apache-2.0 */
#include "launch_state.h"

#include <math.h>
#include <sys/wait.h>

/* Seconds. */
static const double grace_s = 5;   /* from SIGTERM to SIGKILL */
static const double close_s = 10;  /* for the private daemon to end */
static const double flush_s = 2;   /* for the console to take what is left, after Ctrl-C */
static const double tick_s = 0.02; /* between looks at processes that are not our children */

static struct descendants left_behind(const struct launch *l)
{
    return (struct descendants){.except = l->has_daemon ? l->daemon.pid : 0};
}

/* Ask every rank, and everything that ranks have started, to end. */
void launch_begin_ending(struct launch *l, int exit_code)
{
    if (l->exit_code == 0)
        l->exit_code = exit_code;
    if (l->state > LAUNCH_RUNNING)
        return;
    l->role->on_ending(l, exit_code);
    l->state = LAUNCH_ENDING;
    l->kill_at = launch_now_s() + grace_s;
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
        launch_say_verbose(l, "ending %zu process(es) that the ranks left behind", n);
    if (is_first_request)
        l->kill_at = launch_now_s() + grace_s;
}

static void begin_closing(struct launch *l)
{
    ranks_reap(&l->ranks);
    l->state = LAUNCH_CLOSING;
    l->is_killing = false;
    l->kill_at = launch_now_s() + close_s;
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
    l->role->on_flushing(l);
    l->state = LAUNCH_FLUSHING;
    l->kill_at = l->is_interrupted ? launch_now_s() + flush_s : INFINITY;
}

/* Go on to the next state while what the present one waits for has happened. */
void launch_advance(struct launch *l)
{
    struct descendants which = left_behind(l);
    if (l->state == LAUNCH_RUNNING || l->state == LAUNCH_ENDING)
        if (launch_n_living(l) == 0)
            begin_sweeping(l);
    if (l->state == LAUNCH_SWEEPING && descendants_signal(&which, 0) == 0) {
        l->kill_at = INFINITY;
        l->is_killing = false;
        if (!l->has_others)
            begin_closing(l);
    }
    which = left_behind(l);
    if (l->state == LAUNCH_CLOSING && !l->has_daemon) {
        /* Workers of a daemon that died are ours now. */
        if (descendants_signal(&which, SIGKILL) == 0)
            begin_flushing(l);
    }
    if (l->state == LAUNCH_FLUSHING && console_is_empty(&l->console))
        l->state = LAUNCH_DONE;
}

void launch_check_time(struct launch *l)
{
    double now = launch_now_s();
    if (now >= l->timeout_at && l->state == LAUNCH_RUNNING) {
        launch_say(l, "--timeout of %g s passed; ending all ranks", l->args->timeout_s);
        launch_begin_ending(l, LAUNCH_EXIT_TIMEOUT);
    }
    if (now >= l->silent_at)
        l->role->on_input(l);
    if (now < l->kill_at)
        return;
    if (l->state >= LAUNCH_FLUSHING) {
        l->state = LAUNCH_DONE;
        return;
    }
    if (l->state == LAUNCH_STARTING) {
        launch_say(l, "the private daemon (pid %d) was not ready within %d s", (int)l->daemon.pid,
                   LAUNCH_START_S);
        launch_begin_ending(l, LAUNCH_EXIT_FAILED);
        return;
    }
    if (!l->is_killing)
        launch_say_verbose(l, "killing what has not ended");
    l->is_killing = true;
    kill_all(l);
}

int launch_poll_ms(const struct launch *l)
{
    double at = l->kill_at < l->silent_at ? l->kill_at : l->silent_at;
    if (l->state == LAUNCH_RUNNING && l->timeout_at < at)
        at = l->timeout_at;
    double left = at - launch_now_s();
    bool is_sweeping = l->state == LAUNCH_SWEEPING && l->kill_at < INFINITY;
    bool has_strangers = is_sweeping || (l->is_killing && l->state < LAUNCH_FLUSHING) ||
                         (l->state == LAUNCH_CLOSING && !l->has_daemon);
    if (has_strangers && (left > tick_s || left < 0))
        left = tick_s;
    if (left <= 0)
        return 0;
    return left > 1e6 ? -1 : (int)(left * 1000) + 1;
}
