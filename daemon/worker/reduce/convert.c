/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions. bfloat16 and integers are loops that compilers vectorise; float16 needs F16C to be
 * fast, which is asked for at run time, where the forced variant is not the scalar one. */
#include "convert.h"

#include <stdbool.h>
#include <string.h>

#include "half.h"
#include "reduce.h"

static float load_float(const void *base, size_t i)
{
    float value;
    memcpy(&value, (const char *)base + i * sizeof value, sizeof value);
    return value;
}

static void store_float(void *base, size_t i, float value)
{
    memcpy((char *)base + i * sizeof value, &value, sizeof value);
}

static uint16_t load_half(const void *base, size_t i)
{
    uint16_t half;
    memcpy(&half, (const char *)base + i * sizeof half, sizeof half);
    return half;
}

static void store_half(void *base, size_t i, uint16_t half)
{
    memcpy((char *)base + i * sizeof half, &half, sizeof half);
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
        for (size_t i = 0; i < n; i++)
            store_half(out, i, bf16_of_float(load_float(in, i)));
        return;
    }
    for (size_t i = has_f16c() ? narrow_f16_fast(in, out, n) : 0; i < n; i++)
        store_half(out, i, f16_of_float(load_float(in, i)));
}

void convert_widen(enum gradd_dtype half, const void *in, void *out, size_t n)
{
    if (half == GRADD_BF16) {
        for (size_t i = 0; i < n; i++)
            store_float(out, i, float_of_bf16(load_half(in, i)));
        return;
    }
    for (size_t i = has_f16c() ? widen_f16_fast(in, out, n) : 0; i < n; i++)
        store_float(out, i, float_of_f16(load_half(in, i)));
}

void convert_add_int(enum gradd_dtype dtype, const void *in, void *sums, size_t n)
{
    const uint8_t *bytes = in;
    for (size_t i = 0; i < n; i++) {
        int64_t sum;
        int32_t word;
        memcpy(&sum, (char *)sums + i * sizeof sum, sizeof sum);
        if (dtype == GRADD_U8)
            sum += bytes[i];
        else if (dtype == GRADD_I8)
            sum += (int8_t)bytes[i];
        else {
            memcpy(&word, bytes + i * sizeof word, sizeof word);
            sum += word;
        }
        memcpy((char *)sums + i * sizeof sum, &sum, sizeof sum);
    }
}

void convert_narrow_int(enum gradd_dtype dtype, const void *in, void *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int64_t x;
        memcpy(&x, (const char *)in + i * sizeof x, sizeof x);
        const int32_t word = (int32_t)x;
        if (dtype == GRADD_I32)
            memcpy((char *)out + i * sizeof word, &word, sizeof word);
        else
            ((uint8_t *)out)[i] = (uint8_t)x;
    }
}
