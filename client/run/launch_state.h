/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of a run, shared by the files that begin it (launch_begin.c), drive it (launch.c) and
 * bring it to its end (launch_end.c). Nobody else includes this.
 *
 * Thread: loop.
 *
 * Invariant: states only go forward; each is entered by the function of its name.
 */
#ifndef GRADD_RUN_LAUNCH_STATE_H
#define GRADD_RUN_LAUNCH_STATE_H

#include <math.h>
#include <poll.h>

#include "console.h"
#include "launch.h"
#include "private.h"
#include "ranks.h"

enum { LAUNCH_START_S = 15 }; /* seconds for the private daemon to listen */

enum launch_state {
    LAUNCH_STARTING, /* the private daemon does not listen yet; there are no ranks */
    LAUNCH_WAITING,  /* it does; the other hosts of the run do not all have theirs yet */
    LAUNCH_RUNNING,  /* ranks run, or have ended well */
    LAUNCH_ENDING,   /* ranks have been asked to end; at kill_at they are killed */
    LAUNCH_SWEEPING, /* no rank lives; processes that they left behind are made to end */
    LAUNCH_CLOSING,  /* only the private daemon lives, and has been asked to end */
    LAUNCH_FLUSHING, /* no process lives; the console has not taken all lines yet */
    LAUNCH_DONE,
};

struct launch;

/*
 * What differs between a run that a person looks at (launch_terminal.c) and the part of a run over
 * several hosts that its agent looks after (agent.c).
 */
struct launch_role {
    void (*begin)(struct launch *l); /* decide which daemon to use, and begin */
    void (*say)(struct launch *l, const char *text);
    /* The private daemon listens; peer_port is 0 without other hosts. */
    void (*on_ready)(struct launch *l, unsigned peer_port);
    void (*on_started)(struct launch *l); /* all ranks have */
    /* Ranks have ended, was_over says which had before; failed: the one to blame, or NULL. */
    void (*on_over)(struct launch *l, const bool *was_over, const struct rank *failed);
    void (*on_ending)(struct launch *l, int exit_code); /* launch_begin_ending() */
    void (*on_input)(struct launch *l);                 /* input_fd or feed_fd is ready */
    void (*on_flushing)(struct launch *l);              /* nothing lives, all output is queued */
};

struct launch {
    const struct args *args;
    const struct launch_role *role;
    void *owner; /* the role's */
    enum launch_state state;
    int exit_code;
    int signal_fd;
    const sigset_t *rank_mask;
    bool is_interrupted, is_killing;
    bool is_paused;             /* ranks are stopped, and so is who waits for us; we are not */
    double timeout_at, kill_at; /* monotonic seconds; INFINITY: never */
    double interrupted_at;      /* valid when is_interrupted */
    double silent_at;           /* no word from the launcher since too long; INFINITY: never */
    int input_fd;               /* -1: none */
    int feed_fd;                /* to be written, which is on_input()'s too; -1: nothing to */
    bool has_others;            /* the daemon must outlive our ranks: other hosts may need it */
    struct console console;
    struct ranks_output output;
    struct ranks ranks;
    struct environment environment;
    char job[64], library[4096];
    bool has_daemon; /* a private one, not reaped yet */
    struct private_daemon daemon;
    struct stream daemon_output;
    struct pollfd *polled;
};

/* Monotonic, in seconds. */
double launch_now_s(void);

/* A sentence for the user. */
__attribute__((format(printf, 2, 3))) void launch_say(struct launch *l, const char *format, ...);

#define launch_say_verbose(l, ...)                                                                 \
    do {                                                                                           \
        if ((l)->args->is_verbose)                                                                 \
            launch_say(l, __VA_ARGS__);                                                            \
    } while (0)

static inline unsigned launch_n_living(const struct launch *l)
{
    return l->ranks.n_started - l->ranks.n_over;
}

/* In launch_begin.c. */

/*
 * Signals, variables, ranks without processes (places: see ranks_init()). The console and the
 * output are set up by the role. 0, or -errno with a sentence.
 */
int launch_set_up(struct launch *l, const struct place *places, char *error, size_t bytes);
void launch_tear_down(struct launch *l);
/* Start a private daemon; address and key are for other hosts' daemons, or NULL. */
void launch_start_private(struct launch *l, const char *address, const char *key);
/* The daemon is there. */
void launch_start_ranks(struct launch *l);

/* In launch.c. */

/* All fields that are not 0 at the beginning. */
#define LAUNCH_INIT                                                                                \
    .signal_fd = -1, .input_fd = -1, .feed_fd = -1, .timeout_at = INFINITY, .kill_at = INFINITY,   \
    .silent_at = INFINITY, .daemon_output = {.fd = -1},                                            \
    .console = {.sinks = {{.fd = -1}, {.fd = -1}}}
/* From role->begin() to LAUNCH_DONE. */
void launch_drive(struct launch *l);

/* In launch_end.c. */

/* Ask every rank, and everything that ranks have started, to end. The first exit code counts. */
void launch_begin_ending(struct launch *l, int exit_code);
/* Go on to the next state while what the present one waits for has happened. */
void launch_advance(struct launch *l);
/* Do what is due: the time limit, and killing what was asked to end and has not. */
void launch_check_time(struct launch *l);
/* How long poll() may wait, in milliseconds; -1: for ever. */
int launch_poll_ms(const struct launch *l);

#endif
