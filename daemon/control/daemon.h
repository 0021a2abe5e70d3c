/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The root object of gradd: it owns everything and knows when to stop.
 *
 * Thread: loop.
 */
#ifndef GRADD_CONTROL_DAEMON_H
#define GRADD_CONTROL_DAEMON_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "base/log.h"
#include "control/config.h"
#include "control/job.h"
#include "control/listener.h"
#include "control/peers.h"
#include "control/session.h"
#include "control/worker_process.h"

enum {
    SETTINGS_MAX = 64,
};

/* The command line, as main() read it. */
struct daemon_arguments {
    const char *config_file;            /* NULL: none is read */
    bool needs_config_file;             /* it was named: its absence is an error */
    const char *settings[SETTINGS_MAX]; /* --set key=value */
    size_t n_settings;
    const char *private_dir; /* NULL: the node's daemon */
    int lifeline_fd;         /* -1: none; at its end of file the daemon drains */
    int ready_fd;            /* -1: none */
    int cluster_key_fd;      /* -1: none */
    bool sets_peer_port;     /* on the command line */
};

enum daemon_state {
    DAEMON_RUNNING,
    DAEMON_DRAINING, /* takes no joins, waits for running jobs */
    DAEMON_ENDING,   /* jobs have ended or were aborted, waits for workers */
};

struct daemon {
    const struct daemon_arguments *arguments;
    struct loop *loop;
    struct config config;
    struct config_error config_error; /* of the last reload; empty: it went well */
    enum daemon_state state;
    char node[256];
    uint64_t started_ns;
    unsigned max_sessions; /* what the limit of descriptors allows */
    bool has_admin_group;
    gid_t admin_group;
    struct gpus gpus;
    struct worker_setup workers;
    struct jobs jobs;
    struct peers peers;
    TAILQ_HEAD(, session) sessions;
    unsigned n_sessions;
    struct listener *listener;
    char socket_path[CONFIG_TEXT_MAX]; /* created by us, removed at the end; "": passed to us */
    struct log_limit client_lines;
    uint64_t remote_seq; /* of the last RemoteJobRequest */
    struct watch *on_terminate, *on_interrupt, *on_reload, *on_child;
    struct watch *watchdog, *drain_timer, *lifeline;
};

/* Configuration from the command line and the file. 0 or -errno with *out_error. */
int daemon_configure(const struct daemon_arguments *arguments, struct config *out_config,
                     struct config_error *out_error);

/* Run until stopped. Exit status of the process. config is what daemon_configure() gave. */
int daemon_run(const struct daemon_arguments *arguments, const struct config *config);

bool daemon_is_admin(const struct daemon *daemon, const struct peer *peer);
unsigned daemon_max_sessions(const struct daemon *daemon);

#endif
