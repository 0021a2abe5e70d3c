/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CPU reduction: read N inputs once, write M outputs once, nothing in between.
 *
 * Thread: any (pure functions of their arguments). Elements are combined in the order of `in`,
 * half types in float32, so that the result does not depend on the instruction set, on the piece
 * [begin, end) or on the thread: every variant is bit-identical to the scalar reference.
 *
 * Per element: x_i = in[i] * prescale (skipped when 1); r = x_0 op x_1 op … op 0 (n_zero times);
 * AVG: r / divisor; r * postscale (skipped when 1); rounded once to the element type (half types:
 * nearest even, NaN stays NaN). float32 and float64 compute in their own type, the factors cast to
 * it; integers wrap; integer AVG sums in int64 and truncates; integer factors are applied in
 * double and truncated (saturating at the type's limits). MIN and MAX: NaN if any input is NaN.
 *
 * Speed: whoever maps the buffers should see to it that those of one reduction differ in address
 * bits 12 to 19. AMD's L1 caches predict their way by a hash of bits 12 to 27; measured on Zen 4,
 * buffers equal modulo 256 MiB took 3 times as long in the caches and 1.5 times in DRAM.
 */
#ifndef GRADD_REDUCE_H
#define GRADD_REDUCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <gradd/types.h>

struct reduction {
    enum gradd_dtype dtype;
    enum gradd_redop redop;
    unsigned n_in;         /* >= 1 */
    unsigned n_out;        /* >= 1 */
    const void *const *in; /* element 0 of each input */
    void *const *out;      /* element 0 of each output; may equal an input exactly */
    unsigned n_zero;  /* ranks that joined out of data: operands of value 0, after the inputs */
    uint32_t divisor; /* AVG: ranks */
    double prescale, postscale; /* 1: none */
};

/* Reduce elements [begin, end). Pointers need only element alignment (not even that: any address).
 */
void reduce_run(const struct reduction *r, size_t begin, size_t end);

/* How many of n elements are NaN or infinite; 0 for integers. */
size_t reduce_count_nonfinite(enum gradd_dtype dtype, const void *in, size_t n);

/* The scalar reference, for tests. */
void reduce_run_scalar(const struct reduction *r, size_t begin, size_t end);

/* True when dtype and redop are known values. */
bool reduce_is_supported(int dtype, int redop);

/* The chosen variant: "avx512", "avx2", "scalar". GRADD_KERNELS=name in the environment forces one
 * (when the CPU has it). */
const char *reduce_variant(void);

/* Force a variant by name; false when this CPU or build does not have it. For tests and benchmarks.
 */
bool reduce_force_variant(const char *name);

#endif
