/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order of a job on several nodes, on the node of rank 0. Its plan sees the requests of all
 * ranks: those of this node as on one node, those of other nodes as remote members' requests that
 * arrive in batches. What becomes ready is executed here and sent, in the same batches and order,
 * to every other node; small all-reduces are executed here alone (central.h).
 *
 * Thread: loop.
 */
#ifndef GRADD_COORDINATOR_H
#define GRADD_COORDINATOR_H

#include "worker/member.h"
#include "worker/plan/plan.h"
#include "worker/stats_round.h"

struct coordinator;

/* epoch->layout is set. NULL: out of memory. */
struct coordinator *coordinator_new(struct epoch *epoch);
void coordinator_free(struct coordinator *coordinator); /* NULL-safe */

/* The negotiation connection with a node. 0 or -ENOMEM. take_fd is owned. */
int coordinator_attach(struct coordinator *coordinator, uint32_t node, int take_fd);

/* The plan's next decided op, or NULL. One that the other nodes can not be told of comes as failed.
 */
struct plan_op *coordinator_next(struct coordinator *coordinator);

/* These ops are about to run here: so many of them, from the first on, do so everywhere as one
 * batch. 0: they can not, and the epoch has failed. */
size_t coordinator_execute(struct coordinator *coordinator, struct plan_op *const *ops, size_t n);

/* This rank's device memory is on this GPU (16 bytes) of its node. */
void coordinator_set_device(struct coordinator *coordinator, uint32_t rank, const uint8_t *uuid);

/* A remote member's request ends without running. */
void coordinator_refuse(struct coordinator *coordinator, const struct member *member,
                        uint64_t request, int status, const char *text);

/* What a node has counted for an op's finite_check. False: it has no part in such an op. */
bool coordinator_count(struct coordinator *coordinator, uint32_t node, uint64_t finite_check,
                       uint32_t rank, uint64_t count);

/* Ask the other nodes' workers for figures; fn follows with seq, or with that of a later call. */
void coordinator_ask_stats(struct coordinator *coordinator, uint64_t seq, stats_round_fn *fn,
                           void *data);
const struct stats_round *coordinator_stats(const struct coordinator *coordinator);

/* A remote member's request has run here: its result. */
void coordinator_give(struct coordinator *coordinator, const struct request *request);

/* Send what has been queued. */
void coordinator_flush(struct coordinator *coordinator);

/* The epoch is over here. The other nodes notice, whether their daemons say so or not. */
void coordinator_close(struct coordinator *coordinator);

#endif
