/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Halves: every one of the 65536, and float32 on both sides of every boundary between two of them.
 * What is expected is made of integers and of ldexp(), not of the code that is tested.
 */
#include <math.h>
#include <stdbool.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "half.h"
#include "run_suite.h"

struct half_type {
    const char *name;
    unsigned infinity; /* its bits, one more than those of the largest finite value */
    float (*widen)(uint16_t half);
    uint16_t (*narrow)(float value);
    /* Bits of the float32 half way between the halves `h` and `h + 1`, both positive. */
    uint32_t (*boundary)(unsigned h);
};

/* A positive half; of the bits of infinity, the power of two that would come next. */
static double value_of_f16(unsigned h)
{
    const int exponent = (int)(h >> 10);
    return exponent ? ldexp(1024 + (h & 0x3ff), exponent - 25) : ldexp(h, -24);
}

static uint32_t boundary_of_f16(unsigned h)
{
    return bits_of_float((float)((value_of_f16(h) + value_of_f16(h + 1)) / 2));
}

static uint32_t boundary_of_bf16(unsigned h)
{
    return h << 16 | 0x8000;
}

static const struct half_type f16 = {"f16", 0x7c00, float_of_f16, f16_of_float, boundary_of_f16};
static const struct half_type bf16 = {"bf16", 0x7f80, float_of_bf16, bf16_of_float,
                                      boundary_of_bf16};

START_TEST(every_finite_f16_is_widened_exactly)
{
    for (unsigned h = 0; h < 0x7c00; h++) {
        const float expected = (float)value_of_f16(h);
        if (bits_of_float(float_of_f16((uint16_t)h)) != bits_of_float(expected))
            ck_abort_msg("%04x became %a, expected %a", h, float_of_f16((uint16_t)h), expected);
        if (bits_of_float(float_of_f16((uint16_t)(h | 0x8000))) != bits_of_float(-expected))
            ck_abort_msg("%04x did not become %a", h | 0x8000, -expected);
    }
    ck_assert_uint_eq(bits_of_float(float_of_f16(0x7c00)), 0x7f800000);
    ck_assert_uint_eq(bits_of_float(float_of_f16(0xfc00)), 0xff800000);
}
END_TEST

START_TEST(every_bf16_is_the_upper_half_of_its_float32)
{
    for (uint32_t h = 0; h < 0x10000; h++)
        if (bits_of_float(float_of_bf16((uint16_t)h)) != h << 16)
            ck_abort_msg("%04x became %08x", h, bits_of_float(float_of_bf16((uint16_t)h)));
}
END_TEST

START_TEST(every_half_survives_the_way_there_and_back)
{
    const struct half_type *types[] = {&f16, &bf16};
    for (int t = 0; t < 2; t++)
        for (unsigned h = 0; h < 0x10000; h++) {
            const bool is_nan = (h & 0x7fff) > types[t]->infinity;
            const unsigned again = types[t]->narrow(types[t]->widen((uint16_t)h));
            if (!is_nan && again != h)
                ck_abort_msg("%s %04x became %04x", types[t]->name, h, again);
        }
}
END_TEST

static void expect_narrowed(const struct half_type *type, uint32_t bits, unsigned expected)
{
    for (uint32_t sign = 0; sign < 2; sign++) {
        const unsigned got = type->narrow(float_of_bits(sign << 31 | bits));
        if (got != (sign << 15 | expected))
            ck_abort_msg("%s of %08x: %04x, expected %04x", type->name, sign << 31 | bits, got,
                         sign << 15 | expected);
    }
}

static void expect_boundaries(const struct half_type *type)
{
    for (unsigned h = 0; h < type->infinity; h++) {
        const uint32_t middle = type->boundary(h);
        expect_narrowed(type, middle - 1, h);
        expect_narrowed(type, middle, h + (h & 1)); /* a tie goes to the even one */
        expect_narrowed(type, middle + 1, h + 1);
    }
    expect_narrowed(type, 0, 0);
    expect_narrowed(type, 1, 0);
    expect_narrowed(type, 0x7f7fffff, type->infinity);
    expect_narrowed(type, 0x7f800000, type->infinity);
}

START_TEST(between_two_halves_the_nearest_is_taken_and_of_equally_near_the_even)
{
    expect_boundaries(&f16);
    expect_boundaries(&bf16);
}
END_TEST

#ifdef __SSE__
START_TEST(a_cpu_that_flushes_subnormals_rounds_the_same)
{
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* FTZ, DAZ */
    expect_boundaries(&f16);
    expect_boundaries(&bf16);
    for (unsigned h = 0; h < 0x400; h++)
        ck_assert_uint_eq(f16_of_float(float_of_f16((uint16_t)h)), h);
    _mm_setcsr(before);
}
END_TEST
#endif

START_TEST(a_nan_of_f16_keeps_sign_and_payload_and_becomes_quiet)
{
    for (uint32_t h = 0x7c01; h < 0x8000; h++) {
        const uint32_t payload = h & 0x3ff;
        for (uint32_t sign = 0; sign < 2; sign++) {
            const uint32_t wide = sign << 31 | 0x7fc00000 | payload << 13;
            const uint16_t half = (uint16_t)(sign << 15 | h);
            ck_assert_uint_eq(bits_of_float(float_of_f16(half)), wide);
            /* Signalling in float32, and with a payload of which the lower bits are lost. */
            const uint32_t loud = sign << 31 | 0x7f800000 | payload << 13 | 0x1fff;
            ck_assert_uint_eq(f16_of_float(float_of_bits(wide)), half | 0x200);
            ck_assert_uint_eq(f16_of_float(float_of_bits(loud)), half | 0x200);
        }
    }
    ck_assert_uint_eq(f16_of_float(float_of_bits(0x7f800001)), 0x7e00);
}
END_TEST

START_TEST(there_is_one_nan_of_bf16)
{
    for (uint32_t payload = 1; payload < 0x800000; payload += 0xfff) {
        ck_assert_uint_eq(bf16_of_float(float_of_bits(0x7f800000 | payload)), 0x7fc0);
        ck_assert_uint_eq(bf16_of_float(float_of_bits(0xff800000 | payload)), 0x7fc0);
    }
    ck_assert_uint_eq(bf16_of_float(float_of_bits(0x7fffffff)), 0x7fc0);
    ck_assert_uint_eq(bf16_of_float(float_of_bits(0xffffffff)), 0x7fc0);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        every_finite_f16_is_widened_exactly,
        every_bf16_is_the_upper_half_of_its_float32,
        every_half_survives_the_way_there_and_back,
        between_two_halves_the_nearest_is_taken_and_of_equally_near_the_even,
#ifdef __SSE__
        a_cpu_that_flushes_subnormals_rounds_the_same,
#endif
        a_nan_of_f16_keeps_sign_and_payload_and_becomes_quiet,
        there_is_one_nan_of_bf16,
    };
    return run_suite("half", tests, sizeof tests / sizeof tests[0]);
}
