/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's side: ranks of other nodes, layouts, the end of an epoch on all nodes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "control/rendezvous.h"
#include "control/rendezvous_internal.h"
#include "gradd/types.h"

static const uint64_t MS = 1000000;

/* A rank of another node, in the membership of the daemon that coordinates. */
struct remote_member {
    struct member member; /* first: a member's address is this one's */
    LIST_ENTRY(remote_member) link;
    struct job *job;
    struct watch *limit; /* of its wait */
    uint64_t attempt;    /* of its RemoteJoin */
    char node[LAYOUT_NAME_MAX + 1];
    uint16_t port;
};

static void push_refusal(struct peer_link *link, const char *job, uid_t uid, uint32_t rank,
                         uint64_t attempt, const struct fault *fault)
{
    Pb__RemoteRefusal refusal = PB__REMOTE_REFUSAL__INIT;
    refusal.job = (char *)job;
    refusal.uid = (uint32_t)uid;
    refusal.rank = rank;
    refusal.attempt = attempt;
    refusal.code = (uint32_t)-fault->code;
    refusal.text = (char *)fault->text;
    rendezvous_push(link, PB__ENVELOPE__BODY_REMOTE_REFUSAL, &refusal);
}

/* ------------------------------------------------------------------ coordinator: members */

static void remote_member_free(struct remote_member *remote)
{
    LIST_REMOVE(remote, link);
    watch_free(remote->limit);
    free(remote);
}

void rendezvous_sweep(struct job *job)
{
    struct remote_member *remote, *next;
    for (remote = LIST_FIRST(&job->remotes); remote; remote = next) {
        next = LIST_NEXT(remote, link);
        if (remote->member.state == MEMBER_STALE)
            membership_remove(&job->membership, &remote->member);
        if (remote->member.state == MEMBER_NONE)
            remote_member_free(remote);
    }
}

bool rendezvous_has_member(const struct job *job, const struct peer_link *link)
{
    const struct remote_member *remote;
    LIST_FOREACH(remote, &job->remotes, link)
    if (remote->member.origin == link)
        return true;
    return false;
}

static void on_wait_limit(void *data)
{
    struct remote_member *remote = data;
    if (remote->member.state == MEMBER_WAITING)
        job_join_timed_out(&remote->member, (clock_now_ns() - remote->member.since_ns) / MS);
}

static struct remote_member *remote_member_new(struct job *job, struct peer_link *link,
                                               const Pb__RemoteJoin *join)
{
    struct remote_member *remote = calloc(1, sizeof *remote);
    if (!remote || !(remote->limit = watch_timer(job->jobs->loop, on_wait_limit, remote))) {
        free(remote);
        return NULL;
    }
    LIST_INSERT_HEAD(&job->remotes, remote, link);
    remote->job = job;
    remote->port = (uint16_t)join->peer_port;
    remote->attempt = join->attempt;
    snprintf(remote->node, sizeof remote->node, "%s", link->name);
    struct member *member = &remote->member;
    member->rank = join->rank;
    member->size = join->size;
    member->local_rank = join->local_rank;
    member->local_size = join->local_size;
    member->pid = (pid_t)join->pid;
    member->node = remote->node;
    member->origin = link;
    member->last_epoch = join->last_epoch;
    member->takes_devices = join->device_path;
    member->since_ns = clock_now_ns();
    snprintf(member->source, sizeof member->source, "%s", join->source);
    for (char *c = member->source; *c; c++)
        if (*c < 0x20 || *c > 0x7e)
            *c = '?';
    return remote;
}

void rendezvous_refuse(struct job *job, const struct member *member, const struct fault *fault)
{
    push_refusal(member->origin, job->key.name, job->key.uid, member->rank,
                 ((const struct remote_member *)member)->attempt, fault);
}

static int admit(struct jobs *jobs, struct peer_link *link, const Pb__RemoteJoin *join,
                 struct fault *out_fault)
{
    int rc = membership_check_join(join->job, join->rank, join->size, out_fault);
    if (rc < 0)
        return rc;
    if (jobs->is_draining) {
        snprintf(out_fault->text, sizeof out_fault->text,
                 "job %s: the daemon of node %s, the coordinator, is stopping and takes no new "
                 "ranks",
                 join->job, jobs->node);
        return out_fault->code = GRADD_ERR_UNAVAILABLE;
    }
    struct job *job = job_obtain(jobs, (uid_t)join->uid, join->job, NULL, out_fault);
    struct remote_member *remote = job ? remote_member_new(job, link, join) : NULL;
    if (job && !remote) {
        snprintf(out_fault->text, sizeof out_fault->text, "job %s: the daemon is out of memory",
                 join->job);
        out_fault->code = GRADD_ERR_NO_MEMORY;
    }
    if (!remote)
        return out_fault->code;
    uint64_t limit_ms = jobs->config->join_timeout_ms;
    if (join->timeout_ms && join->timeout_ms < limit_ms)
        limit_ms = join->timeout_ms;
    rc = membership_join(&job->membership, &remote->member, out_fault);
    if (rc == 0)
        watch_arm(remote->limit, limit_ms * MS);
    job_settle(job);
    return rc;
}

void rendezvous_on_join(struct jobs *jobs, struct peer_link *link, const Pb__RemoteJoin *join)
{
    struct fault fault;
    if (admit(jobs, link, join, &fault) < 0)
        push_refusal(link, join->job, (uid_t)join->uid, join->rank, join->attempt, &fault);
}

void rendezvous_on_leave(struct jobs *jobs, struct peer_link *link, const Pb__RemoteLeave *leave)
{
    struct job *job = rendezvous_find_job(jobs, leave->job, leave->uid);
    if (!job)
        return;
    struct membership *m = &job->membership;
    struct member *waiting = rendezvous_find_remote(&m->gathering, link, leave->rank);
    struct member *active = rendezvous_find_remote(&m->running, link, leave->rank);
    if (leave->epoch == 0 && waiting) {
        membership_remove(m, waiting);
    } else if (leave->epoch == 0 && active) {
        /* It was counted on a moment too long. */
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text,
                 "job %s epoch %llu: rank %u (node %s, pid %d) has gone before it began", m->name,
                 (unsigned long long)m->epoch, leave->rank, active->node, (int)active->pid);
        struct job_failure failure = {GRADD_ERR_RANK_LOST, text, (int)leave->rank, active->pid};
        job_fail(job, &failure, TELL_BY_WORKER);
    } else if (leave->epoch == m->epoch && active) {
        membership_remove(m, active);
    }
    job_settle(job);
}

/* ------------------------------------------------------------------ coordinator: epochs */

/* Names and addresses of the nodes, as far as this one knows them. */
static void fill_nodes(struct job *job, struct layout *layout)
{
    struct layout_node *own = &layout->nodes[0];
    snprintf(own->name, sizeof own->name, "%s", job->jobs->node);
    /* The others put in what they dialled. */
    snprintf(own->address, sizeof own->address, "127.0.0.1");
    own->port = peers_port(job->jobs->peers);
    const struct roster *gathering = &job->membership.gathering;
    for (uint32_t rank = 0; rank < layout->size; rank++) {
        const struct member *member = gathering->of_rank[rank];
        struct layout_node *node = &layout->nodes[layout->ranks[rank].node];
        if (!member->origin || *node->name)
            continue;
        snprintf(node->name, sizeof node->name, "%s", member->node);
        peer_link_host(member->origin, node->address, sizeof node->address);
        node->port = ((const struct remote_member *)member)->port;
    }
}

static bool is_spread(const struct roster *gathering)
{
    for (uint32_t rank = 0; rank < gathering->size; rank++)
        if (gathering->of_rank[rank]->origin)
            return true;
    return false;
}

/* All nodes of the gathering take device memory. */
static bool take_devices(const struct job *job)
{
    const struct roster *gathering = &job->membership.gathering;
    const char *why_not;
    bool all = worker_process_takes_devices(job->worker, &why_not);
    for (uint32_t rank = 0; rank < gathering->size; rank++) {
        const struct member *member = gathering->of_rank[rank];
        all &= !member->origin || member->takes_devices;
    }
    return all;
}

bool rendezvous_is_confirmed(struct job *job)
{
    const struct roster *gathering = &job->membership.gathering;
    bool is_confirmed = true;
    for (uint32_t rank = 0; rank < gathering->size; rank++) {
        struct peer_link *link = gathering->of_rank[rank]->origin;
        if (link && !peer_link_confirm(link, job->whole_ns))
            is_confirmed = false; /* and go on: all are asked at once */
    }
    return is_confirmed;
}

int rendezvous_plan(struct job *job, struct layout **out_layout, struct fault *out_fault)
{
    const struct roster *gathering = &job->membership.gathering;
    const struct config *config = job->jobs->config;
    *out_layout = NULL;
    if (!is_spread(gathering))
        return 0;
    const struct member *first = gathering->of_rank[0];
    if (first->origin) {
        snprintf(out_fault->text, sizeof out_fault->text,
                 "job %s: rank 0 (pid %d) is on node %s, but its ranks named node %s as the "
                 "coordinator: GRADD_COORDINATOR has to be the node of rank 0",
                 job->key.name, (int)first->pid, first->node, job->jobs->node);
        return out_fault->code = GRADD_ERR_DISAGREE;
    }
    struct layout *layout = layout_new(gathering);
    if (!layout || link_random(layout->link_id, sizeof layout->link_id) < 0 ||
        link_random(layout->secret, sizeof layout->secret) < 0) {
        layout_free(layout);
        snprintf(out_fault->text, sizeof out_fault->text, "job %s: the daemon is out of memory",
                 job->key.name);
        return out_fault->code = GRADD_ERR_NO_MEMORY;
    }
    layout->epoch = membership_next_epoch(&job->membership);
    layout->ring_streams = (uint32_t)config->ring_streams;
    layout->encrypts_data = config->data_encryption == CONFIG_YES;
    layout->wire = config_wire_dtypes[config->wire];
    layout->device_path = take_devices(job);
    fill_nodes(job, layout);
    *out_layout = layout;
    return 0;
}

void rendezvous_begin(struct job *job)
{
    struct layout *layout = job->layout;
    for (uint32_t node = 1; node < layout->n_nodes; node++) {
        Pb__EpochLayout message = PB__EPOCH_LAYOUT__INIT;
        message.job = job->key.name;
        message.uid = (uint32_t)job->key.uid;
        message.layout = layout_pack(layout, node);
        if (message.layout)
            rendezvous_push(layout->nodes[node].link, PB__ENVELOPE__BODY_EPOCH_LAYOUT, &message);
        else
            peer_link_end(layout->nodes[node].link, "out of memory for a layout");
        layout_packed_free(message.layout);
    }
}

void rendezvous_failed(struct job *job, const struct job_failure *failure)
{
    const struct layout *layout = job->layout;
    uint64_t epoch = job->membership.epoch;
    if (!layout)
        return;
    if (layout->node_rank != 0) {
        rendezvous_push_abort(job, layout->nodes[0].link, epoch, failure);
        return;
    }
    for (uint32_t node = 1; node < layout->n_nodes; node++)
        rendezvous_push_abort(job, layout->nodes[node].link, epoch, failure);
}

void rendezvous_on_abort(struct jobs *jobs, struct peer_link *link, const Pb__RemoteAbort *abort)
{
    struct job *job = rendezvous_find_job(jobs, abort->job, abort->uid);
    if (!job)
        return;
    int code = rendezvous_status(abort->code);
    if (job->pending && job->pending->epoch == abort->epoch && job->pending->nodes[0].link == link)
        rendezvous_drop_pending(job, code, abort->text);
    if (abort->epoch == job->membership.epoch && rendezvous_has_part(job, link)) {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text, "%s", abort->text);
        struct job_failure failure = {code, text, abort->rank, (pid_t)abort->pid};
        job_fail(job, &failure, TELL_BY_WORKER);
    }
    job_settle(job);
}

void rendezvous_on_link_lost(struct jobs *jobs, struct peer_link *link,
                             const Pb__RemoteLinkLost *lost)
{
    struct job *job = rendezvous_find_job(jobs, lost->job, lost->uid);
    uint32_t reporter;
    if (job && lost->epoch == job->membership.epoch && rendezvous_find_node(job, link, &reporter) &&
        job->layout->node_rank == 0)
        job_on_link_lost(job, reporter, lost->node, lost->text);
}
