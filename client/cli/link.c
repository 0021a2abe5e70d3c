/* SPDX-License-Identifier: Apache-2.0 */
#include "link.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <gradd/types.h>

enum { OUT_LIMIT = 64 * 1024 };

const char *link_socket_path(const char *argument)
{
    if (argument)
        return argument;
    const char *variable = getenv("GRADD_SOCKET");
    return variable && *variable ? variable : LINK_DEFAULT_SOCKET;
}

void link_init(struct link *link, double timeout_s, int cancel_fd)
{
    *link = (struct link){.fd = -1, .cancel_fd = cancel_fd, .timeout_s = timeout_s};
    wire_in_init(&link->in);
    wire_out_init(&link->out, OUT_LIMIT);
}

void link_deinit(struct link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    wire_in_deinit(&link->in);
    wire_out_deinit(&link->out);
}

/* `return fail(link, RESULT, "...", ...)`: an expression, so that compilers and linters see that
 * what comes back is the failure. */
#define fail(link, result, ...)                                                                    \
    (snprintf((link)->error, sizeof(link)->error, __VA_ARGS__), (result))

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Wait until the socket is ready for `events`, the deadline passes, or the user has had enough. */
static enum link_result wait_for(struct link *link, short events, double deadline_s)
{
    for (;;) {
        double left_s = deadline_s - now_s();
        struct pollfd fds[] = {{link->fd, events, 0}, {link->cancel_fd, POLLIN, 0}};
        int n = left_s > 0 ? poll(fds, 2, (int)(left_s * 1000) + 1) : 0;
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail(link, LINK_FAILED, "cannot wait for %s: %s", link->socket, strerror(errno));
        if (n == 0)
            return fail(link, LINK_UNREACHABLE,
                        "the daemon at %s did not answer within %g s: it may be stopped or "
                        "overloaded",
                        link->socket, link->timeout_s);
        if (fds[1].revents)
            return fail(link, LINK_CANCELLED, "interrupted");
        return LINK_OK;
    }
}

static enum link_result connect_failed(struct link *link, int error)
{
    switch (error) {
    case EACCES:
    case EPERM:
        return fail(link, LINK_DENIED,
                    "may not connect to %s (%s): uid %d needs write permission on the socket and "
                    "search permission on its directory",
                    link->socket, strerror(error), (int)geteuid());
    case ENOENT:
    case ECONNREFUSED:
        return fail(link, LINK_UNREACHABLE, "no daemon at %s (%s): is gradd.service running?",
                    link->socket, strerror(error));
    case EAGAIN:
        return fail(link, LINK_UNREACHABLE,
                    "the daemon at %s does not accept connections (its queue is full)",
                    link->socket);
    default:
        return fail(link, LINK_FAILED, "cannot connect to %s: %s", link->socket, strerror(error));
    }
}

static enum link_result connect_socket(struct link *link, const char *socket_path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const size_t length = strlen(socket_path);
    if (length >= sizeof address.sun_path)
        return fail(link, LINK_FAILED, "socket path of %zu bytes; at most %zu are possible: %s",
                    length, sizeof address.sun_path - 1, socket_path);
    memcpy(address.sun_path, socket_path, length + 1);
    memcpy(link->socket, socket_path, length + 1);
    link->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (link->fd < 0)
        return fail(link, LINK_FAILED, "cannot make a socket: %s", strerror(errno));
    if (connect(link->fd, (struct sockaddr *)&address, sizeof address) < 0)
        return connect_failed(link, errno);
    return LINK_OK;
}

static enum link_result send_all(struct link *link, double deadline_s)
{
    int rc;
    while ((rc = wire_out_flush(&link->out, link->fd)) == 1) {
        enum link_result result = wait_for(link, POLLOUT, deadline_s);
        if (result != LINK_OK)
            return result;
    }
    /* A daemon that refuses may answer and close before it has read: its answer says why. */
    if (rc < 0 && rc != -EPIPE && rc != -ECONNRESET)
        return fail(link, LINK_FAILED, "cannot write to %s: %s", link->socket, strerror(-rc));
    return LINK_OK;
}

static enum link_result receive(struct link *link, double deadline_s, const Pb__Envelope **out)
{
    struct wire_frame frame;
    int rc;
    while ((rc = wire_in_next(&link->in, &frame)) == 0) {
        if (link->in.is_eof)
            return fail(link, LINK_UNREACHABLE,
                        "the daemon at %s closed the connection without an answer: its log says "
                        "why",
                        link->socket);
        enum link_result result = wait_for(link, POLLIN, deadline_s);
        if (result != LINK_OK)
            return result;
        rc = wire_in_read(&link->in, link->fd);
        if (rc == -ECONNRESET)
            link->in.is_eof = true;
        else if (rc < 0)
            break;
    }
    if (rc == -EPROTO)
        return fail(link, LINK_FAILED, "what listens at %s does not speak gradd's protocol: %s",
                    link->socket, link->in.error);
    if (rc < 0)
        return fail(link, LINK_FAILED, "cannot read from %s: %s", link->socket, strerror(-rc));
    wire_frame_close_fds(&frame);
    *out = frame.envelope;
    return LINK_OK;
}

enum link_result link_request(struct link *link, Pb__Envelope__BodyCase body_case, void *body,
                              Pb__Envelope__BodyCase expected, const Pb__Envelope **out_reply)
{
    Pb__Envelope request = PB__ENVELOPE__INIT;
    request.body_case = body_case;
    request.hello = body; /* the members of the union are all pointers */
    double deadline_s = now_s() + link->timeout_s;
    link->error_code = 0;
    int rc = wire_out_push(&link->out, &request, NULL, 0);
    if (rc < 0)
        return fail(link, LINK_FAILED, "request too large or no memory: %s", strerror(-rc));
    const Pb__Envelope *reply = NULL;
    enum link_result result = send_all(link, deadline_s);
    if (result == LINK_OK)
        result = receive(link, deadline_s, &reply);
    if (result != LINK_OK)
        return result;
    if (reply->body_case == PB__ENVELOPE__BODY_ERROR) {
        link->error_code = reply->error->code;
        if (!reply->error->text[0])
            return fail(link, LINK_FAILED,
                        "the daemon at %s refused with code %u and gave no reason", link->socket,
                        reply->error->code);
        return fail(link, reply->error->code == -GRADD_ERR_DENIED ? LINK_DENIED : LINK_FAILED, "%s",
                    reply->error->text);
    }
    if (reply->body_case != expected)
        return fail(link, LINK_FAILED,
                    "the daemon at %s answered with message %d where %d was expected: is it of "
                    "another version? (this program is %s)",
                    link->socket, (int)reply->body_case, (int)expected, GRADD_VERSION);
    *out_reply = reply;
    return LINK_OK;
}

enum link_result link_open(struct link *link, const char *socket, const char *program,
                           Pb__Role role)
{
    enum link_result result = connect_socket(link, socket);
    if (result != LINK_OK)
        return result;
    Pb__Hello hello = PB__HELLO__INIT;
    hello.protocol_min = WIRE_PROTOCOL_MIN;
    hello.protocol_max = WIRE_PROTOCOL_MAX;
    hello.program = (char *)program;
    hello.version = (char *)GRADD_VERSION;
    hello.role = role;
    const Pb__Envelope *reply;
    result = link_request(link, PB__ENVELOPE__BODY_HELLO, &hello, PB__ENVELOPE__BODY_HELLO_REPLY,
                          &reply);
    if (result != LINK_OK)
        return result;
    link->protocol = reply->hello_reply->protocol;
    snprintf(link->version, sizeof link->version, "%s", reply->hello_reply->version);
    if (link->protocol < WIRE_PROTOCOL_MIN || link->protocol > WIRE_PROTOCOL_MAX)
        return fail(link, LINK_FAILED,
                    "the daemon at %s (%s) chose protocol %u; this program (%s) speaks %d to %d",
                    link->socket, link->version, link->protocol, GRADD_VERSION, WIRE_PROTOCOL_MIN,
                    WIRE_PROTOCOL_MAX);
    return LINK_OK;
}
