/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of admin share: admin.c (which request it is, jobs, peers, configuration),
 * admin_status.c and admin_job.c. Thread: loop.
 */
#ifndef GRADD_CONTROL_ADMIN_INTERNAL_H
#define GRADD_CONTROL_ADMIN_INTERNAL_H

#include "control/job.h"
#include "control/session.h"
#include "wire.h"

/* ---- admin.c */

/* Reply with a message of the union's member body_case; in words when it is larger than a frame. */
void admin_reply(struct session *session, int body_case, void *message);
void admin_reply_no_memory(struct session *session);
bool admin_may_see(const struct session *session, const struct job *job);
double admin_seconds_since(uint64_t start_ns);
/* The job in one row. Its texts are borrowed from the job. */
void admin_summarise(Pb__JobSummary *summary, struct job *job);

/* ---- admin_status.c */

void admin_on_status(struct session *session);

/* ---- admin_job.c */

void admin_on_job(struct session *session, const Pb__JobRequest *request);
/* What waits for a worker or a coordinator is answered with what is known. */
void admin_answer_pending(struct session *session);

#endif
