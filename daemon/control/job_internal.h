/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of a job share: job.c (life, joining, leaving), job_epoch.c (how epochs begin),
 * job_failure.c (how they fail), job_guard.c (how losses show), job_worker.c and rendezvous.c (the
 * other nodes). Thread: loop.
 */
#ifndef GRADD_CONTROL_JOB_INTERNAL_H
#define GRADD_CONTROL_JOB_INTERNAL_H

#include "base/log.h"
#include "control/job.h"

/* Who tells the ranks that their epoch has failed. */
enum job_teller {
    TELL_BY_WORKER, /* if it lives: ops that all ranks have submitted finish first */
    TELL_AT_ONCE,   /* the worker can not reach all of them, or there is no time */
};

struct job_failure {
    int code;
    const char *text;
    int rank; /* that caused it, or -1 */
    pid_t pid;
};

static inline struct log_fields job_fields(const struct job *job)
{
    return (struct log_fields){.job = job->membership.name, .epoch = job->membership.epoch};
}

/* The running epoch is alive and somebody is in it here. */
static inline bool job_is_alive(const struct job *job)
{
    return job->membership.running.n > 0 && !job->membership.has_failed;
}

/* ---- job.c */

/* The job of that name, a new one if need be. owner NULL: its ranks are on other nodes so far. */
struct job *job_obtain(struct jobs *jobs, uid_t uid, const char *name, const struct peer *owner,
                       struct fault *out_fault);
/* After every change: begin an epoch that can begin, keep or forget a job that nobody uses. */
void job_settle(struct job *job);
/* Refuse all that wait. */
void job_dismiss(struct job *job, int code, const char *text);
/* Refuse one that waits. */
void job_refuse(struct job *job, struct member *member, const struct fault *fault);

/* ---- job_epoch.c */

int job_epoch_init(struct job *job); /* timers; 0 or -ENOMEM, then deinit too */
void job_epoch_deinit(struct job *job);
/* Begin an epoch if ranks, worker and other nodes are ready for one. */
void job_try_begin(struct job *job);

/* ---- job_worker.c */

int job_start_worker(struct job *job, struct fault *out_fault);

/* ---- job_failure.c */

/* Fail the running epoch, here and on its other nodes. Nothing happens when it is not alive. */
void job_fail(struct job *job, const struct job_failure *failure, enum job_teller teller);
/* The worker has answered: perhaps the request behind the last EpochAbort. */
void job_on_abort_answer(struct job *job, const Pb__StatsReply *reply);
/* The worker has ended: it obeys nothing any more. */
void job_abort_without_worker(struct job *job);
void job_on_abort_limit(void *job); /* of job->abort.limit */

/* ---- job_guard.c */

/* The worker of node `reporter` has lost its link to the one of `node`. text: how. */
void job_on_link_lost(struct job *job, uint32_t reporter, uint32_t node, const char *text);
void job_on_lost_link_limit(void *job); /* of job->lost_link.limit */
void job_on_ping(void *job);            /* of job->ping */

#endif
