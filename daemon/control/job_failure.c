/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How an epoch fails: the worker is told, the ranks hear of it within a second from the worker or
 * from here, and no other epoch begins before the worker has obeyed.
 */
#include <stdio.h>

#include "base/clock.h"
#include "control/job_internal.h"
#include "control/rendezvous.h"
#include "control/session.h"

static const uint64_t MS = 1000000;
/* The others hear of a failure within a second, even from a worker that is stuck. */
static const uint64_t ABORT_LIMIT_NS = UINT64_C(700) * 1000000;
/* Between questions to a worker whose GPUs are still busy with the failed epoch. */
static const uint64_t DRAIN_POLL_NS = UINT64_C(50) * 1000000;
static const uint64_t DRAIN_LIMIT_NS = UINT64_C(1000) * 1000000;

/* The worker answers once it has read the abort. */
static void ask_after_abort(struct job *job)
{
    job->abort.is_pending = job_request_stats(job);
    job->abort.seq = job->stats_seq;
    if (job->abort.is_pending)
        watch_arm(job->abort.limit, ABORT_LIMIT_NS);
}

static void send_abort(struct job *job)
{
    Pb__EpochAbort abort = PB__EPOCH_ABORT__INIT;
    abort.epoch = job->membership.epoch;
    abort.code = (uint32_t)-job->abort.code;
    abort.text = job->membership.last_error;
    abort.rank = job->abort.rank;
    abort.pid = (int32_t)job->abort.pid;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_EPOCH_ABORT;
    envelope.epoch_abort = &abort;
    worker_process_send(job->worker, &envelope, -1);
    job->abort.is_draining = false;
    job->abort.since_ns = clock_now_ns();
    ask_after_abort(job);
}

static void tell_failed(struct job *job, const struct member *member)
{
    struct session_failure failure = {
        .epoch = job->membership.epoch,
        .code = job->abort.code,
        .text = job->membership.last_error,
        .rank = job->abort.rank,
        .pid = job->abort.pid,
    };
    if (!member->origin)
        session_on_epoch_failed(member->session, &failure);
}

static void tell_all_failed(struct job *job)
{
    const struct roster *running = &job->membership.running;
    for (uint32_t rank = 0; rank < running->size; rank++)
        if (running->of_rank[rank])
            tell_failed(job, running->of_rank[rank]);
}

static void log_failure(const struct job *job, const struct job_failure *failure)
{
    struct log_fields fields = job_fields(job);
    fields.has_rank = failure->rank >= 0;
    fields.rank = failure->rank;
    fields.pid = (int)failure->pid;
    log_line(LOG_LEVEL_WARNING, "job", &fields, "epoch failed: %s", failure->text);
}

void job_fail(struct job *job, const struct job_failure *failure, enum job_teller teller)
{
    struct membership *m = &job->membership;
    if (!job_is_alive(job))
        return;
    job->abort.code = failure->code;
    job->abort.rank = failure->rank;
    job->abort.pid = failure->pid;
    log_failure(job, failure);
    membership_fail(m, failure->text);
    job->n_stalled = 0;
    watch_disarm(job->ping);
    watch_disarm(job->lost_link.limit);
    rendezvous_failed(job, failure);
    if (job->worker)
        send_abort(job);
    const struct member *culprit =
        failure->rank >= 0 ? membership_find(m, m->epoch, (uint32_t)failure->rank) : NULL;
    /* A worker whose channel has ended will tell nobody, though it has not been reaped yet. */
    if (!job->worker || !job->abort.is_pending || teller == TELL_AT_ONCE)
        tell_all_failed(job);
    else if (culprit)
        tell_failed(job, culprit); /* the worker has lost it */
}

/* The epoch is over: nothing is lost with the worker. */
static void kill_after_abort(struct job *job, const char *why)
{
    struct log_fields fields = job_fields(job);
    log_line(LOG_LEVEL_WARNING, "job", &fields, "the worker (pid %d) %s and is killed",
             (int)worker_process_pid(job->worker), why);
    tell_all_failed(job);
    worker_process_kill(job->worker);
}

/* The other nodes have begun the next epoch and wait for this one's links, but not for long. */
static bool is_waited_for(const struct job *job)
{
    uint64_t limit_ns = job->jobs->config->peer_dead_ms * MS / 4;
    if (limit_ns > DRAIN_LIMIT_NS)
        limit_ns = DRAIN_LIMIT_NS;
    return job->pending && clock_now_ns() - job->abort.since_ns > limit_ns;
}

void job_on_abort_limit(void *data)
{
    struct job *job = data;
    if (!job->abort.is_waiting) {
        kill_after_abort(job, "does not answer after its epoch failed");
    } else if (is_waited_for(job)) {
        kill_after_abort(job, "has not freed its GPUs when another epoch begins");
    } else {
        job->abort.is_waiting = false;
        ask_after_abort(job);
    }
}

/* Its GPUs are busy with what the epoch has left there. It ends itself if that does not end; the
 * ranks need not wait for it, and the next epoch does. */
static void on_abort_draining(struct job *job)
{
    if (!job->abort.is_draining)
        tell_all_failed(job);
    job->abort.is_draining = job->abort.is_waiting = true;
    watch_arm(job->abort.limit, DRAIN_POLL_NS);
}

static void on_abort_obeyed(struct job *job)
{
    job->abort.is_pending = job->abort.is_waiting = false;
    watch_disarm(job->abort.limit);
    job_settle(job);
}

void job_on_abort_answer(struct job *job, const Pb__StatsReply *reply)
{
    if (!job->abort.is_pending || reply->seq < job->abort.seq)
        return;
    if (reply->is_draining)
        on_abort_draining(job);
    else
        on_abort_obeyed(job);
}

void job_abort_without_worker(struct job *job)
{
    if (watch_is_armed(job->abort.limit))
        tell_all_failed(job); /* the worker may not have come to that */
    job->abort.is_pending = job->abort.is_waiting = false;
    watch_disarm(job->abort.limit);
}
