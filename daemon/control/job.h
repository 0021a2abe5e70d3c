/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The jobs of this node: each a membership, its worker, and how long it is kept.
 *
 * A job's ranks may be on several nodes. The daemon of rank 0's node then coordinates: its
 * membership has all of them, the other daemons' have their own (see rendezvous.h).
 *
 * Thread: loop. Invariant: a job has a worker from its first join on this node until it is
 * forgotten, except between a worker's death and the next join; every trainer that waits in a job
 * gets Joined or an error, and every trainer in an epoch that fails is told.
 */
#ifndef GRADD_CONTROL_JOB_H
#define GRADD_CONTROL_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include <sys/queue.h>
#include <uthash.h>

#include "control/layout.h"
#include "control/membership.h"
#include "control/resolve.h"
#include "control/worker_process.h"

struct job_key {
    uid_t uid;
    char name[MEMBERSHIP_NAME_MAX + 1]; /* zero padded: the whole struct is hashed */
};

struct job {
    struct job_key key;
    UT_hash_handle hh;
    struct jobs *jobs;
    struct membership membership;
    bool has_owner;    /* somebody of this node has joined */
    struct peer owner; /* rights of who did so first; its pidfd is -1 */
    char user[64];
    struct worker_process *worker; /* NULL: none is running */
    struct watch *linger;
    uint64_t created_ns;
    uint64_t first_epoch; /* the last one of an earlier life of the job, or 0 */
    unsigned n_restarts;  /* of the worker, since an epoch last began */
    unsigned n_stalled;
    char stall_text[512];
    uint64_t stats_seq; /* of the last StatsRequest */
    uint64_t query_seq; /* of the last one by job_query_stats() */
    uint64_t query_ns;  /* when it was sent; 0: it is answered */
    /* An epoch that failed while its worker lives. The worker tells the ranks, after the ops that
     * still finish; until it answers the request sent behind EpochAbort, or is killed for not
     * answering, no epoch begins. */
    struct {
        bool is_pending;
        bool is_draining; /* GPUs are busy with the epoch: the daemon has told the ranks */
        bool is_waiting;  /* to ask again */
        uint64_t since_ns;
        uint64_t seq;
        int code, rank;
        pid_t pid;
        struct watch *limit;
    } abort;
    uint64_t whole_ns; /* when the gathering became whole; 0: it is not, or has begun */
    /* The last epoch's, when it is on several nodes; else NULL. */
    struct layout *layout;
    /* Of an epoch that the coordinator has begun and this node has not yet; or NULL. */
    struct layout *pending;
    LIST_HEAD(, remote_member) remotes; /* members on other nodes; see rendezvous.c */
    /* The worker is asked twice a second while an epoch on several nodes is alive: a stopped one
     * would hold up all nodes. */
    struct watch *ping;
    uint64_t asked_ns; /* of the oldest request without an answer; 0: none */
    /* A link between two nodes' workers is lost; a moment's wait may bring a better cause. */
    struct {
        uint32_t node;
        char text[FAULT_TEXT_MAX];
        struct watch *limit;
    } lost_link;
    void *stats; /* the last answer to job_query_stats(), packed */
    size_t stats_bytes;
};

/* What is left of a job that was forgotten: its next epoch is another one all the same. */
struct job_memory {
    struct job_key key;
    UT_hash_handle hh;
    uint64_t epoch;
};

struct jobs {
    struct loop *loop;
    const struct config *config;
    const struct worker_setup *setup;
    const char *node;
    struct peers *peers; /* NULL: this daemon knows no other nodes */
    struct job *by_key;
    struct job_memory *memories;              /* oldest first */
    LIST_HEAD(, remote_query) remote_queries; /* see rendezvous.c */
    unsigned n_remote_queries;
    bool is_draining;
    /* A job has changed or gone. */
    void (*on_change)(void *owner);
    /* job->stats is the answer to job->query_seq. */
    void (*on_stats)(void *owner, struct job *job);
    /* A coordinator has answered rendezvous_ask(). */
    void (*on_remote_stats)(void *owner, const Pb__RemoteJobReply *reply);
    void *owner;
};

/* The owner fills the public fields before and calls deinit after the loop has ended. */
void jobs_deinit(struct jobs *jobs);

/*
 * A trainer joins: member has rank, size, pid, source and session set and is MEMBER_NONE.
 * coordinator: addresses of the daemon on rank 0's node; NULL: all ranks are on this node. 0:
 * session_on_joined() or session_on_join_refused() follows, perhaps already inside. Negative:
 * *out_fault.
 */
int jobs_join(struct jobs *jobs, const char *name, const struct peer *peer,
              const struct resolved *coordinator, struct member *member, struct fault *out_fault);

/* The member goes in order (or stops waiting). Allowed in every state. */
void job_member_leave(struct member *member);

/* The member of a living epoch is gone without leaving; how: "was killed by signal 9 (Killed)". */
void job_member_lost(struct member *member, const char *how);

/* The wait of one member has taken its time: all that wait are told who is missing. */
void job_join_timed_out(struct member *member, uint64_t waited_ms);

struct job *jobs_find(struct jobs *jobs, uid_t uid, const char *name);

/* Ask the worker for a sign of life. False: there is nobody to ask. */
bool job_request_stats(struct job *job);
/* Ask the worker, and by it those of the other nodes, for figures; on_stats() follows, once for all
 * that ask meanwhile. False: there is nobody to ask. */
bool job_query_stats(struct job *job);

/* No new joins; who waits is refused; lingering workers end. */
void jobs_drain(struct jobs *jobs);
/* Fail what still runs. */
void jobs_abort(struct jobs *jobs, const char *why);
unsigned jobs_count_running(const struct jobs *jobs);

#endif
