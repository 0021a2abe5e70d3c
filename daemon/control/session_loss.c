/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that goes without leaving. Its job is told within moments, and after its process' end is
 * known where that can be: the others shall read why.
 */
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "control/daemon.h"
#include "control/session_internal.h"

/* A process closes its sockets a moment before its end can be seen. */
static const uint64_t LOSS_GRACE_NS = UINT64_C(100) * 1000000;
/* Who ended another user's process is told only once its parent has waited for it. */
static const uint64_t LOSS_RETRY_NS = UINT64_C(5) * 1000000;

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

void session_lose(struct session *session)
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
void session_begin_loss(struct session *session)
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
    session_begin_loss(session);
}

void session_on_process_end(void *data, int fd, unsigned events)
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
        session_begin_loss(session);
        watch_arm(session->timer, 0);
    } else if (session->conn) {
        session->state = SESSION_CLOSED;
        conn_close(session->conn, "its process has ended");
    }
}
