/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vector operations by element type, for vectors of VECTOR_BYTES: the arithmetic of
 * reduce_scalar.c, lane by lane and in the same order, hence the same bits.
 *
 * The unit that includes this file defines VECTOR_BYTES,
 * and gives the four functions declared below.
 * dtype and op are constants wherever these functions are called; all of them are inlined into
 * their caller, since none may be shared with a unit of other instruction set flags.
 */
#ifndef GRADD_REDUCE_VECTOR_H
#define GRADD_REDUCE_VECTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <gradd/types.h>

#include "dtype.h"

#define INLINE          static inline __attribute__((always_inline))
#define VECTOR_OF(type) type __attribute__((vector_size(VECTOR_BYTES)))

/* A vector of any type, and one accumulator: lanes of the type, half types widened to float32. */
typedef VECTOR_OF(uint8_t) vec;
/* Half a vector: float16 as they are converted. */
typedef uint16_t vec_half __attribute__((vector_size(VECTOR_BYTES / 2)));

/* VECTOR_BYTES of memory in registers. Half types need both vectors, the others use `a` only. Which
 * element is in which lane is the type's own affair: storing undoes what loading did. */
struct block {
    vec a, b;
};

INLINE vec widen_f16(vec_half h);
INLINE vec_half narrow_f16(vec v);

/* Every NaN of a float32 vector becomes 0x7fc00000. */
INLINE vec canonical_nans(vec v);

/* Any float32 to the nearest bfloat16, ties to even, in the upper 16 bits of each lane; the others
 * are noise. NaNs need no care as long as their lower 16 bits are 0: nothing carries into the sign.
 * x86 makes no other NaN out of bfloat16 operands, since it passes on an operand's payload or makes
 * its default NaN; only a factor can bring another payload in. */
INLINE vec round_bf16(vec v);

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

/* bfloat16 pairs in 32-bit lanes: the lower one in `a`, the upper one in `b`. Widening so costs one
 * operation each and moves nothing across lanes. */
INLINE struct block load_bf16(const char *p)
{
    vec_wrapping_i32 pairs;

    memcpy(&pairs, p, sizeof(pairs));
    return (struct block){(vec)(pairs << 16), (vec)(pairs & 0xffff0000)};
}

INLINE vec pack_bf16(struct block x)
{
    const vec_wrapping_i32 lower = (vec_wrapping_i32)round_bf16(x.a);
    const vec_wrapping_i32 upper = (vec_wrapping_i32)round_bf16(x.b);

    return (vec)((lower >> 16) | (upper & 0xffff0000));
}

INLINE struct block load_f16(const char *p)
{
    vec_half low, high;

    memcpy(&low, p, sizeof(low));
    memcpy(&high, p + sizeof(low), sizeof(high));
    return (struct block){widen_f16(low), widen_f16(high)};
}

INLINE struct block block_load(enum gradd_dtype dtype, const char *p)
{
    struct block x;

    if (dtype == GRADD_BF16)
        return load_bf16(p);
    if (dtype == GRADD_F16)
        return load_f16(p);
    memcpy(&x.a, p, sizeof(x.a));
    x.b = x.a;
    return x;
}

/* What block_store() stores. The result depends on no output, so it is made once for all. */
INLINE struct block block_narrow(enum gradd_dtype dtype, struct block x)
{
    vec_half low, high;

    if (dtype == GRADD_BF16)
        x.a = pack_bf16(x);
    if (dtype == GRADD_F16) {
        low = narrow_f16(x.a);
        high = narrow_f16(x.b);
        memcpy(&x.a, &low, sizeof(low));
        memcpy(&x.b, &high, sizeof(high));
    }
    return x;
}

INLINE void block_store(enum gradd_dtype dtype, char *p, struct block x)
{
    if (dtype == GRADD_F16) {
        memcpy(p, &x.a, VECTOR_BYTES / 2);
        memcpy(p + VECTOR_BYTES / 2, &x.b, VECTOR_BYTES / 2);
        return;
    }
    memcpy(p, &x.a, sizeof(x.a));
}

INLINE struct block block_combine(enum gradd_dtype dtype, enum gradd_redop op, struct block x,
                                  struct block y)
{
    x.a = vec_combine(dtype, op, x.a, y.a);
    if (is_half(dtype))
        x.b = vec_combine(dtype, op, x.b, y.b);
    return x;
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

INLINE struct block block_multiply(enum gradd_dtype dtype, struct block x, double factor)
{
    x.a = vec_multiply(dtype, x.a, factor);
    if (is_half(dtype))
        x.b = vec_multiply(dtype, x.b, factor);
    return x;
}

INLINE struct block block_divide(enum gradd_dtype dtype, struct block x, double divisor)
{
    x.a = vec_divide(dtype, x.a, divisor);
    if (is_half(dtype))
        x.b = vec_divide(dtype, x.b, divisor);
    return x;
}

#endif
