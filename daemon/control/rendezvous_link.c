/* SPDX-License-Identifier: Apache-2.0 */
/* What links to other daemons bring, and what it means for jobs when they are lost. */
#include <stdio.h>
#include <string.h>

#include "control/rendezvous.h"
#include "control/rendezvous_internal.h"
#include "gradd/types.h"

/* ------------------------------------------------------------------ links */

static bool needs(const struct job *job, const struct peer_link *link)
{
    return job->membership.gathering.coordinator == link ||
           (job->pending && job->pending->nodes[0].link == link) ||
           rendezvous_has_member(job, link) ||
           (job_is_alive(job) && rendezvous_has_part(job, link));
}

unsigned rendezvous_count_jobs(const struct jobs *jobs, const struct peer_link *link)
{
    unsigned n = 0;
    for (const struct job *job = jobs->by_key; job; job = job->hh.next)
        n += needs(job, link);
    return n;
}

static bool is_used(void *owner, const struct peer_link *link)
{
    return rendezvous_count_jobs(owner, link) > 0;
}

static void on_up(void *owner, struct peer_link *link)
{
    struct jobs *jobs = owner;
    (void)link;
    for (struct job *job = jobs->by_key; job; job = job->hh.next)
        rendezvous_forward(job);
}

/* Epochs may wait for the nodes' answers before they begin. */
static void on_answer(void *owner, struct peer_link *link)
{
    struct jobs *jobs = owner;
    struct job *job, *next;
    HASH_ITER(hh, jobs->by_key, job, next)
    {
        if (job->whole_ns && rendezvous_has_member(job, link))
            job_settle(job);
    }
}

/* The address that ranks gave as the coordinator's is one of this daemon's. */
static void on_self(void *owner, struct peer_link *link)
{
    struct jobs *jobs = owner;
    struct job *job, *next;
    HASH_ITER(hh, jobs->by_key, job, next)
    {
        if (job->membership.gathering.coordinator != link)
            continue;
        membership_move(&job->membership, NULL);
        job_settle(job);
    }
}

/* The link was up before any of these ranks came, and has brought nothing since their joins left.
 */
static bool was_dead_already(const struct roster *gathering, const struct peer_link *link)
{
    for (uint32_t rank = 0; rank < gathering->size; rank++) {
        const struct member *member = gathering->of_rank[rank];
        if (member && (member->since_ns < link->up_ns ||
                       (member->is_forwarded && member->forwarded_ns <= link->heard_ns)))
            return false;
    }
    return link->up_ns != 0;
}

/*
 * The link was of no use any more when the ranks came, which only now becomes known (its network
 * was broken, or the coordinator has been started again): a new one may do better.
 */
static bool try_again(struct job *job, const struct peer_link *link)
{
    struct membership *m = &job->membership;
    char why[256];
    if (!was_dead_already(&m->gathering, link))
        return false;
    struct peer_link *fresh = peers_dial(job->jobs->peers, &link->targets, why, sizeof why);
    if (!fresh)
        return false;
    membership_move(m, fresh);
    return true;
}

/* Ranks that wait for a coordinator, or that a coordinator waits for. */
static void lose_gathering(struct job *job, const struct peer_link *link, const char *why)
{
    struct membership *m = &job->membership;
    if (m->gathering.coordinator == link && !try_again(job, link)) {
        char text[FAULT_TEXT_MAX];
        for (uint32_t rank = 0; rank < m->gathering.size; rank++)
            if (m->gathering.of_rank[rank])
                m->gathering.of_rank[rank]->is_forwarded = false;
        snprintf(text, sizeof text, "job %s: the coordinator at %s (%s) can not be joined: %s",
                 m->name, link->address_text, link->name, why);
        job_dismiss(job, GRADD_ERR_UNAVAILABLE, text);
    }
    for (uint32_t rank = 0; rank < m->gathering.size; rank++) {
        struct member *member = rendezvous_find_remote(&m->gathering, link, rank);
        if (member)
            membership_remove(m, member);
    }
    if (job->pending && job->pending->nodes[0].link == link) {
        layout_free(job->pending);
        job->pending = NULL;
    }
}

/* The running epoch, in which that node has a part. */
static void lose_running(struct job *job, const struct peer_link *link, const char *why)
{
    struct membership *m = &job->membership;
    struct layout *layout = job->layout;
    if (!rendezvous_has_part(job, link))
        return;
    bool is_coordinator = layout->node_rank == 0, is_needed = !is_coordinator;
    for (uint32_t rank = 0; rank < m->running.size; rank++)
        is_needed = is_needed || rendezvous_find_remote(&m->running, link, rank);
    for (uint32_t node = 0; node < layout->n_nodes; node++)
        if (layout->nodes[node].link == link)
            layout->nodes[node].link = NULL;
    if (!is_needed)
        return;
    char text[FAULT_TEXT_MAX];
    snprintf(text, sizeof text, "job %s epoch %llu: node %s lost %snode %s (%s): %s", m->name,
             (unsigned long long)m->epoch, job->jobs->node,
             is_coordinator ? "" : "the coordinator, ", link->name, link->address_text, why);
    struct job_failure failure = {GRADD_ERR_RANK_LOST, text, -1, 0};
    job_fail(job, &failure, TELL_BY_WORKER);
}

static void on_lost(void *owner, struct peer_link *link, const char *why)
{
    struct jobs *jobs = owner;
    struct job *job, *next_job;
    rendezvous_drop_queries(jobs, link);
    HASH_ITER(hh, jobs->by_key, job, next_job)
    {
        if (!needs(job, link) && !rendezvous_has_part(job, link))
            continue;
        lose_gathering(job, link, why);
        lose_running(job, link, why);
        job_settle(job);
    }
}

static void on_message(void *owner, struct peer_link *link, const Pb__Envelope *envelope)
{
    struct jobs *jobs = owner;
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_REMOTE_JOIN:
        rendezvous_on_join(jobs, link, envelope->remote_join);
        break;
    case PB__ENVELOPE__BODY_REMOTE_REFUSAL:
        rendezvous_on_refusal(jobs, link, envelope->remote_refusal);
        break;
    case PB__ENVELOPE__BODY_REMOTE_LEAVE:
        rendezvous_on_leave(jobs, link, envelope->remote_leave);
        break;
    case PB__ENVELOPE__BODY_EPOCH_LAYOUT:
        rendezvous_on_layout(jobs, link, envelope->epoch_layout);
        break;
    case PB__ENVELOPE__BODY_REMOTE_ABORT:
        rendezvous_on_abort(jobs, link, envelope->remote_abort);
        break;
    case PB__ENVELOPE__BODY_REMOTE_LINK_LOST:
        rendezvous_on_link_lost(jobs, link, envelope->remote_link_lost);
        break;
    case PB__ENVELOPE__BODY_REMOTE_JOB_REQUEST:
        rendezvous_on_job_request(jobs, link, envelope->remote_job_request);
        break;
    case PB__ENVELOPE__BODY_REMOTE_JOB_REPLY:
        jobs->on_remote_stats(jobs->owner, envelope->remote_job_reply);
        break;
    default:
        break; /* of a newer version: what must be understood comes with a new protocol number */
    }
}

/* ------------------------------------------------------------------ data connections */

/* The job whose living epoch the hello names, as a connection of one of its nodes to this one. */
static struct job *find_epoch(struct jobs *jobs, const struct link_hello *hello)
{
    for (struct job *job = jobs->by_key; job; job = job->hh.next) {
        const struct layout *layout = job->layout;
        if (!layout || !job->worker || !job_is_alive(job) || job->membership.epoch != hello->epoch)
            continue;
        if (memcmp(layout->link_id, hello->link_id, LINK_ID_BYTES) == 0 &&
            hello->to_node == layout->node_rank && hello->from_node != layout->node_rank &&
            hello->from_node < layout->n_nodes)
            return job;
    }
    return NULL;
}

static const uint8_t *find_secret(void *owner, const struct link_hello *hello)
{
    const struct job *job = find_epoch(owner, hello);
    return job ? job->layout->secret : NULL;
}

static void on_data_link(void *owner, const struct link_hello *hello, int fd)
{
    struct job *job = find_epoch(owner, hello);
    if (!job)
        return;
    Pb__LinkArrived arrived = PB__LINK_ARRIVED__INIT;
    arrived.epoch = hello->epoch;
    arrived.from_node = hello->from_node;
    arrived.stream = hello->stream;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_LINK_ARRIVED;
    envelope.link_arrived = &arrived;
    int rc = worker_process_send(job->worker, &envelope, fd);
    if (rc < 0) {
        struct log_fields fields = job_fields(job);
        log_line(LOG_LEVEL_WARNING, "job", &fields,
                 "a data connection of node %u can not be given to the worker: %s",
                 hello->from_node, strerror(-rc));
    }
}

const struct peers_ops rendezvous_peers_ops = {
    .on_up = on_up,
    .on_lost = on_lost,
    .on_self = on_self,
    .on_answer = on_answer,
    .on_message = on_message,
    .is_used = is_used,
    .find_secret = find_secret,
    .on_data_link = on_data_link,
};
