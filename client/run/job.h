/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The description of a run that gradrun gives to its agent on a host: everything that the agent
 * needs, so that its command line is the same for all and shows nothing. Pure.
 *
 * Thread: any.
 *
 * Invariant: a job that was unpacked has at least one rank; its numbers are within the limits of
 * gradrun's own command line.
 */
#ifndef GRADD_RUN_JOB_H
#define GRADD_RUN_JOB_H

#include "environment.h"
#include "frame.h"

enum job_daemon {
    JOB_DAEMON_NONE,    /* a world of one */
    JOB_DAEMON_PRIVATE, /* start one */
    JOB_DAEMON_SOCKET,  /* use the one at `socket` */
};

enum { JOB_KEY_DIGITS = 64 };

struct job {
    const char *name, *directory; /* working directory */
    const char *socket;           /* for JOB_DAEMON_SOCKET */
    const char *host;             /* this host's name on the command line */
    const char *address;          /* of this host, as far as the launcher knows; "": not */
    const char *key;              /* of the cluster, in hex; "": none */
    uint32_t daemon;
    bool is_check, is_verbose;
    bool wants_output, wants_input; /* from the ranks; for rank 0 */
    uint32_t n_ranks;               /* of the whole job */
    uint32_t n_hosts, host_index;
    struct place *places; /* of this host's ranks */
    uint32_t n_places;
    const char **command;     /* NULL-terminated, as the next three */
    const char **environment; /* "NAME=VALUE", for the agent and what it starts */
    const char **exports;     /* of -x: win over what gradrun sets */
    const char **settings;    /* of --set */
};

/* Results as frame_end(). */
int job_pack(struct frame_writer *writer, const struct job *job);

/*
 * The strings borrow the frame's bytes; the lists are freed by job_deinit(). 0, -EPROTO or
 * -ENOMEM; *out needs job_deinit() only after 0.
 */
int job_unpack(struct frame *frame, struct job *out);
void job_deinit(struct job *job);

#endif
