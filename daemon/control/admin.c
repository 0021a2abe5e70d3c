/* SPDX-License-Identifier: Apache-2.0 */
#include "control/admin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "control/daemon.h"
#include "control/rendezvous.h"
#include "control/session.h"
#include "gradd/types.h"

enum {
    PROBLEMS_MAX = 16,
    PROBLEM_TEXT_MAX = 768,
};

static const uint64_t QUERY_LIMIT_NS = UINT64_C(1000000000);

static bool may_see(const struct session *session, const struct job *job)
{
    return session->is_admin || session->peer.uid == job->key.uid;
}

static double seconds_since(uint64_t start_ns)
{
    return (double)(clock_now_ns() - start_ns) / 1e9;
}

/* ------------------------------------------------------------------ status */

/* Sentences in memory of fixed size, as protobuf-c wants them. */
struct problems {
    char texts[PROBLEMS_MAX][PROBLEM_TEXT_MAX];
    char *pointers[PROBLEMS_MAX];
    size_t n;
};

__attribute__((format(printf, 2, 3))) static void add_problem(struct problems *problems,
                                                              const char *format, ...)
{
    if (problems->n == PROBLEMS_MAX)
        return;
    char *text = problems->texts[problems->n];
    va_list args;
    va_start(args, format);
    vsnprintf(text, PROBLEM_TEXT_MAX, format, args);
    va_end(args);
    problems->pointers[problems->n++] = text;
}

static void count_job(Pb__StatusReply *reply, struct problems *problems, const struct job *job)
{
    reply->n_jobs++;
    reply->n_stalled += job->n_stalled;
    if (job->n_stalled)
        add_problem(problems, "%s",
                    *job->stall_text ? job->stall_text : "some tensors are stalled");
    if (job->membership.state == JOB_FAILED) {
        reply->n_failed++;
        add_problem(problems, "%s", job->membership.last_error);
    }
}

static void fill_gpus(Pb__StatusReply *reply, struct gpus *gpus, Pb__GpuSummary *rows,
                      Pb__GpuSummary **pointers)
{
    for (unsigned i = 0; i < gpus->n_gpus; i++) {
        struct gpu *gpu = &gpus->gpus[i];
        const struct gpu_use use = worker_process_gpu_use(gpu->uuid);
        pb__gpu_summary__init(&rows[i]);
        rows[i].uuid = gpu->uuid;
        rows[i].name = gpu->name;
        rows[i].memory_bytes = gpu->memory_bytes;
        rows[i].compute = gpu->compute;
        rows[i].mode = gpu->mode;
        rows[i].has_mps = gpu->has_mps;
        rows[i].n_workers = use.n_workers;
        rows[i].worker_bytes = use.worker_bytes;
        rows[i].import_bytes = use.import_bytes;
        pointers[i] = &rows[i];
    }
    reply->gpus = pointers;
    reply->n_gpus = gpus->n_gpus;
    reply->driver = gpus->driver;
    reply->nccl = gpus->nccl;
    reply->gpu_kernels = gpus->kernels;
    reply->device_path = gpus->device_path;
    reply->device_text = gpus->is_done ? gpus->text : (char *)"gradd-worker --gpus still looks";
}

static void on_status(struct session *session)
{
    struct daemon *daemon = session->daemon;
    struct problems *problems = calloc(1, sizeof *problems);
    if (!problems) {
        conn_push_error(session->conn, -GRADD_ERR_NO_MEMORY, "the daemon is out of memory");
        return;
    }
    Pb__StatusReply reply = PB__STATUS_REPLY__INIT;
    reply.version = (char *)GRADD_VERSION;
    reply.protocol_min = WIRE_PROTOCOL_MIN;
    reply.protocol_max = WIRE_PROTOCOL_MAX;
    reply.node = daemon->node;
    reply.pid = (int32_t)getpid();
    reply.uptime_s = seconds_since(daemon->started_ns);
    reply.state = (char *)(daemon->state == DAEMON_RUNNING ? "running" : "draining");
    reply.n_sessions = daemon->n_sessions;
    reply.config_file =
        daemon->arguments->config_file ? (char *)daemon->arguments->config_file : (char *)"";
    reply.config_error = daemon->config_error.text;
    if (*daemon->config_error.text)
        add_problem(problems, "the configuration was not reloaded: %s", daemon->config_error.text);
    if (daemon->config.backend == BACKEND_NCCL && daemon->gpus.is_done && !daemon->gpus.device_path)
        add_problem(problems, "backend = nccl, but jobs are refused: %s", daemon->gpus.text);
    Pb__GpuSummary gpus[GPUS_MAX], *gpu_pointers[GPUS_MAX];
    fill_gpus(&reply, &daemon->gpus, gpus, gpu_pointers);
    for (const struct job *job = daemon->jobs.by_key; job; job = job->hh.next)
        if (may_see(session, job))
            count_job(&reply, problems, job);
    reply.problems = problems->pointers;
    reply.n_problems = problems->n;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_STATUS_REPLY;
    envelope.status_reply = &reply;
    conn_push(session->conn, &envelope);
    free(problems);
}

/* ------------------------------------------------------------------ jobs */

static void summarise(Pb__JobSummary *summary, struct job *job)
{
    struct membership *m = &job->membership;
    const struct roster *roster = m->state == JOB_GATHERING ? &m->gathering : &m->running;
    pb__job_summary__init(summary);
    summary->name = m->name;
    summary->uid = (uint32_t)job->key.uid;
    summary->user = job->user;
    summary->state = (char *)job_state_name(m->state);
    summary->epoch = m->epoch;
    summary->size = roster->size;
    summary->n_joined = roster->n;
    summary->worker_pid = job->worker ? (int32_t)worker_process_pid(job->worker) : 0;
    summary->age_s = seconds_since(job->created_ns);
    summary->n_stalled = job->n_stalled;
    summary->last_error = m->last_error;
}

static void on_jobs(struct session *session)
{
    struct jobs *jobs = &session->daemon->jobs;
    unsigned n_jobs = HASH_COUNT(jobs->by_key);
    Pb__JobSummary *summaries = calloc(n_jobs + 1, sizeof *summaries);
    Pb__JobSummary **pointers = calloc(n_jobs + 1, sizeof *pointers);
    Pb__JobsReply reply = PB__JOBS_REPLY__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    if (summaries && pointers) {
        for (struct job *job = jobs->by_key; job; job = job->hh.next) {
            if (!may_see(session, job))
                continue;
            summarise(&summaries[reply.n_jobs], job);
            pointers[reply.n_jobs] = &summaries[reply.n_jobs];
            reply.n_jobs++;
        }
        reply.jobs = pointers;
        envelope.body_case = PB__ENVELOPE__BODY_JOBS_REPLY;
        envelope.jobs_reply = &reply;
        conn_push(session->conn, &envelope);
    } else {
        conn_push_error(session->conn, -GRADD_ERR_NO_MEMORY, "the daemon is out of memory");
    }
    free(summaries);
    free(pointers);
}

/* ------------------------------------------------------------------ one job */

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
    summarise(&summary, job);
    Pb__JobReply reply = PB__JOB_REPLY__INIT;
    reply.summary = &summary;
    reply.missing = missing;
    reply.n_missing = list_missing(&job->membership, missing);
    reply.stats_stale = news->is_stale;
    if (news->remote) {
        reply.missing = news->remote->missing;
        reply.n_missing = news->remote->n_missing;
        summary.n_joined = news->remote->n_joined;
    }
    if (job->worker) {
        reply.backend = (char *)worker_process_backend(job->worker);
        reply.kernels = (char *)worker_process_kernels(job->worker);
        reply.threads = worker_process_threads(job->worker);
    }
    Pb__JobStats known = PB__JOB_STATS__INIT;
    if (news->stats)
        reply.stats = news->stats;
    else if (fill_known_ranks(&known, job, session->daemon->node))
        reply.stats = &known;
    if (reply.stats)
        name_nodes(&reply, job, node_pointers, session->daemon->node);
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_JOB_REPLY;
    envelope.job_reply = &reply;
    conn_push(session->conn, &envelope);
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
        conn_push_error(session->conn, -GRADD_ERR_NO_MEMORY, "the daemon is out of memory");
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

static void on_job(struct session *session, const Pb__JobRequest *request)
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

void admin_on_query_timeout(struct session *session)
{
    if (session->query.is_pending)
        finish_query(session, true, NULL);
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

/* ------------------------------------------------------------------ peers */

static void fill_peer(Pb__PeerSummary *row, struct daemon *daemon, struct peer_link *link)
{
    pb__peer_summary__init(row);
    row->node = link->name;
    row->address = link->address_text;
    row->port = resolve_port(&link->address);
    row->state = (char *)peer_link_state_name(link);
    row->rtt_us = link->rtt_us;
    row->clock_skew_s = link->skew_s;
    row->sent_bytes = link->sent_bytes;
    row->received_bytes = link->received_bytes;
    row->since_s = seconds_since(link->since_ns);
    row->version = link->version;
    row->last_error = link->error;
    row->n_jobs = rendezvous_count_jobs(&daemon->jobs, link);
}

static void on_peers(struct session *session)
{
    struct daemon *daemon = session->daemon;
    struct peers *peers = &daemon->peers;
    struct peer_link *link;
    size_t n = 0;
    char listening[RESOLVE_TEXT_MAX];
    TAILQ_FOREACH(link, &peers->links, link)
    n++;
    Pb__PeerSummary *rows = calloc(n + 1, sizeof *rows);
    Pb__PeerSummary **pointers = calloc(n + 1, sizeof *pointers);
    Pb__PeersReply reply = PB__PEERS_REPLY__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    if (rows && pointers) {
        TAILQ_FOREACH(link, &peers->links, link)
        {
            fill_peer(&rows[reply.n_peers], daemon, link);
            pointers[reply.n_peers] = &rows[reply.n_peers];
            reply.n_peers++;
        }
        reply.peers = pointers;
        reply.has_key = peers->key.is_set;
        if (peers_is_listening(peers)) {
            resolve_format(&peers->listening, listening, sizeof listening);
            reply.listening = listening;
        }
        envelope.body_case = PB__ENVELOPE__BODY_PEERS_REPLY;
        envelope.peers_reply = &reply;
        conn_push(session->conn, &envelope);
    } else {
        conn_push_error(session->conn, -GRADD_ERR_NO_MEMORY, "the daemon is out of memory");
    }
    free(rows);
    free(pointers);
}

/* ------------------------------------------------------------------ config and version */

static void on_config(struct session *session)
{
    const struct config *config = &session->daemon->config;
    Pb__ConfigOption rows[CONFIG_OPTIONS_MAX];
    Pb__ConfigOption *pointers[CONFIG_OPTIONS_MAX];
    char values[CONFIG_OPTIONS_MAX][CONFIG_TEXT_MAX];
    Pb__ConfigReply reply = PB__CONFIG_REPLY__INIT;
    for (size_t i = 0; i < config_n_options(); i++) {
        const struct config_option *option = &config_options[i];
        config_format(config, i, values[i], sizeof values[i]);
        pb__config_option__init(&rows[i]);
        rows[i].section = (char *)option->section;
        rows[i].key = (char *)option->key;
        rows[i].value = values[i];
        rows[i].default_value = (char *)option->default_value;
        rows[i].source = (char *)config->sources[i];
        rows[i].doc = (char *)option->doc;
        rows[i].reloadable = option->reload == CONFIG_RELOADABLE;
        pointers[i] = &rows[i];
    }
    reply.n_options = config_n_options();
    reply.options = pointers;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_CONFIG_REPLY;
    envelope.config_reply = &reply;
    conn_push(session->conn, &envelope);
}

static void on_version(struct session *session)
{
    Pb__VersionReply reply = PB__VERSION_REPLY__INIT;
    reply.version = (char *)GRADD_VERSION;
    reply.protocol_min = WIRE_PROTOCOL_MIN;
    reply.protocol_max = WIRE_PROTOCOL_MAX;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_VERSION_REPLY;
    envelope.version_reply = &reply;
    conn_push(session->conn, &envelope);
}

void admin_on_request(struct session *session, const Pb__Envelope *envelope)
{
    /* Replies keep the order of requests: who does not wait gets the older answer as it stands. */
    if (session->query.is_pending)
        finish_query(session, true, NULL);
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_STATUS_REQUEST:
        on_status(session);
        break;
    case PB__ENVELOPE__BODY_JOBS_REQUEST:
        on_jobs(session);
        break;
    case PB__ENVELOPE__BODY_JOB_REQUEST:
        on_job(session, envelope->job_request);
        break;
    case PB__ENVELOPE__BODY_PEERS_REQUEST:
        on_peers(session);
        break;
    case PB__ENVELOPE__BODY_CONFIG_REQUEST:
        on_config(session);
        break;
    case PB__ENVELOPE__BODY_VERSION_REQUEST:
        on_version(session);
        break;
    default:
        conn_push_error(session->conn, -GRADD_ERR_UNSUPPORTED,
                        "this daemon does not know this request");
    }
}
