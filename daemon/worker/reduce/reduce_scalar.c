/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scalar reference: what every other variant must equal bit for bit (NaN for NaN), and what
 * finishes their odd ends. Plain, one element after the other, no assumption about the CPU.
 *
 * Every input of an element is read before its first output is written, so an output may equal an
 * input.
 */
#include "dtype.h"
#include "finite.h"
#include "half.h"
#include "variant.h"

#include <math.h>
#include <string.h>

/* The functions below take dtype as a constant of the caller: one loop per type comes out. */
#define INLINE static inline __attribute__((always_inline))

INLINE float load_float(enum gradd_dtype dtype, const void *base, size_t i)
{
    const char *p = (const char *)base + i * element_size(dtype);
    uint16_t h;
    float f;

    if (dtype == GRADD_F32) {
        memcpy(&f, p, sizeof(f));
        return f;
    }
    memcpy(&h, p, sizeof(h));
    return dtype == GRADD_F16 ? float_of_f16(h) : float_of_bf16(h);
}

INLINE void store_float(enum gradd_dtype dtype, void *base, size_t i, float f)
{
    char *p = (char *)base + i * element_size(dtype);
    uint16_t h;

    if (dtype == GRADD_F32) {
        memcpy(p, &f, sizeof(f));
        return;
    }
    h = dtype == GRADD_F16 ? f16_of_float(f) : bf16_of_float(f);
    memcpy(p, &h, sizeof(h));
}

static float combine_float(enum gradd_redop op, float a, float b)
{
    switch (op) {
    case GRADD_PROD:
        return a * b;
    case GRADD_MAX:
        return a > b || isnan(a) ? a : b;
    case GRADD_MIN:
        return a < b || isnan(a) ? a : b;
    case GRADD_SUM:
    case GRADD_AVG:
        break;
    }
    return a + b;
}

INLINE void run_float(enum gradd_dtype dtype, const struct reduction *r, size_t begin, size_t end)
{
    for (size_t at = begin; at < end; at++) {
        float result = 0;

        for (unsigned i = 0; i < r->n_in; i++) {
            float x = load_float(dtype, r->in[i], at);

            if (r->prescale != 1)
                x *= (float)r->prescale;
            result = i == 0 ? x : combine_float(r->redop, result, x);
        }
        for (unsigned i = 0; i < r->n_zero; i++)
            result = combine_float(r->redop, result, 0);
        if (r->redop == GRADD_AVG)
            result /= (float)r->divisor;
        if (r->postscale != 1)
            result *= (float)r->postscale;
        for (unsigned o = 0; o < r->n_out; o++)
            store_float(dtype, r->out[o], at, result);
    }
}

static double combine_double(enum gradd_redop op, double a, double b)
{
    switch (op) {
    case GRADD_PROD:
        return a * b;
    case GRADD_MAX:
        return a > b || isnan(a) ? a : b;
    case GRADD_MIN:
        return a < b || isnan(a) ? a : b;
    case GRADD_SUM:
    case GRADD_AVG:
        break;
    }
    return a + b;
}

static void run_double(const struct reduction *r, size_t begin, size_t end)
{
    for (size_t at = begin; at < end; at++) {
        double result = 0;

        for (unsigned i = 0; i < r->n_in; i++) {
            double x;

            memcpy(&x, (const char *)r->in[i] + at * sizeof(x), sizeof(x));
            if (r->prescale != 1)
                x *= r->prescale;
            result = i == 0 ? x : combine_double(r->redop, result, x);
        }
        for (unsigned i = 0; i < r->n_zero; i++)
            result = combine_double(r->redop, result, 0);
        if (r->redop == GRADD_AVG)
            result /= r->divisor;
        if (r->postscale != 1)
            result *= r->postscale;
        for (unsigned o = 0; o < r->n_out; o++)
            memcpy((char *)r->out[o] + at * sizeof(result), &result, sizeof(result));
    }
}

/* The value of the element type that `x` wraps around to. */
INLINE int64_t wrap_int(enum gradd_dtype dtype, int64_t x)
{
    switch (dtype) {
    case GRADD_I8:
        return (int8_t)x;
    case GRADD_U8:
        return (uint8_t)x;
    case GRADD_I32:
        return (int32_t)x;
    default:
        return x;
    }
}

INLINE int64_t scale_int(enum gradd_dtype dtype, int64_t x, double factor)
{
    const int64_t low = dtype == GRADD_I8    ? INT8_MIN
                        : dtype == GRADD_U8  ? 0
                        : dtype == GRADD_I32 ? INT32_MIN
                                             : INT64_MIN;
    const int64_t high = dtype == GRADD_I8    ? INT8_MAX
                         : dtype == GRADD_U8  ? UINT8_MAX
                         : dtype == GRADD_I32 ? INT32_MAX
                                              : INT64_MAX;
    const double scaled = (double)x * factor;

    if (isnan(scaled))
        return 0;
    if (scaled <= (double)low)
        return low;
    if (scaled >= (double)high)
        return high;
    return (int64_t)scaled;
}

INLINE int64_t load_int(enum gradd_dtype dtype, const void *base, size_t i)
{
    const char *p = (const char *)base + i * element_size(dtype);
    int64_t x = 0;
    int32_t x32;

    switch (dtype) {
    case GRADD_I8:
    case GRADD_U8:
        return wrap_int(dtype, *p);
    case GRADD_I32:
        memcpy(&x32, p, sizeof(x32));
        return x32;
    default:
        memcpy(&x, p, sizeof(x));
        return x;
    }
}

INLINE void store_int(enum gradd_dtype dtype, void *base, size_t i, int64_t x)
{
    char *p = (char *)base + i * element_size(dtype);
    const int32_t x32 = (int32_t)x;

    switch (dtype) {
    case GRADD_I8:
    case GRADD_U8:
        *p = (char)x;
        return;
    case GRADD_I32:
        memcpy(p, &x32, sizeof(x32));
        return;
    default:
        memcpy(p, &x, sizeof(x));
    }
}

/* Sums and products are made modulo 2^64, which is right modulo any narrower type too. */
static int64_t combine_int(enum gradd_redop op, int64_t a, int64_t b)
{
    switch (op) {
    case GRADD_PROD:
        return (int64_t)((uint64_t)a * (uint64_t)b);
    case GRADD_MAX:
        return a > b ? a : b;
    case GRADD_MIN:
        return a < b ? a : b;
    case GRADD_SUM:
    case GRADD_AVG:
        break;
    }
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

INLINE void run_int(enum gradd_dtype dtype, const struct reduction *r, size_t begin, size_t end)
{
    for (size_t at = begin; at < end; at++) {
        int64_t result = 0;

        for (unsigned i = 0; i < r->n_in; i++) {
            int64_t x = load_int(dtype, r->in[i], at);

            if (r->prescale != 1)
                x = scale_int(dtype, x, r->prescale);
            result = i == 0 ? x : combine_int(r->redop, result, x);
        }
        for (unsigned i = 0; i < r->n_zero; i++)
            result = combine_int(r->redop, result, 0);
        if (r->redop == GRADD_AVG)
            result /= (int64_t)r->divisor;
        result = wrap_int(dtype, result);
        if (r->postscale != 1)
            result = scale_int(dtype, result, r->postscale);
        for (unsigned o = 0; o < r->n_out; o++)
            store_int(dtype, r->out[o], at, result);
    }
}

void reduce_run_scalar(const struct reduction *r, size_t begin, size_t end)
{
    switch (r->dtype) {
    case GRADD_I8:
        return run_int(GRADD_I8, r, begin, end);
    case GRADD_U8:
        return run_int(GRADD_U8, r, begin, end);
    case GRADD_I32:
        return run_int(GRADD_I32, r, begin, end);
    case GRADD_I64:
        return run_int(GRADD_I64, r, begin, end);
    case GRADD_F16:
        return run_float(GRADD_F16, r, begin, end);
    case GRADD_F32:
        return run_float(GRADD_F32, r, begin, end);
    case GRADD_BF16:
        return run_float(GRADD_BF16, r, begin, end);
    case GRADD_F64:
        return run_double(r, begin, end);
    }
}

size_t reduce_finite_scalar(enum gradd_dtype dtype, const void *in, size_t n)
{
    return finite_count(dtype, in, n);
}
