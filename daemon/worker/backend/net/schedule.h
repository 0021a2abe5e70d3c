/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which chunks nodes exchange, with whom, in which order: derived by each node from the ops alone.
 *
 * A batch becomes a list of cells. A cell is the work on one chunk on this node: what it receives,
 * what it sends, what it does between. Invariants: the k-th message that node a sends to node b on
 * a stream is the k-th that b expects from a there, with the same step, block, digest and bytes;
 * both lists are in the order of the cells; a message leads from a cell to one that comes, in the
 * common order of all nodes, at most SCHEDULE_WINDOW cells later. So whoever works on the first
 * SCHEDULE_WINDOW cells that are not complete never waits for something that waits for it.
 *
 * How an element is added depends on the size of its op alone, never on what else is in the batch.
 *
 * Pure. Thread: any.
 */
#ifndef GRADD_SCHEDULE_H
#define GRADD_SCHEDULE_H

#include "worker/backend/backend.h"

enum {
    SCHEDULE_CHUNK_BYTES = 128 * 1024, /* of a message: a few of them stay in a core's L2 */
    /* All-reduces up to this size go to every node at once, where there are more than two. */
    SCHEDULE_DIRECT_BYTES = 32 * 1024,
    /* Broadcasts and all-gathers up to this size, likewise. */
    SCHEDULE_CHAIN_BYTES = 64 * 1024,
    SCHEDULE_WINDOW = 32, /* cells that may be begun and not complete */
    SCHEDULE_SLOT = 8,    /* cells of a ring that are under way at once */
    SCHEDULE_ALL = UINT32_MAX,
};

enum schedule_action {
    SCHEDULE_ORIGINATE, /* send the local sum */
    SCHEDULE_ADD,       /* add the local sum to what came, pass it on */
    SCHEDULE_FINISH,    /* the same; that is the result: store it too */
    SCHEDULE_STORE,     /* a result came: store it, pass it on */
    SCHEDULE_EXCHANGE,  /* send the local sum to all, add all in the order of nodes, store */
    SCHEDULE_SCATTER,   /* the same, each receiver its own part of the sum */
    SCHEDULE_COPY,      /* inputs travel as they are; `own` is copied between local ranks */
};

/* Elements of one op. */
struct schedule_piece {
    uint32_t op;       /* index into the batch */
    uint32_t from, to; /* copies: parts; to: also SCHEDULE_ALL outputs. Scatter: `to` only */
    uint64_t begin;    /* in the inputs */
    uint64_t at;       /* in the outputs */
    uint64_t count;
};

struct schedule_pieces {
    uint32_t first, n;
    uint32_t bytes; /* on the wire */
};

struct program;
struct buffer;

struct schedule_message {
    uint32_t cell;
    uint32_t node;
    uint32_t stream;
    struct schedule_pieces pieces;
    uint32_t step;
    uint32_t digest; /* of what it is, the same on both ends */
    /* The executor's. */
    struct schedule_message *next; /* on its lane */
    struct program *program;
    uint8_t *memory;
    struct buffer *buffer;
};

struct schedule_cell {
    enum schedule_action action;
    bool is_relay; /* sends what it receives */
    uint32_t block, step;
    struct schedule_pieces own; /* what starts or stays on this node */
    uint32_t first_message;     /* the received ones, then the sent ones */
    uint32_t n_in, n_out;
    /* The executor's. */
    uint32_t n_in_left, n_out_left;
    uint8_t *memory; /* the local sum */
    struct buffer *buffer;
    bool is_complete;
};

struct schedule {
    struct schedule_cell *cells;
    struct schedule_message *messages;
    struct schedule_piece *pieces;
    uint32_t *local; /* ops whose ranks are all on this node */
    uint32_t n_cells, n_messages, n_pieces, n_local;
    uint32_t cell_capacity, message_capacity, piece_capacity, local_capacity;
    struct schedule_scratch *scratch;
};

struct schedule_view {
    uint32_t n_nodes, node_rank;
    uint32_t n_streams; /* between neighbours of the job's ring */
    int wire;           /* 0, or the type in which float32 travels */
};

/* Bytes of an element of this op between nodes. */
uint32_t schedule_wire_bytes(const struct backend_op *op, int wire);

/* Where the next piece of a message begins. */
uint32_t schedule_align(uint32_t bytes);

/* Streams between two nodes. */
uint32_t schedule_streams(const struct schedule_view *view, uint32_t node);

void schedule_init(struct schedule *schedule);
void schedule_deinit(struct schedule *schedule);

/* Replaces the contents. 0 or -ENOMEM. */
int schedule_build(struct schedule *schedule, const struct schedule_view *view,
                   struct backend_op *const *ops, uint32_t n_ops);

#endif
