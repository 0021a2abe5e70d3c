/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer joins a job and leaves it, and what its job tells it meanwhile. */
#include <errno.h>
#include <stdio.h>

#include "base/clock.h"
#include "control/daemon.h"
#include "control/session_internal.h"
#include "gradd/types.h"

static const uint64_t MS = 1000000;
/* A coordinator that refuses at its own time limit is heard before ours. */
static const uint64_t REMOTE_GRACE_NS = UINT64_C(2) * 1000000000;

static void fill_member(struct session *session, const Pb__Join *join)
{
    struct member *member = &session->member;
    bool knows_local = join->local_size > 0 && join->local_rank < join->local_size;
    uint64_t limit_ms = session->daemon->config.join_timeout_ms;
    if (join->timeout_ms && join->timeout_ms < limit_ms)
        limit_ms = join->timeout_ms;
    member->rank = join->rank;
    member->size = join->size;
    member->local_rank = knows_local ? join->local_rank : join->rank;
    member->local_size = knows_local ? join->local_size : 0;
    member->pid = session->peer.pid;
    member->is_forwarded = false;
    member->since_ns = clock_now_ns();
    member->deadline_ns = member->since_ns + limit_ms * MS;
    snprintf(member->source, sizeof member->source, "%s", join->source);
    /* It is shown on terminals. */
    for (char *c = member->source; *c; c++)
        if (*c < 0x20 || *c > 0x7e)
            *c = '?';
}

/* Join the job of session->job, whose coordinator (NULL: this daemon) has been found. */
static void enter_job(struct session *session, const struct resolved *coordinator)
{
    struct member *member = &session->member;
    struct fault fault;
    uint64_t now = clock_now_ns();
    watch_arm(session->timer, member->deadline_ns > now ? member->deadline_ns - now : 0);
    int rc = jobs_join(&session->daemon->jobs, session->job, &session->peer, coordinator, member,
                       &fault);
    if (rc < 0) {
        watch_disarm(session->timer);
        session_reply_error(session, fault.code, fault.text);
    } else if (member->state == MEMBER_WAITING && member->coordinator) {
        watch_arm(session->timer, member->deadline_ns - now + REMOTE_GRACE_NS);
    }
}

void session_on_resolved(void *data, const struct resolved *result)
{
    struct session *session = data;
    session->lookup = NULL;
    if (result->n_addresses) {
        enter_job(session, result);
        return;
    }
    char text[FAULT_TEXT_MAX];
    watch_disarm(session->timer);
    snprintf(text, sizeof text, "job %s: the coordinator's address can not be found: %s",
             session->job, result->error);
    session_reply_error(session, GRADD_ERR_INVALID, text);
}

/* Numbers are used at once, names are looked up meanwhile. */
static void find_coordinator(struct session *session, const char *text)
{
    struct peers *peers = session->daemon->jobs.peers;
    char host[RESOLVE_HOST_MAX + 1], reason[FAULT_TEXT_MAX];
    uint16_t port;
    struct resolved number = {.n_addresses = 1};
    if (!resolve_split(text, peers_port(peers), host, &port)) {
        snprintf(reason, sizeof reason,
                 "job %s: the coordinator \"%.80s\" is not of the form host:port", session->job,
                 text);
        session_reply_error(session, GRADD_ERR_INVALID, reason);
        return;
    }
    if (resolve_number(host, port, &number.addresses[0])) {
        enter_job(session, &number);
        return;
    }
    session->lookup = resolve_start(peers->resolver, host, port, session_on_resolved, session);
    if (!session->lookup) {
        snprintf(
            reason, sizeof reason,
            "job %s: too many host names are being looked up; give the coordinator's IP address",
            session->job);
        session_reply_error(session, GRADD_ERR_UNAVAILABLE, reason);
        return;
    }
    watch_arm(session->timer, session->member.deadline_ns - session->member.since_ns);
}

void session_on_join(struct session *session, const Pb__Join *join)
{
    struct member *member = &session->member;
    struct fault fault = {0};
    if (membership_check_join(join->job, join->rank, join->size, &fault) < 0) {
        session_reply_error(session, fault.code, fault.text);
        return;
    }
    bool is_joined = member->state == MEMBER_WAITING || member->state == MEMBER_ACTIVE;
    if (is_joined || session->lookup) {
        snprintf(
            fault.text, sizeof fault.text,
            "job %s: pid %d joins as rank %u, but this connection is rank %u of job %s already",
            join->job, (int)session->peer.pid, join->rank, member->rank,
            is_joined ? member->membership->name : session->job);
        session_reply_error(session, GRADD_ERR_DUPLICATE, fault.text);
        return;
    }
    job_member_leave(member); /* of an epoch that has failed */
    fill_member(session, join);
    snprintf(session->job, sizeof session->job, "%s", join->job);
    if (*join->coordinator && session->daemon->jobs.peers)
        find_coordinator(session, join->coordinator);
    else
        enter_job(session, NULL);
}

void session_on_leave(struct session *session)
{
    watch_disarm(session->timer);
    resolve_cancel(session->lookup);
    session->lookup = NULL;
    job_member_leave(&session->member);
    session->state = SESSION_TRAINER;
    Pb__Left left = PB__LEFT__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_LEFT;
    envelope.left = &left;
    conn_push(session->conn, &envelope);
}

int session_on_joined(struct session *session, const struct session_place *place, int fd)
{
    const struct member *member = &session->member;
    watch_disarm(session->timer);
    Pb__Joined joined = PB__JOINED__INIT;
    joined.epoch = place->epoch;
    joined.rank = member->rank;
    joined.size = member->size;
    joined.local_rank = member->local_rank;
    joined.local_size = member->local_size;
    joined.node_rank = place->node_rank;
    joined.n_nodes = place->n_nodes;
    joined.max_in_flight = (uint32_t)session->daemon->config.max_in_flight;
    joined.memory_bytes = session->daemon->config.job_memory_bytes;
    joined.device_path = place->device_path;
    joined.device_text = (char *)place->device_text;
    joined.order = (uint32_t)session->daemon->config.order;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_JOINED;
    envelope.joined = &joined;
    int rc = session->conn ? conn_push_fd(session->conn, &envelope, fd) : -EPIPE;
    if (rc == 0)
        conn_flush(session->conn);
    return rc;
}

void session_on_join_refused(struct session *session, const struct fault *fault)
{
    watch_disarm(session->timer);
    if (session->conn)
        conn_push_error(session->conn, (unsigned)-fault->code, fault->text);
}

void session_on_epoch_failed(struct session *session, const struct session_failure *failure)
{
    Pb__EpochFailed failed = PB__EPOCH_FAILED__INIT;
    failed.epoch = failure->epoch;
    failed.code = (uint32_t)-failure->code;
    failed.text = (char *)failure->text;
    failed.rank = failure->rank;
    failed.pid = (int32_t)failure->pid;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_EPOCH_FAILED;
    envelope.epoch_failed = &failed;
    if (session->conn)
        conn_push(session->conn, &envelope);
}
