/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fork and exec of gradd-worker, and nothing of the daemon in it: no capability, no descriptor but
 * its channel, no signal setting, no group but the owner's.
 *
 * Thread: the only one of the process (fork).
 */
#ifndef GRADD_CONTROL_WORKER_SPAWN_H
#define GRADD_CONTROL_WORKER_SPAWN_H

#include <stdbool.h>
#include <sys/types.h>

struct worker_spawn {
    const char *program;
    int channel;        /* becomes fd 3 */
    const char *option; /* NULL: none; else its standard output is the channel too */
    bool changes_user;
    uid_t uid;
    gid_t gid;
    const gid_t *groups;
    int n_groups;
};

/* The pid, or -errno. What fails after the fork ends the child with a status of its own. */
pid_t worker_spawn(const struct worker_spawn *spawn);

/* The words for such a status, or NULL when it is the worker's own. */
const char *worker_spawn_failure(int exit_status);

/* This process has CAP_SETUID and CAP_SETGID. */
bool worker_spawn_may_change_user(void);

#endif
