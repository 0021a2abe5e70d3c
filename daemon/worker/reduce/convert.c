/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions. bfloat16 and integers are loops that compilers vectorise; float16 needs F16C to be
 * fast, which is asked for at run time, where the forced variant is not the scalar one. */
#include "convert.h"

#include <stdbool.h>
#include <string.h>

#include "reduce.h"

static uint32_t load_32(const void *base, size_t i)
{
    uint32_t bits;
    memcpy(&bits, (const char *)base + i * sizeof bits, sizeof bits);
    return bits;
}

static void store_32(void *base, size_t i, uint32_t bits)
{
    memcpy((char *)base + i * sizeof bits, &bits, sizeof bits);
}

static uint16_t load_16(const void *base, size_t i)
{
    uint16_t bits;
    memcpy(&bits, (const char *)base + i * sizeof bits, sizeof bits);
    return bits;
}

static void store_16(void *base, size_t i, uint32_t bits)
{
    const uint16_t low = (uint16_t)bits;
    memcpy((char *)base + i * sizeof low, &low, sizeof low);
}

static void narrow_bf16(const void *in, void *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = load_32(in, i);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        store_16(out, i, (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

static void widen_bf16(const void *in, void *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        store_32(out, i, (uint32_t)load_16(in, i) << 16);
}

static uint32_t f16_of_f32(uint32_t bits)
{
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    float small;
    if (magnitude > 0x7f800000)
        return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);
    if (magnitude >= 0x477ff000) /* half way from the largest float16 to the next */
        return sign | 0x7c00;
    if (magnitude >= 0x38800000)
        return sign | (magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* Below 2^-14 the unit in the last place is 2^-24, as float32's is from 0.5 on. */
    memcpy(&small, &magnitude, sizeof small);
    small += 0.5f;
    memcpy(&bits, &small, sizeof bits);
    return sign | (bits & 0xffff);
}

static uint32_t f32_of_f16(uint32_t h)
{
    const uint32_t sign = (h & 0x8000) << 16, exponent = h >> 10 & 0x1f, fraction = h & 0x3ff;
    uint32_t bits;
    if (exponent == 0x1f) /* a signalling NaN becomes quiet, as the CPU's instruction has it */
        return sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0);
    if (exponent != 0)
        return sign | (exponent + 127 - 15) << 23 | fraction << 13;
    const float small = (float)fraction * 0x1p-24f;
    memcpy(&bits, &small, sizeof bits);
    return sign | bits;
}

#ifdef __x86_64__
#include <immintrin.h>

static bool has_f16c(void)
{
    return strcmp(reduce_variant(), "scalar") != 0; /* all other variants need it */
}

__attribute__((target("avx,f16c"))) static size_t narrow_f16_fast(const void *in, void *out,
                                                                  size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(
            (void *)((uint16_t *)out + i),
            _mm256_cvtps_ph(_mm256_loadu_ps((const float *)in + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}

__attribute__((target("avx,f16c"))) static size_t widen_f16_fast(const void *in, void *out,
                                                                 size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps((float *)out + i, _mm256_cvtph_ps(_mm_loadu_si128(
                                               (const void *)((const uint16_t *)in + i))));
    return i;
}
#else
static bool has_f16c(void)
{
    return false;
}

static size_t narrow_f16_fast(const void *in, void *out, size_t n)
{
    return 0;
}

static size_t widen_f16_fast(const void *in, void *out, size_t n)
{
    return 0;
}
#endif

void convert_narrow(enum gradd_dtype half, const void *in, void *out, size_t n)
{
    if (half == GRADD_BF16) {
        narrow_bf16(in, out, n);
        return;
    }
    for (size_t i = has_f16c() ? narrow_f16_fast(in, out, n) : 0; i < n; i++)
        store_16(out, i, f16_of_f32(load_32(in, i)));
}

void convert_widen(enum gradd_dtype half, const void *in, void *out, size_t n)
{
    if (half == GRADD_BF16) {
        widen_bf16(in, out, n);
        return;
    }
    for (size_t i = has_f16c() ? widen_f16_fast(in, out, n) : 0; i < n; i++)
        store_32(out, i, f32_of_f16(load_16(in, i)));
}

void convert_add_int(enum gradd_dtype dtype, const void *in, void *sums, size_t n)
{
    const uint8_t *bytes = in;
    for (size_t i = 0; i < n; i++) {
        int64_t sum;
        memcpy(&sum, (char *)sums + i * sizeof sum, sizeof sum);
        if (dtype == GRADD_U8)
            sum += bytes[i];
        else if (dtype == GRADD_I8)
            sum += (int8_t)bytes[i];
        else
            sum += (int32_t)load_32(in, i);
        memcpy((char *)sums + i * sizeof sum, &sum, sizeof sum);
    }
}

void convert_narrow_int(enum gradd_dtype dtype, const void *in, void *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int64_t x;
        memcpy(&x, (const char *)in + i * sizeof x, sizeof x);
        if (dtype == GRADD_I32)
            store_32(out, i, (uint32_t)x);
        else
            ((uint8_t *)out)[i] = (uint8_t)x;
    }
}
