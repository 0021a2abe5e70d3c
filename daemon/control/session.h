/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection to the daemon: a trainer that joins a job, or somebody who asks.
 *
 * Thread: loop. Invariant: a session whose member is in a living epoch never just goes away: it
 * leaves in order, or its job is told that the rank is lost, and why.
 */
#ifndef GRADD_CONTROL_SESSION_H
#define GRADD_CONTROL_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "base/conn.h"
#include "control/membership.h"
#include "control/peer.h"
#include "control/resolve.h"

struct daemon;

enum session_state {
    SESSION_GREETING, /* has not said Hello */
    SESSION_TRAINER,
    SESSION_ADMIN,
    SESSION_LOSING, /* lost; a moment's wait tells how its process ended */
    SESSION_CLOSED, /* only to be freed once the connection has closed */
};

struct session {
    TAILQ_ENTRY(session) link;
    struct daemon *daemon;
    enum session_state state;
    bool is_admin;     /* sees the jobs of all users */
    struct conn *conn; /* NULL once closed */
    struct peer peer;
    struct watch *process; /* its pidfd; only for trainers */
    struct watch *timer;   /* what for: by state */
    struct member member;
    struct resolution *lookup;         /* of the coordinator's name, while its Join waits for it */
    char job[MEMBERSHIP_NAME_MAX + 1]; /* of that Join */
    uint64_t loss_deadline_ns;         /* when the cause of a loss is said, known or not */
    /* A JobRequest that waits for the worker's answer. */
    struct {
        bool is_pending;
        bool is_remote; /* the job's coordinator is asked */
        uid_t uid;
        char name[MEMBERSHIP_NAME_MAX + 1];
        uint64_t seq;
    } query;
};

struct session_failure {
    uint64_t epoch;
    int code; /* enum gradd_status */
    const char *text;
    int rank;
    pid_t pid;
};

/* Where its rank is in the epoch. */
struct session_place {
    uint64_t epoch;
    uint32_t node_rank, n_nodes;
    bool device_path;
    const char *device_text; /* why not */
};

/* Serve a new connection. fd is taken, even on failure (NULL). */
struct session *session_new(struct daemon *daemon, int take_fd);
/* At once and without a word to its job. */
void session_free(struct session *session);

/* Reply with an error and close. */
void session_reject(struct session *session, int code, const char *text);

/* From the job of its member. fd is borrowed. 0, or -errno: the trainer does not hear of it. */
int session_on_joined(struct session *session, const struct session_place *place, int fd);
void session_on_join_refused(struct session *session, const struct fault *fault);
void session_on_epoch_failed(struct session *session, const struct session_failure *failure);
/* The worker has lost it; the session finds out how. */
void session_on_lost_at_worker(struct session *session);

#endif
