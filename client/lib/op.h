/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of ops in flight, found by id, recycled.
 *
 * Thread: any, under the context's lock.
 */
#ifndef GRADD_CLIENT_OP_H
#define GRADD_CLIENT_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stage.h"

enum op_state {
    OP_FREE = 0, /* in the pool */
    OP_PREPARED, /* holds buffers, not yet known to the worker */
    OP_RUNNING,  /* submitted */
    OP_ENDED,    /* has its status; waits for its group, its waiters and its release */
};

/* One side of an op: a place in a region, and the caller's memory when that place is a stage. */
struct lane {
    struct region *region; /* NULL: no buffer */
    uint64_t offset;
    uint64_t ring_bytes;
    struct stage_buffer *stage; /* owned; NULL: registered memory */
    uint8_t *user;              /* borrowed until the op ends: what is copied, else NULL */
};

/* A process set that this rank has helped to create. */
struct process_set {
    uint32_t id, size;
    int32_t index; /* of this rank within it, or -1 */
};

struct cuda_op;

struct op {
    int64_t id; /* generation << OP_SLOT_BITS | slot: positive, increasing, never reused */
    uint32_t slot;
    enum op_state state;
    struct op *next; /* the submission's next op; in the pool: the next free record */
    struct op *lead; /* the submission's first op: its id is the handle */

    /* Of a lead: the submission. */
    uint32_t n_ops, n_running;
    uint32_t n_waiting; /* threads inside gradd_wait() */
    bool is_released;
    int status; /* of the first op that failed */
    char *text; /* its sentence; NULL: the context's failure */

    /* What it moves. */
    uint8_t kind;
    uint8_t element_bytes;
    uint64_t count;
    uint64_t in_bytes, out_bytes;
    struct lane in, out;
    struct flow flow;
    bool is_flowing; /* in and out pass a ring piece by piece; else they are whole buffers */
    bool holds_regions;
    bool has_feed; /* flow.fed grew since the worker heard of it: on the context's feed list */
    struct op *next_feed;

    struct process_set set; /* GRADD_SET_ADD: without its id; GRADD_SET_REMOVE: only its id */
    uint64_t *counts;       /* of the completion; capacity is kept when the record is recycled */
    size_t n_counts, counts_capacity;
    uint64_t nonfinite; /* elements of nonfinite_rank's input that were NaN or infinite */
    int32_t nonfinite_rank;
    struct cuda_op *cuda; /* device memory: its streams and buffers; NULL: host memory */
};

enum {
    OP_SLOT_BITS = 20,
    OP_BLOCK = 64, /* records allocated at a time */
};

struct op_pool {
    struct op **blocks;
    size_t n_blocks;
    struct op *free;
    int64_t generation;
    uint32_t n_running;
    uint64_t bytes_running; /* of their inputs and outputs: how long they may take */
};

void op_pool_deinit(struct op_pool *pool);

/* A cleared record in state OP_PREPARED, without an id; NULL: out of memory. */
struct op *op_new(struct op_pool *pool);
/* Back to the pool. Its buffers must have been released. */
void op_free(struct op_pool *pool, struct op *op);
/* Give it the next id; it is OP_RUNNING from here on. */
void op_start(struct op_pool *pool, struct op *op);
/* The record with this id, or NULL: never was, or is gone. */
struct op *op_find(const struct op_pool *pool, int64_t id);
/* Record by slot, for walks over all records; NULL past the end. */
struct op *op_at(const struct op_pool *pool, uint32_t slot);

/* Count the op as a user of the caller's regions that it names; and no longer. Idempotent pair. */
void op_hold_regions(struct op *op);
void op_drop_regions(struct op *op);

/* Keep the completion's counts. 0 or -ENOMEM. */
int op_set_counts(struct op *op, const uint64_t *counts, size_t n);

#endif
