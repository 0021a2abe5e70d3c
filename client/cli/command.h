/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A command of gradctl: one file, one const row. The row drives the parser, the help and the
 * completion.
 *
 * Thread: any.
 */
#ifndef GRADD_CLI_COMMAND_H
#define GRADD_CLI_COMMAND_H

#include "link.h"
#include "writer.h"

/* Exit codes beside those of enum link_result. */
enum {
    EXIT_CODE_USAGE = 2,
    EXIT_CODE_DEGRADED = 5,
};

struct options {
    const char *socket; /* NULL: GRADD_SOCKET, else the system's */
    bool is_json;
    double timeout_s;
    double watch_s; /* 0: once */
    bool has_uid;
    uint32_t uid;
    const char *name; /* the command's argument, or NULL */
};

/* One run of one command. */
struct context {
    const struct options *options;
    struct link *link; /* open, unless the command has no need of it */
    struct writer *writer;
};

struct command {
    const char *name;
    const char *argument; /* what help calls it; NULL: none */
    const char *help;
    bool takes_uid;
    bool is_offline; /* has something to say when no daemon answers */
    /* An exit code. On LINK_FAILED and above, link->error is the sentence. */
    int (*run)(struct context *context);
};

extern const struct command command_status;
extern const struct command command_jobs;
extern const struct command command_job;
extern const struct command command_peers;
extern const struct command command_config;
extern const struct command command_version;

/*
 * When the system's daemon does not answer, the private daemons of gradrun that the caller may
 * talk to, as " (…)" to append to the sentence; "" when there are none.
 */
void hint_private_daemons(char *hint, size_t bytes);

/* All of them, NULL-terminated. */
extern const struct command *const commands[];

#endif
