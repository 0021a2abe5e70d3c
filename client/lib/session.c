/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The way into a job and out of it, over the daemon's socket: Hello, Join, Joined; Leave, Left.
 *
 * Thread: the caller of gradd_init() or gradd_shutdown(), alone with the context.
 */
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "context.h"

enum {
    QUEUE_BYTES = 64 << 20,
    HELLO_TIMEOUT_S = 10,
    JOIN_GRACE_S = 10, /* the daemon keeps the time; this is for one that does not answer at all */
    LEAVE_TIMEOUT_S = 5,
};

static const uint64_t second_ns = 1000000000u;

void link_init(struct link *link, int take_fd)
{
    *link = (struct link){.fd = take_fd, .is_over = take_fd < 0, .is_broken = take_fd < 0};
    wire_in_init(&link->in);
    wire_out_init(&link->out, QUEUE_BYTES);
}

void link_deinit(struct link *link)
{
    wire_in_deinit(&link->in);
    wire_out_deinit(&link->out);
    if (link->fd >= 0)
        close(link->fd);
    link_init(link, -1);
}

/* ------------------------------------------------------------------ talking to the daemon */

static int no_daemon(const char *socket_path, int code)
{
    return error_set(code == EACCES ? GRADD_ERR_DENIED : GRADD_ERR_UNAVAILABLE,
                     "no gradd daemon at %s (%s): start it, or run the program under gradrun",
                     socket_path, strerror(code));
}

/* A connected socket, or a status. */
static int connect_daemon(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(path);
    if (length >= sizeof address.sun_path)
        return error_set(GRADD_ERR_INVALID, "the socket's path %s has more than %zu bytes", path,
                         sizeof address.sun_path - 1);
    memcpy(address.sun_path, path, length + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return error_set(GRADD_ERR_NO_MEMORY, "no socket: %s", strerror(errno));
    /* A full backlog blocks connect(); the time limit ends that. */
    struct timeval limit = {.tv_sec = HELLO_TIMEOUT_S};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    int rc;
    do {
        rc = connect(fd, (struct sockaddr *)&address, sizeof address);
    } while (rc < 0 && errno == EINTR);
    if (rc == 0)
        return fd;
    rc = no_daemon(path, errno);
    close(fd);
    return rc;
}

/* Wait until the socket is ready or the deadline (0: none) has passed. False: it has passed. */
static bool wait_ready(const struct link *link, uint64_t deadline_ns)
{
    struct pollfd poll_fd = {.fd = link->fd, .events = POLLIN};
    if (!wire_out_is_empty(&link->out) && !link->is_broken)
        poll_fd.events |= POLLOUT;
    for (;;) {
        uint64_t now = deadline_ns ? context_now_ns() : 0;
        if (deadline_ns && now >= deadline_ns)
            return false;
        uint64_t left = deadline_ns - now;
        struct timespec timeout = {(time_t)(left / second_ns), (long)(left % second_ns)};
        if (ppoll(&poll_fd, 1, deadline_ns ? &timeout : NULL, NULL) > 0)
            return true;
    }
}

static void send_envelope(struct link *link, const Pb__Envelope *envelope)
{
    if (link->is_broken || wire_out_push(&link->out, envelope, NULL, 0) < 0)
        return;
    link->is_broken = wire_out_flush(&link->out, link->fd) < 0;
}

/*
 * The next frame from the daemon. 0; GRADD_PENDING: the deadline passed; or a status. The caller
 * closes the frame's descriptors.
 */
static int receive(struct link *link, uint64_t deadline_ns, struct wire_frame *out)
{
    for (;;) {
        int rc = wire_in_next(&link->in, out);
        if (rc == 1)
            return 0;
        if (rc < 0)
            return error_set(GRADD_ERR_PROTOCOL, "the daemon sent %s",
                             link->in.error ? link->in.error : strerror(-rc));
        if (link->in.is_eof)
            return error_set(
                GRADD_ERR_UNAVAILABLE,
                "the daemon closed the connection without an answer: its log says why");
        if (!link->is_broken && !wire_out_is_empty(&link->out))
            link->is_broken = wire_out_flush(&link->out, link->fd) < 0;
        if (!wait_ready(link, deadline_ns))
            return GRADD_PENDING;
        rc = wire_in_read(&link->in, link->fd);
        if (rc == -ECONNRESET) /* it closed without reading what we had sent */
            link->in.is_eof = true;
        else if (rc < 0)
            return error_set(GRADD_ERR_UNAVAILABLE, "the daemon's connection broke: %s",
                             strerror(-rc));
    }
}

static int refused(const Pb__Error *error)
{
    int status = error_status_from_wire(error->code);
    return error_set(status ? status : GRADD_ERR_INTERNAL, "%s",
                     error->text[0] ? error->text : "the daemon refused without a reason");
}

/* ------------------------------------------------------------------ joining */

static int say_hello(struct gradd *g, const char *socket_path)
{
    Pb__Hello hello = PB__HELLO__INIT;
    hello.protocol_min = WIRE_PROTOCOL_MIN;
    hello.protocol_max = WIRE_PROTOCOL_MAX;
    hello.program = (char *)"libgradd";
    hello.version = (char *)GRADD_VERSION;
    hello.role = PB__ROLE__TRAINER;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_HELLO;
    envelope.hello = &hello;
    send_envelope(&g->daemon, &envelope);

    struct wire_frame frame;
    int rc = receive(&g->daemon, context_now_ns() + HELLO_TIMEOUT_S * second_ns, &frame);
    if (rc == GRADD_PENDING)
        return error_set(GRADD_ERR_UNAVAILABLE, "the gradd daemon at %s did not answer within %d s",
                         socket_path, HELLO_TIMEOUT_S);
    if (rc < 0)
        return rc;
    const Pb__Envelope *reply = frame.envelope;
    wire_frame_close_fds(&frame);
    if (reply->body_case == PB__ENVELOPE__BODY_ERROR)
        return refused(reply->error);
    if (reply->body_case != PB__ENVELOPE__BODY_HELLO_REPLY)
        return error_set(GRADD_ERR_PROTOCOL, "the daemon at %s answered Hello with something else",
                         socket_path);
    unsigned protocol = reply->hello_reply->protocol;
    if (protocol < WIRE_PROTOCOL_MIN || protocol > WIRE_PROTOCOL_MAX)
        return error_set(GRADD_ERR_PROTOCOL,
                         "the daemon (gradd %s) chose protocol %u, libgradd %s speaks %d to %d",
                         reply->hello_reply->version, protocol, GRADD_VERSION, WIRE_PROTOCOL_MIN,
                         WIRE_PROTOCOL_MAX);
    return 0;
}

static void ask_to_join(struct gradd *g, double timeout_s)
{
    Pb__Join join = PB__JOIN__INIT;
    join.job = g->identity.job;
    join.rank = (uint32_t)g->identity.rank;
    join.size = (uint32_t)g->identity.size;
    join.local_rank = (uint32_t)g->identity.local_rank;
    join.local_size = (uint32_t)g->identity.local_size;
    join.source = (char *)g->identity.source;
    join.coordinator = g->identity.coordinator;
    double timeout_ms = timeout_s * 1000;
    join.timeout_ms = timeout_ms < UINT32_MAX ? (uint32_t)timeout_ms : UINT32_MAX;
    if (timeout_s > 0 && join.timeout_ms == 0)
        join.timeout_ms = 1; /* 0 would mean the daemon's own limit */
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_JOIN;
    envelope.join = &join;
    send_envelope(&g->daemon, &envelope);
}

static int take_joined(struct gradd *g, const Pb__Joined *joined, struct wire_frame *frame)
{
    struct identity *id = &g->identity;
    if (joined->rank != (uint32_t)id->rank || joined->size != (uint32_t)id->size ||
        joined->local_size < 1 || joined->n_nodes < 1 || frame->n_fds != 1)
        return error_set(GRADD_ERR_PROTOCOL,
                         "job %s: asked to join as rank %d of %d, the daemon answered rank %u of "
                         "%u with %u descriptors",
                         id->job, id->rank, id->size, joined->rank, joined->size, frame->n_fds);
    id->local_rank = (int32_t)joined->local_rank;
    id->local_size = (int32_t)joined->local_size;
    g->node_rank = (int32_t)joined->node_rank;
    g->n_nodes = (int32_t)joined->n_nodes;
    g->epoch = joined->epoch;
    g->max_in_flight = joined->max_in_flight ? joined->max_in_flight : UINT32_MAX;
    g->memory_bytes = joined->memory_bytes ? joined->memory_bytes : UINT64_MAX;
    g->has_device_path = joined->device_path;
    g->device_order = joined->order;
    snprintf(g->device_text, sizeof g->device_text, "%s", joined->device_text);
    link_init(&g->worker, frame->fds[0]);
    frame->fds[0] = -1;
    return 0;
}

static int await_joined(struct gradd *g, double timeout_s)
{
    uint64_t deadline = 0;
    if (timeout_s > 0 && timeout_s < 1e9)
        deadline = context_now_ns() + (uint64_t)((timeout_s + JOIN_GRACE_S) * 1e9);
    struct wire_frame frame;
    int rc = receive(&g->daemon, deadline, &frame);
    if (rc == GRADD_PENDING)
        return error_set(GRADD_ERR_TIMEOUT,
                         "job %s, rank %d: the daemon did not answer Join within %g s",
                         g->identity.job, g->identity.rank, timeout_s + JOIN_GRACE_S);
    if (rc < 0) {
        char why[ERROR_TEXT_BYTES];
        snprintf(why, sizeof why, "%s", gradd_error());
        return error_set(rc, "job %s, rank %d: %s while it waited for the other ranks",
                         g->identity.job, g->identity.rank, why);
    }
    const Pb__Envelope *reply = frame.envelope;
    if (reply->body_case == PB__ENVELOPE__BODY_JOINED)
        rc = take_joined(g, reply->joined, &frame);
    else if (reply->body_case == PB__ENVELOPE__BODY_ERROR)
        rc = refused(reply->error);
    else
        rc = error_set(GRADD_ERR_PROTOCOL, "job %s: the daemon answered Join with something else",
                       g->identity.job);
    wire_frame_close_fds(&frame);
    return rc;
}

int session_join(struct gradd *g, const char *socket, double timeout_s)
{
    int fd = connect_daemon(socket);
    if (fd < 0)
        return fd;
    link_init(&g->daemon, fd);
    int rc = say_hello(g, socket);
    if (rc < 0)
        return rc;
    ask_to_join(g, timeout_s);
    return await_joined(g, timeout_s);
}

/* ------------------------------------------------------------------ leaving */

static void send_leave(struct link *link)
{
    Pb__Leave leave = PB__LEAVE__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_LEAVE;
    envelope.leave = &leave;
    send_envelope(link, &envelope);
}

void session_leave(struct gradd *g)
{
    pthread_mutex_lock(&g->out_lock);
    send_leave(&g->worker);
    pthread_mutex_unlock(&g->out_lock);
    send_leave(&g->daemon);
    uint64_t deadline = context_now_ns() + LEAVE_TIMEOUT_S * second_ns;
    bool has_left = g->daemon.is_broken || g->daemon.is_over;
    while (!has_left) {
        struct wire_frame frame;
        if (receive(&g->daemon, deadline, &frame) != 0)
            break;
        has_left = frame.envelope->body_case == PB__ENVELOPE__BODY_LEFT;
        wire_frame_close_fds(&frame);
    }
}
