/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counting NaN and infinity: plain loops that each variant's unit compiles for its CPU.
 * A value is non-finite when its exponent bits are all ones. Thread: any.
 */
#ifndef GRADD_REDUCE_FINITE_H
#define GRADD_REDUCE_FINITE_H

#include <string.h>

#include "variant.h"

static inline size_t finite_count_16(const char *in, size_t n, uint16_t exponent)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, in + 2 * i, sizeof bits);
        count += (bits & exponent) == exponent;
    }
    return count;
}

static inline size_t finite_count_32(const char *in, size_t n)
{
    const uint32_t exponent = 0x7f800000;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, in + 4 * i, sizeof bits);
        count += (bits & exponent) == exponent;
    }
    return count;
}

static inline size_t finite_count_64(const char *in, size_t n)
{
    const uint64_t exponent = 0x7ff0000000000000;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, in + 8 * i, sizeof bits);
        count += (bits & exponent) == exponent;
    }
    return count;
}

static inline size_t finite_count(enum gradd_dtype dtype, const void *in, size_t n)
{
    switch (dtype) {
    case GRADD_F16:
        return finite_count_16(in, n, 0x7c00);
    case GRADD_BF16:
        return finite_count_16(in, n, 0x7f80);
    case GRADD_F32:
        return finite_count_32(in, n);
    case GRADD_F64:
        return finite_count_64(in, n);
    default:
        return 0;
    }
}

#endif
