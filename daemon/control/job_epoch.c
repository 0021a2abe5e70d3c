/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the epochs of a job begin: with a gathering that is whole here, or because the coordinator on
 * another node has begun one. The worker is told, and each trainer connected with it.
 */
#include <errno.h>
#include <stdio.h>
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

int job_epoch_init(struct job *job)
{
    struct loop *loop = job->jobs->loop;
    job->abort.limit = watch_timer(loop, job_on_abort_limit, job);
    job->lost_link.limit = watch_timer(loop, job_on_lost_link_limit, job);
    job->ping = watch_timer(loop, job_on_ping, job);
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
