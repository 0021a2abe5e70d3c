/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the other nodes are told of ops that run: an ExecuteBatch made from the plan's ops, and how
 * much of it a frame takes. A batch is what all nodes execute as one, so it is cut before it is
 * made and never while it travels.
 *
 * Pure. Thread: loop.
 */
#ifndef GRADD_EXECUTE_MESSAGE_H
#define GRADD_EXECUTE_MESSAGE_H

#include "wire.h"
#include "worker/plan/plan.h"

/* The part of a frame that ops may fill: the rest is the envelope's and the batch's own. */
enum { EXECUTE_BYTES_MAX = WIRE_FRAME_MAX - 64 };

struct execute_message {
    Pb__ExecuteBatch batch; /* without seq */
    Pb__Execute *ops;
    Pb__Execute **op_pointers;
    Pb__ExecutePart *parts;
    Pb__ExecutePart **part_pointers;
};

/* What the op takes of a frame, at most. Its finite_check need not be known yet. */
size_t execute_bytes(const struct plan_op *op);

/*
 * How many of the ops, from the first on, a frame takes: all of them, else whole groups, else, when
 * the first group is too large for a frame, a part of it. Each op alone must fit.
 */
size_t execute_count(struct plan_op *const *ops, size_t n);

/* Borrows what the ops point to. False: no memory; deinit is due all the same. */
bool execute_message_init(struct execute_message *message, struct plan_op *const *ops, size_t n);
void execute_message_deinit(struct execute_message *message); /* idempotent */

#endif
