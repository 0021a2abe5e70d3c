/* SPDX-License-Identifier: Apache-2.0 */
/* The worker of a job: its start, what it says, and its end. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "control/job_internal.h"
#include "control/rendezvous.h"
#include "control/session.h"
#include "gradd/types.h"

enum {
    RESTARTS_MAX = 3, /* of a worker that dies before an epoch begins */
};

/* After that long another question is sent: the epoch of the first may have ended with it. */
static const uint64_t QUERY_LIMIT_NS = UINT64_C(1000) * 1000000;

static void on_worker_ready(void *data);
static void on_worker_message(void *data, const Pb__Envelope *envelope);
static void on_worker_ended(void *data, const char *how);

static const struct worker_process_ops worker_ops = {
    .on_ready = on_worker_ready,
    .on_message = on_worker_message,
    .on_ended = on_worker_ended,
};

int job_start_worker(struct job *job, struct fault *out_fault)
{
    char why[256];
    job->worker = worker_process_start(job->jobs->setup, job->membership.name, &job->owner,
                                       &worker_ops, job, why, sizeof why);
    if (job->worker)
        return 0;
    snprintf(out_fault->text, sizeof out_fault->text, "job %s: %s", job->membership.name, why);
    return out_fault->code = GRADD_ERR_UNAVAILABLE;
}

/* ------------------------------------------------------------------ what it is asked */

static bool ask_worker(struct job *job, bool all_nodes)
{
    if (!job->worker || !worker_process_is_ready(job->worker))
        return false;
    Pb__StatsRequest request = PB__STATS_REQUEST__INIT;
    request.seq = ++job->stats_seq;
    request.all_nodes = all_nodes;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_STATS_REQUEST;
    envelope.stats_request = &request;
    worker_process_send(job->worker, &envelope, -1);
    return true;
}

bool job_request_stats(struct job *job)
{
    return ask_worker(job, false);
}

bool job_query_stats(struct job *job)
{
    /* Answers may be large. However many ask at once, the worker's queue holds one. */
    if (job->worker && job->query_ns && clock_now_ns() - job->query_ns < QUERY_LIMIT_NS)
        return true;
    if (!ask_worker(job, true))
        return false;
    job->query_seq = job->stats_seq;
    job->query_ns = clock_now_ns();
    return true;
}

/* ------------------------------------------------------------------ what it says */

static void on_worker_ready(void *data)
{
    job_settle(data);
}

static void on_member_gone(struct job *job, const Pb__MemberGone *gone)
{
    struct membership *m = &job->membership;
    struct member *member = membership_find(m, gone->epoch, gone->rank);
    if (!member || m->has_failed || member->origin)
        return;
    if (!gone->failed) {
        job_member_leave(member);
    } else if (gone->code == -GRADD_ERR_RANK_LOST) {
        /* The session will know better how its process ended. */
        session_on_lost_at_worker(member->session);
    } else {
        struct job_failure failure = {-(int)gone->code, gone->text, (int)member->rank, member->pid};
        job_fail(job, &failure, TELL_BY_WORKER);
        job_settle(job);
    }
}

/* GPUs or NCCL failed it. What still runs on them may take long to end. */
static void on_epoch_failed(struct job *job, const Pb__EpochFailed *failed)
{
    if (failed->epoch != job->membership.epoch)
        return;
    struct job_failure failure = {-(int)failed->code, failed->text, failed->rank, failed->pid};
    job_fail(job, &failure, TELL_AT_ONCE);
    job_settle(job);
}

static void on_stats_reply(struct job *job, const Pb__StatsReply *reply)
{
    job->asked_ns = 0;
    job_on_abort_answer(job, reply);
    if (reply->seq != job->query_seq)
        return;
    job->query_ns = 0;
    if (!reply->stats)
        return;
    size_t bytes = pb__job_stats__get_packed_size(reply->stats);
    void *packed = malloc(bytes ? bytes : 1);
    if (!packed)
        return;
    pb__job_stats__pack(reply->stats, packed);
    free(job->stats);
    job->stats = packed;
    job->stats_bytes = bytes;
    rendezvous_on_stats(job);
    job->jobs->on_stats(job->jobs->owner, job);
}

static void on_worker_message(void *data, const Pb__Envelope *envelope)
{
    struct job *job = data;
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_MEMBER_GONE:
        on_member_gone(job, envelope->member_gone);
        break;
    case PB__ENVELOPE__BODY_STALL_NOTICE:
        if (envelope->stall_notice->epoch != job->membership.epoch)
            break;
        job->n_stalled = envelope->stall_notice->n_stalled;
        snprintf(job->stall_text, sizeof job->stall_text, "%s", envelope->stall_notice->text);
        break;
    case PB__ENVELOPE__BODY_EPOCH_FAILED:
        on_epoch_failed(job, envelope->epoch_failed);
        break;
    case PB__ENVELOPE__BODY_STATS_REPLY:
        on_stats_reply(job, envelope->stats_reply);
        break;
    case PB__ENVELOPE__BODY_LINK_LOST:
        if (envelope->link_lost->epoch == job->membership.epoch)
            job_on_link_lost(job, job->layout ? job->layout->node_rank : 0,
                             envelope->link_lost->node, envelope->link_lost->text);
        break;
    default:
        break;
    }
}

static void on_worker_ended(void *data, const char *how)
{
    struct job *job = data;
    struct membership *m = &job->membership;
    bool was_ready = worker_process_was_ready(job->worker);
    char text[FAULT_TEXT_MAX];
    snprintf(text, sizeof text, "job %s epoch %llu: worker (node %s, pid %d) %s", m->name,
             (unsigned long long)m->epoch, job->jobs->node, (int)worker_process_pid(job->worker),
             how);
    job->worker = NULL;
    job->query_ns = 0;
    job_abort_without_worker(job);
    struct job_failure failure = {GRADD_ERR_RANK_LOST, text, -1, 0};
    job_fail(job, &failure, TELL_AT_ONCE);
    if (m->gathering.n > 0 && job->has_owner) {
        struct fault fault = {.code = GRADD_ERR_UNAVAILABLE};
        snprintf(fault.text, sizeof fault.text, "%s", text);
        if (!was_ready || job->n_restarts++ >= RESTARTS_MAX || job_start_worker(job, &fault) < 0)
            job_dismiss(job, fault.code, fault.text);
    }
    job_settle(job);
}
