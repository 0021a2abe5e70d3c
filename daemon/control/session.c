/* SPDX-License-Identifier: Apache-2.0 */
#include "control/session.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/words.h"
#include "control/admin.h"
#include "control/daemon.h"
#include "control/session_internal.h"
#include "gradd/types.h"

enum {
    QUEUE_BYTES = 1 << 20,
};

static const uint64_t MS = 1000000;

static void on_frame(void *data, struct conn *conn, struct wire_frame *frame);
static void on_closed(void *data, struct conn *conn, const char *reason);
static void on_timer(void *data);

static const struct conn_ops conn_ops = {.on_frame = on_frame, .on_closed = on_closed};

/* Lines that clients cause: limited, with who it was. */
void session_log(const struct session *session, enum log_level level, const char *format, ...)
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
    session_log(session, LOG_LEVEL_NOTICE, "refused: %s", text);
    conn_push_error(session->conn, (unsigned)-code, text);
    session->state = SESSION_CLOSED;
    conn_close(session->conn, "refused");
}

void session_reply_error(struct session *session, int code, const char *text)
{
    session_log(session, LOG_LEVEL_NOTICE, "%s", text);
    conn_push_error(session->conn, (unsigned)-code, text);
}

static void on_closed(void *data, struct conn *conn, const char *reason)
{
    struct session *session = data;
    if (*reason && session->state != SESSION_CLOSED)
        session_log(session, LOG_LEVEL_NOTICE, "connection closed: %s", reason);
    conn_free(conn);
    session->conn = NULL;
    if (session->member.state == MEMBER_ACTIVE) {
        session_begin_loss(session);
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
            session_on_resolved(session,
                                &(struct resolved){.error = "the name service does not answer"});
        } else if (session->member.state == MEMBER_WAITING)
            job_join_timed_out(&session->member, (clock_now_ns() - session->member.since_ns) / MS);
        break;
    case SESSION_ADMIN:
        admin_on_query_timeout(session);
        break;
    case SESSION_LOSING:
        session_lose(session);
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
                                    session_on_process_end, session);
}

/* ------------------------------------------------------------------ frames */

static void on_trainer_frame(struct session *session, const Pb__Envelope *envelope)
{
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_JOIN:
        session_on_join(session, envelope->join);
        break;
    case PB__ENVELOPE__BODY_LEAVE:
        session_on_leave(session);
        break;
    default:
        session_reply_error(session, GRADD_ERR_UNSUPPORTED,
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
            session_on_leave(session);
        break;
    case SESSION_CLOSED:
        break;
    }
}
