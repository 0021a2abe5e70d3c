/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What gradctl asks. Thread: loop. Invariant: each request gets one reply, in order, within a
 * second, and shows only jobs that its user may see.
 */
#ifndef GRADD_CONTROL_ADMIN_H
#define GRADD_CONTROL_ADMIN_H

#include "wire.h"

struct daemon;
struct job;
struct session;

void admin_on_request(struct session *session, const Pb__Envelope *envelope);
/* The worker has not answered in time: reply with what is known. */
void admin_on_query_timeout(struct session *session);
/* A worker has answered: reply to all that wait for it. */
void admin_on_stats(struct daemon *daemon, struct job *job);
/* The same from the job's coordinator. */
void admin_on_remote_stats(struct daemon *daemon, const Pb__RemoteJobReply *reply);

#endif
