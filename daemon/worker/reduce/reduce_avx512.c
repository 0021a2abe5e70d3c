/* SPDX-License-Identifier: Apache-2.0 */
/* The reduction for CPUs with AVX-512 F, BW, DQ and VL: 64-byte vectors. */
#include "variant.h"

#include <immintrin.h>

#define VECTOR_BYTES 64
#include "kernel.h"
#include "finite.h"

INLINE vec widen_f16(vec_half h)
{
    return (vec)_mm512_cvtph_ps((__m256i)h);
}

INLINE vec_half narrow_f16(vec v)
{
    return (vec_half)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vec canonical_nans(vec v)
{
    const __m512 x = (__m512)v;
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);

    return (vec)_mm512_mask_mov_epi32((__m512i)v, is_nan, _mm512_set1_epi32(0x7fc00000));
}

INLINE vec round_bf16(vec v)
{
    const __m512i bits = (__m512i)v;
    const __m512i sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));

    return (vec)_mm512_mask_add_epi32(sum, is_odd, sum, _mm512_set1_epi32(1));
}

void reduce_run_avx512(const struct reduction *r, size_t begin, size_t end)
{
    kernel_run(r, begin, end);
}

size_t reduce_finite_avx512(enum gradd_dtype dtype, const void *in, size_t n)
{
    return finite_count(dtype, in, n);
}
