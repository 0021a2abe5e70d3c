/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every collective on host memory is a list of strips: "reduce (or copy) these inputs into these
 * outputs, for these elements". Strips are independent of each other, and so are the pieces of a
 * strip: any thread may execute any piece at any time.
 *
 * Pure. Thread: any.
 */
#ifndef GRADD_STRIP_H
#define GRADD_STRIP_H

#include "worker/backend/backend.h"

struct strip {
    bool is_copy;
    enum gradd_dtype dtype;
    enum gradd_redop redop;
    double prescale, postscale;
    uint32_t n_in, n_out, n_zero, divisor;
    const struct backend_span *in, *out; /* into the list's spans */
    uint64_t begin, end;                 /* elements */
    uint64_t first_piece;                /* index of its first piece within the list */
    _Atomic uint64_t *nonfinite;         /* NULL, or where to count bad elements of each input */
};

struct strip_list {
    struct strip *strips;
    size_t n_strips, strip_capacity;
    struct backend_span *spans;
    size_t n_spans, span_capacity;
    uint64_t n_pieces;
    uint64_t piece_bytes;
    uint64_t bytes; /* per buffer, over all strips: how much there is to do */
};

enum { STRIP_PIECE_BYTES = 64 * 1024 }; /* per buffer: N of them stay in a core's L2 */

void strip_list_init(struct strip_list *list);
void strip_list_deinit(struct strip_list *list);
/* Forget the strips, keep the memory. */
void strip_list_clear(struct strip_list *list);

/* Append an op's strips. 0 or -ENOMEM (the list is then to be cleared). */
int strip_list_add(struct strip_list *list, const struct backend_op *op);
/* After the last add: number the pieces. */
void strip_list_seal(struct strip_list *list);

/* Execute piece 0 … n_pieces - 1. */
void strip_list_run_piece(const struct strip_list *list, uint64_t piece);

#endif
