/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of sums on their way between nodes: local sum, addition to what came, result.
 *
 * A partial sum travels in the wire form of its op: in the element type; float32 in a half type
 * where the job asks for it, added in float32 and rounded at each hop; averages of small integers
 * as int64. Half types and half wires divide an average before it travels, so that partial sums
 * stay in their range. The result, too, is what its wire form says, so that all nodes store the
 * same bits.
 *
 * Thread: any; a scratch belongs to one thread at a time.
 */
#ifndef GRADD_SUMS_H
#define GRADD_SUMS_H

#include "worker/backend/backend.h"

enum sum_form {
    SUM_PLAIN, /* travels as it is */
    SUM_HALF,  /* float32 as a half type */
    SUM_WIDE,  /* small integers as int64 */
};

/* One op on this node, ready to be executed. */
struct sum {
    const struct backend_op *op;
    enum sum_form form;
    int wire; /* SUM_HALF: the type */
    uint32_t size, wire_size;
    double prescale;
    enum gradd_redop first_redop, last_redop; /* among partial sums; of the result */
    uint32_t n_in, n_out;
    const void **in; /* local inputs and outputs, element 0 */
    void **out;
};

struct sum_scratch {
    uint8_t *a, *b; /* SUM_SCRATCH_BYTES each */
    const void **in;
    void **out;
    uint32_t capacity;
};

enum { SUM_SCRATCH_BYTES = 256 * 1024 }; /* a chunk of half types as float32 */

/* in_out: room for 2 * n_ranks pointers; the sum's for as long as it is used. */
void sum_init(struct sum *sum, const struct backend_op *op, uint32_t node, int wire,
              const void **in_out);

/* Room for so many inputs or outputs. 0 or -ENOMEM. */
int sum_scratch_reserve(struct sum_scratch *scratch, uint32_t n);
void sum_scratch_deinit(struct sum_scratch *scratch);

/* Elements [begin, begin + count) of the local inputs, added; zeros when there is none. */
void sum_local(const struct sum *sum, struct sum_scratch *scratch, uint64_t begin, uint64_t count,
               void *out_wire);

/* Add them to a partial sum. */
void sum_add(const struct sum *sum, struct sum_scratch *scratch, uint64_t begin, uint64_t count,
             void *wire);

/* Add them to the partial sum of all others: it becomes the result, and is stored. */
void sum_finish(const struct sum *sum, struct sum_scratch *scratch, uint64_t begin, uint64_t count,
                void *wire);

/* Store a result that has travelled to the local outputs. */
void sum_store(const struct sum *sum, uint64_t at, uint64_t count, const void *wire);

/* Add n partial sums in order and store the result at out[0 … n_out - 1] + at elements. */
void sum_combine(const struct sum *sum, struct sum_scratch *scratch, const void *const *wires,
                 uint32_t n, uint64_t at, uint64_t count, void *const *out, uint32_t n_out);

#endif
