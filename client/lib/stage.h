/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Staging: how a tensor in ordinary memory travels through shared memory, piece by piece.
 *
 * `struct flow` is the pure arithmetic of a ring; `struct stage_pool` lends shared memory to it and
 * takes it back.
 *
 * Thread: any, under the context's lock.
 */
#ifndef GRADD_CLIENT_STAGE_H
#define GRADD_CLIENT_STAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gradd;
struct op;
struct region;

/*
 * A tensor of `total` bytes passes through a ring of `window` bytes: byte b lies in slot
 * b % window. Invariant: drained <= done <= fed <= total, and no byte is fed into a slot whose
 * earlier byte is still needed.
 */
struct flow {
    uint64_t total, window;
    uint64_t chunk;   /* bytes fed at a time; divides window; a multiple of the element's size */
    uint64_t fed;     /* the worker may read and write below this */
    uint64_t done;    /* the worker's results are final below this */
    uint64_t drained; /* copied out below this; equals done where nothing is to be copied out */
    bool is_drained;  /* results are copied out of the ring */
};

/* How far the worker may go next: a multiple of chunk or the end; equals `fed` while it may not. */
uint64_t flow_limit(const struct flow *flow);

/* Bytes from `at` that lie side by side in the ring, at most `until - at`. */
uint64_t flow_span(const struct flow *flow, uint64_t at, uint64_t until);

enum {
    STAGE_CLASS_MIN_SHIFT = 12, /* 4 KiB */
    STAGE_CLASSES = 4 * 40,     /* four sizes an octave */
};

/* Which class holds `bytes`, and how much such a buffer holds (never less than asked). */
unsigned stage_class(uint64_t bytes);
uint64_t stage_class_bytes(unsigned class);

/* A piece of a staging region, lent to one op. */
struct stage_buffer {
    struct region *region;
    uint64_t offset;
    unsigned class;
    bool is_whole;             /* it is its region: may be given back to the system */
    struct stage_pool *pool;   /* where it belongs */
    struct stage_buffer *next; /* in the pool */
};

struct stage_pool {
    /* Memory of another kind than memory_new_region() makes; NULL: that kind. */
    int (*new_region)(struct gradd *g, struct stage_pool *pool, size_t bytes, struct region **out);
    void (*free_region)(struct gradd *g, struct stage_pool *pool, struct region *region);
    void *owner; /* for these two */
    struct stage_buffer *idle[STAGE_CLASSES];
    struct region **regions; /* all, for the end */
    size_t n_regions, regions_capacity;
    uint64_t bytes;      /* of all regions */
    uint64_t lent_bytes; /* of buffers in use */
    uint64_t limit;      /* above this, ops take small windows */
};

enum stage_window {
    STAGE_BLOCKING, /* the caller waits at once: a window that stays in the cache */
    STAGE_ASYNC,    /* the caller is elsewhere: the whole tensor, so that nothing waits for it */
};

/*
 * Lend the op the shared memory that it needs. May release the lock while the worker answers.
 * 0, or a gradd_status with gradd_error() set; then the op holds nothing.
 */
int stage_prepare(struct gradd *g, struct op *op, enum stage_window window);

/* Copy in at most one chunk. True when op->flow.fed grew. */
bool stage_fill_chunk(struct op *op);
/* The worker has finished everything below `done` bytes: copy it out. */
void stage_drain(struct op *op, uint64_t done);
/* The op went well: copy out what is left. */
void stage_finish(struct op *op);
/* Give back what stage_prepare() lent. Idempotent. */
void stage_release(struct gradd *g, struct op *op);

/* Lend a buffer of at least `bytes`. May release the lock. 0 or a status. */
int stage_borrow(struct gradd *g, struct stage_pool *pool, uint64_t bytes,
                 struct stage_buffer **out);
void stage_give_back(struct stage_buffer *buffer); /* NULL-safe */

/* Give idle buffers back to the system, at least `bytes` where possible. */
void stage_trim(struct gradd *g, struct stage_pool *pool, uint64_t bytes);
/* Free everything: the context ends. Memory of another kind is its owner's to free before. */
void stage_pool_deinit(struct stage_pool *pool);

#endif
