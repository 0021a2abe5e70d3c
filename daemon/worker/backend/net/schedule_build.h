/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the schedule's making share: a builder that appends pieces, messages and
 * cells, and remembers that memory ran out instead of asking each caller to.
 *
 * Pure. Thread: any.
 */
#ifndef GRADD_SCHEDULE_BUILD_H
#define GRADD_SCHEDULE_BUILD_H

#include "worker/backend/net/schedule.h"

enum { SCHEDULE_NODES_MAX = 256 };

/* A whole piece on its way from one node to another, before it is cut into chunks. */
struct flow_piece {
    struct schedule_piece piece;
    uint32_t next; /* of the same flow, + 1; 0: the last */
};

struct flow {
    uint32_t first, last; /* + 1 */
    uint64_t taken;       /* elements of `first` that are cut off already */
};

struct builder {
    struct schedule *schedule;
    const struct schedule_view *view;
    struct backend_op *const *ops;
    bool is_out_of_memory;

    /* The nodes that take part in what is being built, in order, and which of them this is. */
    uint32_t nodes[SCHEDULE_NODES_MAX];
    uint32_t n, me;

    struct schedule_pieces *ranges; /* of a ring: ranges[block * n + segment] */
    uint32_t n_ranges, range_capacity;
    struct flow_piece *flow_pieces;
    uint32_t n_flow_pieces, flow_capacity;
    uint64_t *offsets;
    uint32_t offset_capacity;
};

/* Make room for one more of *array. False: out of memory. */
bool builder_reserve(struct builder *b, void *array, uint32_t n, uint32_t *capacity, size_t size);

void builder_add_piece(struct builder *b, struct schedule_pieces *range,
                       const struct schedule_piece *piece);
struct schedule_pieces builder_open_range(const struct builder *b);
void builder_add_range(struct builder *b, struct schedule_pieces range);

/* A cell takes its messages at once: all received ones, then all sent ones. Messages without bytes
 * are left out; a cell without messages and without own pieces is dropped by builder_end_cell(). */
void builder_begin_cell(struct builder *b, enum schedule_action action, uint32_t block,
                        uint32_t step, struct schedule_pieces own);
/* The cell that was begun passes on what it receives. */
void builder_relay(struct builder *b);
void builder_receive(struct builder *b, uint32_t position, uint32_t stream_index,
                     struct schedule_pieces pieces);
void builder_send(struct builder *b, uint32_t position, uint32_t stream_index,
                  struct schedule_pieces pieces);
void builder_end_cell(struct builder *b);

/* The ring's wavefront over b->ranges: step k of block i happens in slot k + i * stride. */
void builder_ring(struct builder *b, uint32_t n_blocks, uint32_t n_steps,
                  enum schedule_action (*action)(uint32_t step, uint32_t n));

/* Bytes of a chunk that is sent to all others and held from all others. */
uint32_t builder_exchange_bytes(const struct builder *b);

/* All-reduces among the same nodes, that share messages: whole sums to everybody, or by segments
 * around the ring. */
void builder_direct(struct builder *b, const uint32_t *group, uint32_t n_group);
void builder_reduce_ring(struct builder *b, const uint32_t *group, uint32_t n_group);

/* Broadcast, all-gather, reduce-scatter, all-to-all: one op by itself. */
void builder_move(struct builder *b, uint32_t op);

#endif
