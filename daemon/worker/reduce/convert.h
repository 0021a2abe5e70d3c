/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arrays of one element type from another: what travels between nodes in fewer or more bytes.
 *
 * Thread: any. Any address will do, as in reduce.h, and so is the rounding: nearest even, NaN stays
 * NaN; bit-identical on every CPU.
 */
#ifndef GRADD_REDUCE_CONVERT_H
#define GRADD_REDUCE_CONVERT_H

#include <stddef.h>
#include <stdint.h>

#include <gradd/types.h>

/* float32 to a half type, and back. */
void convert_narrow(enum gradd_dtype half, const void *in, void *out, size_t n);
void convert_widen(enum gradd_dtype half, const void *in, void *out, size_t n);

/* sums[i] += in[i]: int64 and an integer type of up to 32 bits. */
void convert_add_int(enum gradd_dtype dtype, const void *in, void *sums, size_t n);
/* int64 that fits into the type, back into it. */
void convert_narrow_int(enum gradd_dtype dtype, const void *in, void *out, size_t n);

#endif
