/* SPDX-License-Identifier: Apache-2.0 */
/* Modules and the kernels' twins of the fake driver. */
#include <math.h>
#include <string.h>

#include "cuda_params.h"
#include "fake_driver.h"

enum { N = 1000 };

static CUfunction kernel(const char *name)
{
    static CUmodule module; /* until the process ends */
    CUfunction f;
    OK(cu.cuModuleLoadData(&module, ".version 8.0\n"));
    OK(cu.cuModuleGetFunction(&f, module, name));
    return f;
}

static CUresult launch(CUfunction f, unsigned segments, void *parameter)
{
    void *parameters[] = {parameter};
    return cu.cuLaunchKernel(f, 4, segments, 1, CUDA_KERNELS_THREADS, 1, 1, 0, NULL, parameters,
                             NULL);
}

/* n floats: first, first + 1, ... */
static CUdeviceptr floats(float first)
{
    float values[N];
    CUdeviceptr p;
    for (int i = 0; i < N; i++)
        values[i] = first + (float)i;
    OK(cu.cuMemAlloc_v2(&p, sizeof values));
    OK(cu.cuMemcpyHtoD_v2(p, values, sizeof values));
    return p;
}

static float float_at(CUdeviceptr p, size_t at)
{
    float value;
    OK(cu.cuMemcpyDtoH_v2(&value, p + at * sizeof value, sizeof value));
    return value;
}

START_TEST(a_reduction_reads_inputs_and_writes_outputs)
{
    driver_open(0);
    struct cuda_reduce_params p = {.in = {floats(0), floats(10)},
                                   .out = {floats(0), floats(0)},
                                   .n = N,
                                   .prescale = 1,
                                   .postscale = 1,
                                   .n_in = 2,
                                   .n_out = 2};
    OK(launch(kernel("gradd_reduce_f32_sum"), 1, &p));
    unsigned long long out = p.out[1];
    memset(&p, 0, sizeof p); /* the launch has its own copy */
    ck_assert(float_at(out, 0) == 10 && float_at(out, N - 1) == 2 * (N - 1) + 10);
}
END_TEST

START_TEST(a_function_belongs_to_the_context_of_its_module)
{
    driver_open(0);
    struct cuda_copy_params p = {0};
    CUcontext other;
    CUfunction f = kernel("gradd_copy");
    OK(launch(f, 1, &p));
    OK(cu.cuDevicePrimaryCtxRetain(&other, 1));
    OK(cu.cuCtxSetCurrent(other));
    GIVES(CUDA_ERROR_INVALID_HANDLE, launch(f, 1, &p));
    OK(launch(kernel("gradd_copy"), 1, &p));
}
END_TEST

START_TEST(elements_at_odd_addresses_are_a_fault)
{
    driver_open(0);
    struct cuda_nonfinite_params p = {.in = floats(0) + 2, .n = 1, .count = floats(0)};
    OK(launch(kernel("gradd_nonfinite_f32"), 1, &p));
    GIVES(CUDA_ERROR_MISALIGNED_ADDRESS, cu.cuCtxSynchronize());
}
END_TEST

START_TEST(a_divisor_makes_the_sum_an_average)
{
    driver_open(0);
    struct cuda_reduce_params p = {.in = {floats(0), floats(10)},
                                   .out = {floats(0)},
                                   .n = N,
                                   .prescale = 1,
                                   .postscale = 1,
                                   .n_in = 2,
                                   .n_out = 1,
                                   .divisor = 2};
    OK(launch(kernel("gradd_reduce_f32_sum"), 1, &p));
    ck_assert(float_at(p.out[0], 4) == 9);
}
END_TEST

START_TEST(a_copy_moves_every_segment)
{
    driver_open(0);
    static struct cuda_copy_params p;
    CUdeviceptr from = floats(0), to = floats(5);
    p.segments[0] = (struct cuda_copy_segment){to, from, 8};
    p.segments[1] = (struct cuda_copy_segment){to + 12, from + 4, 4};
    OK(launch(kernel("gradd_copy"), 2, &p));
    ck_assert(float_at(to, 0) == 0 && float_at(to, 1) == 1);
    ck_assert(float_at(to, 2) == 7 && float_at(to, 3) == 1);
}
END_TEST

START_TEST(what_is_not_finite_is_added_to_the_count)
{
    driver_open(0);
    CUdeviceptr in = floats(0), count;
    uint64_t counted;
    OK(cu.cuMemAlloc_v2(&count, 8));
    OK(cu.cuMemsetD8_v2(count, 0, 8));
    OK(cu.cuMemcpyHtoD_v2(in + 40, &(float){NAN}, 4));
    OK(cu.cuMemcpyHtoD_v2(in + 80, &(float){INFINITY}, 4));
    struct cuda_nonfinite_params p = {.in = in, .n = N, .count = count};
    OK(launch(kernel("gradd_nonfinite_f32"), 1, &p));
    OK(cu.cuMemcpyDtoH_v2(&counted, count, 8));
    ck_assert_uint_eq(counted, 2);
}
END_TEST

START_TEST(a_kernel_outside_of_memory_is_a_fault)
{
    driver_open(0);
    struct cuda_reduce_params p = {.in = {floats(0)},
                                   .out = {floats(0)},
                                   .n = 1 << 20,
                                   .prescale = 1,
                                   .postscale = 1,
                                   .n_in = 1,
                                   .n_out = 1};
    OK(launch(kernel("gradd_reduce_f32_max"), 1, &p));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuCtxSynchronize());
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, launch(NULL, 1, &p));
}
END_TEST

START_TEST(what_is_no_image_or_no_kernel_is_refused)
{
    driver_open(0);
    CUmodule module;
    CUfunction f;
    GIVES(200, cu.cuModuleLoadData(&module, "not an image"));
    OK(cu.cuModuleLoadData(&module, "\177ELF"));
    GIVES(CUDA_ERROR_NOT_FOUND, cu.cuModuleGetFunction(&f, module, "gradd_reduce_f32_avg"));
    OK(cu.cuModuleGetFunction(&f, module, "gradd_reduce_bf16_min"));
    void *parameters[] = {&f};
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu.cuLaunchKernel(f, 1, 1, 1, 1025, 1, 1, 0, NULL, parameters, NULL));
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu.cuLaunchKernel(f, 0, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
    OK(cu.cuModuleUnload(module));
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_reduction_reads_inputs_and_writes_outputs,
        a_function_belongs_to_the_context_of_its_module,
        elements_at_odd_addresses_are_a_fault,
        a_divisor_makes_the_sum_an_average,
        a_copy_moves_every_segment,
        what_is_not_finite_is_added_to_the_count,
        a_kernel_outside_of_memory_is_a_fault,
        what_is_no_image_or_no_kernel_is_refused,
    };
    Suite *fakes = suite_create("fake_kernel");
    TCase *tcase = tcase_create("fake_kernel");
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tcase_add_test(tcase, tests[i]);
    suite_add_tcase(fakes, tcase);
    return run_fake_suite(fakes);
}
