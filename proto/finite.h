/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counting NaN and infinity: plain loops, which library and worker share, and which each variant of
 * the worker's kernels compiles for its CPU. A value is non-finite when its exponent bits are all
 * ones. Any address will do. Thread: any.
 */
#ifndef GRADD_PROTO_FINITE_H
#define GRADD_PROTO_FINITE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <gradd/types.h>

#define DEFINE_FINITE_COUNT(name, type, exponent)                                                  \
    static inline size_t name(const char *in, size_t n)                                            \
    {                                                                                              \
        size_t count = 0;                                                                          \
        for (size_t i = 0; i < n; i++) {                                                           \
            type bits;                                                                             \
            memcpy(&bits, in + i * sizeof bits, sizeof bits);                                      \
            count += (bits & (exponent)) == (exponent);                                            \
        }                                                                                          \
        return count;                                                                              \
    }

DEFINE_FINITE_COUNT(finite_count_f16, uint16_t, 0x7c00)
DEFINE_FINITE_COUNT(finite_count_bf16, uint16_t, 0x7f80)
DEFINE_FINITE_COUNT(finite_count_f32, uint32_t, 0x7f800000)
DEFINE_FINITE_COUNT(finite_count_f64, uint64_t, 0x7ff0000000000000)

/* How many of n elements are NaN or infinite; 0 for types that know neither. */
static inline size_t finite_count(int dtype, const void *in, size_t n)
{
    switch (dtype) {
    case GRADD_F16:
        return finite_count_f16(in, n);
    case GRADD_BF16:
        return finite_count_bf16(in, n);
    case GRADD_F32:
        return finite_count_f32(in, n);
    case GRADD_F64:
        return finite_count_f64(in, n);
    default:
        return 0;
    }
}

#endif
