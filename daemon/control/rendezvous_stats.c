/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What gradctl asks about a job on several nodes: a node asks the coordinator, which asks its
 * worker. Jobs depend on the links that this travels on, so a question never fills one: figures are
 * cut to what a frame takes, and while much is queued already nothing is asked or answered. Then
 * gradctl is shown what its own daemon knows, as old figures.
 */
#include <stdlib.h>
#include <string.h>

#include "base/stats_fit.h"
#include "control/rendezvous.h"
#include "control/rendezvous_internal.h"

enum {
    QUERIES_MAX = 256,
    BACKLOG_MAX = 2 << 20, /* bytes queued on a link, beyond which it is left alone */
};

static const uint64_t QUERY_LIMIT_NS = UINT64_C(900) * 1000000;

/* Another node's RemoteJobRequest that waits for the worker's answer. */
struct remote_query {
    LIST_ENTRY(remote_query) link;
    struct jobs *jobs;
    struct peer_link *peer;
    uint64_t seq;
    struct job_key key;
    struct watch *limit;
};

bool rendezvous_ask(struct job *job, uint64_t seq)
{
    struct peer_link *link = job->membership.gathering.coordinator;
    if (!link && job->layout && job->layout->node_rank != 0 && job_is_alive(job))
        link = job->layout->nodes[0].link;
    if (!link || link->state != PEER_UP || peer_link_backlog(link) > BACKLOG_MAX)
        return false;
    Pb__RemoteJobRequest request = PB__REMOTE_JOB_REQUEST__INIT;
    request.seq = seq;
    request.job = job->key.name;
    request.uid = (uint32_t)job->key.uid;
    rendezvous_push(link, PB__ENVELOPE__BODY_REMOTE_JOB_REQUEST, &request);
    return true;
}

static const Pb__JobStats no_stats = PB__JOB_STATS__INIT;

static void reply(struct peer_link *link, uint64_t seq, struct job *job, bool is_stale)
{
    if (peer_link_backlog(link) > BACKLOG_MAX)
        return;
    uint32_t missing[MEMBERSHIP_SIZE_MAX];
    Pb__RemoteJobReply message = PB__REMOTE_JOB_REPLY__INIT;
    Pb__JobStats *stats = NULL;
    struct stats_fit fit;
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
    stats_fit_init(&fit, stats ? stats : &no_stats);
    message.stats = stats ? &fit.stats : NULL;
    rendezvous_push(link, PB__ENVELOPE__BODY_REMOTE_JOB_REPLY, &message);
    stats_fit_deinit(&fit);
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

void rendezvous_on_job_request(struct jobs *jobs, struct peer_link *link,
                               const Pb__RemoteJobRequest *request)
{
    struct job *job = rendezvous_find_job(jobs, request->job, request->uid);
    struct remote_query *query = NULL;
    if (job && jobs->n_remote_queries < QUERIES_MAX && job_query_stats(job))
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
    struct remote_query *query, *next;
    for (query = LIST_FIRST(&jobs->remote_queries); query; query = next) {
        next = LIST_NEXT(query, link);
        query_free(query);
    }
}

void rendezvous_drop_queries(struct jobs *jobs, const struct peer_link *link)
{
    struct remote_query *query, *next;
    for (query = LIST_FIRST(&jobs->remote_queries); query; query = next) {
        next = LIST_NEXT(query, link);
        if (query->peer == link)
            query_free(query);
    }
}
