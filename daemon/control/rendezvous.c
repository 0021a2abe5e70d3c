/* SPDX-License-Identifier: Apache-2.0 */
/* A node's side: its ranks join and leave a job that another daemon coordinates. */
#include "control/rendezvous.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "control/rendezvous_internal.h"
#include "gradd/types.h"

static const uint64_t MS = 1000000;

/* ------------------------------------------------------------------ messages */

void rendezvous_push(struct peer_link *link, int body_case, void *message)
{
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.remote_join = message; /* all members of the union are pointers */
    if (link)
        peer_link_push(link, &envelope);
}

void rendezvous_push_abort(const struct job *job, struct peer_link *link, uint64_t epoch,
                           const struct job_failure *failure)
{
    Pb__RemoteAbort abort = PB__REMOTE_ABORT__INIT;
    abort.job = (char *)job->key.name;
    abort.uid = (uint32_t)job->key.uid;
    abort.epoch = epoch;
    abort.code = (uint32_t)-failure->code;
    abort.text = (char *)failure->text;
    abort.rank = failure->rank;
    abort.pid = (int32_t)failure->pid;
    rendezvous_push(link, PB__ENVELOPE__BODY_REMOTE_ABORT, &abort);
}

/* The other side's code, or one that makes sense. */
int rendezvous_status(uint32_t code)
{
    return code > 0 && code < 64 ? -(int)code : GRADD_ERR_INTERNAL;
}

/* ------------------------------------------------------------------ finding */

struct job *rendezvous_find_job(struct jobs *jobs, const char *name, uint32_t uid)
{
    return strlen(name) <= MEMBERSHIP_NAME_MAX ? jobs_find(jobs, (uid_t)uid, name) : NULL;
}

/* The member of that node with this rank, in this roster. */
struct member *rendezvous_find_remote(const struct roster *roster, const struct peer_link *link,
                                      uint32_t rank)
{
    struct member *member = rank < roster->size ? roster->of_rank[rank] : NULL;
    return member && member->origin == link ? member : NULL;
}

/* The rank of the node that the link leads to, in the last epoch. False: it has no part in it. */
bool rendezvous_find_node(const struct job *job, const struct peer_link *link, uint32_t *out_node)
{
    for (uint32_t node = 0; job->layout && node < job->layout->n_nodes; node++) {
        if (job->layout->nodes[node].link != link)
            continue;
        *out_node = node;
        return true;
    }
    return false;
}

bool rendezvous_has_part(const struct job *job, const struct peer_link *link)
{
    uint32_t node;
    return rendezvous_find_node(job, link, &node);
}

/* ------------------------------------------------------------------ node: joining and leaving */

static void push_leave(const struct job *job, struct peer_link *link, uint64_t epoch, uint32_t rank)
{
    Pb__RemoteLeave leave = PB__REMOTE_LEAVE__INIT;
    leave.job = (char *)job->key.name;
    leave.uid = (uint32_t)job->key.uid;
    leave.epoch = epoch;
    leave.rank = rank;
    rendezvous_push(link, PB__ENVELOPE__BODY_REMOTE_LEAVE, &leave);
}

static void push_join(struct job *job, const struct member *member)
{
    uint64_t now = clock_now_ns();
    Pb__RemoteJoin join = PB__REMOTE_JOIN__INIT;
    join.job = job->key.name;
    join.uid = (uint32_t)job->key.uid;
    join.rank = member->rank;
    join.size = member->size;
    join.local_rank = member->local_rank;
    join.local_size = member->local_size;
    join.pid = (int32_t)member->pid;
    join.source = (char *)member->source;
    join.timeout_ms =
        member->deadline_ns > now ? (uint32_t)((member->deadline_ns - now) / MS) + 1 : 1;
    join.peer_port = peers_port(job->jobs->peers);
    join.last_epoch = job->membership.epoch;
    const char *why_not;
    join.device_path = worker_process_takes_devices(job->worker, &why_not);
    join.attempt = member->forwarded_ns; /* each later than the one before */
    rendezvous_push(member->coordinator, PB__ENVELOPE__BODY_REMOTE_JOIN, &join);
}

void rendezvous_forward(struct job *job)
{
    const struct roster *gathering = &job->membership.gathering;
    /* A worker that is ready keeps nobody waiting once the epoch begins. */
    if (!gathering->coordinator || gathering->coordinator->state != PEER_UP || !job->worker ||
        !worker_process_is_ready(job->worker))
        return;
    for (uint32_t rank = 0; rank < gathering->size; rank++) {
        struct member *member = gathering->of_rank[rank];
        if (!member || member->is_forwarded)
            continue;
        member->is_forwarded = true;
        member->forwarded_ns = clock_now_ns();
        push_join(job, member);
    }
}

void rendezvous_leave(struct job *job, struct member *member)
{
    const struct layout *layout = job->layout;
    if (member->origin)
        return;
    if (member->state == MEMBER_WAITING && member->is_forwarded)
        push_leave(job, member->coordinator, 0, member->rank);
    else if (member->state == MEMBER_ACTIVE && layout && layout->node_rank != 0)
        push_leave(job, layout->nodes[0].link, job->membership.epoch, member->rank);
    member->is_forwarded = false;
}

/* The member that the coordinator refuses; NULL: it has stopped waiting. Meanwhile the rank may
 * have come again, with a join that is not answered, or not even sent. */
static struct member *find_refused(const struct roster *gathering, const Pb__RemoteRefusal *refusal)
{
    struct member *member =
        refusal->rank < gathering->size ? gathering->of_rank[refusal->rank] : NULL;
    if (!member || !member->is_forwarded)
        return NULL;
    return !refusal->attempt || refusal->attempt == member->forwarded_ns ? member : NULL;
}

void rendezvous_on_refusal(struct jobs *jobs, struct peer_link *link,
                           const Pb__RemoteRefusal *refusal)
{
    struct job *job = rendezvous_find_job(jobs, refusal->job, refusal->uid);
    struct roster *gathering = job ? &job->membership.gathering : NULL;
    if (!job || gathering->coordinator != link)
        return;
    struct member *member = find_refused(gathering, refusal);
    if (!member)
        return;
    struct fault fault = {.code = rendezvous_status(refusal->code)};
    snprintf(fault.text, sizeof fault.text, "%s", refusal->text);
    member->is_forwarded = false;
    job_refuse(job, member, &fault);
    job_settle(job);
}

/* ------------------------------------------------------------------ node: epochs */

void rendezvous_decline(struct job *job, const struct layout *layout, const char *text)
{
    struct job_failure failure = {GRADD_ERR_RANK_LOST, text, -1, 0};
    rendezvous_push_abort(job, layout->nodes[0].link, layout->epoch, &failure);
}

void rendezvous_on_layout(struct jobs *jobs, struct peer_link *link, const Pb__EpochLayout *message)
{
    const char *error = "no layout";
    struct layout *layout = NULL;
    struct job *job = rendezvous_find_job(jobs, message->job, message->uid);
    if (!job || job->membership.gathering.coordinator != link)
        return; /* its ranks have gone, which the coordinator hears of */
    int rc = message->layout ? layout_unpack(message->layout, &layout, &error) : -1;
    if (rc < 0) {
        char text[160];
        snprintf(text, sizeof text, "sent a layout with %s", error ? error : "too much");
        peer_link_end(link, text);
        return;
    }
    struct layout_node *coordinator = &layout->nodes[0];
    coordinator->link = link;
    char address[sizeof coordinator->address];
    peer_link_host(link, address, sizeof address);
    layout_place_coordinator(layout, address);
    coordinator->port = resolve_port(&link->address);
    layout_free(job->pending);
    job->pending = layout;
    job_settle(job);
}

void rendezvous_link_lost(struct job *job, uint32_t node, const char *text)
{
    Pb__RemoteLinkLost lost = PB__REMOTE_LINK_LOST__INIT;
    lost.job = job->key.name;
    lost.uid = (uint32_t)job->key.uid;
    lost.epoch = job->membership.epoch;
    lost.node = node;
    lost.text = (char *)text;
    rendezvous_push(job->layout->nodes[0].link, PB__ENVELOPE__BODY_REMOTE_LINK_LOST, &lost);
}

/* The epoch failed before it began here. */
void rendezvous_drop_pending(struct job *job, int code, const char *text)
{
    const struct layout *layout = job->pending;
    struct roster *gathering = &job->membership.gathering;
    struct fault fault = {.code = code};
    snprintf(fault.text, sizeof fault.text, "%s", text);
    for (uint32_t rank = 0; rank < layout->size && rank < gathering->size; rank++) {
        struct member *member = gathering->of_rank[rank];
        if (!member || layout->ranks[rank].node != layout->node_rank ||
            layout->ranks[rank].pid != member->pid)
            continue;
        member->is_forwarded = false;
        job_refuse(job, member, &fault);
    }
    layout_free(job->pending);
    job->pending = NULL;
}
