/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order of a job on several nodes, on a node that does not coordinate: sends its ranks'
 * requests to the coordinator's worker and executes what that says, in its batches and order.
 *
 * Thread: loop. Names travel once; afterwards as small ids.
 */
#ifndef GRADD_FOLLOWER_H
#define GRADD_FOLLOWER_H

#include "worker/member.h"
#include "worker/plan/plan.h"

struct follower;

enum { FOLLOWER_NAMES_MAX = 65536 }; /* names with an id; later ones travel in full */

/* epoch->layout is set. NULL: out of memory. */
struct follower *follower_new(struct epoch *epoch);
void follower_free(struct follower *follower); /* NULL-safe */

/* The negotiation connection with the coordinator. 0 or -ENOMEM. take_fd is owned. */
int follower_attach(struct follower *follower, int take_fd);

/* Like plan_submit(): 0, or a status and a sentence. The request comes back by follower_next(), or
 * is completed with the coordinator's refusal. */
int follower_submit(struct follower *follower, const struct member *member, uint32_t set,
                    const char *name, const struct signature *signature, struct request *request,
                    const char **out_text);
void follower_rank_left(struct follower *follower, uint32_t rank, const char *text);
/* This rank's device memory is on this GPU (16 bytes) of this node. */
void follower_set_device(struct follower *follower, uint32_t rank, const uint8_t *uuid);
/* Send what is queued: now, or one turn of the loop later when others of the node's ranks have not
 * submitted yet, so that requests made at the same time travel together. */
void follower_flush(struct follower *follower);

/* The epoch is over here. The coordinator's worker notices, whether its daemon says so or not. */
void follower_close(struct follower *follower);

/* What this node has counted for an op's finite_check; the coordinator's answer follows. */
void follower_count(struct follower *follower, uint64_t finite_check, uint32_t rank,
                    uint64_t count);

/* Ranks of a set as plan_set_ranks() gives them. */
uint32_t follower_set_ranks(const struct follower *follower, uint32_t set,
                            const uint32_t **out_ranks);

/* The next op to execute; NULL at the end of each batch and when there is none. */
struct plan_op *follower_next(struct follower *follower);
void follower_op_done(struct follower *follower, struct plan_op *op);

/* Every request that the coordinator has not answered ends with this. */
void follower_fail_all(struct follower *follower, int status, const char *text);

#endif
