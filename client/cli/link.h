/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One blocking conversation with a daemon, for programs that people run: connect, Hello, then
 * requests that each have one reply. Every wait is bounded and can be cut short through an fd.
 *
 * Thread: any, one at a time per object.
 *
 * Invariant: when a function here fails, link->error is a whole sentence for a person, and the
 * result says which of the CLI's exit codes belongs to it.
 */
#ifndef GRADD_CLI_LINK_H
#define GRADD_CLI_LINK_H

#include "wire.h"

#define LINK_DEFAULT_SOCKET "/run/gradd/gradd.sock"

/* What became of a request. The numbers are the exit codes of gradctl. */
enum link_result {
    LINK_OK = 0,
    LINK_FAILED = 1,      /* the daemon said no, or what it said makes no sense */
    LINK_UNREACHABLE = 3, /* nobody listens, or nobody answers in time */
    LINK_DENIED = 4,      /* the socket, or the daemon, refuses this user */
    LINK_CANCELLED = 130, /* cancel_fd became readable */
};

struct link {
    int fd;        /* -1: closed */
    int cancel_fd; /* borrowed; -1: none. Readable: stop waiting */
    double timeout_s;
    struct wire_in in;
    struct wire_out out;
    char socket[108];    /* as far as a Unix socket's path may be long */
    char error[1024];    /* the sentence of the last failure */
    unsigned error_code; /* of the daemon's Error reply: -(enum gradd_status), or 0 */
    char version[64];    /* of the daemon */
    unsigned protocol;   /* agreed */
};

/* The socket to talk to: the argument if not NULL, else GRADD_SOCKET, else the system's. */
const char *link_socket_path(const char *argument);

/* A closed link. program is the name to give in Hello. */
void link_init(struct link *link, double timeout_s, int cancel_fd);
/* Close and free. Idempotent. */
void link_deinit(struct link *link);

/* Connect to the socket and exchange Hello. */
enum link_result link_open(struct link *link, const char *socket, const char *program,
                           Pb__Role role);

/*
 * Send one request, whose body is the message that belongs to body_case, and wait for the reply of
 * the expected kind. The reply is valid until the next call on this link. An Error reply is
 * LINK_FAILED or LINK_DENIED, with the daemon's sentence.
 */
enum link_result link_request(struct link *link, Pb__Envelope__BodyCase body_case, void *body,
                              Pb__Envelope__BodyCase expected, const Pb__Envelope **out_reply);

#endif
