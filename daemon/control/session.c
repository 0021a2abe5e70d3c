/* SPDX-License-Identifier: Apache-2.0 */
#include "control/session.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/words.h"
#include "control/admin.h"
#include "control/daemon.h"
#include "gradd/types.h"

enum {
    QUEUE_BYTES = 1 << 20,
};

/* A process closes its sockets a moment before its end can be seen. */
static const uint64_t LOSS_GRACE_NS = UINT64_C(100) * 1000000;
/* Who ended another user's process is told only once its parent has waited for it. */
static const uint64_t LOSS_RETRY_NS = UINT64_C(5) * 1000000;
static const uint64_t MS = 1000000;
/* A coordinator that refuses at its own time limit is heard before ours. */
static const uint64_t REMOTE_GRACE_NS = UINT64_C(2) * 1000000000;

static void on_frame(void *data, struct conn *conn, struct wire_frame *frame);
static void on_closed(void *data, struct conn *conn, const char *reason);
static void on_timer(void *data);
static void on_resolved(void *data, const struct resolved *result);
static void on_process_end(void *data, int fd, unsigned events);

static const struct conn_ops conn_ops = {.on_frame = on_frame, .on_closed = on_closed};

/* Lines that clients cause: limited, with who it was. */
__attribute__((format(printf, 3, 4))) static void
log_client(const struct session *session, enum log_level level, const char *format, ...)
{
    unsigned n_dropped;
    if (!log_limit_allows(&session->daemon->client_lines, &n_dropped))
        return;
    if (n_dropped)
        log_notice("session", "%u line%s about clients suppressed", n_dropped, words_s(n_dropped));
    const struct member *member = &session->member;
    struct log_fields fields = {
        .pid = (int)session->peer.pid,
        .has_rank = member->state != MEMBER_NONE,
        .rank = (int)member->rank,
        .job = member->membership ? member->membership->name : NULL,
    };
    char text[FAULT_TEXT_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_line(level, "session", &fields, "%s", text);
}

/* ------------------------------------------------------------------ life */

struct session *session_new(struct daemon *daemon, int take_fd)
{
    struct session *session = calloc(1, sizeof *session);
    if (!session) {
        close(take_fd);
        return NULL;
    }
    session->daemon = daemon;
    session->member.session = session;
    session->peer.pidfd = -1;
    TAILQ_INSERT_TAIL(&daemon->sessions, session, link);
    daemon->n_sessions++;
    int rc = peer_init(&session->peer, take_fd);
    session->conn = conn_new(daemon->loop, take_fd, QUEUE_BYTES, &conn_ops, session);
    session->timer = watch_timer(daemon->loop, on_timer, session);
    if (rc < 0 || !session->conn || !session->timer) {
        session_free(session);
        return NULL;
    }
    session->is_admin = daemon_is_admin(daemon, &session->peer);
    watch_arm(session->timer, daemon->config.hello_timeout_ms * MS);
    return session;
}

void session_free(struct session *session)
{
    TAILQ_REMOVE(&session->daemon->sessions, session, link);
    session->daemon->n_sessions--;
    resolve_cancel(session->lookup);
    watch_free(session->timer);
    watch_free(session->process);
    conn_free(session->conn);
    peer_deinit(&session->peer);
    free(session);
}

void session_reject(struct session *session, int code, const char *text)
{
    log_client(session, LOG_LEVEL_NOTICE, "refused: %s", text);
    conn_push_error(session->conn, (unsigned)-code, text);
    session->state = SESSION_CLOSED;
    conn_close(session->conn, "refused");
}

static void reply_error(struct session *session, int code, const char *text)
{
    log_client(session, LOG_LEVEL_NOTICE, "%s", text);
    conn_push_error(session->conn, (unsigned)-code, text);
}

/* ------------------------------------------------------------------ losing a rank */

/* By a signal with which launchers end the other ranks once one is lost. */
static bool was_told_to_end(const struct peer *peer)
{
    int status;
    if (!peer_has_ended(peer) || !peer_end_status(peer, &status) || !WIFSIGNALED(status))
        return false;
    return WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGINT || WTERMSIG(status) == SIGHUP;
}

/*
 * This rank was ended because of another one here, which has ended by itself and is not counted as
 * lost yet. That one comes first, by its own watch: it may have left in its last moment.
 */
static bool is_consequence(const struct session *session)
{
    if (session->member.state != MEMBER_ACTIVE || !was_told_to_end(&session->peer))
        return false;
    const struct roster *running = &session->member.membership->running;
    for (uint32_t i = 0; i < running->size; i++) {
        const struct member *member = running->of_rank[i];
        const struct session *other = member ? member->session : NULL;
        if (other && other != session && member->state == MEMBER_ACTIVE &&
            peer_has_ended(&other->peer) && !was_told_to_end(&other->peer))
            return true;
    }
    return false;
}

static void lose(struct session *session)
{
    char end[160], how[224];
    bool has_ended = peer_has_ended(&session->peer);
    if (has_ended) {
        bool is_known = peer_describe_end(&session->peer, end, sizeof end);
        if ((!is_known || is_consequence(session)) && clock_now_ns() < session->loss_deadline_ns) {
            watch_arm(session->timer, LOSS_RETRY_NS);
            return;
        }
        snprintf(how, sizeof how, "%s without leaving", end);
    } else {
        snprintf(how, sizeof how, "closed its connection%s without leaving",
                 session->conn ? " to the worker" : "");
    }
    if (session->member.state == MEMBER_ACTIVE)
        job_member_lost(&session->member, how);
    job_member_leave(&session->member);
    /* A process that lives has been told; it may join again. */
    session->state = session->conn && !has_ended ? SESSION_TRAINER : SESSION_CLOSED;
    if (!session->conn)
        session_free(session);
    else if (has_ended)
        conn_close(session->conn, "lost");
}

/* The rank is gone: at once when its process has ended, else after a moment. */
static void begin_loss(struct session *session)
{
    if (session->state == SESSION_LOSING || session->state == SESSION_CLOSED)
        return;
    bool has_ended = peer_has_ended(&session->peer);
    session->state = SESSION_LOSING;
    session->loss_deadline_ns = clock_now_ns() + LOSS_GRACE_NS;
    watch_arm(session->timer, has_ended || !session->process ? 0 : LOSS_GRACE_NS);
}

void session_on_lost_at_worker(struct session *session)
{
    begin_loss(session);
}

static void on_process_end(void *data, int fd, unsigned events)
{
    (void)fd;
    (void)events;
    struct session *session = data;
    watch_free(session->process);
    session->process = NULL;
    /* It may have left in its last moment; a child of it may keep the socket open for ever. */
    if (session->conn && session->state == SESSION_TRAINER)
        conn_drain(session->conn);
    if (session->member.state == MEMBER_ACTIVE) {
        begin_loss(session);
        watch_arm(session->timer, 0);
    } else if (session->conn) {
        session->state = SESSION_CLOSED;
        conn_close(session->conn, "its process has ended");
    }
}

static void on_closed(void *data, struct conn *conn, const char *reason)
{
    struct session *session = data;
    if (*reason && session->state != SESSION_CLOSED)
        log_client(session, LOG_LEVEL_NOTICE, "connection closed: %s", reason);
    conn_free(conn);
    session->conn = NULL;
    if (session->member.state == MEMBER_ACTIVE) {
        begin_loss(session);
        return;
    }
    job_member_leave(&session->member);
    session_free(session);
}

static void on_timer(void *data)
{
    struct session *session = data;
    char text[160];
    switch (session->state) {
    case SESSION_GREETING:
        snprintf(text, sizeof text, "said no Hello in %.1f s",
                 (double)session->daemon->config.hello_timeout_ms / 1000);
        session_reject(session, GRADD_ERR_TIMEOUT, text);
        break;
    case SESSION_TRAINER:
        if (session->lookup) {
            resolve_cancel(session->lookup);
            on_resolved(session, &(struct resolved){.error = "the name service does not answer"});
        } else if (session->member.state == MEMBER_WAITING)
            job_join_timed_out(&session->member, (clock_now_ns() - session->member.since_ns) / MS);
        break;
    case SESSION_ADMIN:
        admin_on_query_timeout(session);
        break;
    case SESSION_LOSING:
        lose(session);
        break;
    case SESSION_CLOSED:
        break;
    }
}

/* ------------------------------------------------------------------ hello */

static void push_hello_reply(struct session *session, unsigned protocol)
{
    Pb__HelloReply reply = PB__HELLO_REPLY__INIT;
    reply.protocol = protocol;
    reply.version = (char *)GRADD_VERSION;
    reply.node = session->daemon->node;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_HELLO_REPLY;
    envelope.hello_reply = &reply;
    conn_push(session->conn, &envelope);
}

/* Trainers leave room for those who ask. */
static bool has_room_for_trainer(struct session *session)
{
    const struct config *config = &session->daemon->config;
    unsigned n = 0, n_of_uid = 0;
    const struct session *other;
    TAILQ_FOREACH(other, &session->daemon->sessions, link)
    {
        bool is_open = other->conn && !conn_is_closing(other->conn);
        if (other->state != SESSION_TRAINER || !is_open)
            continue;
        n++;
        n_of_uid += other->peer.uid == session->peer.uid;
    }
    char text[160];
    if (n_of_uid >= config->max_sessions_per_uid)
        snprintf(text, sizeof text, "uid %u has %u trainer%s connected (max_sessions_per_uid)",
                 (unsigned)session->peer.uid, n_of_uid, words_s(n_of_uid));
    else if (n >= daemon_max_sessions(session->daemon))
        snprintf(text, sizeof text, "%u trainer%s connected (max_sessions)", n, words_s(n));
    else
        return true;
    session_reject(session, GRADD_ERR_NO_MEMORY, text);
    return false;
}

static void on_hello(struct session *session, const Pb__Hello *hello)
{
    unsigned protocol = wire_protocol_agree(hello->protocol_min, hello->protocol_max,
                                            WIRE_PROTOCOL_MIN, WIRE_PROTOCOL_MAX);
    if (!protocol) {
        char text[320];
        snprintf(text, sizeof text,
                 "%.32s %.32s speaks protocol %u to %u, gradd %s on node %s speaks %d to %d: "
                 "install versions that fit",
                 hello->program[0] ? hello->program : "a client", hello->version,
                 hello->protocol_min, hello->protocol_max, GRADD_VERSION, session->daemon->node,
                 WIRE_PROTOCOL_MIN, WIRE_PROTOCOL_MAX);
        session_reject(session, GRADD_ERR_PROTOCOL, text);
        return;
    }
    if (hello->role == PB__ROLE__TRAINER && !has_room_for_trainer(session))
        return;
    watch_disarm(session->timer);
    push_hello_reply(session, protocol);
    if (hello->role != PB__ROLE__TRAINER) {
        session->state = SESSION_ADMIN;
        return;
    }
    session->state = SESSION_TRAINER;
    if (session->peer.pidfd >= 0)
        session->process = watch_fd(session->daemon->loop, session->peer.pidfd, WATCH_READ,
                                    on_process_end, session);
}

/* ------------------------------------------------------------------ join and leave */

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
        reply_error(session, fault.code, fault.text);
    } else if (member->state == MEMBER_WAITING && member->coordinator) {
        watch_arm(session->timer, member->deadline_ns - now + REMOTE_GRACE_NS);
    }
}

static void on_resolved(void *data, const struct resolved *result)
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
    reply_error(session, GRADD_ERR_INVALID, text);
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
        reply_error(session, GRADD_ERR_INVALID, reason);
        return;
    }
    if (resolve_number(host, port, &number.addresses[0])) {
        enter_job(session, &number);
        return;
    }
    session->lookup = resolve_start(peers->resolver, host, port, on_resolved, session);
    if (!session->lookup) {
        snprintf(reason, sizeof reason,
                 "job %s: too many host names are being looked up; give the coordinator's number",
                 session->job);
        reply_error(session, GRADD_ERR_UNAVAILABLE, reason);
        return;
    }
    watch_arm(session->timer, session->member.deadline_ns - session->member.since_ns);
}

static void on_join(struct session *session, const Pb__Join *join)
{
    struct member *member = &session->member;
    struct fault fault = {0};
    if (membership_check_join(join->job, join->rank, join->size, &fault) < 0) {
        reply_error(session, fault.code, fault.text);
        return;
    }
    bool is_joined = member->state == MEMBER_WAITING || member->state == MEMBER_ACTIVE;
    if (is_joined || session->lookup) {
        snprintf(
            fault.text, sizeof fault.text,
            "job %s: pid %d joins as rank %u, but this connection is rank %u of job %s already",
            join->job, (int)session->peer.pid, join->rank, member->rank,
            is_joined ? member->membership->name : session->job);
        reply_error(session, GRADD_ERR_DUPLICATE, fault.text);
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

static void on_leave(struct session *session)
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

/* ------------------------------------------------------------------ frames */

static void on_trainer_frame(struct session *session, const Pb__Envelope *envelope)
{
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_JOIN:
        on_join(session, envelope->join);
        break;
    case PB__ENVELOPE__BODY_LEAVE:
        on_leave(session);
        break;
    default:
        reply_error(session, GRADD_ERR_UNSUPPORTED,
                    "this daemon does not know this request of a trainer");
    }
}

static void on_frame(void *data, struct conn *conn, struct wire_frame *frame)
{
    (void)conn;
    struct session *session = data;
    const Pb__Envelope *envelope = frame->envelope;
    switch (session->state) {
    case SESSION_GREETING:
        if (envelope->body_case == PB__ENVELOPE__BODY_HELLO)
            on_hello(session, envelope->hello);
        else
            session_reject(session, GRADD_ERR_PROTOCOL, "the first message must be Hello");
        break;
    case SESSION_TRAINER:
        on_trainer_frame(session, envelope);
        break;
    case SESSION_ADMIN:
        admin_on_request(session, envelope);
        break;
    case SESSION_LOSING:
        /* A Leave that crossed the loss changes nothing for the others, but is answered. */
        if (envelope->body_case == PB__ENVELOPE__BODY_LEAVE)
            on_leave(session);
        break;
    case SESSION_CLOSED:
        break;
    }
}
