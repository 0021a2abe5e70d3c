/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The variants of x86-64, each with the CPU features that its compiler flags assume: this table
 * and meson.build must name the same features.
 */
#include "variant.h"

#include <cpuid.h>

/* clang 14's __builtin_cpu_supports() does not know F16C. Whether the kernel keeps the wide
 * registers is part of the answer for AVX2. */
static bool has_f16c(void)
{
    unsigned eax, ebx, ecx, edx;

    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && has_f16c();
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const struct reduce_variant reduce_variants[] = {
    {"avx512", has_avx512, reduce_run_avx512, reduce_finite_avx512},
    {"avx2", has_avx2, reduce_run_avx2, reduce_finite_avx2},
    {"scalar", NULL, reduce_run_scalar, reduce_finite_scalar},
};
const size_t reduce_n_variants = sizeof(reduce_variants) / sizeof(reduce_variants[0]);
