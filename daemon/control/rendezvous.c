/* SPDX-License-Identifier: Apache-2.0 */
#include "control/rendezvous.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "control/session.h"
#include "gradd/types.h"

enum {
    QUERIES_MAX = 256,
};

static const uint64_t MS = 1000000;
static const uint64_t QUERY_LIMIT_NS = UINT64_C(900) * 1000000;

/* A rank of another node, in the membership of the daemon that coordinates. */
struct remote_member {
    struct member member; /* first: a member's address is this one's */
    LIST_ENTRY(remote_member) link;
    struct job *job;
    struct watch *limit; /* of its wait */
    char node[LAYOUT_NAME_MAX + 1];
    uint16_t port;
};

/* Another node's RemoteJobRequest that waits for the worker's answer. */
struct remote_query {
    LIST_ENTRY(remote_query) link;
    struct jobs *jobs;
    struct peer_link *peer;
    uint64_t seq;
    struct job_key key;
    struct watch *limit;
};

/* ------------------------------------------------------------------ messages */

static void push(struct peer_link *link, int body_case, void *message)
{
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.remote_join = message; /* all members of the union are pointers */
    if (link)
        peer_link_push(link, &envelope);
}

static void push_abort(const struct job *job, struct peer_link *link, uint64_t epoch,
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
    push(link, PB__ENVELOPE__BODY_REMOTE_ABORT, &abort);
}

static void push_leave(const struct job *job, struct peer_link *link, uint64_t epoch, uint32_t rank)
{
    Pb__RemoteLeave leave = PB__REMOTE_LEAVE__INIT;
    leave.job = (char *)job->key.name;
    leave.uid = (uint32_t)job->key.uid;
    leave.epoch = epoch;
    leave.rank = rank;
    push(link, PB__ENVELOPE__BODY_REMOTE_LEAVE, &leave);
}

static void push_refusal(struct peer_link *link, const char *job, uid_t uid, uint32_t rank,
                         const struct fault *fault)
{
    Pb__RemoteRefusal refusal = PB__REMOTE_REFUSAL__INIT;
    refusal.job = (char *)job;
    refusal.uid = (uint32_t)uid;
    refusal.rank = rank;
    refusal.code = (uint32_t)-fault->code;
    refusal.text = (char *)fault->text;
    push(link, PB__ENVELOPE__BODY_REMOTE_REFUSAL, &refusal);
}

/* The other side's code, or one that makes sense. */
static int status_of(uint32_t code)
{
    return code > 0 && code < 64 ? -(int)code : GRADD_ERR_INTERNAL;
}

/* ------------------------------------------------------------------ node: joining and leaving */

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
    push(member->coordinator, PB__ENVELOPE__BODY_REMOTE_JOIN, &join);
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

static struct job *find_job(struct jobs *jobs, const char *name, uint32_t uid)
{
    return strlen(name) <= MEMBERSHIP_NAME_MAX ? jobs_find(jobs, (uid_t)uid, name) : NULL;
}

static void on_refusal(struct jobs *jobs, struct peer_link *link, const Pb__RemoteRefusal *refusal)
{
    struct job *job = find_job(jobs, refusal->job, refusal->uid);
    struct roster *gathering = job ? &job->membership.gathering : NULL;
    if (!job || gathering->coordinator != link || refusal->rank >= gathering->size ||
        !gathering->of_rank[refusal->rank])
        return;
    struct fault fault = {.code = status_of(refusal->code)};
    snprintf(fault.text, sizeof fault.text, "%s", refusal->text);
    struct member *member = gathering->of_rank[refusal->rank];
    member->is_forwarded = false;
    job_refuse(job, member, &fault);
    job_settle(job);
}

/* ------------------------------------------------------------------ node: epochs */

void rendezvous_decline(struct job *job, const struct layout *layout, const char *text)
{
    struct job_failure failure = {GRADD_ERR_RANK_LOST, text, -1, 0};
    push_abort(job, layout->nodes[0].link, layout->epoch, &failure);
}

static void on_layout(struct jobs *jobs, struct peer_link *link, const Pb__EpochLayout *message)
{
    const char *error = "no layout";
    struct layout *layout = NULL;
    struct job *job = find_job(jobs, message->job, message->uid);
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
    /* As this node reaches it. */
    peer_link_host(link, coordinator->address, sizeof coordinator->address);
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
    push(job->layout->nodes[0].link, PB__ENVELOPE__BODY_REMOTE_LINK_LOST, &lost);
}

/* The epoch failed before it began here. */
static void drop_pending(struct job *job, int code, const char *text)
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
    member->since_ns = clock_now_ns();
    snprintf(member->source, sizeof member->source, "%s", join->source);
    for (char *c = member->source; *c; c++)
        if (*c < 0x20 || *c > 0x7e)
            *c = '?';
    return remote;
}

void rendezvous_refuse(struct job *job, const struct member *member, const struct fault *fault)
{
    push_refusal(member->origin, job->key.name, job->key.uid, member->rank, fault);
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

static void on_join(struct jobs *jobs, struct peer_link *link, const Pb__RemoteJoin *join)
{
    struct fault fault;
    if (admit(jobs, link, join, &fault) < 0)
        push_refusal(link, join->job, (uid_t)join->uid, join->rank, &fault);
}

/* The member of that node with this rank, in this roster. */
static struct member *find_remote(const struct roster *roster, const struct peer_link *link,
                                  uint32_t rank)
{
    struct member *member = rank < roster->size ? roster->of_rank[rank] : NULL;
    return member && member->origin == link ? member : NULL;
}

static void on_leave(struct jobs *jobs, struct peer_link *link, const Pb__RemoteLeave *leave)
{
    struct job *job = find_job(jobs, leave->job, leave->uid);
    if (!job)
        return;
    struct membership *m = &job->membership;
    struct member *waiting = find_remote(&m->gathering, link, leave->rank);
    struct member *active = find_remote(&m->running, link, leave->rank);
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
            push(layout->nodes[node].link, PB__ENVELOPE__BODY_EPOCH_LAYOUT, &message);
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
        push_abort(job, layout->nodes[0].link, epoch, failure);
        return;
    }
    for (uint32_t node = 1; node < layout->n_nodes; node++)
        push_abort(job, layout->nodes[node].link, epoch, failure);
}

/* The rank of the node that the link leads to, in the last epoch. False: it has no part in it. */
static bool find_node(const struct job *job, const struct peer_link *link, uint32_t *out_node)
{
    for (uint32_t node = 0; job->layout && node < job->layout->n_nodes; node++) {
        if (job->layout->nodes[node].link != link)
            continue;
        *out_node = node;
        return true;
    }
    return false;
}

static bool has_part(const struct job *job, const struct peer_link *link)
{
    uint32_t node;
    return find_node(job, link, &node);
}

static void on_abort(struct jobs *jobs, struct peer_link *link, const Pb__RemoteAbort *abort)
{
    struct job *job = find_job(jobs, abort->job, abort->uid);
    if (!job)
        return;
    int code = status_of(abort->code);
    if (job->pending && job->pending->epoch == abort->epoch && job->pending->nodes[0].link == link)
        drop_pending(job, code, abort->text);
    if (abort->epoch == job->membership.epoch && has_part(job, link)) {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text, "%s", abort->text);
        struct job_failure failure = {code, text, abort->rank, (pid_t)abort->pid};
        job_fail(job, &failure, TELL_BY_WORKER);
    }
    job_settle(job);
}

static void on_link_lost(struct jobs *jobs, struct peer_link *link, const Pb__RemoteLinkLost *lost)
{
    struct job *job = find_job(jobs, lost->job, lost->uid);
    uint32_t reporter;
    if (job && lost->epoch == job->membership.epoch && find_node(job, link, &reporter) &&
        job->layout->node_rank == 0)
        job_on_link_lost(job, reporter, lost->node, lost->text);
}

/* ------------------------------------------------------------------ statistics */

bool rendezvous_ask(struct job *job, uint64_t seq)
{
    struct peer_link *link = job->membership.gathering.coordinator;
    if (!link && job->layout && job->layout->node_rank != 0 && job_is_alive(job))
        link = job->layout->nodes[0].link;
    if (!link || link->state != PEER_UP)
        return false;
    Pb__RemoteJobRequest request = PB__REMOTE_JOB_REQUEST__INIT;
    request.seq = seq;
    request.job = job->key.name;
    request.uid = (uint32_t)job->key.uid;
    push(link, PB__ENVELOPE__BODY_REMOTE_JOB_REQUEST, &request);
    return true;
}

static void reply(struct peer_link *link, uint64_t seq, struct job *job, bool is_stale)
{
    uint32_t missing[MEMBERSHIP_SIZE_MAX];
    Pb__RemoteJobReply message = PB__REMOTE_JOB_REPLY__INIT;
    Pb__JobStats *stats = NULL;
    message.seq = seq;
    message.stats_stale = is_stale;
    message.missing = missing;
    if (job) {
        const struct membership *m = &job->membership;
        bool is_gathering = m->state == JOB_GATHERING;
        message.n_joined = is_gathering ? m->gathering.n : m->running.n;
        for (uint32_t rank = 0; rank < m->gathering.size; rank++)
            if (!m->gathering.of_rank[rank])
                missing[message.n_missing++] = rank;
        if (job->stats && !is_gathering)
            stats = pb__job_stats__unpack(NULL, job->stats_bytes, job->stats);
    }
    message.stats = stats;
    push(link, PB__ENVELOPE__BODY_REMOTE_JOB_REPLY, &message);
    if (stats)
        pb__job_stats__free_unpacked(stats, NULL);
}

static void query_free(struct remote_query *query)
{
    LIST_REMOVE(query, link);
    query->jobs->n_remote_queries--;
    watch_free(query->limit);
    free(query);
}

static void on_query_limit(void *data)
{
    struct remote_query *query = data;
    reply(query->peer, query->seq, jobs_find(query->jobs, query->key.uid, query->key.name), true);
    query_free(query);
}

void rendezvous_on_stats(struct job *job)
{
    struct remote_query *query, *next;
    for (query = LIST_FIRST(&job->jobs->remote_queries); query; query = next) {
        next = LIST_NEXT(query, link);
        if (memcmp(&query->key, &job->key, sizeof job->key) != 0)
            continue;
        reply(query->peer, query->seq, job, false);
        query_free(query);
    }
}

static void on_job_request(struct jobs *jobs, struct peer_link *link,
                           const Pb__RemoteJobRequest *request)
{
    struct job *job = find_job(jobs, request->job, request->uid);
    struct remote_query *query = NULL;
    if (job && jobs->n_remote_queries < QUERIES_MAX && job_request_stats(job))
        query = calloc(1, sizeof *query);
    if (query && !(query->limit = watch_timer(jobs->loop, on_query_limit, query))) {
        free(query);
        query = NULL;
    }
    if (!query) {
        reply(link, request->seq, job, true);
        return;
    }
    LIST_INSERT_HEAD(&jobs->remote_queries, query, link);
    jobs->n_remote_queries++;
    query->jobs = jobs;
    query->peer = link;
    query->seq = request->seq;
    query->key = job->key;
    watch_arm(query->limit, QUERY_LIMIT_NS);
}

void rendezvous_deinit(struct jobs *jobs)
{
    struct remote_query *query;
    while ((query = LIST_FIRST(&jobs->remote_queries)))
        query_free(query);
}

/* ------------------------------------------------------------------ links */

static bool needs(const struct job *job, const struct peer_link *link)
{
    const struct remote_member *remote;
    if (job->membership.gathering.coordinator == link ||
        (job->pending && job->pending->nodes[0].link == link))
        return true;
    LIST_FOREACH(remote, &job->remotes, link)
    if (remote->member.origin == link)
        return true;
    return job_is_alive(job) && has_part(job, link);
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

/* Ranks that wait for a coordinator, or that a coordinator waits for. */
static void lose_gathering(struct job *job, const struct peer_link *link, const char *why)
{
    struct membership *m = &job->membership;
    if (m->gathering.coordinator == link) {
        char text[FAULT_TEXT_MAX];
        for (uint32_t rank = 0; rank < m->gathering.size; rank++)
            if (m->gathering.of_rank[rank])
                m->gathering.of_rank[rank]->is_forwarded = false;
        snprintf(text, sizeof text, "job %s: the coordinator at %s (%s) can not be joined: %s",
                 m->name, link->address_text, link->name, why);
        job_dismiss(job, GRADD_ERR_UNAVAILABLE, text);
    }
    for (uint32_t rank = 0; rank < m->gathering.size; rank++) {
        struct member *member = find_remote(&m->gathering, link, rank);
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
    if (!has_part(job, link))
        return;
    bool is_coordinator = layout->node_rank == 0, is_needed = !is_coordinator;
    for (uint32_t rank = 0; rank < m->running.size; rank++)
        is_needed = is_needed || find_remote(&m->running, link, rank);
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
    struct remote_query *query, *next;
    for (query = LIST_FIRST(&jobs->remote_queries); query; query = next) {
        next = LIST_NEXT(query, link);
        if (query->peer == link)
            query_free(query);
    }
    HASH_ITER(hh, jobs->by_key, job, next_job)
    {
        if (!needs(job, link) && !has_part(job, link))
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
        on_join(jobs, link, envelope->remote_join);
        break;
    case PB__ENVELOPE__BODY_REMOTE_REFUSAL:
        on_refusal(jobs, link, envelope->remote_refusal);
        break;
    case PB__ENVELOPE__BODY_REMOTE_LEAVE:
        on_leave(jobs, link, envelope->remote_leave);
        break;
    case PB__ENVELOPE__BODY_EPOCH_LAYOUT:
        on_layout(jobs, link, envelope->epoch_layout);
        break;
    case PB__ENVELOPE__BODY_REMOTE_ABORT:
        on_abort(jobs, link, envelope->remote_abort);
        break;
    case PB__ENVELOPE__BODY_REMOTE_LINK_LOST:
        on_link_lost(jobs, link, envelope->remote_link_lost);
        break;
    case PB__ENVELOPE__BODY_REMOTE_JOB_REQUEST:
        on_job_request(jobs, link, envelope->remote_job_request);
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
    worker_process_send(job->worker, &envelope, fd);
}

const struct peers_ops rendezvous_peers_ops = {
    .on_up = on_up,
    .on_lost = on_lost,
    .on_self = on_self,
    .on_message = on_message,
    .is_used = is_used,
    .find_secret = find_secret,
    .on_data_link = on_data_link,
};
