/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ranks of a run: their processes, their process groups and their output.
 *
 * Thread: loop.
 *
 * Invariant: a rank that has ended stays a zombie until ranks_reap(), so that its process group
 * can be signalled without meeting a stranger.
 */
#ifndef GRADD_RUN_RANKS_H
#define GRADD_RUN_RANKS_H

#include "environment.h"
#include "process.h"
#include "stream.h"

struct rank {
    struct place place;
    pid_t pid; /* 0: never started, or reaped */
    bool is_over;
    struct ending ending; /* of a rank that is over */
    struct stream out, err;
};

struct ranks {
    struct rank *list;
    struct rank_log *logs; /* NULL: none */
    pid_t *groups;         /* of those started */
    unsigned n, n_started, n_over;
};

/* Where the output goes. Sinks may be NULL (--quiet), and the same. Borrowed. */
struct ranks_output {
    struct sink *out, *err;
    stream_show *show; /* NULL: as text, each line after its rank */
    const char *dir;   /* of the logs, or NULL */
};

/*
 * n ranks without processes; their logs are created. places (borrowed) says which they are; NULL:
 * all ranks of a job on one host. 0, or -errno with a sentence.
 */
int ranks_init(struct ranks *ranks, unsigned n, const struct place *places,
               const struct ranks_output *output, char *error, size_t bytes);
void ranks_deinit(struct ranks *ranks);

/* Start all. 0, or -errno with a sentence; those started so far live then. */
int ranks_start(struct ranks *ranks, char **command, const struct environment *environment,
                const struct ranks_output *output, const sigset_t *mask, char *error, size_t bytes);

/* To the ranks' process groups. */
void ranks_signal_groups(struct ranks *ranks, int signal);
/* To the ranks alone. */
void ranks_signal(struct ranks *ranks, int signal);

/*
 * Note which ranks have ended since the last call. Returns the one to hold responsible when some
 * failed, else NULL: when several end at once, one that a signal killed comes before one that
 * gave up, which may have done so because of it.
 */
struct rank *ranks_collect(struct ranks *ranks);
bool ranks_has_pid(const struct ranks *ranks, pid_t pid);
void ranks_reap(struct ranks *ranks);

#endif
