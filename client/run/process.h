/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starting a process, describing how it ended, and finding what it left behind.
 *
 * Thread: any.
 *
 * Invariant: a started process leads its own process group; nothing is signalled by a pid that
 * may have passed to somebody else meanwhile.
 */
#ifndef GRADD_RUN_PROCESS_H
#define GRADD_RUN_PROCESS_H

#include <signal.h>
#include <stddef.h>
#include <sys/types.h>

struct spawn {
    char **argv;
    char **envp;
    int stdio[3];         /* borrowed: what becomes 0, 1 and 2 */
    int keep[3];          /* borrowed: passed on under their numbers; -1: none */
    int death_signal;     /* that it gets when this process dies; 0: none */
    const sigset_t *mask; /* its signal mask */
};

/* Start it. 0, or -errno: of fork(), or of exec() when the command cannot be run. */
int process_spawn(const struct spawn *spawn, pid_t *out_pid);

/*
 * Block the signals that a run handles, and get them as reads of the descriptor returned; -errno.
 * SIGPIPE is ignored.
 */
int signals_watch(void);

/* How a process ended. */
struct ending {
    int code;   /* exit code, when signal is 0 */
    int signal; /* that killed it, or 0 */
};
/* As a shell reports it: the exit code, or 128 + signal. */
int ending_exit_code(struct ending ending);
/* In words: "exited with code 3", "was killed by signal 9 (SIGKILL)". */
void ending_describe(struct ending ending, char *text, size_t bytes);

/*
 * Has the child ended? It stays a zombie, so that its pid and process group can not become
 * somebody else's, until process_reap(). 1 and *out_ending, or 0.
 */
int process_poll(pid_t pid, struct ending *out_ending);
void process_reap(pid_t pid);

/* Which descendants are meant. */
struct descendants {
    pid_t except;        /* without this child and what it started; 0: no exception */
    const pid_t *groups; /* without the members of these process groups */
    size_t n_groups;
};
/*
 * Send a signal to the living descendants of this process that are meant; with signal 0 they are
 * only counted. Returns how many there are.
 */
size_t descendants_signal(const struct descendants *which, int signal);

#endif
