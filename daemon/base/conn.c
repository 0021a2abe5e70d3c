/* SPDX-License-Identifier: Apache-2.0 */
#include "base/conn.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    /* Reads per wake-up, so that one busy peer can not starve the others. */
    READS_PER_TURN = 16,
};

struct conn {
    struct loop *loop;
    int fd;
    struct watch *watch;
    struct watch *soon; /* zero timer: flush, or report the end */
    struct wire_in in;
    struct wire_out out;
    const struct conn_ops *ops;
    void *owner;
    bool is_reading; /* inside on_readable(): flushing waits for the end of the batch */
    bool is_manual;  /* the owner flushes */
    bool is_paused;
    bool is_closing;
    char reason[160];
};

static void on_event(void *data, int fd, unsigned events);
static void on_soon(void *data);

struct conn *conn_new(struct loop *loop, int take_fd, size_t queue_bytes,
                      const struct conn_ops *ops, void *owner)
{
    struct conn *conn = calloc(1, sizeof *conn);
    if (!conn) {
        close(take_fd);
        return NULL;
    }
    conn->loop = loop;
    conn->fd = take_fd;
    conn->ops = ops;
    conn->owner = owner;
    wire_in_init(&conn->in);
    wire_out_init(&conn->out, queue_bytes);
    conn->watch = watch_fd(loop, take_fd, WATCH_READ, on_event, conn);
    conn->soon = watch_timer(loop, on_soon, conn);
    if (!conn->watch || !conn->soon) {
        conn_free(conn);
        return NULL;
    }
    return conn;
}

void conn_free(struct conn *conn)
{
    if (!conn)
        return;
    watch_free(conn->watch);
    watch_free(conn->soon);
    wire_in_deinit(&conn->in);
    wire_out_deinit(&conn->out);
    close(conn->fd);
    free(conn);
}

int conn_fd(const struct conn *conn)
{
    return conn->fd;
}

bool conn_is_closing(const struct conn *conn)
{
    return conn->is_closing;
}

void conn_close(struct conn *conn, const char *reason)
{
    if (conn->is_closing)
        return;
    conn->is_closing = true;
    snprintf(conn->reason, sizeof conn->reason, "%s", reason);
    wire_out_flush(&conn->out, conn->fd);
    watch_set(conn->watch, 0);
    watch_arm(conn->soon, 0);
}

static void on_soon(void *data)
{
    struct conn *conn = data;
    if (conn->is_closing)
        conn->ops->on_closed(conn->owner, conn, conn->reason);
    else
        conn_flush(conn);
}

void conn_flush(struct conn *conn)
{
    if (conn->is_closing)
        return;
    int rc = wire_out_flush(&conn->out, conn->fd);
    if (rc < 0) {
        /* A dead peer: what it sent before is still read, and its end of stream ends us. */
        if (rc == -EPIPE || rc == -ECONNRESET)
            wire_out_deinit(&conn->out);
        else
            conn_close(conn, strerror(-rc));
        return;
    }
    watch_set(conn->watch, (conn->is_paused ? 0 : WATCH_READ) | (rc > 0 ? WATCH_WRITE : 0));
}

void conn_pause(struct conn *conn)
{
    conn->is_paused = true;
    conn_flush(conn);
}

void conn_resume(struct conn *conn)
{
    conn->is_paused = false;
    conn_flush(conn);
}

void conn_set_manual_flush(struct conn *conn)
{
    conn->is_manual = true;
}

static int push(struct conn *conn, const Pb__Envelope *envelope, const int *fds, unsigned n_fds)
{
    if (conn->is_closing)
        return -EPIPE;
    bool was_empty = wire_out_is_empty(&conn->out);
    int rc = wire_out_push(&conn->out, envelope, fds, n_fds);
    if (rc == -ENOBUFS) {
        conn_close(conn, "does not read what is sent to it");
    } else if (rc == -EMFILE || rc == -ENFILE) {
        return rc; /* nothing was queued, and the other side has no part in it */
    } else if (rc < 0) {
        conn_close(conn, strerror(-rc));
    } else if (was_empty && !conn->is_reading && !conn->is_manual) {
        watch_arm(conn->soon, 0);
    }
    return rc;
}

int conn_push(struct conn *conn, const Pb__Envelope *envelope)
{
    return push(conn, envelope, NULL, 0);
}

int conn_push_fd(struct conn *conn, const Pb__Envelope *envelope, int fd)
{
    return push(conn, envelope, &fd, 1);
}

void conn_push_error(struct conn *conn, unsigned code, const char *text)
{
    Pb__Error error = PB__ERROR__INIT;
    error.code = code;
    error.text = (char *)text;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_ERROR;
    envelope.error = &error;
    conn_push(conn, &envelope);
}

/* Hand over whole frames. False when the connection is over. */
static bool take_frames(struct conn *conn)
{
    struct wire_frame frame;
    int rc;
    while (!conn->is_closing && (rc = wire_in_next(&conn->in, &frame)) != 0) {
        if (rc < 0) {
            const char *reason = rc == -EPROTO ? conn->in.error : strerror(-rc);
            conn_push_error(conn, rc == -EPROTO ? 7 : 6, reason);
            conn_close(conn, reason);
            return false;
        }
        conn->ops->on_frame(conn->owner, conn, &frame);
        wire_frame_close_fds(&frame);
    }
    return !conn->is_closing;
}

static void read_frames(struct conn *conn, unsigned n_reads)
{
    conn->is_reading = true;
    for (unsigned i = 0; i < n_reads && !conn->is_closing; i++) {
        size_t before = conn->in.end;
        int rc = wire_in_read(&conn->in, conn->fd);
        if (rc < 0) {
            const char *reason = rc == -EPROTO ? conn->in.error : strerror(-rc);
            if (rc == -EPROTO)
                conn_push_error(conn, 7, reason);
            conn_close(conn, rc == -ECONNRESET ? "" : reason);
            break;
        }
        bool is_empty = conn->in.end == before && !conn->in.is_eof;
        bool is_full = conn->in.end == conn->in.capacity;
        if (!take_frames(conn))
            break;
        if (conn->in.is_eof) {
            conn_close(conn, conn->in.begin == conn->in.end ? "" : "ended inside a message");
            break;
        }
        if (is_empty || !is_full)
            break;
    }
    conn->is_reading = false;
    if (conn->ops->on_batch_end)
        conn->ops->on_batch_end(conn->owner, conn);
    if (!conn->is_closing && !wire_out_is_empty(&conn->out))
        conn_flush(conn);
}

void conn_drain(struct conn *conn)
{
    if (!conn->is_closing && !conn->is_reading && !conn->is_paused)
        read_frames(conn, 1024);
}

static void on_event(void *data, int fd, unsigned events)
{
    (void)fd;
    struct conn *conn = data;
    if (events & WATCH_WRITE)
        conn_flush(conn);
    if (events & WATCH_READ && !conn->is_closing)
        read_frames(conn, READS_PER_TURN);
}
