/* SPDX-License-Identifier: Apache-2.0 */
/* Only small whole numbers occur, so that every sum is exact in every type; averages round once. */
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

#include "half.h"
#include "names.h"

enum { PERIOD = 5, BLOCK_ELEMENTS = PERIOD * 1024, MAX_ELEMENT = 8 };

typedef unsigned char block[BLOCK_ELEMENTS * MAX_ELEMENT];

/* 0..4; for products 1 or 2, so that eight ranks still fit into a half type. */
static double value_at(enum gradd_redop redop, size_t i, int rank)
{
    size_t v = (i * 7 + (size_t)rank * 3) % PERIOD;
    return redop == GRADD_PROD ? (double)(1 + v % 2) : (double)v;
}

static double exact_at(enum gradd_redop redop, size_t i, int ranks)
{
    double result = value_at(redop, i, 0);
    for (int r = 1; r < ranks; r++) {
        double v = value_at(redop, i, r);
        if (redop == GRADD_SUM || redop == GRADD_AVG)
            result += v;
        else if (redop == GRADD_PROD)
            result *= v;
        else if (redop == GRADD_MAX)
            result = v > result ? v : result;
        else
            result = v < result ? v : result;
    }
    return redop == GRADD_AVG ? result / ranks : result;
}

static void store(enum gradd_dtype dtype, unsigned char *at, double value)
{
    union {
        int8_t i8;
        uint8_t u8;
        int32_t i32;
        int64_t i64;
        uint16_t half;
        float f32;
        double f64;
    } u;
    switch (dtype) {
    case GRADD_I8:
        u.i8 = (int8_t)value;
        break;
    case GRADD_U8:
        u.u8 = (uint8_t)value;
        break;
    case GRADD_I32:
        u.i32 = (int32_t)value;
        break;
    case GRADD_I64:
        u.i64 = (int64_t)value;
        break;
    case GRADD_F16:
        u.half = f16_of_float((float)value);
        break;
    case GRADD_BF16:
        u.half = bf16_of_float((float)value);
        break;
    case GRADD_F32:
        u.f32 = (float)value;
        break;
    case GRADD_F64:
        u.f64 = value;
        break;
    }
    memcpy(at, &u, dtype_size(dtype));
}

void tensor_fill(const struct bench_options *options, void *tensor, size_t bytes, int rank)
{
    size_t element = dtype_size(options->dtype), block_bytes = BLOCK_ELEMENTS * element;
    block pattern;
    for (size_t i = 0; i < BLOCK_ELEMENTS && i * element < bytes; i++)
        store(options->dtype, pattern + i * element, value_at(options->redop, i, rank));
    for (size_t at = 0; at < bytes; at += block_bytes)
        memcpy((unsigned char *)tensor + at, pattern,
               bytes - at < block_bytes ? bytes - at : block_bytes);
}

static size_t count_differences(const unsigned char *a, const unsigned char *b, size_t n)
{
    size_t different = 0;
    if (memcmp(a, b, n) == 0)
        return 0;
    for (size_t i = 0; i < n; i++)
        different += a[i] != b[i];
    return different;
}

size_t tensor_n_wrong(const struct bench_options *options, const void *tensor, size_t bytes,
                      int ranks)
{
    size_t element = dtype_size(options->dtype), block_bytes = BLOCK_ELEMENTS * element;
    size_t n_wrong = 0;
    block exact;
    for (size_t i = 0; i < BLOCK_ELEMENTS && i * element < bytes; i++)
        store(options->dtype, exact + i * element, exact_at(options->redop, i, ranks));
    for (size_t at = 0; at < bytes; at += block_bytes)
        n_wrong += count_differences((const unsigned char *)tensor + at, exact,
                                     bytes - at < block_bytes ? bytes - at : block_bytes);
    return n_wrong;
}
