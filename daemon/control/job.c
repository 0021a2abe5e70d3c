/* SPDX-License-Identifier: Apache-2.0 */
#include "control/job.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "control/session.h"
#include "gradd/types.h"

enum {
    RESTARTS_MAX = 3, /* of a worker that dies before an epoch begins */
};

/* The others hear of a failure within a second, even from a worker that is stuck. */
static const uint64_t ABORT_LIMIT_NS = UINT64_C(700) * 1000000;

/* Who tells the ranks that their epoch has failed. */
enum teller {
    TELL_BY_WORKER, /* if it lives: ops that all ranks have submitted finish first */
    TELL_AT_ONCE,   /* the worker can not reach all of them, or there is no time */
};

static void on_worker_ready(void *data);
static void on_worker_message(void *data, const Pb__Envelope *envelope);
static void on_worker_ended(void *data, const char *how);

static const struct worker_process_ops worker_ops = {
    .on_ready = on_worker_ready,
    .on_message = on_worker_message,
    .on_ended = on_worker_ended,
};

static struct job *job_of(const struct member *member)
{
    return (struct job *)((char *)member->membership - offsetof(struct job, membership));
}

static struct log_fields fields_of(const struct job *job)
{
    return (struct log_fields){.job = job->membership.name, .epoch = job->membership.epoch};
}

/* ------------------------------------------------------------------ life of a job */

static void on_linger_end(void *data);
static void on_abort_limit(void *data);

static void fill_key(struct job_key *key, uid_t uid, const char *name)
{
    memset(key, 0, sizeof *key);
    key->uid = uid;
    strncpy(key->name, name, sizeof key->name - 1);
}

struct job *jobs_find(struct jobs *jobs, uid_t uid, const char *name)
{
    struct job_key key;
    struct job *job;
    fill_key(&key, uid, name);
    HASH_FIND(hh, jobs->by_key, &key, sizeof key, job);
    return job;
}

static unsigned count_of_uid(const struct jobs *jobs, uid_t uid)
{
    unsigned n = 0;
    for (const struct job *job = jobs->by_key; job; job = job->hh.next)
        n += job->key.uid == uid;
    return n;
}

static struct job *job_new(struct jobs *jobs, const char *name, const struct peer *peer)
{
    struct job *job = calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->linger = watch_timer(jobs->loop, on_linger_end, job);
    job->abort.limit = watch_timer(jobs->loop, on_abort_limit, job);
    if (!job->linger || !job->abort.limit) {
        watch_free(job->linger);
        watch_free(job->abort.limit);
        free(job);
        return NULL;
    }
    fill_key(&job->key, peer->uid, name);
    job->jobs = jobs;
    job->owner = *peer;
    job->owner.pidfd = -1;
    job->created_ns = clock_now_ns();
    user_name(peer->uid, job->user, sizeof job->user);
    membership_init(&job->membership, peer->uid, name);
    HASH_ADD(hh, jobs->by_key, key, sizeof job->key, job);
    return job;
}

static void job_free(struct job *job)
{
    HASH_DELETE(hh, job->jobs->by_key, job);
    worker_process_end(job->worker);
    membership_deinit(&job->membership);
    watch_free(job->linger);
    watch_free(job->abort.limit);
    free(job->stats);
    free(job);
}

void jobs_deinit(struct jobs *jobs)
{
    struct job *job, *next;
    HASH_ITER(hh, jobs->by_key, job, next)
    job_free(job);
}

static void on_linger_end(void *data)
{
    struct job *job = data;
    struct jobs *jobs = job->jobs;
    struct log_fields fields = fields_of(job);
    log_line(LOG_LEVEL_DEBUG, "job", &fields, "forgotten");
    job_free(job);
    jobs->on_change(jobs->owner);
}

static void try_begin(struct job *job);

/* After every change: begin an epoch that can begin, keep or forget a job that nobody uses. */
static void job_settle(struct job *job)
{
    const struct membership *m = &job->membership;
    try_begin(job);
    bool is_idle = m->state == JOB_LINGERING || m->state == JOB_FAILED;
    if (!is_idle) {
        watch_disarm(job->linger);
    } else if (job->jobs->is_draining || m->epoch == 0) {
        watch_arm(job->linger, 0);
    } else if (!watch_is_armed(job->linger)) {
        watch_arm(job->linger, job->jobs->config->job_linger_ms * 1000000);
    }
    job->jobs->on_change(job->jobs->owner);
}

/* ------------------------------------------------------------------ the end of an epoch */

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
    job->abort.is_pending = job_request_stats(job);
    job->abort.seq = job->stats_seq;
    if (job->abort.is_pending)
        watch_arm(job->abort.limit, ABORT_LIMIT_NS);
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
    session_on_epoch_failed(member->session, &failure);
}

static void tell_all_failed(struct job *job)
{
    const struct roster *running = &job->membership.running;
    for (uint32_t rank = 0; rank < running->size; rank++)
        if (running->of_rank[rank])
            tell_failed(job, running->of_rank[rank]);
}

/* Fail the running epoch. culprit, the member that caused it, may be NULL. */
static void fail_epoch(struct job *job, int code, const char *text, const struct member *culprit,
                       enum teller teller)
{
    struct membership *m = &job->membership;
    if (m->has_failed || m->running.n == 0)
        return;
    job->abort.code = code;
    job->abort.rank = culprit ? (int)culprit->rank : -1;
    job->abort.pid = culprit ? culprit->pid : 0;
    struct log_fields fields = fields_of(job);
    fields.has_rank = culprit != NULL;
    fields.rank = job->abort.rank;
    fields.pid = (int)job->abort.pid;
    log_line(LOG_LEVEL_WARNING, "job", &fields, "epoch failed: %s", text);
    membership_fail(m, text);
    job->n_stalled = 0;
    if (job->worker)
        send_abort(job);
    if (!job->worker || teller == TELL_AT_ONCE)
        tell_all_failed(job);
    else if (culprit)
        tell_failed(job, culprit); /* the worker has lost it */
}

/* The worker does not read what it is sent. The epoch is over: nothing is lost with it. */
static void on_abort_limit(void *data)
{
    struct job *job = data;
    struct log_fields fields = fields_of(job);
    log_line(LOG_LEVEL_WARNING, "job", &fields,
             "the worker (pid %d) does not answer after its epoch failed and is killed",
             (int)worker_process_pid(job->worker));
    tell_all_failed(job);
    worker_process_kill(job->worker);
}

static void on_abort_obeyed(struct job *job)
{
    job->abort.is_pending = false;
    watch_disarm(job->abort.limit);
    job_settle(job);
}

/* Refuse all that wait. */
static void dismiss(struct job *job, int code, const char *text)
{
    struct roster *gathering = &job->membership.gathering;
    if (gathering->n == 0)
        return;
    struct fault fault = {.code = code};
    snprintf(fault.text, sizeof fault.text, "%s", text);
    for (uint32_t rank = 0; rank < gathering->size; rank++)
        if (gathering->of_rank[rank])
            session_on_join_refused(gathering->of_rank[rank]->session, &fault);
    membership_dismiss(&job->membership);
}

void job_member_leave(struct member *member)
{
    if (member->state == MEMBER_NONE)
        return;
    struct job *job = job_of(member);
    membership_remove(&job->membership, member);
    job_settle(job);
}

void job_member_lost(struct member *member, const char *how)
{
    struct job *job = job_of(member);
    char text[FAULT_TEXT_MAX];
    snprintf(text, sizeof text, "job %s: rank %u (node %s, pid %d) %s", job->membership.name,
             member->rank, job->jobs->node, (int)member->pid, how);
    fail_epoch(job, GRADD_ERR_RANK_LOST, text, member, TELL_BY_WORKER);
    membership_remove(&job->membership, member);
    job_settle(job);
}

void job_join_timed_out(struct member *member, uint64_t waited_ms)
{
    struct job *job = job_of(member);
    const struct membership *m = &job->membership;
    char who[300], text[FAULT_TEXT_MAX];
    membership_describe_missing(m, who, sizeof who);
    if (*who) {
        snprintf(text, sizeof text,
                 "job %s: %u of %u ranks joined in %.1f s; %s did not: are they started, and with "
                 "the same job name and user?",
                 m->name, m->gathering.n, m->gathering.size, (double)waited_ms / 1000, who);
    } else if (!job->worker || !worker_process_is_ready(job->worker)) {
        snprintf(text, sizeof text, "job %s: its worker was not ready in %.1f s", m->name,
                 (double)waited_ms / 1000);
    } else {
        membership_describe_active(m, who, sizeof who);
        snprintf(text, sizeof text,
                 "job %s: all ranks joined, but for %.1f s epoch %llu still had active %s: a rank "
                 "that does not leave keeps the next epoch waiting",
                 m->name, (double)waited_ms / 1000, (unsigned long long)m->epoch, who);
    }
    struct log_fields fields = fields_of(job);
    log_line(LOG_LEVEL_WARNING, "job", &fields, "%s", text);
    dismiss(job, GRADD_ERR_TIMEOUT, text);
    job_settle(job);
}

/* ------------------------------------------------------------------ the begin of an epoch */

static void send_epoch_begin(struct job *job)
{
    const struct membership *m = &job->membership;
    Pb__EpochBegin begin = PB__EPOCH_BEGIN__INIT;
    begin.epoch = m->epoch;
    begin.size = m->running.size;
    begin.n_local = m->running.n;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_EPOCH_BEGIN;
    envelope.epoch_begin = &begin;
    worker_process_send(job->worker, &envelope, -1);
}

static void send_add_member(struct job *job, const struct member *member, int fd)
{
    Pb__AddMember add = PB__ADD_MEMBER__INIT;
    add.epoch = job->membership.epoch;
    add.rank = member->rank;
    add.local_rank = member->local_rank;
    add.pid = (int32_t)member->pid;
    add.uid = (uint32_t)job->key.uid;
    add.source = (char *)member->source;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_ADD_MEMBER;
    envelope.add_member = &add;
    worker_process_send(job->worker, &envelope, fd);
}

/* Connect one trainer with the worker. 0 or -errno. */
static int introduce(struct job *job, struct member *member)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return -errno;
    send_add_member(job, member, ends[1]);
    session_on_joined(member->session, job->membership.epoch, ends[0]);
    close(ends[0]);
    close(ends[1]);
    return 0;
}

static void try_begin(struct job *job)
{
    struct membership *m = &job->membership;
    if (!job->worker || !worker_process_is_ready(job->worker) || job->abort.is_pending ||
        !membership_is_ready(m))
        return;
    membership_begin(m);
    job->n_restarts = 0;
    job->n_stalled = 0;
    struct log_fields fields = fields_of(job);
    log_line(LOG_LEVEL_INFO, "job", &fields, "epoch begins with %u ranks of uid %u",
             m->running.size, (unsigned)job->key.uid);
    send_epoch_begin(job);
    for (uint32_t rank = 0; rank < m->running.size; rank++) {
        int rc = introduce(job, m->running.of_rank[rank]);
        if (rc == 0)
            continue;
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text, "job %s: rank %u can not be connected with the worker: %s",
                 m->name, rank, strerror(-rc));
        fail_epoch(job, GRADD_ERR_NO_MEMORY, text, NULL, TELL_AT_ONCE);
        return;
    }
}

static int start_worker(struct job *job, struct fault *out_fault)
{
    char why[256];
    job->worker = worker_process_start(job->jobs->setup, job->membership.name, &job->owner,
                                       &worker_ops, job, why, sizeof why);
    if (job->worker)
        return 0;
    snprintf(out_fault->text, sizeof out_fault->text, "job %s: %s", job->membership.name, why);
    return out_fault->code = GRADD_ERR_UNAVAILABLE;
}

/* The job of that name, a new one if need be. NULL with *out_fault. */
static struct job *obtain(struct jobs *jobs, const char *name, const struct peer *peer,
                          struct fault *out_fault)
{
    struct job *job = jobs_find(jobs, peer->uid, name);
    if (job)
        return job;
    if (count_of_uid(jobs, peer->uid) >= jobs->config->max_jobs_per_uid) {
        out_fault->code = GRADD_ERR_NO_MEMORY;
        snprintf(out_fault->text, sizeof out_fault->text,
                 "job %s: uid %u has %llu jobs on node %s already (max_jobs_per_uid)", name,
                 (unsigned)peer->uid, (unsigned long long)jobs->config->max_jobs_per_uid,
                 jobs->node);
        return NULL;
    }
    job = job_new(jobs, name, peer);
    if (!job) {
        out_fault->code = GRADD_ERR_NO_MEMORY;
        snprintf(out_fault->text, sizeof out_fault->text, "job %s: the daemon is out of memory",
                 name);
    }
    return job;
}

int jobs_join(struct jobs *jobs, const char *name, const struct peer *peer, struct member *member,
              struct fault *out_fault)
{
    if (jobs->is_draining) {
        snprintf(out_fault->text, sizeof out_fault->text,
                 "job %s: the daemon of node %s is stopping and takes no new ranks", name,
                 jobs->node);
        return out_fault->code = GRADD_ERR_UNAVAILABLE;
    }
    struct job *job = obtain(jobs, name, peer, out_fault);
    if (!job)
        return out_fault->code;
    int rc = membership_join(&job->membership, member, out_fault);
    if (rc == 0 && !job->worker) {
        rc = start_worker(job, out_fault);
        if (rc < 0)
            membership_remove(&job->membership, member);
    }
    job_settle(job);
    return rc;
}

/* ------------------------------------------------------------------ the worker's word */

static void on_worker_ready(void *data)
{
    job_settle(data);
}

static void on_member_gone(struct job *job, const Pb__MemberGone *gone)
{
    struct membership *m = &job->membership;
    struct member *member = membership_find(m, gone->epoch, gone->rank);
    if (!member || m->has_failed)
        return;
    if (!gone->failed) {
        job_member_leave(member);
    } else if (gone->code == -GRADD_ERR_RANK_LOST) {
        /* The session will know better how its process ended. */
        session_on_lost_at_worker(member->session);
    } else {
        fail_epoch(job, -(int)gone->code, gone->text, member, TELL_BY_WORKER);
        job_settle(job);
    }
}

static void on_stats_reply(struct job *job, const Pb__StatsReply *reply)
{
    if (job->abort.is_pending && reply->seq >= job->abort.seq)
        on_abort_obeyed(job);
    if (reply->seq != job->stats_seq || !reply->stats)
        return;
    size_t bytes = pb__job_stats__get_packed_size(reply->stats);
    void *packed = malloc(bytes ? bytes : 1);
    if (!packed)
        return;
    pb__job_stats__pack(reply->stats, packed);
    free(job->stats);
    job->stats = packed;
    job->stats_bytes = bytes;
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
    case PB__ENVELOPE__BODY_STATS_REPLY:
        on_stats_reply(job, envelope->stats_reply);
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
    if (watch_is_armed(job->abort.limit))
        tell_all_failed(job); /* it may not have come to that */
    job->abort.is_pending = false;
    watch_disarm(job->abort.limit);
    fail_epoch(job, GRADD_ERR_RANK_LOST, text, NULL, TELL_AT_ONCE);
    if (m->gathering.n > 0) {
        struct fault fault = {.code = GRADD_ERR_UNAVAILABLE};
        snprintf(fault.text, sizeof fault.text, "%s", text);
        if (!was_ready || job->n_restarts++ >= RESTARTS_MAX || start_worker(job, &fault) < 0)
            dismiss(job, fault.code, fault.text);
    }
    job_settle(job);
}

bool job_request_stats(struct job *job)
{
    if (!job->worker || !worker_process_is_ready(job->worker))
        return false;
    Pb__StatsRequest request = PB__STATS_REQUEST__INIT;
    request.seq = ++job->stats_seq;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_STATS_REQUEST;
    envelope.stats_request = &request;
    worker_process_send(job->worker, &envelope, -1);
    return true;
}

/* ------------------------------------------------------------------ the end of the daemon */

void jobs_drain(struct jobs *jobs)
{
    jobs->is_draining = true;
    struct job *job, *next;
    HASH_ITER(hh, jobs->by_key, job, next)
    {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text, "job %s: the daemon of node %s is stopping",
                 job->membership.name, jobs->node);
        dismiss(job, GRADD_ERR_UNAVAILABLE, text);
        job_settle(job);
    }
}

void jobs_abort(struct jobs *jobs, const char *why)
{
    struct job *job, *next;
    HASH_ITER(hh, jobs->by_key, job, next)
    {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text, "job %s epoch %llu: %s", job->membership.name,
                 (unsigned long long)job->membership.epoch, why);
        fail_epoch(job, GRADD_ERR_UNAVAILABLE, text, NULL, TELL_AT_ONCE);
        job_settle(job);
    }
}

unsigned jobs_count_running(const struct jobs *jobs)
{
    unsigned n = 0;
    for (const struct job *job = jobs->by_key; job; job = job->hh.next)
        n += job->membership.state == JOB_RUNNING;
    return n;
}
