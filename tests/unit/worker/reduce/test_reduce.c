/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reduction kernels: the scalar reference against values worked out by hand or in exact
 * arithmetic, and every vectorised variant against the reference, bit for bit.
 *
 * Invariant: a NaN equals any NaN; everything else, signed zeros included, must have equal bits,
 * and nothing outside the outputs' [begin, end) may change.
 */
#include "../../../support/element.h"
#include "../../../support/random.h"
#include "reduce.h"

#include <check.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

enum { MAX_RANKS = 9, MAX_ELEMENTS = 420, MAX_SKEW = 7, GUARD_BYTES = 64 };
enum { BUFFER_BYTES = MAX_ELEMENTS * 8 + MAX_SKEW + 2 * GUARD_BYTES };

struct type_row {
    enum gradd_dtype dtype;
    const char *name;
    size_t size;
};

static const struct type_row types[] = {
    {GRADD_I8, "int8", 1},     {GRADD_U8, "uint8", 1},      {GRADD_I32, "int32", 4},
    {GRADD_I64, "int64", 8},   {GRADD_F16, "float16", 2},   {GRADD_F32, "float32", 4},
    {GRADD_F64, "float64", 8}, {GRADD_BF16, "bfloat16", 2},
};

static const char *const op_names[] = {"sum", "prod", "max", "min", "avg"};
static const char *const variant_names[] = {"scalar", "avx2", "avx512"};

/* False, with the reason in the log, when this machine cannot run the variant. */
static bool use_variant(int index)
{
    if (reduce_force_variant(variant_names[index]))
        return true;
    printf("skipped: %s: this CPU or this build does not have it\n", variant_names[index]);
    return false;
}

static struct reduction sum_of(enum gradd_dtype dtype, unsigned n_in, const void *const *in,
                               unsigned n_out, void *const *out)
{
    return (struct reduction){
        .dtype = dtype,
        .redop = GRADD_SUM,
        .n_in = n_in,
        .n_out = n_out,
        .in = in,
        .out = out,
        .divisor = 1,
        .prescale = 1,
        .postscale = 1,
    };
}

/* --- the reference against hand-made values --- */

#define CHECK_ONE(type, dtype_, redop_, divisor_, zero_, pre_, post_, expected, ...)               \
    do {                                                                                           \
        const type values_[] = {__VA_ARGS__};                                                      \
        const void *in_[ARRAY_SIZE(values_)];                                                      \
        type got_, expected_ = expected;                                                           \
        void *out_[] = {&got_};                                                                    \
        struct reduction r_ = sum_of(dtype_, ARRAY_SIZE(values_), in_, 1, out_);                   \
                                                                                                   \
        for (size_t i_ = 0; i_ < ARRAY_SIZE(values_); i_++)                                        \
            in_[i_] = &values_[i_];                                                                \
        r_.redop = redop_;                                                                         \
        r_.divisor = divisor_;                                                                     \
        r_.n_zero = zero_;                                                                         \
        r_.prescale = pre_;                                                                        \
        r_.postscale = post_;                                                                      \
        reduce_run_scalar(&r_, 0, 1);                                                              \
        if (element_is_nan(dtype_, &expected_))                                                    \
            ck_assert(element_is_nan(dtype_, &got_));                                              \
        else                                                                                       \
            ck_assert_mem_eq(&got_, &expected_, sizeof(got_));                                     \
    } while (0)

START_TEST(integers_wrap_and_their_averages_truncate)
{
    CHECK_ONE(int8_t, GRADD_I8, GRADD_SUM, 1, 0, 1, 1, -128, 127, 1);
    CHECK_ONE(uint8_t, GRADD_U8, GRADD_PROD, 1, 0, 1, 1, 144, 20, 20);
    CHECK_ONE(int32_t, GRADD_I32, GRADD_PROD, 1, 0, 1, 1, 0, 65536, 65536);
    CHECK_ONE(int64_t, GRADD_I64, GRADD_SUM, 1, 0, 1, 1, INT64_MIN, INT64_MAX, 1);
    CHECK_ONE(int8_t, GRADD_I8, GRADD_AVG, 2, 0, 1, 1, 127, 127, 127);
    CHECK_ONE(int32_t, GRADD_I32, GRADD_AVG, 2, 0, 1, 1, -3, -3, -4);
    CHECK_ONE(uint8_t, GRADD_U8, GRADD_AVG, 3, 0, 1, 1, 254, 255, 255, 254);
    CHECK_ONE(int32_t, GRADD_I32, GRADD_MAX, 1, 0, 1, 1, -1, -5, -1);
    CHECK_ONE(uint8_t, GRADD_U8, GRADD_MAX, 1, 0, 1, 1, 200, 200, 100);
    CHECK_ONE(int8_t, GRADD_I8, GRADD_MIN, 1, 0, 1, 1, -56, -56, 100);
}
END_TEST

START_TEST(integer_factors_truncate_and_saturate)
{
    CHECK_ONE(int32_t, GRADD_I32, GRADD_SUM, 1, 0, 0.5, 1, -2, -3, -3);
    CHECK_ONE(int32_t, GRADD_I32, GRADD_SUM, 1, 0, 1, 0.5, -3, -3, -4);
    CHECK_ONE(int8_t, GRADD_I8, GRADD_SUM, 1, 0, 1, 10, 127, 10, 10);
    CHECK_ONE(int8_t, GRADD_I8, GRADD_SUM, 1, 0, 1, -10, -128, 10, 10);
    CHECK_ONE(uint8_t, GRADD_U8, GRADD_SUM, 1, 0, 1, -1, 0, 10, 10);
    CHECK_ONE(int64_t, GRADD_I64, GRADD_SUM, 1, 0, 1, 4, INT64_MAX, INT64_MAX / 2);
    CHECK_ONE(int32_t, GRADD_I32, GRADD_SUM, 1, 0, 1, (double)NAN, 0, 7);
}
END_TEST

START_TEST(floats_scale_before_and_after_and_keep_nan)
{
    CHECK_ONE(float, GRADD_F32, GRADD_SUM, 1, 0, 2, 3, 18, 1, 2);
    CHECK_ONE(float, GRADD_F32, GRADD_PROD, 1, 0, 2, 3, 24, 1, 2);
    CHECK_ONE(double, GRADD_F64, GRADD_AVG, 3, 0, 1, 1, 1.0 / 3, 0.5, 0.25, 0.25);
    CHECK_ONE(float, GRADD_F32, GRADD_MAX, 1, 0, 1, 1, NAN, NAN, 2);
    CHECK_ONE(float, GRADD_F32, GRADD_MAX, 1, 0, 1, 1, NAN, 2, NAN);
    CHECK_ONE(float, GRADD_F32, GRADD_MIN, 1, 0, 1, 1, NAN, NAN, 2, 1);
    CHECK_ONE(double, GRADD_F64, GRADD_MIN, 1, 0, 1, 1, NAN, 1, NAN, 2);
    CHECK_ONE(float, GRADD_F32, GRADD_MIN, 1, 0, 1, 1, -INFINITY, 2, -INFINITY);
}
END_TEST

START_TEST(ranks_out_of_data_count_as_zeros)
{
    CHECK_ONE(float, GRADD_F32, GRADD_MAX, 1, 1, 1, 1, 0, -2, -1);
    CHECK_ONE(float, GRADD_F32, GRADD_PROD, 1, 2, 1, 1, -0.0F, -2, 1);
    CHECK_ONE(float, GRADD_F32, GRADD_SUM, 1, 1, 1, 1, 0.0F, -0.0F, -0.0F);
    CHECK_ONE(double, GRADD_F64, GRADD_AVG, 4, 2, 1, 1, 0.75, 1, 2);
    CHECK_ONE(int32_t, GRADD_I32, GRADD_MIN, 1, 3, 1, 1, 0, 5, 9);
    CHECK_ONE(int32_t, GRADD_I32, GRADD_AVG, 3, 1, 1, 1, 3, 5, 6);
}
END_TEST

START_TEST(half_types_round_once_to_nearest_even)
{
    /* float16: 1 + 2^-11 is half way to 1 + 2^-10; 65504 + 16 is half way to 65536. */
    CHECK_ONE(uint16_t, GRADD_F16, GRADD_SUM, 1, 0, 1, 1, 0x3c00, 0x3c00, 0x1000);
    CHECK_ONE(uint16_t, GRADD_F16, GRADD_SUM, 1, 0, 1, 1, 0x3c02, 0x3c01, 0x1000);
    CHECK_ONE(uint16_t, GRADD_F16, GRADD_SUM, 1, 0, 1, 1, 0x3c01, 0x3c00, 0x1000, 0x0002);
    CHECK_ONE(uint16_t, GRADD_F16, GRADD_SUM, 1, 0, 1, 1, 0x7c00, 0x7bff, 0x4c00);
    CHECK_ONE(uint16_t, GRADD_F16, GRADD_SUM, 1, 0, 1, 1, 0x7bff, 0x7bff, 0x4bff);
    CHECK_ONE(uint16_t, GRADD_F16, GRADD_SUM, 1, 0, 1, 0.5, 0x0002, 0x0003);
    CHECK_ONE(uint16_t, GRADD_F16, GRADD_MAX, 1, 0, 1, 1, 0x7e00, 0x7c01, 0x3c00);
    /* bfloat16: 1 + 2^-8 is half way to 1 + 2^-7; a NaN must not be rounded to infinity or 0. */
    CHECK_ONE(uint16_t, GRADD_BF16, GRADD_SUM, 1, 0, 1, 1, 0x3f80, 0x3f80, 0x3b80);
    CHECK_ONE(uint16_t, GRADD_BF16, GRADD_SUM, 1, 0, 1, 1, 0x3f82, 0x3f81, 0x3b80);
    CHECK_ONE(uint16_t, GRADD_BF16, GRADD_SUM, 1, 0, 1, 1, 0x7f80, 0x7f7f, 0x7f7f);
    CHECK_ONE(uint16_t, GRADD_BF16, GRADD_SUM, 1, 0, 1, 1, 0x7fff, 0x7fff);
    CHECK_ONE(uint16_t, GRADD_BF16, GRADD_MIN, 1, 0, 1, 1, 0x7fc0, 0x3f80, 0x7f81);
}
END_TEST

/* --- half types against exact arithmetic --- */

static double value_of_f16(uint16_t h)
{
    const int exponent = h >> 10 & 0x1f;
    const int fraction = h & 0x3ff;
    const double sign = h & 0x8000 ? -1 : 1;

    if (exponent == 0x1f)
        return fraction ? (double)NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

static double value_of_bf16(uint16_t h)
{
    const int exponent = h >> 7 & 0xff;
    const int fraction = h & 0x7f;
    const double sign = h & 0x8000 ? -1 : 1;

    if (exponent == 0xff)
        return fraction ? (double)NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(128 + fraction, exponent - 134) : ldexp(fraction, -133));
}

/* The nearest value that `digits` binary digits and a smallest step of 2^least can hold. */
static double nearest(double x, int digits, int least, double limit)
{
    int exponent;
    double rounded;

    if (isnan(x) || isinf(x) || x == 0)
        return x;
    frexp(x, &exponent);
    exponent = exponent - digits > least ? exponent - digits : least;
    rounded = ldexp(nearbyint(ldexp(x, -exponent)), exponent);
    return fabs(rounded) >= limit ? copysign(INFINITY, x) : rounded;
}

static bool same_value(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b && !signbit(a) == !signbit(b);
}

static void check_half_sums(enum gradd_dtype dtype, uint16_t *a, uint16_t *b, uint16_t *sum)
{
    const bool is_f16 = dtype == GRADD_F16;
    double (*value_of)(uint16_t) = is_f16 ? value_of_f16 : value_of_bf16;
    const void *in[] = {a, b};
    void *out[] = {sum};
    const struct reduction r = sum_of(dtype, 2, in, 1, out);

    reduce_run(&r, 0, 65536);
    for (unsigned i = 0; i < 65536; i++) {
        const double in_float32 = (double)((float)value_of(a[i]) + (float)value_of(b[i]));
        const double expected =
            is_f16 ? nearest(in_float32, 11, -24, 65536) : nearest(in_float32, 8, -133, 0x1p128);

        if (!same_value(value_of(sum[i]), expected))
            ck_abort_msg("%s: %s %04x + %04x = %04x", reduce_variant(),
                         is_f16 ? "float16" : "bfloat16", a[i], b[i], sum[i]);
    }
}

START_TEST(every_half_value_plus_another_is_the_nearest_half)
{
    static uint16_t a[65536], b[65536], sum[65536];

    if (!use_variant(_i))
        return;
    for (unsigned round = 0; round < 4; round++) {
        for (unsigned i = 0; i < 65536; i++) {
            a[i] = (uint16_t)i;
            b[i] = round == 0 ? 0x8000 : (uint16_t)random_bits();
        }
        check_half_sums(GRADD_F16, a, b, sum);
        check_half_sums(GRADD_BF16, a, b, sum);
    }
}
END_TEST

/* --- every variant against the reference --- */

static const uint64_t special_f64[] = {
    0,
    0x8000000000000000,
    1,                  /* smallest denormal */
    0x800fffffffffffff, /* largest denormal, negative */
    0x7ff0000000000000,
    0xfff0000000000000,
    0x7ff8000000000000, /* quiet NaN */
    0xfff0000000000001, /* signalling NaN, payload 1 */
    0x7fefffffffffffff, /* largest */
    0x3ff0000000000000,
};
static const uint32_t special_f32[] = {
    0,          0x80000000, 1,          0x807fffff, 0x7f800000, 0xff800000,
    0x7fc00000, 0xff800001, 0x7f7fffff, 0x3f800000, 0x7fffffff,
};
static const uint16_t special_f16[] = {0,      0x8000, 1,      0x83ff, 0x7c00, 0xfc00,
                                       0x7e00, 0xfc01, 0x7bff, 0x3c00, 0x7fff};
static const uint16_t special_bf16[] = {0,      0x8000, 1,      0x807f, 0x7f80, 0xff80,
                                        0x7fc0, 0xff81, 0x7f7f, 0x3f80, 0x7fff};

static void put_ordinary(enum gradd_dtype dtype, void *p)
{
    const float f = ((float)random_below(20001) - 10000) / 3000;
    const double d = (double)f / 7;
    uint32_t bits;
    uint16_t h;

    memcpy(&bits, &f, sizeof(bits));
    switch (dtype) {
    case GRADD_F32:
        memcpy(p, &f, sizeof(f));
        return;
    case GRADD_F64:
        memcpy(p, &d, sizeof(d));
        return;
    case GRADD_F16:
        h = (uint16_t)(random_bits() & 0x83ff) | (uint16_t)((12 + random_below(6)) << 10);
        memcpy(p, &h, sizeof(h));
        return;
    case GRADD_BF16:
        h = (uint16_t)(bits >> 16);
        memcpy(p, &h, sizeof(h));
        return;
    default:
        return;
    }
}

static void put_special(enum gradd_dtype dtype, void *p)
{
    switch (dtype) {
    case GRADD_F32:
        memcpy(p, &special_f32[random_below(ARRAY_SIZE(special_f32))], 4);
        return;
    case GRADD_F64:
        memcpy(p, &special_f64[random_below(ARRAY_SIZE(special_f64))], 8);
        return;
    case GRADD_F16:
        memcpy(p, &special_f16[random_below(ARRAY_SIZE(special_f16))], 2);
        return;
    case GRADD_BF16:
        memcpy(p, &special_bf16[random_below(ARRAY_SIZE(special_bf16))], 2);
        return;
    default:
        return;
    }
}

/* Any bits; for floating point types mostly ordinary values, so that results stay finite too. */
static void fill(const struct type_row *t, char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = random_bits();

        memcpy(p + i * t->size, &bits, t->size);
        switch (random_below(8)) {
        case 0:
            break;
        case 1:
            put_special(t->dtype, p + i * t->size);
            break;
        default:
            put_ordinary(t->dtype, p + i * t->size);
        }
    }
}

enum placement { IN_PLACE, ONE_INPUT_IS_OUTPUT, OUT_OF_PLACE, N_PLACEMENTS };

/* One reduction twice: by the reference in one set of buffers, by the variant in its twin. */
struct trial {
    const struct type_row *type;
    struct reduction r;
    size_t begin, end;
    unsigned n_buffers;
    const void *in[2][MAX_RANKS];
    void *out[2][MAX_RANKS];
    char *buffer[2][2 * MAX_RANKS];
};

static void *place(struct trial *t, unsigned side, unsigned buffer, size_t skew)
{
    return t->buffer[side][buffer] + GUARD_BYTES + skew;
}

static void trial_init(struct trial *t, enum placement placement, unsigned n_in, unsigned n_out)
{
    const size_t skew_unit = random_below(2) ? 1 : t->type->size;

    t->n_buffers = 0;
    for (unsigned i = 0; i < n_in; i++, t->n_buffers++) {
        const size_t skew = skew_unit * random_below(MAX_SKEW / (unsigned)skew_unit + 1);

        for (unsigned side = 0; side < 2; side++)
            t->in[side][i] = place(t, side, t->n_buffers, skew);
    }
    for (unsigned o = 0; o < n_out; o++) {
        const size_t skew = random_below(MAX_SKEW + 1);
        const bool is_input = placement == IN_PLACE || (placement == ONE_INPUT_IS_OUTPUT && o == 0);

        for (unsigned side = 0; side < 2; side++)
            t->out[side][o] = is_input ? (void *)(uintptr_t)t->in[side][(o + 1) % n_in]
                                       : place(t, side, t->n_buffers, skew);
        t->n_buffers += is_input ? 0 : 1;
    }
    for (unsigned b = 0; b < t->n_buffers; b++) {
        memset(t->buffer[0][b], (int)random_below(256), BUFFER_BYTES);
    }
    for (unsigned i = 0; i < n_in; i++)
        fill(t->type, (char *)(uintptr_t)t->in[0][i], MAX_ELEMENTS);
    for (unsigned b = 0; b < t->n_buffers; b++)
        memcpy(t->buffer[1][b], t->buffer[0][b], BUFFER_BYTES);
    t->r.n_in = n_in;
    t->r.n_out = n_out;
}

static void trial_describe(const struct trial *t, char *text, size_t size)
{
    snprintf(text, size, "%s %s n_in %u n_out %u n_zero %u / %u * %g * %g [%zu, %zu)",
             t->type->name, op_names[t->r.redop], t->r.n_in, t->r.n_out, t->r.n_zero, t->r.divisor,
             t->r.prescale, t->r.postscale, t->begin, t->end);
}

/* NaNs of the twin become the reference's NaNs, so that whole buffers can be compared. */
static void unify_nans(struct trial *t)
{
    for (unsigned o = 0; o < t->r.n_out; o++) {
        char *expected = t->out[0][o], *got = t->out[1][o];

        for (size_t at = t->begin * t->type->size; at < t->end * t->type->size; at += t->type->size)
            if (element_is_nan(t->type->dtype, expected + at) &&
                element_is_nan(t->type->dtype, got + at))
                memcpy(got + at, expected + at, t->type->size);
    }
}

static void trial_run(struct trial *t)
{
    char text[200];

    t->r.in = t->in[0];
    t->r.out = t->out[0];
    reduce_run_scalar(&t->r, t->begin, t->end);
    t->r.in = t->in[1];
    t->r.out = t->out[1];
    reduce_run(&t->r, t->begin, t->end);
    unify_nans(t);
    trial_describe(t, text, sizeof(text));
    for (unsigned b = 0; b < t->n_buffers; b++) {
        if (memcmp(t->buffer[0][b], t->buffer[1][b], BUFFER_BYTES) != 0)
            ck_abort_msg("%s: %s: buffer %u differs from the reference", reduce_variant(), text, b);
    }
}

static void choose_range(struct trial *t)
{
    t->begin = random_below(4) == 0 ? random_below(100) : 0;
    t->end = t->begin + random_below(MAX_ELEMENTS - 100);
}

/* A NaN whose payload is all ones is the one that careless rounding turns into a zero. */
static const struct {
    double pre, post;
} factors[] = {
    {1, 1},
    {1.0 / 3, 1},
    {1, 0.7},
    {0.25, -3.3},
    {1e30, 1e-30},
    {__builtin_nan("0x7ffffffffffff"), 1},
    {1, __builtin_nan("0x7ffffffffffff")},
};

static void run_all_shapes(struct trial *t)
{
    for (unsigned n_in = 1; n_in <= MAX_RANKS; n_in++) {
        for (unsigned p = 0; p < N_PLACEMENTS; p++) {
            const unsigned n_out = p == IN_PLACE ? n_in : 1 + random_below(n_in);

            for (t->r.n_zero = 0; t->r.n_zero < 3; t->r.n_zero++) {
                t->r.divisor = n_in + t->r.n_zero;
                trial_init(t, (enum placement)p, n_in, n_out);
                choose_range(t);
                trial_run(t);
            }
        }
    }
}

START_TEST(every_combination_equals_the_reference)
{
    static char memory[2][2 * MAX_RANKS][BUFFER_BYTES];
    struct trial t = {0};

    if (!use_variant(_i))
        return;
    for (unsigned b = 0; b < 2 * MAX_RANKS; b++) {
        t.buffer[0][b] = memory[0][b];
        t.buffer[1][b] = memory[1][b];
    }
    for (size_t d = 0; d < ARRAY_SIZE(types); d++) {
        t.type = &types[d];
        t.r.dtype = types[d].dtype;
        for (unsigned op = 0; op < ARRAY_SIZE(op_names); op++) {
            t.r.redop = (enum gradd_redop)op;
            for (size_t f = 0; f < ARRAY_SIZE(factors); f++) {
                t.r.prescale = factors[f].pre;
                t.r.postscale = factors[f].post;
                run_all_shapes(&t);
            }
        }
    }
}
END_TEST

START_TEST(pieces_give_the_bits_of_the_whole)
{
    enum { N = 1000 };
    static float a[N], b[N], c[N], whole[N], pieces[N];
    const void *in[] = {a, b, c};
    void *out[] = {whole};
    struct reduction r = sum_of(GRADD_F32, 3, in, 1, out);

    if (!use_variant(_i))
        return;
    for (size_t i = 0; i < N; i++) {
        put_ordinary(GRADD_F32, &a[i]);
        put_ordinary(GRADD_F32, &b[i]);
        put_ordinary(GRADD_F32, &c[i]);
    }
    r.redop = GRADD_AVG;
    r.divisor = 3;
    reduce_run(&r, 0, N);
    out[0] = pieces;
    for (size_t begin = 0, size = 1; begin < N; begin += size, size += 6)
        reduce_run(&r, begin, begin + size < N ? begin + size : N);
    ck_assert_mem_eq(whole, pieces, sizeof(whole));
}
END_TEST

/* --- choosing a variant --- */

START_TEST(environment_forces_a_variant)
{
    setenv("GRADD_KERNELS", "scalar", 1);
    ck_assert_str_eq(reduce_variant(), "scalar");
}
END_TEST

START_TEST(unknown_variants_are_not_forced)
{
    char best[16];

    setenv("GRADD_KERNELS", "abacus", 1);
    snprintf(best, sizeof(best), "%s", reduce_variant());
    printf("best variant here: %s\n", best);
    ck_assert(!reduce_force_variant("abacus"));
    ck_assert(!reduce_force_variant(NULL));
    ck_assert_str_eq(reduce_variant(), best);
    ck_assert(reduce_force_variant("scalar"));
    ck_assert_str_eq(reduce_variant(), "scalar");
    ck_assert(reduce_force_variant(best));
}
END_TEST

static void *sum_in_thread(void *arg)
{
    const struct reduction *r = arg;

    reduce_run(r, 0, 100);
    return (void *)(uintptr_t)reduce_variant();
}

START_TEST(first_calls_may_race)
{
    enum { N_THREADS = 4 };
    static float a[100], sum[N_THREADS][100];
    const void *in[] = {a, a};
    void *out[N_THREADS][1];
    struct reduction r[N_THREADS];
    pthread_t thread[N_THREADS];
    void *name;

    for (size_t i = 0; i < 100; i++)
        a[i] = (float)i;
    for (size_t t = 0; t < N_THREADS; t++) {
        out[t][0] = sum[t];
        r[t] = sum_of(GRADD_F32, 2, in, 1, out[t]);
        ck_assert_int_eq(pthread_create(&thread[t], NULL, sum_in_thread, &r[t]), 0);
    }
    for (size_t t = 0; t < N_THREADS; t++) {
        ck_assert_int_eq(pthread_join(thread[t], &name), 0);
        ck_assert_str_eq(name, reduce_variant());
        for (size_t i = 0; i < 100; i++)
            ck_assert(sum[t][i] == (float)(2 * i));
    }
}
END_TEST

START_TEST(only_known_types_and_operators_are_supported)
{
    unsigned n = 0;

    for (int dtype = -1; dtype < 300; dtype++)
        for (int op = -1; op < 300; op++)
            n += reduce_is_supported(dtype, op) ? 1 : 0;
    ck_assert_uint_eq(n, ARRAY_SIZE(types) * ARRAY_SIZE(op_names));
    ck_assert(reduce_is_supported(GRADD_BF16, GRADD_AVG));
    ck_assert(!reduce_is_supported(3, GRADD_SUM));
    ck_assert(!reduce_is_supported(5, GRADD_SUM));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("reduce");
    TCase *reference = tcase_create("reference");
    TCase *variants = tcase_create("variants");
    TCase *choice = tcase_create("choice");
    SRunner *runner;
    int n_failed;

    tcase_add_test(reference, integers_wrap_and_their_averages_truncate);
    tcase_add_test(reference, integer_factors_truncate_and_saturate);
    tcase_add_test(reference, floats_scale_before_and_after_and_keep_nan);
    tcase_add_test(reference, ranks_out_of_data_count_as_zeros);
    tcase_add_test(reference, half_types_round_once_to_nearest_even);
    tcase_set_timeout(variants, 120);
    tcase_add_loop_test(variants, every_half_value_plus_another_is_the_nearest_half, 0,
                        ARRAY_SIZE(variant_names));
    tcase_add_loop_test(variants, every_combination_equals_the_reference, 0,
                        ARRAY_SIZE(variant_names));
    tcase_add_loop_test(variants, pieces_give_the_bits_of_the_whole, 0, ARRAY_SIZE(variant_names));
    tcase_add_test(choice, environment_forces_a_variant);
    tcase_add_test(choice, unknown_variants_are_not_forced);
    tcase_add_test(choice, first_calls_may_race);
    tcase_add_test(choice, only_known_types_and_operators_are_supported);
    suite_add_tcase(s, reference);
    suite_add_tcase(s, variants);
    suite_add_tcase(s, choice);
    runner = srunner_create(s);
    srunner_run_all(runner, CK_ENV);
    n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
