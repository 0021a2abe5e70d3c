/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device's kernels against the scalar reference: kernels.cu itself, compiled for the CPU, and
 * launched by cuda_kernels.c through a table that calls it. What only a GPU can show (its
 * conversion instructions, its memory) is tests/gpu's.
 */
#include "../../../support/element.h"
#include "../../../support/random.h"
#include "cuda_kernels.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "convert.h"
#include "device.h"
#include "reduce.h"

enum { GUARD_BYTES = 64, MAX_TENSORS = 8, MAX_ELEMENTS = 40000 };
enum { BUFFER_BYTES = MAX_ELEMENTS * 8 + 16 + 2 * GUARD_BYTES };

static const struct {
    enum gradd_dtype dtype;
    size_t size;
} types[] = {
    {GRADD_I8, 1},  {GRADD_U8, 1},  {GRADD_I32, 4}, {GRADD_I64, 8},
    {GRADD_F16, 2}, {GRADD_F32, 4}, {GRADD_F64, 8}, {GRADD_BF16, 2},
};
enum { N_TYPES = sizeof(types) / sizeof(types[0]), N_OPS = 5 };

float device_float_of_f16(unsigned short h);
unsigned short device_f16_of_float(float f);
unsigned short device_bf16_of_float(float f);

float device_float_of_f16(unsigned short h)
{
    float f;

    convert_widen(GRADD_F16, &h, &f, 1);
    return f;
}

unsigned short device_f16_of_float(float f)
{
    unsigned short h;

    convert_narrow(GRADD_F16, &f, &h, 1);
    return h;
}

unsigned short device_bf16_of_float(float f)
{
    unsigned short h;

    convert_narrow(GRADD_BF16, &f, &h, 1);
    return h;
}

/* --- a driver with kernels and nothing else --- */

static const char *lacking; /* a function that the module has not */
static unsigned last_grid[2];
static char names[256][32]; /* a function handle is one of these */
static unsigned n_names;

static CUresult device_attribute(int *out, int attribute, CUdevice device)
{
    ck_assert_int_eq(attribute, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    *out = 2;
    return CUDA_SUCCESS;
}

static CUresult module_function(CUfunction *out, CUmodule module, const char *name)
{
    if (lacking && strcmp(name, lacking) == 0)
        return CUDA_ERROR_NOT_FOUND;
    if (n_names == 256)
        return CUDA_ERROR_OUT_OF_MEMORY;
    strcpy(names[n_names], name);
    *out = (CUfunction)names[n_names++];
    return CUDA_SUCCESS;
}

static CUresult launch_kernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z,
                              unsigned shared_bytes, CUstream s, void **parameters, void **extra)
{
    ck_assert(grid_z == 1 && block_y == 1 && block_z == 1 && shared_bytes == 0 && extra == NULL);
    ck_assert(block_x == CUDA_KERNELS_THREADS);
    last_grid[0] = grid_x;
    last_grid[1] = grid_y;
    ck_assert_msg(device_run((const char *)f, grid_x, grid_y, block_x, parameters[0]),
                  "no kernel is called %s", (const char *)f);
    return CUDA_SUCCESS;
}

static const struct cuda_table driver = {
    .device_attribute = device_attribute,
    .module_function = module_function,
    .launch_kernel = launch_kernel,
};

static const struct cuda_kernels *kernels(void)
{
    static struct cuda_kernels loaded;

    if (!loaded.cuda)
        ck_assert_int_eq(cuda_kernels_load(&loaded, &driver, NULL, 0), CUDA_SUCCESS);
    return &loaded;
}

/* --- random tensors --- */

static _Alignas(64) uint8_t device[2 * MAX_TENSORS][BUFFER_BYTES];
static _Alignas(64) uint8_t expected[MAX_TENSORS][BUFFER_BYTES];

static void fill(uint8_t *p, size_t n, enum gradd_dtype dtype)
{
    for (size_t i = 0; i < n; i++) {
        const double x = ((double)(random_bits() % 2000001) - 1000000) / 4096;
        const float f = (float)x;

        switch (dtype) {
        case GRADD_F16:
        case GRADD_BF16:
            convert_narrow(dtype, &f, p + 2 * i, 1);
            if (random_below(40) == 0)
                memcpy(p + 2 * i, &(uint16_t){(uint16_t)random_bits()}, 2);
            break;
        case GRADD_F32:
            memcpy(p + 4 * i,
                   random_below(40) ? (const void *)&f : &(uint32_t){(uint32_t)random_bits()}, 4);
            break;
        case GRADD_F64:
            memcpy(p + 8 * i, random_below(40) ? (const void *)&x : &(uint64_t){random_bits()}, 8);
            break;
        default:
            memcpy(p + i * (dtype == GRADD_I64   ? 8
                            : dtype == GRADD_I32 ? 4
                                                 : 1),
                   &(uint64_t){random_bits()},
                   dtype == GRADD_I64   ? 8
                   : dtype == GRADD_I32 ? 4
                                        : 1);
        }
    }
}

struct shape {
    size_t n;
    unsigned skew;  /* bytes before the first element, in every tensor */
    bool is_mixed;  /* one tensor has another */
    bool is_inside; /* in place */
};

static void check_reduction(unsigned type, enum gradd_redop op, struct shape shape)
{
    const size_t size = types[type].size;
    const void *in[MAX_TENSORS];
    void *out[MAX_TENSORS], *wanted[MAX_TENSORS];
    struct reduction r = {
        .dtype = types[type].dtype,
        .redop = op,
        .n_in = 1 + random_below(MAX_TENSORS),
        .n_out = 1 + random_below(MAX_TENSORS),
        .in = in,
        .out = out,
        .n_zero = random_below(3) ? 0 : 2,
        .divisor = 1 + random_below(9),
        .prescale = random_below(3) ? 1 : 0.7,
        .postscale = random_below(3) ? 1 : -1.3,
    };

    if (shape.is_inside)
        r.n_out = r.n_in;
    memset(device, 0xa5, sizeof(device));
    memset(expected, 0xa5, sizeof(expected));
    for (unsigned i = 0; i < r.n_in; i++) {
        const unsigned odd = shape.is_mixed && i == r.n_in - 1 ? (unsigned)size : 0;
        uint8_t *p = device[i] + GUARD_BYTES + shape.skew + odd;

        fill(p, shape.n, r.dtype);
        in[i] = p;
        if (shape.is_inside) {
            out[i] = p;
            wanted[i] = expected[i] + GUARD_BYTES + shape.skew + odd;
        }
    }
    for (unsigned o = 0; o < r.n_out && !shape.is_inside; o++) {
        out[o] = device[MAX_TENSORS + o] + GUARD_BYTES + shape.skew;
        wanted[o] = expected[o] + GUARD_BYTES + shape.skew;
    }
    r.out = wanted;
    reduce_run_scalar(&r, 0, shape.n);
    r.out = out;
    ck_assert_int_eq(cuda_kernels_reduce(kernels(), NULL, &r, shape.n), CUDA_SUCCESS);
    for (unsigned o = 0; o < r.n_out; o++) {
        const uint8_t *got = out[o], *want = wanted[o];

        for (size_t i = 0; i < shape.n; i++) {
            if (element_is_nan(r.dtype, want + i * size) && element_is_nan(r.dtype, got + i * size))
                continue;
            ck_assert_msg(memcmp(got + i * size, want + i * size, size) == 0,
                          "type %d op %d in %u out %u zero %u: element %zu of %zu, skew %u",
                          r.dtype, op, r.n_in, r.n_out, r.n_zero, i, shape.n, shape.skew);
        }
        ck_assert_mem_eq(got - GUARD_BYTES / 2, want - GUARD_BYTES / 2, GUARD_BYTES / 2);
        ck_assert_mem_eq(got + shape.n * size, want + shape.n * size, GUARD_BYTES / 2);
    }
}

START_TEST(kernels_equal_the_reference_bit_for_bit)
{
    for (unsigned op = 0; op < N_OPS; op++)
        for (unsigned round = 0; round < 4; round++)
            check_reduction((unsigned)_i, (enum gradd_redop)op,
                            (struct shape){
                                .n = 1 + random_below(round == 0 ? 40 : 3000),
                                .skew = (unsigned)types[_i].size * random_below(16),
                                .is_mixed = round == 3,
                                .is_inside = round == 2,
                            });
}
END_TEST

START_TEST(large_tensors_are_covered_by_a_small_grid)
{
    check_reduction((unsigned)_i, GRADD_SUM, (struct shape){.n = MAX_ELEMENTS - 3});
    ck_assert_uint_le(last_grid[0], 8);
}
END_TEST

START_TEST(what_has_no_kernel_is_refused)
{
    float x = 1;
    const void *in[] = {&x};
    void *out[] = {&x};
    struct reduction r = {.dtype = GRADD_F32,
                          .redop = GRADD_SUM,
                          .n_in = 1,
                          .n_out = 1,
                          .in = in,
                          .out = out,
                          .divisor = 1,
                          .prescale = 1,
                          .postscale = 1};

    ck_assert_int_eq(cuda_kernels_reduce(kernels(), NULL, &r, 1), CUDA_SUCCESS);
    r.n_in = CUDA_REDUCE_MAX + 1;
    ck_assert_int_eq(cuda_kernels_reduce(kernels(), NULL, &r, 1), CUDA_ERROR_INVALID_VALUE);
    r.n_in = 1;
    r.n_out = 0;
    ck_assert_int_eq(cuda_kernels_reduce(kernels(), NULL, &r, 1), CUDA_ERROR_INVALID_VALUE);
    r.n_out = 1;
    r.dtype = (enum gradd_dtype)3;
    ck_assert_int_eq(cuda_kernels_reduce(kernels(), NULL, &r, 1), CUDA_ERROR_INVALID_VALUE);
}
END_TEST

START_TEST(pieces_of_any_alignment_are_copied_in_as_few_launches_as_possible)
{
    enum { N = CUDA_COPY_SEGMENTS + 5 };
    static uint8_t from[N * 200], to[N * 200], wanted[N * 200];
    struct cuda_copy_segment segments[N];

    for (size_t i = 0; i < sizeof(from); i++)
        from[i] = (uint8_t)random_bits();
    memset(to, 7, sizeof(to));
    memset(wanted, 7, sizeof(wanted));
    for (unsigned i = 0; i < N; i++) {
        const unsigned bytes = random_below(140), a = random_below(40), b = random_below(40);

        segments[i] = (struct cuda_copy_segment){
            .to = (uintptr_t)(to + i * 200 + a),
            .from = (uintptr_t)(from + i * 200 + (i % 3 ? b : a)),
            .bytes = bytes,
        };
        memcpy(wanted + i * 200 + a, from + i * 200 + (i % 3 ? b : a), bytes);
    }
    ck_assert_int_eq(cuda_kernels_copy(kernels(), NULL, segments, N), CUDA_SUCCESS);
    ck_assert_mem_eq(to, wanted, sizeof(to));
    ck_assert_uint_eq(last_grid[1], 5);
}
END_TEST

START_TEST(what_is_not_finite_is_counted)
{
    const size_t n = 5000;
    uint8_t *p = device[0] + types[_i].size;
    uint64_t count = 3;

    memset(device, 0, sizeof(device));
    fill(p, n, types[_i].dtype);
    ck_assert_int_eq(cuda_kernels_count_nonfinite(kernels(), NULL, types[_i].dtype, (uintptr_t)p, n,
                                                  (uintptr_t)&count),
                     CUDA_SUCCESS);
    ck_assert_uint_eq(count, 3 + reduce_count_nonfinite(types[_i].dtype, p, n));
}
END_TEST

START_TEST(a_module_that_lacks_a_kernel_is_not_loaded)
{
    struct cuda_kernels loaded = {.n_multiprocessors = 77};

    lacking = "gradd_reduce_bf16_min";
    ck_assert_int_eq(cuda_kernels_load(&loaded, &driver, NULL, 0), CUDA_ERROR_NOT_FOUND);
    ck_assert_uint_eq(loaded.n_multiprocessors, 77);
}
END_TEST

/* Forked by check: each case reads the environment anew. */
START_TEST(a_file_takes_the_place_of_the_image)
{
    char path[] = "/tmp/gradd-image-XXXXXX";
    const int fd = mkstemp(path);
    const char *text = NULL;
    size_t bytes = 0;
    const char *data;

    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(write(fd, ".version 8.0", 12), 12);
    close(fd);
    setenv("GRADD_CUDA_KERNELS", path, 1);
    data = cuda_kernels_image(&bytes, &text);
    unlink(path);
    ck_assert_ptr_nonnull(data);
    ck_assert_uint_eq(bytes, 12);
    ck_assert_str_eq(data, ".version 8.0");
    ck_assert_str_eq(text, path);
    ck_assert_str_eq(cuda_kernels_describe(), path);
}
END_TEST

START_TEST(a_file_that_is_missing_is_named)
{
    size_t bytes = 1;

    setenv("GRADD_CUDA_KERNELS", "/nowhere/kernels", 1);
    ck_assert_ptr_null(cuda_kernels_image(&bytes, NULL));
    ck_assert_uint_eq(bytes, 0);
    ck_assert_str_eq(cuda_kernels_describe(),
                     "none (GRADD_CUDA_KERNELS: /nowhere/kernels: No such file or directory)");
}
END_TEST

START_TEST(an_image_is_described_or_its_absence_is)
{
    const char *text = NULL;
    size_t bytes = 0;
    const void *data;

    unsetenv("GRADD_CUDA_KERNELS");
    data = cuda_kernels_image(&bytes, &text);
    if (data) {
        ck_assert_uint_gt(bytes, 1000);
        ck_assert_ptr_nonnull(strstr(text, "PTX"));
    } else {
        ck_assert_uint_eq(bytes, 0);
        ck_assert_str_eq(text, "none (built without nvcc)");
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device kernels");
    TCase *reduction = tcase_create("reduction"), *other = tcase_create("other");
    SRunner *runner;
    int failed;

    tcase_set_timeout(reduction, 60);
    tcase_add_loop_test(reduction, kernels_equal_the_reference_bit_for_bit, 0, N_TYPES);
    tcase_add_loop_test(reduction, large_tensors_are_covered_by_a_small_grid, 0, N_TYPES);
    tcase_add_test(reduction, what_has_no_kernel_is_refused);
    suite_add_tcase(suite, reduction);
    tcase_add_test(other, pieces_of_any_alignment_are_copied_in_as_few_launches_as_possible);
    tcase_add_loop_test(other, what_is_not_finite_is_counted, 0, N_TYPES);
    tcase_add_test(other, a_module_that_lacks_a_kernel_is_not_loaded);
    tcase_add_test(other, a_file_takes_the_place_of_the_image);
    tcase_add_test(other, a_file_that_is_missing_is_named);
    tcase_add_test(other, an_image_is_described_or_its_absence_is);
    suite_add_tcase(suite, other);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
