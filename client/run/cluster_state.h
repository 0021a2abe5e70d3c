/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of a run over hosts, shared by the files that begin it (cluster_begin.c), look up its
 * hosts (cluster_names.c), drive it (cluster.c), hear agents (cluster_hear.c), bring it to its end
 * (cluster_end.c) and only test it (cluster_check.c). Nobody else includes this.
 *
 * Thread: loop.
 *
 * Invariant: states only go forward.
 */
#ifndef GRADD_RUN_CLUSTER_STATE_H
#define GRADD_RUN_CLUSTER_STATE_H

#include "cluster.h"
#include "console.h"
#include "job.h"
#include "launch.h"
#include "rank_log.h"
#include "remote.h"

enum cluster_state {
    CLUSTER_PREPARING, /* not every host is ready */
    CLUSTER_RUNNING,   /* ranks have been started */
    CLUSTER_ENDING,    /* every agent has been told to end; at give_up_at we go without it */
    CLUSTER_FLUSHING,  /* every agent has ended; the console has not taken all lines yet */
    CLUSTER_DONE,
};

struct cluster_rank {
    unsigned host;
    pid_t pid; /* on its host; 0: not started */
    bool is_over;
};

/* The rank to blame: known for good only when a moment has passed, since news of the same event
 * come over several connections. */
struct verdict {
    bool is_open;
    double at; /* when it is pronounced */
    unsigned rank;
    struct ending ending;
    bool had_others; /* who ran still */
};

struct cluster {
    const struct args *args;
    const sigset_t *mask;
    const struct hosts *hosts;
    struct remote *remotes; /* one for each host */
    struct cluster_rank *ranks;
    unsigned n_ranks, n_over;
    struct rank_log *logs; /* NULL: none */
    struct console console;
    struct pollfd *polled;
    struct frame_writer writer;
    int signal_fd;
    enum cluster_state state;
    int exit_code;
    struct verdict verdict;
    enum { INPUT_NONE, INPUT_WANTED, INPUT_SENT } input; /* ours, for rank 0 */
    bool is_interrupted, is_killing, is_muted[3];
    bool is_paused; /* ranks are stopped, and so is who waits for us; we are not */
    double names_slow_at, names_end_at; /* when looking up names is told, is given up */
    double interrupted_at, timeout_at, ping_at, give_up_at; /* monotonic; INFINITY: never */
    char key[JOB_KEY_DIGITS + 1], name[64], directory[4096], program[4096];
};

double cluster_now_s(void);

#define cluster_say(c, ...) console_say(&(c)->console, __VA_ARGS__)
#define cluster_say_verbose(c, ...)                                                                \
    do {                                                                                           \
        if ((c)->args->is_verbose)                                                                 \
            cluster_say(c, __VA_ARGS__);                                                           \
    } while (0)

static inline void cluster_send(struct cluster *c, struct remote *remote, struct message message)
{
    remote_send(remote, &c->writer, &message);
}

static inline bool cluster_is_listening(const struct remote *remote)
{
    return remote->state == REMOTE_GREETED || remote->state == REMOTE_READY;
}

/* Have all hosts reached this state? */
bool cluster_all(const struct cluster *c, enum remote_state state);

/* In cluster_begin.c. */

int cluster_set_up(struct cluster *c, char *error, size_t bytes);
void cluster_tear_down(struct cluster *c);
/* Start the remote shells. */
void cluster_begin(struct cluster *c);
/* The host's agent has greeted: give it the job. */
void cluster_give_job(struct cluster *c, struct remote *remote);
/* All are ready: the one that others have to reach and can not, since all that is known of it is a
 * loopback address; NULL: there is none. */
const struct remote *cluster_find_unreachable(const struct cluster *c);
/* All are ready: start the ranks. */
void cluster_start(struct cluster *c);

/* In cluster_names.c. */

/* Look up the addresses of the other hosts. */
void cluster_names_begin(struct cluster *c);
/* Are there hosts whose address is not known yet? No agent gets its job before. */
bool cluster_is_looking(const struct cluster *c);
/* Say that it takes long; give up. */
void cluster_names_advance(struct cluster *c);
void cluster_names_stop(struct cluster *c);

/* In cluster_hear.c. */

/* Read once from a host, and do what it says. false: nothing came. */
bool cluster_hear(struct cluster *c, struct remote *remote);

/* In cluster_end.c. */

/* The host can not do its part: a sentence, and everything ends. The first exit code counts. */
__attribute__((format(printf, 4, 5))) void cluster_fail(struct cluster *c,
                                                        const struct remote *remote, int exit_code,
                                                        const char *format, ...);
/* A rank has ended. */
void cluster_on_exited(struct cluster *c, const struct message *m);
/* The process that led to a host has ended. */
void cluster_on_gone(struct cluster *c, struct remote *remote);
void cluster_begin_ending(struct cluster *c);
void cluster_on_end_signal(struct cluster *c, int signal);
/* Do what is due; go on to the next state. */
void cluster_advance(struct cluster *c);
int cluster_poll_ms(const struct cluster *c);

/* In cluster_check.c. */

/* All hosts are ready to be tested. */
void cluster_check_begin(struct cluster *c);
void cluster_check_result(struct cluster *c, struct remote *remote, const struct message *m);
void cluster_check_clock(struct cluster *c, struct remote *remote, const struct message *m);

#endif
