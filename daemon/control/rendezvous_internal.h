/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of rendezvous share: rendezvous.c (a node's side), rendezvous_coordinator.c,
 * rendezvous_stats.c and rendezvous_link.c. Thread: loop.
 */
#ifndef GRADD_CONTROL_RENDEZVOUS_INTERNAL_H
#define GRADD_CONTROL_RENDEZVOUS_INTERNAL_H

#include "control/job_internal.h"
#include "control/peers.h"

/* ---- rendezvous.c */

/* Send a message of the union's member body_case. link NULL: nobody is there. */
void rendezvous_push(struct peer_link *link, int body_case, void *message);
void rendezvous_push_abort(const struct job *job, struct peer_link *link, uint64_t epoch,
                           const struct job_failure *failure);
/* The other side's code as a status, or one that makes sense. */
int rendezvous_status(uint32_t code);
struct job *rendezvous_find_job(struct jobs *jobs, const char *name, uint32_t uid);
/* The member of that node with this rank, in this roster; or NULL. */
struct member *rendezvous_find_remote(const struct roster *roster, const struct peer_link *link,
                                      uint32_t rank);
/* The rank of the node that the link leads to, in the last epoch. False: it has no part in it. */
bool rendezvous_find_node(const struct job *job, const struct peer_link *link, uint32_t *out_node);
bool rendezvous_has_part(const struct job *job, const struct peer_link *link);
/* The epoch failed before it began here. */
void rendezvous_drop_pending(struct job *job, int code, const char *text);
void rendezvous_on_refusal(struct jobs *jobs, struct peer_link *link,
                           const Pb__RemoteRefusal *refusal);
void rendezvous_on_layout(struct jobs *jobs, struct peer_link *link,
                          const Pb__EpochLayout *message);

/* ---- rendezvous_coordinator.c */

/* A rank of that node is in the gathering or in the running epoch. */
bool rendezvous_has_member(const struct job *job, const struct peer_link *link);
void rendezvous_on_join(struct jobs *jobs, struct peer_link *link, const Pb__RemoteJoin *join);
void rendezvous_on_leave(struct jobs *jobs, struct peer_link *link, const Pb__RemoteLeave *leave);
void rendezvous_on_abort(struct jobs *jobs, struct peer_link *link, const Pb__RemoteAbort *abort);
void rendezvous_on_link_lost(struct jobs *jobs, struct peer_link *link,
                             const Pb__RemoteLinkLost *lost);

/* ---- rendezvous_stats.c */

void rendezvous_on_job_request(struct jobs *jobs, struct peer_link *link,
                               const Pb__RemoteJobRequest *request);
/* Who asked is gone. */
void rendezvous_drop_queries(struct jobs *jobs, const struct peer_link *link);

#endif
