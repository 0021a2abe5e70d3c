/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the daemons of a job's nodes meet: what they tell each other about its ranks and epochs.
 *
 * The daemon on rank 0's node coordinates: it gathers the ranks of all nodes, begins each epoch
 * with one layout for all, and fails it everywhere. The other nodes forward their ranks' joins, and
 * tell of ranks that leave and of everything that ends an epoch.
 *
 * Thread: loop. Invariant: what a message of another epoch, or of a node that has no part in the
 * job, says is ignored; a node that loses the coordinator fails its part itself.
 */
#ifndef GRADD_CONTROL_RENDEZVOUS_H
#define GRADD_CONTROL_RENDEZVOUS_H

#include "control/job_internal.h"
#include "control/peers.h"

/* ---- what happens to a job here */

/* Tell the coordinator of the ranks that wait here and are not known to it. */
void rendezvous_forward(struct job *job);
/* A member of this node is about to go in order, from waiting or from a living epoch. */
void rendezvous_leave(struct job *job, struct member *member);
/* A waiting member of another node is refused. */
void rendezvous_refuse(struct job *job, const struct member *member, const struct fault *fault);
/* The epoch has failed here. */
void rendezvous_failed(struct job *job, const struct job_failure *failure);
/* This node's worker has lost its link to another node's; the coordinator decides. */
void rendezvous_link_lost(struct job *job, uint32_t node, const char *text);
/* Free the records of remote members that are in no living roster. */
void rendezvous_sweep(struct job *job);

/*
 * All nodes of the whole gathering have answered since job->whole_ns. Else they are asked, and
 * job_settle() follows: ranks of a node that is not there any more, which is not yet known, shall
 * not begin an epoch with the others.
 */
bool rendezvous_is_confirmed(struct job *job);
/*
 * The layout of a whole gathering with members on other nodes; NULL when they have gone. 0, or a
 * status with *out_fault. Epoch and size are the caller's.
 */
int rendezvous_plan(struct job *job, struct layout **out_layout, struct fault *out_fault);
/* The epoch has begun here, with job->layout: begin it on the other nodes. */
void rendezvous_begin(struct job *job);
/* This node can not begin the coordinator's epoch. */
void rendezvous_decline(struct job *job, const struct layout *layout, const char *text);

/* ---- what gradctl asks */

/* Ask the coordinator of the job for its picture: on_remote_stats() may follow. False: this node
 * coordinates, or the job is on this node only. */
bool rendezvous_ask(struct job *job, uint64_t seq);
/* The worker has answered: so do we. */
void rendezvous_on_stats(struct job *job);
/* Jobs that have a part on the other side of the link. */
unsigned rendezvous_count_jobs(const struct jobs *jobs, const struct peer_link *link);

/* ---- what happens to a link */

extern const struct peers_ops rendezvous_peers_ops; /* owner: struct jobs */

void rendezvous_deinit(struct jobs *jobs);

#endif
