/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of an epoch share: epoch.c (life, members, turns), epoch_order.c (who decides what
 * runs), epoch_links.c (the other nodes), epoch_device.c (the GPUs), epoch_failure.c (causes and
 * ends) and epoch_stalls.c (what is late). Thread: loop.
 */
#ifndef GRADD_EPOCH_INTERNAL_H
#define GRADD_EPOCH_INTERNAL_H

#include "worker/epoch.h"

/* ---- epoch.c */

/* "rank 3 (node b, pid 4711)" */
void epoch_describe_member(const struct epoch *epoch, const struct member *member, char *text,
                           size_t bytes);
/* The plan's sentences name the rank so. */
void epoch_describe_to_plan(const struct epoch *epoch, const struct member *member);
/* Read what trainers send. Idempotent. */
void epoch_start_members(struct epoch *epoch);
void epoch_flush_members(struct epoch *epoch);
/* Ops have ended outside epoch_turn(): send what was queued, and what waited for their end. */
void epoch_settle(struct epoch *epoch);
/* Tell the worker when nobody is left, or when nothing of a retired epoch runs any more. */
void epoch_check_over(struct epoch *epoch);
void epoch_check_idle(struct epoch *epoch);

/* ---- epoch_order.c */

/* Makes plan or follower, coordinator, and exec; epoch_free() frees them. False: no memory. */
bool epoch_open_order(struct epoch *epoch);

/* ---- epoch_links.c */

/* Connects the nodes of the layout; the members start when the links stand. False: no memory. */
bool epoch_open_links(struct epoch *epoch);

/* ---- epoch_device.c */

/* The backend of ops on device memory, where the epoch takes them. False: no memory. */
bool epoch_open_device_backend(struct epoch *epoch);

/* ---- epoch_failure.c */

/* NCCL lost somebody, perhaps because of what happened elsewhere: the daemons know better, and are
 * given a while to tell. */
void epoch_suspect_device(struct epoch *epoch, const char *sentence);
/* The daemon is told before the links end, which other nodes would take for the cause. */
void epoch_fail_by_device(struct epoch *epoch, int status, const char *text);
/* Broken ops end with the cause, or after a while without it. */
void epoch_await_cause(struct epoch *epoch);
/* Tell the members of the failure, once what still ran has been told. */
void epoch_announce_failure(struct epoch *epoch);
/* What waits for a rank, for data or for another node ends now. */
void epoch_fail_waiting(struct epoch *epoch, int status, const char *text);
/* The daemons have said nothing: fail with what can be seen from here. */
void epoch_on_lost_timer(void *data);

/* ---- epoch_stalls.c */

/* Something waits: look at it when it would become late, and every second while it is. */
void epoch_watch_stalls(struct epoch *epoch);
void epoch_on_stall_timer(void *data);

#endif
