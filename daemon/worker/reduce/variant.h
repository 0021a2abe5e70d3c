/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the variants of the reduction share: the table of variants that reduce.c chooses from.
 *
 * Thread: any. Each variant is one translation unit with its own instruction set flags; nothing
 * but its functions here may be called in it, and only after `is_usable` said true, because any
 * function of that unit may hold instructions that this CPU does not have.
 */
#ifndef GRADD_REDUCE_VARIANT_H
#define GRADD_REDUCE_VARIANT_H

#include "reduce.h"

struct reduce_variant {
    const char *name;
    bool (*is_usable)(void); /* NULL: always */
    void (*run)(const struct reduction *r, size_t begin, size_t end);
    size_t (*count_nonfinite)(enum gradd_dtype dtype, const void *in, size_t n);
};

/* Best first, the scalar reference last. */
extern const struct reduce_variant reduce_variants[];
extern const size_t reduce_n_variants;

void reduce_run_avx2(const struct reduction *r, size_t begin, size_t end);
void reduce_run_avx512(const struct reduction *r, size_t begin, size_t end);
size_t reduce_finite_avx2(enum gradd_dtype dtype, const void *in, size_t n);
size_t reduce_finite_avx512(enum gradd_dtype dtype, const void *in, size_t n);
size_t reduce_finite_scalar(enum gradd_dtype dtype, const void *in, size_t n);

#endif
