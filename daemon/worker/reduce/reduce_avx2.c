/* SPDX-License-Identifier: Apache-2.0 */
/* The reduction for CPUs with AVX2 and F16C: 32-byte vectors. */
#include "variant.h"

#include <immintrin.h>

#define VECTOR_BYTES 32
#include "kernel.h"
#include "finite.h"

INLINE vec widen_f16(vec_half h)
{
    return (vec)_mm256_cvtph_ps((__m128i)h);
}

INLINE vec_half narrow_f16(vec v)
{
    return (vec_half)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vec canonical_nans(vec v)
{
    const __m256 x = (__m256)v;
    const __m256 nan = (__m256)_mm256_set1_epi32(0x7fc00000);

    return (vec)_mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INLINE vec round_bf16(vec v)
{
    const __m256i bits = (__m256i)v;
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));

    return (vec)_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

void reduce_run_avx2(const struct reduction *r, size_t begin, size_t end)
{
    kernel_run(r, begin, end);
}

size_t reduce_finite_avx2(enum gradd_dtype dtype, const void *in, size_t n)
{
    return finite_count(dtype, in, n);
}
