/* SPDX-License-Identifier: Apache-2.0 */
/* The epochs of a job: how they begin, how they fail, and what the worker says about them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/words.h"
#include "control/job_internal.h"
#include "control/peers.h"
#include "control/rendezvous.h"
#include "control/session.h"
#include "gradd/types.h"

enum {
    RESTARTS_MAX = 3, /* of a worker that dies before an epoch begins */
};

static const uint64_t MS = 1000000;
/* The others hear of a failure within a second, even from a worker that is stuck. */
static const uint64_t ABORT_LIMIT_NS = UINT64_C(700) * 1000000;
/* A process that ended closes its links before its daemon can tell why. */
static const uint64_t LOST_LINK_GRACE_NS = UINT64_C(300) * 1000000;
/* Between questions to a worker whose GPUs are still busy with the failed epoch. */
static const uint64_t DRAIN_POLL_NS = UINT64_C(50) * 1000000;
static const uint64_t DRAIN_LIMIT_NS = UINT64_C(1000) * 1000000;
/* After that long another question is sent: the epoch of the first may have ended with it. */
static const uint64_t QUERY_LIMIT_NS = UINT64_C(1000) * 1000000;
static const uint64_t PING_NS = UINT64_C(500) * 1000000;

static void on_worker_ready(void *data);
static void on_worker_message(void *data, const Pb__Envelope *envelope);
static void on_worker_ended(void *data, const char *how);
static void on_abort_limit(void *data);
static void on_lost_link_limit(void *data);
static void on_ping(void *data);

static const struct worker_process_ops worker_ops = {
    .on_ready = on_worker_ready,
    .on_message = on_worker_message,
    .on_ended = on_worker_ended,
};

int job_epoch_init(struct job *job)
{
    struct loop *loop = job->jobs->loop;
    job->abort.limit = watch_timer(loop, on_abort_limit, job);
    job->lost_link.limit = watch_timer(loop, on_lost_link_limit, job);
    job->ping = watch_timer(loop, on_ping, job);
    return job->abort.limit && job->lost_link.limit && job->ping ? 0 : -ENOMEM;
}

void job_epoch_deinit(struct job *job)
{
    watch_free(job->abort.limit);
    watch_free(job->lost_link.limit);
    watch_free(job->ping);
    layout_free(job->layout);
    layout_free(job->pending);
}

/* ------------------------------------------------------------------ the end of an epoch */

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

static void on_abort_limit(void *data)
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

/* ------------------------------------------------------------------ links between nodes' workers
 */

/* A rank of that node has not left yet. Only the coordinator knows. */
static bool has_active_rank(const struct job *job, uint32_t node)
{
    const struct roster *running = &job->membership.running;
    for (uint32_t rank = 0; rank < running->size; rank++)
        if (running->of_rank[rank] && job->layout->ranks[rank].node == node)
            return true;
    return false;
}

static void on_lost_link_limit(void *data)
{
    struct job *job = data;
    if (!job_is_alive(job) || !job->layout || !has_active_rank(job, job->lost_link.node))
        return;
    struct job_failure failure = {GRADD_ERR_RANK_LOST, job->lost_link.text, -1, 0};
    job_fail(job, &failure, TELL_BY_WORKER);
    job_settle(job);
}

void job_on_link_lost(struct job *job, uint32_t reporter, uint32_t node, const char *text)
{
    const struct layout *layout = job->layout;
    if (!job_is_alive(job) || !layout || node >= layout->n_nodes)
        return;
    if (layout->node_rank != 0) {
        rendezvous_link_lost(job, node, text);
        return;
    }
    if (watch_is_armed(job->lost_link.limit) || !has_active_rank(job, node))
        return;
    job->lost_link.node = node;
    bool is_own = node == reporter;
    snprintf(job->lost_link.text, sizeof job->lost_link.text,
             "job %s epoch %llu: the worker of node %s lost its link%s%s: %s", job->membership.name,
             (unsigned long long)layout->epoch, layout->nodes[reporter].name,
             is_own ? "s" : " to node ", is_own ? "" : layout->nodes[node].name, text);
    watch_arm(job->lost_link.limit, LOST_LINK_GRACE_NS);
}

/* It has been asked, and this process has been awake to hear it. */
static bool is_worker_silent(struct job *job, uint64_t limit_ns)
{
    if (job->asked_ns && clock_now_ns() - job->asked_ns >= limit_ns)
        worker_process_drain(job->worker);
    return job->asked_ns && clock_now_ns() - job->asked_ns >= limit_ns;
}

/* All nodes wait for each other's workers: one that is stopped is ended. */
static void on_ping(void *data)
{
    struct job *job = data;
    uint64_t limit_ns = job->jobs->config->peer_dead_ms * MS;
    if (!job_is_alive(job) || !job->worker)
        return;
    bool is_silent = is_worker_silent(job, limit_ns);
    if (!job_is_alive(job) || !job->worker)
        return;
    if (is_silent) {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text,
                 "job %s epoch %llu: worker (node %s, pid %d) did not answer for %.3g s and was "
                 "killed",
                 job->membership.name, (unsigned long long)job->membership.epoch, job->jobs->node,
                 (int)worker_process_pid(job->worker), (double)limit_ns / 1e9);
        struct job_failure failure = {GRADD_ERR_RANK_LOST, text, -1, 0};
        worker_process_kill(job->worker);
        job_fail(job, &failure, TELL_AT_ONCE);
        job_settle(job);
        return;
    }
    job_request_stats(job);
    if (!job->asked_ns)
        job->asked_ns = clock_now_ns();
    uint64_t next_ns = PING_NS < limit_ns / 8 ? PING_NS : limit_ns / 8;
    uint64_t left_ns = job->asked_ns + limit_ns - clock_now_ns();
    watch_arm(job->ping, next_ns < left_ns ? next_ns : left_ns);
}

/* ------------------------------------------------------------------ the begin of an epoch */

static void send_epoch_begin(struct job *job, Pb__Layout *layout)
{
    const struct membership *m = &job->membership;
    Pb__EpochBegin begin = PB__EPOCH_BEGIN__INIT;
    begin.epoch = m->epoch;
    begin.size = m->running.size;
    begin.n_local = job->layout ? job->layout->nodes[job->layout->node_rank].n_ranks : m->running.n;
    begin.layout = layout;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_EPOCH_BEGIN;
    envelope.epoch_begin = &begin;
    worker_process_send(job->worker, &envelope, -1);
}

static int send_add_member(struct job *job, const struct member *member, int fd)
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
    return worker_process_send(job->worker, &envelope, fd);
}

/* What its launcher has not told it. */
static void place_locally(const struct job *job, struct member *member)
{
    const struct layout *layout = job->layout;
    if (layout)
        member->local_rank = layout->ranks[member->rank].local_rank;
    else if (member->local_size == 0)
        member->local_rank = member->rank;
    if (member->local_size == 0)
        member->local_size = layout ? layout->nodes[layout->node_rank].n_ranks : member->size;
}

/* Does the epoch take device memory? layout NULL: all ranks are here. */
static bool takes_devices(const struct job *job, const struct layout *layout, const char **out_text)
{
    bool is_taken = worker_process_takes_devices(job->worker, out_text);
    if (!is_taken || !layout || layout->device_path)
        return is_taken;
    *out_text = "another node of the job takes no device memory";
    return false;
}

/* Is the operator content with where this epoch's device tensors would go? */
static bool is_refused(const struct job *job, const struct layout *layout, char *text, size_t size)
{
    const char *why_not;
    if (job->jobs->config->backend != BACKEND_NCCL || takes_devices(job, layout, &why_not))
        return false;
    snprintf(text, size, "job %s: backend = nccl on node %s, but the GPUs can not be used: %s",
             job->membership.name, job->jobs->node, why_not);
    return true;
}

/* Connect one trainer with the worker. 0 or -errno. */
static int introduce(struct job *job, struct member *member)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return -errno;
    place_locally(job, member);
    struct session_place place = {
        .epoch = job->membership.epoch,
        .node_rank = job->layout ? job->layout->node_rank : 0,
        .n_nodes = job->layout ? job->layout->n_nodes : 1,
    };
    place.device_path = takes_devices(job, job->layout, &place.device_text);
    int rc = send_add_member(job, member, ends[1]);
    if (rc != -EMFILE && rc != -ENFILE)
        rc = session_on_joined(member->session, &place, ends[0]);
    close(ends[0]);
    close(ends[1]);
    /* A connection that has ended fails the epoch by itself, and knows better why. */
    return rc == -EMFILE || rc == -ENFILE ? rc : 0;
}

/* Tell the worker and the trainers of this node. */
static void start_epoch(struct job *job)
{
    struct membership *m = &job->membership;
    struct log_fields fields = job_fields(job);
    const uint32_t n_nodes = job->layout ? job->layout->n_nodes : 1;
    job->n_restarts = 0;
    job->n_stalled = 0;
    /* What is left of the epoch before: a link that its nodes closed as they left is no loss now.
     */
    watch_disarm(job->lost_link.limit);
    watch_disarm(job->ping);
    log_line(LOG_LEVEL_INFO, "job", &fields, "epoch begins with %u rank%s on %u node%s, of uid %u",
             m->running.size, words_s(m->running.size), n_nodes, words_s(n_nodes),
             (unsigned)job->key.uid);
    int rc = 0;
    Pb__Layout *packed = NULL;
    if (job->layout && !(packed = layout_pack(job->layout, job->layout->node_rank)))
        rc = -ENOMEM;
    if (rc == 0)
        send_epoch_begin(job, packed);
    layout_packed_free(packed);
    for (uint32_t rank = 0; rank < m->running.size && rc == 0; rank++)
        if (m->running.of_rank[rank] && !m->running.of_rank[rank]->origin)
            rc = introduce(job, m->running.of_rank[rank]);
    if (rc < 0) {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text,
                 "job %s epoch %llu: ranks of node %s can not be connected with the worker: %s",
                 m->name, (unsigned long long)m->epoch, job->jobs->node, strerror(-rc));
        struct job_failure failure = {GRADD_ERR_NO_MEMORY, text, -1, 0};
        job_fail(job, &failure, TELL_AT_ONCE);
        return;
    }
    if (job->layout) {
        job->asked_ns = 0;
        watch_arm(job->ping, 0);
        peers_on_epoch(job->jobs->peers);
    }
}

/* This daemon gathers, and the gathering is whole. */
static void begin_own(struct job *job)
{
    struct membership *m = &job->membership;
    struct layout *layout = NULL;
    struct fault fault;
    if (!job->whole_ns)
        job->whole_ns = clock_now_ns();
    if (!rendezvous_is_confirmed(job))
        return;
    job->whole_ns = 0;
    if (!LIST_EMPTY(&job->remotes) && rendezvous_plan(job, &layout, &fault) < 0) {
        job_dismiss(job, fault.code, fault.text);
        return;
    }
    if (is_refused(job, layout, fault.text, sizeof fault.text)) {
        layout_free(layout);
        job_dismiss(job, GRADD_ERR_UNAVAILABLE, fault.text);
        return;
    }
    membership_begin(m, membership_next_epoch(m), NULL);
    layout_free(job->layout);
    job->layout = layout;
    if (layout)
        rendezvous_begin(job);
    start_epoch(job);
}

/* The coordinator has begun; the ranks that it counted on may have gone meanwhile. */
static void begin_pending(struct job *job)
{
    struct membership *m = &job->membership;
    struct layout *layout = job->pending;
    bool takes[MEMBERSHIP_SIZE_MAX] = {false};
    uint32_t n_missing = 0, missing = 0, n_taken = 0;
    job->pending = NULL;
    for (uint32_t rank = 0; rank < layout->size; rank++) {
        if (layout->ranks[rank].node != layout->node_rank)
            continue;
        const struct member *member = rank < m->gathering.size ? m->gathering.of_rank[rank] : NULL;
        takes[rank] = member && member->is_forwarded && member->size == layout->size &&
                      member->pid == layout->ranks[rank].pid;
        n_taken += takes[rank];
        if (!takes[rank]) {
            n_missing++;
            missing = rank;
        }
    }
    char text[FAULT_TEXT_MAX] = "out of memory";
    const bool is_unwanted = is_refused(job, layout, text, sizeof text);
    if (is_unwanted)
        n_missing = 0;
    else if (n_missing)
        snprintf(text, sizeof text,
                 "job %s epoch %llu: rank %u (node %s, pid %d) has gone before it began", m->name,
                 (unsigned long long)layout->epoch, missing, job->jobs->node,
                 (int)layout->ranks[missing].pid);
    else if (layout->epoch <= m->epoch)
        snprintf(text, sizeof text, "job %s: epoch %llu is over on node %s", m->name,
                 (unsigned long long)layout->epoch, job->jobs->node);
    if (n_taken == 0 || is_unwanted || layout->epoch <= m->epoch ||
        membership_begin(m, layout->epoch, takes) < 0) {
        rendezvous_decline(job, layout, text);
        layout_free(layout);
        if (n_taken > 0)
            job_dismiss(job, GRADD_ERR_UNAVAILABLE, text);
        return;
    }
    layout_free(job->layout);
    job->layout = layout;
    start_epoch(job);
    if (n_missing) {
        struct job_failure failure = {GRADD_ERR_RANK_LOST, text, (int)missing,
                                      layout->ranks[missing].pid};
        job_fail(job, &failure, TELL_AT_ONCE);
    }
}

void job_try_begin(struct job *job)
{
    const struct membership *m = &job->membership;
    if (!job->worker || !worker_process_is_ready(job->worker) || job->abort.is_pending)
        return;
    if (membership_is_ready(m)) {
        begin_own(job);
        return;
    }
    job->whole_ns = 0;
    if (job->pending && membership_is_free(m))
        begin_pending(job);
}

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

/* ------------------------------------------------------------------ the worker's word */

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
    if (job->abort.is_pending && reply->seq >= job->abort.seq) {
        if (reply->is_draining)
            on_abort_draining(job);
        else
            on_abort_obeyed(job);
    }
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
    if (watch_is_armed(job->abort.limit))
        tell_all_failed(job); /* it may not have come to that */
    job->abort.is_pending = job->abort.is_waiting = false;
    watch_disarm(job->abort.limit);
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
