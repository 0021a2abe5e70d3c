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

/* Does the job's part that touches nothing, and reports. The exit code. */
int agent_check(struct agent *agent);

#endif
