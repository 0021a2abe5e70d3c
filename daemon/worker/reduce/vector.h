/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vector operations by element type, for vectors of VECTOR_BYTES: the arithmetic of
 * reduce_scalar.c, lane by lane and in the same order, hence the same bits.
 *
 * The unit that includes this file defines VECTOR_BYTES and gives widen_f16() and narrow_f16().
 * dtype and op are constants wherever these functions are called; all of them are inlined into
 * their caller, since none may be shared with a unit of other instruction set flags.
 */
#ifndef GRADD_REDUCE_VECTOR_H
#define GRADD_REDUCE_VECTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <gradd/types.h>

#define INLINE          static inline __attribute__((always_inline))
#define VECTOR_OF(type) type __attribute__((vector_size(VECTOR_BYTES)))

/* The accumulator of any type: full types fill it, half types are widened to float32 in it. */
typedef VECTOR_OF(uint8_t) vec;
/* What one accumulator of a half type looks like in memory. */
typedef uint16_t vec_half __attribute__((vector_size(VECTOR_BYTES / 2)));

INLINE vec widen_f16(vec_half h);
INLINE vec_half narrow_f16(vec v);

INLINE vec select_lanes(vec mask, vec a, vec b)
{
    return (a & mask) | (b & ~mask);
}

/* combine_<name>(): one operator on vectors of `type`; sums and products are made in `wrapping`,
 * the type in which overflow is defined. Comparing x with itself finds NaNs. */
#define DEFINE_COMBINE(name, type, wrapping)                                                       \
    typedef VECTOR_OF(type) vec_##name;                                                            \
    typedef VECTOR_OF(wrapping) vec_wrapping_##name;                                               \
    INLINE vec combine_##name(enum gradd_redop op, vec a, vec b)                                   \
    {                                                                                              \
        const vec_##name x = (vec_##name)a, y = (vec_##name)b;                                     \
                                                                                                   \
        switch (op) {                                                                              \
        case GRADD_PROD:                                                                           \
            return (vec)((vec_wrapping_##name)a * (vec_wrapping_##name)b);                         \
        case GRADD_MAX:                                                                            \
            return select_lanes((vec)((x > y) | (x != x)), a, b);                                  \
        case GRADD_MIN:                                                                            \
            return select_lanes((vec)((x < y) | (x != x)), a, b);                                  \
        case GRADD_SUM:                                                                            \
        case GRADD_AVG:                                                                            \
            break;                                                                                 \
        }                                                                                          \
        return (vec)((vec_wrapping_##name)a + (vec_wrapping_##name)b);                             \
    }

DEFINE_COMBINE(i8, int8_t, uint8_t)
DEFINE_COMBINE(u8, uint8_t, uint8_t)
DEFINE_COMBINE(i32, int32_t, uint32_t)
DEFINE_COMBINE(i64, int64_t, uint64_t)
DEFINE_COMBINE(f32, float, float)
DEFINE_COMBINE(f64, double, double)

INLINE vec vec_combine(enum gradd_dtype dtype, enum gradd_redop op, vec a, vec b)
{
    switch (dtype) {
    case GRADD_I8:
        return combine_i8(op, a, b);
    case GRADD_U8:
        return combine_u8(op, a, b);
    case GRADD_I32:
        return combine_i32(op, a, b);
    case GRADD_I64:
        return combine_i64(op, a, b);
    case GRADD_F64:
        return combine_f64(op, a, b);
    case GRADD_F16:
    case GRADD_F32:
    case GRADD_BF16:
        break;
    }
    return combine_f32(op, a, b);
}

INLINE bool is_half(enum gradd_dtype dtype)
{
    return dtype == GRADD_F16 || dtype == GRADD_BF16;
}

INLINE bool is_float(enum gradd_dtype dtype)
{
    return dtype == GRADD_F32 || dtype == GRADD_F64 || is_half(dtype);
}

INLINE size_t element_size(enum gradd_dtype dtype)
{
    switch (dtype) {
    case GRADD_I8:
    case GRADD_U8:
        return 1;
    case GRADD_F16:
    case GRADD_BF16:
        return 2;
    case GRADD_I32:
    case GRADD_F32:
        return 4;
    case GRADD_I64:
    case GRADD_F64:
        break;
    }
    return 8;
}

/* Bytes of memory that fill one accumulator. */
INLINE size_t vec_memory_bytes(enum gradd_dtype dtype)
{
    return is_half(dtype) ? VECTOR_BYTES / 2 : VECTOR_BYTES;
}

INLINE vec widen_bf16(vec_half h)
{
    return (vec)(__builtin_convertvector(h, vec_wrapping_i32) << 16);
}

INLINE vec_half narrow_bf16(vec v)
{
    const vec_wrapping_i32 bits = (vec_wrapping_i32)v;
    const vec_wrapping_i32 nearest_even = bits + 0x7fff + (bits >> 16 & 1);
    const vec is_nan = (vec)((vec_f32)v != (vec_f32)v);
    const vec rounded = select_lanes(is_nan, (vec)(bits | 0x400000), (vec)nearest_even);

    return __builtin_convertvector((vec_wrapping_i32)rounded >> 16, vec_half);
}

INLINE vec vec_load(enum gradd_dtype dtype, const char *p)
{
    vec_half h;
    vec v;

    if (is_half(dtype)) {
        memcpy(&h, p, sizeof(h));
        return dtype == GRADD_F16 ? widen_f16(h) : widen_bf16(h);
    }
    memcpy(&v, p, sizeof(v));
    return v;
}

INLINE vec_half vec_narrow(enum gradd_dtype dtype, vec v)
{
    return dtype == GRADD_F16 ? narrow_f16(v) : narrow_bf16(v);
}

/* Floating point types only. */
INLINE vec vec_multiply(enum gradd_dtype dtype, vec v, double factor)
{
    if (dtype == GRADD_F64)
        return (vec)((vec_f64)v * factor);
    return (vec)((vec_f32)v * (float)factor);
}

INLINE vec vec_divide(enum gradd_dtype dtype, vec v, double divisor)
{
    if (dtype == GRADD_F64)
        return (vec)((vec_f64)v / divisor);
    return (vec)((vec_f32)v / (float)divisor);
}

#endif
