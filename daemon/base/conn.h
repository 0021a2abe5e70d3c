/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection on the loop: a socket, the wire codec and a frame handler.
 *
 * Thread: loop. Frames are handed over in batches as they arrive; replies pushed while a batch is
 * handled leave together after it. The connection never frees itself: on_closed() tells the owner,
 * who calls conn_free() there or later.
 */
#ifndef GRADD_CONN_H
#define GRADD_CONN_H

#include <stdbool.h>

#include "base/loop.h"
#include "wire.h"

struct conn;

struct conn_ops {
    /*
     * One frame. fds that the handler keeps are taken from frame->fds (set to -1); the rest are
     * closed afterwards. conn_close() is allowed inside.
     */
    void (*on_frame)(void *owner, struct conn *conn, struct wire_frame *frame);
    /* All frames of one wake-up have been handed over. May be NULL. */
    void (*on_batch_end)(void *owner, struct conn *conn);
    /*
     * The connection is over; called once, from the loop, never inside conn_push(). reason: a
     * sentence; "" for an orderly end of stream; gone with the connection. conn_free() is allowed
     * inside.
     */
    void (*on_closed)(void *owner, struct conn *conn, const char *reason);
};

/* fd is taken, even on failure (NULL). queue_bytes: unsent bytes at which a slow reader is cut. */
struct conn *conn_new(struct loop *loop, int take_fd, size_t queue_bytes,
                      const struct conn_ops *ops, void *owner);
/* Free at once, silently. NULL-safe. Not inside on_frame: conn_close() there. */
void conn_free(struct conn *conn);

/*
 * Queue an envelope; it leaves at the end of the current batch, or when the loop turns. On failure
 * the connection is closed (on_closed follows), so most callers need not look. 0 or -errno. Only
 * where the copy of fd lacks a descriptor (-EMFILE, -ENFILE) does the connection go on.
 */
int conn_push(struct conn *conn, const Pb__Envelope *envelope);
int conn_push_fd(struct conn *conn, const Pb__Envelope *envelope, int fd);

/* Send what is queued now, as far as the socket takes it. */
void conn_flush(struct conn *conn);

/* The owner promises to conn_flush() after pushing: nothing is sent before. Saves loop turns. */
void conn_set_manual_flush(struct conn *conn);

/* Reply with Error {code, text}. */
void conn_push_error(struct conn *conn, unsigned code, const char *text);

/*
 * End the connection: no more frames are handed over; what is queued is sent if the socket takes
 * it at once; on_closed(reason) follows from the loop. Idempotent.
 */
void conn_close(struct conn *conn, const char *reason);
bool conn_is_closing(const struct conn *conn);

/* Read nothing until conn_resume(): what arrives waits in the socket. */
void conn_pause(struct conn *conn);
void conn_resume(struct conn *conn);

/* Hand over what has arrived already, without waiting for the loop (used before an epoch ends). */
void conn_drain(struct conn *conn);

int conn_fd(const struct conn *conn);

#endif
