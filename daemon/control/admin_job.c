/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gradctl job: one job, from what this daemon knows, what its worker says and what the coordinator
 * says. The answer waits for these, but for a second only.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/stats_fit.h"
#include "control/admin.h"
#include "control/admin_internal.h"
#include "control/daemon.h"
#include "control/rendezvous.h"
#include "gradd/types.h"

static const uint64_t QUERY_LIMIT_NS = UINT64_C(1000000000);

/* The ranks as the daemon knows them, for a job whose worker has told nothing. */
static bool fill_known_ranks(Pb__JobStats *stats, struct job *job, char *node)
{
    const struct membership *m = &job->membership;
    bool is_gathering = m->state == JOB_GATHERING;
    const struct roster *roster = is_gathering ? &m->gathering : &m->running;
    stats->ranks = calloc(roster->n + 1, sizeof *stats->ranks);
    Pb__RankStats *ranks = calloc(roster->n + 1, sizeof *ranks);
    if (!stats->ranks || !ranks) {
        free(stats->ranks);
        free(ranks);
        stats->ranks = NULL;
        return false;
    }
    for (uint32_t rank = 0; rank < roster->size; rank++) {
        struct member *member = roster->of_rank[rank];
        if (!member)
            continue;
        Pb__RankStats *row = &ranks[stats->n_ranks];
        pb__rank_stats__init(row);
        row->rank = rank;
        row->local_rank = member->local_rank;
        row->pid = (int32_t)member->pid;
        row->uid = (uint32_t)job->key.uid;
        row->node = member->node ? (char *)member->node : node;
        row->source = member->source;
        row->state = (char *)(is_gathering ? "joining" : "active");
        stats->ranks[stats->n_ranks++] = row;
    }
    /* The rows are one block that the first slot past the end remembers. */
    stats->ranks[stats->n_ranks] = ranks;
    return true;
}

static void free_known_ranks(Pb__JobStats *stats)
{
    if (stats->ranks)
        free(stats->ranks[stats->n_ranks]);
    free(stats->ranks);
}

static size_t list_missing(const struct membership *m, uint32_t *out_ranks)
{
    size_t n = 0;
    /* Who is missing in a gathering of another daemon, that one knows. */
    for (uint32_t rank = 0; rank < m->gathering.size && !m->gathering.coordinator; rank++)
        if (!m->gathering.of_rank[rank])
            out_ranks[n++] = rank;
    return n;
}

/* Names of the nodes, by node rank, and on the rows of ranks that have none. */
static void name_nodes(Pb__JobReply *reply, struct job *job, char **pointers, char *own)
{
    struct layout *layout = job->layout;
    reply->nodes = pointers;
    for (uint32_t node = 0; layout && node < layout->n_nodes; node++)
        pointers[reply->n_nodes++] = layout->nodes[node].name;
    if (!layout)
        pointers[reply->n_nodes++] = own;
    for (size_t i = 0; i < reply->stats->n_ranks; i++) {
        Pb__RankStats *row = reply->stats->ranks[i];
        if (*row->node)
            continue;
        uint32_t node = layout && row->rank < layout->size ? layout->ranks[row->rank].node : 0;
        row->node = pointers[node];
    }
}

/* What is told about a job besides the daemon's own knowledge. */
struct job_news {
    Pb__JobStats *stats;              /* NULL: none */
    const Pb__RemoteJobReply *remote; /* of the coordinator; NULL: not asked */
    bool is_stale;
};

static void push_job_reply(struct session *session, struct job *job, const struct job_news *news,
                           char **node_pointers)
{
    uint32_t missing[MEMBERSHIP_SIZE_MAX];
    Pb__JobSummary summary;
    admin_summarise(&summary, job);
    Pb__JobReply reply = PB__JOB_REPLY__INIT;
    reply.summary = &summary;
    reply.missing = missing;
    reply.n_missing = list_missing(&job->membership, missing);
    reply.stats_stale = news->is_stale;
    if (news->remote) {
        reply.missing = news->remote->missing;
        reply.n_missing = news->remote->n_missing < MEMBERSHIP_SIZE_MAX ? news->remote->n_missing
                                                                        : MEMBERSHIP_SIZE_MAX;
        summary.n_joined = news->remote->n_joined;
    }
    if (job->worker) {
        reply.backend = (char *)worker_process_backend(job->worker);
        reply.kernels = (char *)worker_process_kernels(job->worker);
        reply.threads = worker_process_threads(job->worker);
    }
    Pb__JobStats known = PB__JOB_STATS__INIT;
    struct stats_fit fit = {0};
    if (news->stats)
        reply.stats = news->stats;
    else if (fill_known_ranks(&known, job, session->daemon->node))
        reply.stats = &known;
    if (reply.stats) {
        name_nodes(&reply, job, node_pointers, session->daemon->node);
        stats_fit_init(&fit, reply.stats);
        reply.stats = &fit.stats;
    }
    admin_reply(session, PB__ENVELOPE__BODY_JOB_REPLY, &reply);
    stats_fit_deinit(&fit);
    free_known_ranks(&known);
}

static int compare_ranks(const void *a, const void *b)
{
    const Pb__RankStats *const *left = a, *const *right = b;
    return (*left)->rank < (*right)->rank ? -1 : (*left)->rank > (*right)->rank;
}

static void push_job(struct session *session, struct job *job, bool is_stale,
                     const Pb__RemoteJobReply *remote)
{
    struct job_news news = {.remote = remote, .is_stale = is_stale};
    const void *packed = job->stats;
    size_t bytes = job->stats_bytes;
    void *copy = NULL;
    /* Unpacked anew, because node names are put into the rows for the time of the reply. */
    if (remote && remote->stats) {
        bytes = pb__job_stats__get_packed_size(remote->stats);
        packed = copy = malloc(bytes + 1);
        if (copy)
            pb__job_stats__pack(remote->stats, copy);
    }
    if (packed && job->membership.state != JOB_GATHERING)
        news.stats = pb__job_stats__unpack(NULL, bytes, packed);
    free(copy);
    if (news.stats && news.stats->n_ranks > 1)
        qsort(news.stats->ranks, news.stats->n_ranks, sizeof *news.stats->ranks, compare_ranks);
    uint32_t n_nodes = job->layout ? job->layout->n_nodes : 1;
    char **node_pointers = calloc(n_nodes, sizeof *node_pointers);
    char **names = news.stats ? calloc(news.stats->n_ranks + 1, sizeof *names) : NULL;
    if (node_pointers && (names || !news.stats)) {
        for (size_t i = 0; names && i < news.stats->n_ranks; i++)
            names[i] = news.stats->ranks[i]->node;
        push_job_reply(session, job, &news, node_pointers);
        for (size_t i = 0; names && i < news.stats->n_ranks; i++)
            news.stats->ranks[i]->node = names[i];
    } else {
        admin_reply_no_memory(session);
    }
    if (news.stats)
        pb__job_stats__free_unpacked(news.stats, NULL);
    free(names);
    free(node_pointers);
}

static void push_no_job(struct session *session, uid_t uid, const char *name)
{
    char text[400];
    snprintf(text, sizeof text, "there is no job %.255s of uid %u on node %s", name, (unsigned)uid,
             session->daemon->node);
    conn_push_error(session->conn, -GRADD_ERR_INVALID, text);
}

/* Reply to the request that waits, with what is known now. */
static void finish_query(struct session *session, bool is_stale, const Pb__RemoteJobReply *remote)
{
    session->query.is_pending = false;
    watch_disarm(session->timer);
    struct job *job = jobs_find(&session->daemon->jobs, session->query.uid, session->query.name);
    if (job)
        push_job(session, job, is_stale, remote);
    else
        push_no_job(session, session->query.uid, session->query.name);
}

/* Own job first; who sees all and names no uid gets the only job of that name. */
static struct job *find_job(struct session *session, const Pb__JobRequest *request)
{
    struct jobs *jobs = &session->daemon->jobs;
    uid_t uid = request->has_uid ? (uid_t)request->uid : session->peer.uid;
    struct job *found = jobs_find(jobs, uid, request->name);
    if (found || request->has_uid || !session->is_admin)
        return found;
    unsigned n = 0;
    for (struct job *job = jobs->by_key; job; job = job->hh.next) {
        if (strcmp(job->key.name, request->name) == 0) {
            found = job;
            n++;
        }
    }
    return n == 1 ? found : NULL;
}

void admin_on_job(struct session *session, const Pb__JobRequest *request)
{
    uid_t uid = request->has_uid ? (uid_t)request->uid : session->peer.uid;
    if (uid != session->peer.uid && !session->is_admin) {
        conn_push_error(session->conn, -GRADD_ERR_DENIED,
                        "jobs of other users are shown to root and to the admin group");
        return;
    }
    if (strlen(request->name) > MEMBERSHIP_NAME_MAX) {
        conn_push_error(session->conn, -GRADD_ERR_INVALID, "the job's name is too long");
        return;
    }
    struct job *job = find_job(session, request);
    if (!job) {
        push_no_job(session, uid, request->name);
        return;
    }
    struct daemon *daemon = session->daemon;
    bool is_asked = job_query_stats(job);
    session->query.is_remote = rendezvous_ask(job, ++daemon->remote_seq);
    if (!is_asked && !session->query.is_remote) {
        push_job(session, job, job->membership.state == JOB_RUNNING, NULL);
        return;
    }
    session->query.is_pending = true;
    session->query.uid = job->key.uid;
    session->query.seq = session->query.is_remote ? daemon->remote_seq : job->query_seq;
    snprintf(session->query.name, sizeof session->query.name, "%s", job->key.name);
    watch_arm(session->timer, QUERY_LIMIT_NS);
}

void admin_answer_pending(struct session *session)
{
    if (session->query.is_pending)
        finish_query(session, true, NULL);
}

void admin_on_query_timeout(struct session *session)
{
    admin_answer_pending(session);
}

void admin_on_stats(struct daemon *daemon, struct job *job)
{
    struct session *session;
    TAILQ_FOREACH(session, &daemon->sessions, link)
    {
        if (session->query.is_pending && !session->query.is_remote && session->conn &&
            session->query.uid == job->key.uid && strcmp(session->query.name, job->key.name) == 0)
            finish_query(session, false, NULL);
    }
}

void admin_on_remote_stats(struct daemon *daemon, const Pb__RemoteJobReply *reply)
{
    struct session *session;
    TAILQ_FOREACH(session, &daemon->sessions, link)
    {
        if (session->query.is_pending && session->query.is_remote && session->conn &&
            session->query.seq == reply->seq)
            finish_query(session, reply->stats_stale, reply);
    }
}
