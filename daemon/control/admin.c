/* SPDX-License-Identifier: Apache-2.0 */
#include "control/admin.h"

#include <stdlib.h>

#include "base/clock.h"
#include "control/admin_internal.h"
#include "control/daemon.h"
#include "control/rendezvous.h"
#include "gradd/types.h"

enum {
    /* Of the rows of a list: the queue of a session takes one such message. */
    LIST_BYTES_MAX = WIRE_FRAME_MAX - (64 << 10),
    ROW_OVERHEAD = 4, /* tag and length */
};

void admin_reply(struct session *session, int body_case, void *message)
{
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.status_reply = message; /* all members of the union are pointers */
    if (pb__envelope__get_packed_size(&envelope) > WIRE_FRAME_MAX)
        conn_push_error(session->conn, -GRADD_ERR_UNSUPPORTED,
                        "the answer is larger than a message may be");
    else
        conn_push(session->conn, &envelope);
}

void admin_reply_no_memory(struct session *session)
{
    conn_push_error(session->conn, -GRADD_ERR_NO_MEMORY, "the daemon is out of memory");
}

bool admin_may_see(const struct session *session, const struct job *job)
{
    return session->is_admin || session->peer.uid == job->key.uid;
}

double admin_seconds_since(uint64_t start_ns)
{
    return (double)(clock_now_ns() - start_ns) / 1e9;
}

/* ------------------------------------------------------------------ jobs */

void admin_summarise(Pb__JobSummary *summary, struct job *job)
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
    summary->age_s = admin_seconds_since(job->created_ns);
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
    size_t bytes = 0;
    reply.sees_all = session->is_admin;
    reply.jobs = pointers;
    if (summaries && pointers) {
        for (struct job *job = jobs->by_key; job; job = job->hh.next) {
            if (!admin_may_see(session, job))
                continue;
            Pb__JobSummary *row = &summaries[reply.n_jobs];
            admin_summarise(row, job);
            bytes += ROW_OVERHEAD + pb__job_summary__get_packed_size(row);
            if (bytes > LIST_BYTES_MAX)
                reply.jobs_left_out++;
            else
                pointers[reply.n_jobs++] = row;
        }
        admin_reply(session, PB__ENVELOPE__BODY_JOBS_REPLY, &reply);
    } else {
        admin_reply_no_memory(session);
    }
    free(summaries);
    free(pointers);
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
    row->since_s = admin_seconds_since(link->since_ns);
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
        admin_reply(session, PB__ENVELOPE__BODY_PEERS_REPLY, &reply);
    } else {
        admin_reply_no_memory(session);
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
    admin_reply(session, PB__ENVELOPE__BODY_CONFIG_REPLY, &reply);
}

static void on_version(struct session *session)
{
    Pb__VersionReply reply = PB__VERSION_REPLY__INIT;
    reply.version = (char *)GRADD_VERSION;
    reply.protocol_min = WIRE_PROTOCOL_MIN;
    reply.protocol_max = WIRE_PROTOCOL_MAX;
    admin_reply(session, PB__ENVELOPE__BODY_VERSION_REPLY, &reply);
}

void admin_on_request(struct session *session, const Pb__Envelope *envelope)
{
    /* Replies keep the order of requests: who does not wait gets the older answer as it stands. */
    admin_answer_pending(session);
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_STATUS_REQUEST:
        admin_on_status(session);
        break;
    case PB__ENVELOPE__BODY_JOBS_REQUEST:
        on_jobs(session);
        break;
    case PB__ENVELOPE__BODY_JOB_REQUEST:
        admin_on_job(session, envelope->job_request);
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
