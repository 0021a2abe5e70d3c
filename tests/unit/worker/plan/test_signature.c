/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "worker/plan/signature.h"

START_TEST(sizes_and_names_of_every_type)
{
    const struct {
        enum gradd_dtype dtype;
        const char *name;
        size_t bytes;
    } rows[] = {{GRADD_I8, "int8", 1},     {GRADD_U8, "uint8", 1},     {GRADD_I32, "int32", 4},
                {GRADD_I64, "int64", 8},   {GRADD_F16, "float16", 2},  {GRADD_F32, "float32", 4},
                {GRADD_F64, "float64", 8}, {GRADD_BF16, "bfloat16", 2}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ck_assert_str_eq(dtype_name(rows[i].dtype), rows[i].name);
        ck_assert_uint_eq(dtype_bytes(rows[i].dtype), rows[i].bytes);
    }
    ck_assert_uint_eq(dtype_bytes(3), 0);
    ck_assert_uint_eq(dtype_bytes(1000), 0);
    ck_assert_uint_eq(dtype_bytes(-1), 0);
}
END_TEST

START_TEST(counts_must_fit_the_tensor_and_the_ranks)
{
    const uint64_t counts[] = {1, 2}, huge[] = {UINT64_MAX, 4};
    struct signature s = {.kind = GRADD_ALLTOALL,
                          .dtype = GRADD_F32,
                          .count = 3,
                          .counts = counts,
                          .n_counts = 2,
                          .group = ""};
    ck_assert_ptr_null(signature_check(&s, 2));
    ck_assert_ptr_nonnull(signature_check(&s, 3));
    s.count = 4;
    ck_assert_ptr_nonnull(signature_check(&s, 2));
    s.counts = huge;
    s.count = 3; /* what the sum would be if it wrapped around */
    ck_assert_ptr_nonnull(signature_check(&s, 2));
}
END_TEST

START_TEST(long_counts_are_described_within_the_buffer)
{
    uint64_t many[500], one[1] = {0};
    char text[64];
    memset(many, 0xff, sizeof many);
    struct signature a = {
        .kind = GRADD_REDUCE_SCATTER, .counts = many, .n_counts = 500, .group = ""};
    struct signature b = a;
    b.counts = one;
    b.n_counts = 1;
    signature_describe(&a, &b, text, sizeof text);
    ck_assert_uint_lt(strlen(text), sizeof text);
    ck_assert_ptr_nonnull(strstr(text, "reduce-scatter counts [1844"));
}
END_TEST

START_TEST(host_and_device_do_not_mix)
{
    for (int kind = GRADD_ALLREDUCE; kind <= GRADD_JOIN; kind++) {
        const struct signature host = {.kind = kind, .dtype = GRADD_F32, .count = 4, .group = ""};
        struct signature device = host;
        char text[64];
        device.is_device = true;
        ck_assert(signature_matches(&device, &device));
        /* Sets and joins have no tensors. */
        ck_assert_int_eq(signature_matches(&host, &device), kind > GRADD_BARRIER);
        if (kind > GRADD_BARRIER)
            continue;
        ck_assert_str_eq(signature_describe(&host, &device, text, sizeof text), "host memory");
        ck_assert_str_eq(signature_describe(&device, &host, text, sizeof text), "device memory");
    }
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        sizes_and_names_of_every_type,
        counts_must_fit_the_tensor_and_the_ranks,
        long_counts_are_described_within_the_buffer,
        host_and_device_do_not_mix,
    };
    return run_suite("signature", tests, sizeof tests / sizeof *tests);
}
