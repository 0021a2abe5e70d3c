/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon that a run talks to: the node's, if one answers, else a private one that lives in a
 * directory of its own and ends with the run.
 *
 * Thread: loop.
 *
 * Invariant: the private daemon holds the reading end of a lifeline whose writing end only gradrun
 * has. However gradrun ends, the daemon sees that, and removes its socket and directory.
 */
#ifndef GRADD_RUN_PRIVATE_H
#define GRADD_RUN_PRIVATE_H

#include <stdbool.h>
#include <signal.h>
#include <stddef.h>
#include <sys/types.h>

struct private_daemon {
    pid_t pid;    /* 0: not running, or reaped */
    int lifeline; /* writing end; closing it asks the daemon to end. -1: closed */
    int ready;    /* see private_on_ready(); -1: closed */
    int output;   /* its stdout and stderr; taken over by a stream */
    char dir[64]; /* "": none */
    char socket[80];
};

struct private_options {
    const char *program; /* gradd */
    const char *log_level;
    const char **settings; /* --set, NULL-terminated or NULL */
    const char *address;   /* where daemons of other hosts reach it; NULL: there are none */
    const char *key;       /* in hex, for these connections; handed over through a pipe */
    const sigset_t *mask;
};

/* The port at which the daemon at this socket takes other daemons; 0 and a reason: none. */
unsigned daemon_peer_port(const char *socket, int cancel_fd, char *reason, size_t bytes);

/* Does a daemon answer Hello at this socket within 2 s? If not, reason says why. */
bool daemon_answers(const char *socket, int cancel_fd, char *reason, size_t bytes);

/*
 * The gradd to start: GRADD_DAEMON, else the one of the build tree that this program is in, else
 * the installed one.
 */
void private_find_program(char *path, size_t bytes);

/* Start it. 0, or -errno with a sentence; nothing is left behind then. */
int private_start(struct private_daemon *daemon, const struct private_options *options, char *error,
                  size_t bytes);
/*
 * `ready` became readable: closes it. true: it listens; *out_peer_port is where it listens for
 * other daemons, or 0. false: it will not listen (or the answer is yet to come: `ready` is open).
 */
bool private_on_ready(struct private_daemon *daemon, unsigned *out_peer_port);
/* Ask it to end: it drains, removes its socket and directory, and exits. */
void private_stop(struct private_daemon *daemon);
/* Reap it, and remove what it left if it could not do so itself. */
void private_finish(struct private_daemon *daemon);

/* "<directory of this program>/<relative>", or "" when that does not exist. */
void build_tree_path(const char *relative, char *path, size_t bytes);

#endif
