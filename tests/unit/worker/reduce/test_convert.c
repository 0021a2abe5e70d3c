/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions: exact where they can be, nearest even elsewhere, the same with and without F16C. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "convert.h"
#include "reduce.h"

enum { HALVES = 65536 };

static uint16_t halves[HALVES], again[HALVES];
static float floats[HALVES], others[HALVES];

static void set_up_halves(void)
{
    for (unsigned i = 0; i < HALVES; i++)
        halves[i] = (uint16_t)i;
}

START_TEST(every_half_survives_the_way_there_and_back)
{
    static const enum gradd_dtype types[] = {GRADD_F16, GRADD_BF16};
    set_up_halves();
    for (size_t t = 0; t < 2; t++) {
        convert_widen(types[t], halves, floats, HALVES);
        convert_narrow(types[t], floats, again, HALVES);
        unsigned n_nan = 0;
        for (unsigned i = 0; i < HALVES; i++) {
            if (isnan(floats[i]))
                n_nan++;
            else if (again[i] != halves[i])
                ck_abort_msg("%04x became %04x", halves[i], again[i]);
        }
        ck_assert_uint_eq(n_nan, types[t] == GRADD_F16 ? 2 * 1023 : 2 * 127);
        convert_widen(types[t], again, others, HALVES);
        for (unsigned i = 0; i < HALVES; i++)
            if (isnan(floats[i]) && !isnan(others[i]))
                ck_abort_msg("the NaN %04x became a number", halves[i]);
    }
}
END_TEST

START_TEST(ties_go_to_even_and_what_is_too_large_to_infinity)
{
    static const struct {
        enum gradd_dtype type;
        float from;
        uint16_t to;
    } rows[] = {
        {GRADD_F16, 1.0f + 0x1p-11f, 0x3c00},
        {GRADD_F16, 1.0f + 3 * 0x1p-11f, 0x3c02},
        {GRADD_F16, 65519.0f, 0x7bff},
        {GRADD_F16, 65520.0f, 0x7c00},
        {GRADD_F16, -65520.0f, 0xfc00},
        {GRADD_F16, 0x1p-25f, 0x0000},
        {GRADD_F16, 0x1.8p-24f, 0x0002},
        {GRADD_BF16, 1.0f + 0x1p-8f, 0x3f80},
        {GRADD_BF16, 1.0f + 3 * 0x1p-8f, 0x3f82},
        {GRADD_BF16, -0.0f, 0x8000},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint16_t got[9];
        float from[9];
        for (int k = 0; k < 9; k++) /* eight are a vector, one is not */
            from[k] = rows[i].from;
        convert_narrow(rows[i].type, from, got, 9);
        ck_assert_msg(got[0] == rows[i].to && got[8] == rows[i].to, "row %zu: %04x %04x", i, got[0],
                      got[8]);
    }
}
END_TEST

START_TEST(the_cpu_changes_no_bit)
{
    uint32_t state = 1;
    for (unsigned i = 0; i < HALVES; i++) {
        state = state * 1664525u + 1013904223u;
        memcpy(&floats[i], &state, sizeof state);
    }
    const char *variant = reduce_variant();
    set_up_halves();
    convert_narrow(GRADD_F16, floats, halves, HALVES);
    ck_assert(reduce_force_variant("scalar"));
    convert_narrow(GRADD_F16, floats, again, HALVES);
    ck_assert(memcmp(halves, again, sizeof halves) == 0);
    set_up_halves();
    convert_widen(GRADD_F16, halves, floats, HALVES);
    ck_assert(reduce_force_variant(variant));
    convert_widen(GRADD_F16, halves, others, HALVES);
    ck_assert(memcmp(floats, others, sizeof floats) == 0);
}
END_TEST

START_TEST(small_integers_add_up_in_64_bits)
{
    int64_t sums[3] = {1, 2, 3};
    const int8_t bytes[] = {-128, 127, 0};
    const uint8_t unsigned_bytes[] = {255, 0, 1};
    const int32_t words[] = {INT32_MAX, INT32_MIN, 7};
    convert_add_int(GRADD_I8, bytes, sums, 3);
    convert_add_int(GRADD_U8, unsigned_bytes, sums, 3);
    ck_assert(sums[0] == 128 && sums[1] == 129 && sums[2] == 4);
    uint8_t narrow[3];
    convert_narrow_int(GRADD_U8, sums, narrow, 3);
    ck_assert(narrow[0] == 128 && narrow[1] == 129 && narrow[2] == 4);
    convert_add_int(GRADD_I32, words, sums, 3);
    ck_assert(sums[0] == 128 + (int64_t)INT32_MAX && sums[1] == 129 + (int64_t)INT32_MIN);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        every_half_survives_the_way_there_and_back,
        ties_go_to_even_and_what_is_too_large_to_infinity,
        the_cpu_changes_no_bit,
        small_integers_add_up_in_64_bits,
    };
    return run_suite("convert", tests, sizeof tests / sizeof tests[0]);
}
