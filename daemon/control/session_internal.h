/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of a session share: session.c (life, greeting, frames), session_join.c and
 * session_loss.c. Thread: loop.
 */
#ifndef GRADD_CONTROL_SESSION_INTERNAL_H
#define GRADD_CONTROL_SESSION_INTERNAL_H

#include "base/log.h"
#include "control/session.h"
#include "wire.h"

/* ---- session.c */

/* Lines that clients cause: limited, with who it was. */
void session_log(const struct session *session, enum log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Refuse a request; the session goes on. */
void session_reply_error(struct session *session, int code, const char *text);

/* ---- session_join.c */

void session_on_join(struct session *session, const Pb__Join *join);
void session_on_leave(struct session *session);
/* The coordinator's name was looked up, or that took too long. data: the session. */
void session_on_resolved(void *data, const struct resolved *result);

/* ---- session_loss.c */

/* The rank is gone: its job is told at once when its process has ended, else after a moment. */
void session_begin_loss(struct session *session);
/* That moment is over. The session may be freed. */
void session_lose(struct session *session);
void session_on_process_end(void *data, int fd, unsigned events); /* of session->process */

#endif
