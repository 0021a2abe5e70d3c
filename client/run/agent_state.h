/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of an agent, shared by what runs a job (agent.c) and what only tests whether it could
 * (agent_check.c). Nobody else includes this.
 *
 * Thread: loop.
 */
#ifndef GRADD_RUN_AGENT_STATE_H
#define GRADD_RUN_AGENT_STATE_H

#include "address.h"
#include "agent.h"
#include "inbox.h"
#include "job.h"
#include "launch_state.h"

struct agent {
    struct launch launch;
    struct args args;
    struct inbox inbox;
    struct inbox first; /* holds the job's strings */
    struct job job;
    struct frame_writer writer;
    char address[ADDRESS_BYTES]; /* where other hosts reach this one; "": not known */
    char coordinator[ADDRESS_BYTES + 16], master_address[ADDRESS_BYTES];
    bool is_asked; /* to end */
    struct feed {  /* rank 0's standard input */
        struct sink to;
        bool is_open, is_owed; /* the launcher waits for FRAME_TAKEN */
        bool is_last;          /* nothing follows what is queued */
    } feed;
};

/* Queue a message for the launcher. */
void agent_send(struct agent *agent, const struct message *message);
/* The same, with a text up to its end, cut to what a sentence may have. */
void agent_send_text(struct agent *agent, struct message message, const char *text);
void agent_answer_ping(struct agent *agent);
/* Wait for the next frame and write what is queued meanwhile. false: there will be none. */
bool agent_wait(struct agent *agent, struct frame *out);
/* Everything queued is written, or the launcher is gone. */
void agent_flush(struct agent *agent);

/* In agent_feed.c. */

/* Make our standard input a pipe, which rank 0 inherits. */
void agent_open_feed(struct agent *agent);
/* Rank 0 has it. */
void agent_leave_feed(void);
void agent_take_input(struct launch *l, const struct message *m);
/* Go on; asks to be called again through feed_fd. */
void agent_feed(struct launch *l);

/* Does the job's part that touches nothing, and reports. The exit code. */
int agent_check(struct agent *agent);

#endif
