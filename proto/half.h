/* SPDX-License-Identifier: Apache-2.0 */
/*
 * float32 from and to binary16 ("f16") and bfloat16 ("bf16"), one element: the rounding that
 * library and worker share, and that vectorised and device kernels must equal.
 *
 * Widening is exact. Narrowing rounds once, to nearest, ties to even: what lies half way beyond the
 * largest finite value, or farther, becomes infinity, subnormal results are rounded like any other,
 * and zeros keep their sign. NaN stays NaN, always a quiet one: between float32 and binary16 with
 * its sign and the upper bits of its payload, as the F16C instructions have it; every NaN becomes
 * the one bfloat16 0x7fc0; a bfloat16 is widened as it is.
 *
 * Thread: any. The rounding mode must be the usual one, to nearest; whether the CPU flushes
 * subnormal numbers to zero makes no difference. No branch depends on the value in the functions
 * for bfloat16, so that compilers vectorise loops over them.
 */
#ifndef GRADD_PROTO_HALF_H
#define GRADD_PROTO_HALF_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of_bf16(uint16_t half)
{
    return float_of_bits((uint32_t)half << 16);
}

static inline uint16_t bf16_of_float(float value)
{
    const uint32_t bits = bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

static inline float float_of_f16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 0x1f;
    const uint32_t fraction = half & 0x3ff;
    if (exponent == 0x1f) /* 0x400000: the bit that makes a NaN quiet */
        return float_of_bits(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
    if (exponent != 0)
        return float_of_bits(sign | (exponent + 127 - 15) << 23 | fraction << 13);
    /* Subnormal in binary16, normal here: exact. */
    return float_of_bits(sign | bits_of_float((float)fraction * 0x1p-24f));
}

static inline uint16_t f16_of_float(float value)
{
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) /* 65520: half way from the largest binary16 to the next */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000) {
        /* A carry out of the fraction goes into the exponent, which is the right neighbour. */
        const uint32_t biased = magnitude - ((127 - 15) << 23);
        return (uint16_t)(sign | (biased + 0xfff + (magnitude >> 13 & 1)) >> 13);
    }
    /* Below 2^-14 a unit in the last place is 2^-24, as it is in float32 from 0.5 on: the sum is
     * rounded there, and its low bits are the binary16. */
    return (uint16_t)(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) & 0xffff));
}

#endif
