/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of a member share: member.c (life and connection), member_request.c (records of
 * ops), member_submit.c (what the trainer submits), member_reply.c (what it is told) and
 * member_register.c (its memory and its queues). Thread: loop.
 */
#ifndef GRADD_MEMBER_INTERNAL_H
#define GRADD_MEMBER_INTERNAL_H

#include "worker/member.h"

/* ---- member_request.c */

/* NULL: no memory. Counts as in flight until request_release(). */
struct request *request_new(struct member *member, uint64_t id);
/* It holds nothing any more, and is spare. */
void request_release(struct request *request);
/* With its memory; it may still hold something. */
void request_free(struct request *request);
/* False: no memory. */
bool request_copy_counts(struct request *request, const uint64_t *from, size_t n);

/* ---- member_reply.c */

/* Queued; body is the message of that case. Nothing happens when the connection is over. */
void member_push(struct member *member, Pb__Envelope__BodyCase body_case, void *body);
/* A completion with words or counts leaves in a frame of its own, in order. */
void member_push_completion(struct member *member, uint64_t id, int status, const char *text,
                            const struct request_result *result);

/* ---- member_submit.c: handlers of frames */

void member_on_submit_batch(struct member *member, struct wire_frame *frame);
void member_on_feed_batch(struct member *member, struct wire_frame *frame);

/* ---- member_register.c: handlers of frames; a descriptor that they take is -1 in the frame */

void member_on_register(struct member *member, struct wire_frame *frame);
void member_on_register_chunks(struct member *member, struct wire_frame *frame);
void member_on_unregister(struct member *member, struct wire_frame *frame);
void member_on_open_queue(struct member *member, struct wire_frame *frame);
void member_on_close_queue(struct member *member, struct wire_frame *frame);

#endif
