/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The work of cells: what is sent is made when its turn comes, what was received is added or
 * stored at once, while it is in the cache.
 *
 * Thread: the net thread. Functions here touch one cell and its buffers only.
 */
#ifndef GRADD_CELL_H
#define GRADD_CELL_H

#include "worker/backend/net/schedule.h"
#include "worker/backend/net/sums.h"

struct buffer {
    struct buffer *next;
    uint8_t bytes[SCHEDULE_CHUNK_BYTES] __attribute__((aligned(64)));
};

struct buffer_pool {
    struct buffer *free;
};

/* NULL: out of memory. */
struct buffer *buffer_take(struct buffer_pool *pool);
void buffer_give(struct buffer_pool *pool, struct buffer *buffer);
void buffer_pool_deinit(struct buffer_pool *pool);

/* A batch under way. */
struct program {
    struct backend_batch *batch;
    struct schedule schedule;
    struct sum *sums; /* per op */
    const void **pointers;
    uint32_t sum_capacity, pointer_capacity;
    uint64_t first_cell; /* number of cell 0 among all of the epoch */
    uint32_t n_complete; /* cells */
    uint32_t n_done;     /* cells that are complete without a gap */
    uint32_t n_opened;   /* cells that the window has reached */
    struct program *next;
};

struct work {
    uint32_t node_rank;
    int wire;
    struct buffer_pool pool;
    struct sum_scratch scratch;
};

static inline struct schedule_cell *message_cell(const struct schedule_message *message)
{
    return &message->program->schedule.cells[message->cell];
}

/* Where the message's bytes are to go; false: out of memory. */
bool cell_prepare_receive(struct work *work, struct schedule_message *message);

/* Make what the message sends, when its cell can; *out_is_ready. False: out of memory. */
bool cell_prepare_send(struct work *work, struct schedule_message *message, bool *out_is_ready);

/* The message has come. */
void cell_on_received(struct work *work, struct schedule_message *message);

/* All has come and gone: do what is last, give the buffers back. False: out of memory. */
bool cell_end(struct work *work, struct program *program, struct schedule_cell *cell);

/* Give the buffers back, whatever the state. */
void cell_release(struct work *work, struct program *program, struct schedule_cell *cell);

#endif
