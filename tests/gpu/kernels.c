/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gradd's kernels on the GPU itself: right against the scalar reference, fast against a
 * device-to-device copy of the driver.
 *
 *   gpu_kernels check          every type and operator, odd sizes and alignments
 *   gpu_kernels speed [MIB [N]]  time of the reduction of 2 and of 4 tensors, best of N rounds
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../support/element.h"
#include "cuda_kernels.h"
#include "device.h"
#include "reduce.h"

enum { INPUTS = 5, N = 30011, BYTES = (N + 64) * 8 };

static const struct {
    enum gradd_dtype dtype;
    size_t size;
} types[] = {
    {GRADD_I8, 1},  {GRADD_U8, 1},  {GRADD_I32, 4}, {GRADD_I64, 8},
    {GRADD_F16, 2}, {GRADD_F32, 4}, {GRADD_F64, 8}, {GRADD_BF16, 2},
};
static struct cuda_kernels kernels;

static void load(void)
{
    size_t bytes;
    const char *why = "";
    const void *image = cuda_kernels_image(&bytes, &why);
    CUmodule module;

    if (!image)
        fail("no kernels: %s", why);
    CU(module_load(&module, image));
    check_cuda(cuda_kernels_load(&kernels, cuda, module, 0), "cuda_kernels_load");
}

static CUdeviceptr tensors[INPUTS + 1];
static unsigned char *hosts[INPUTS + 1], *expected;

static void check_one(size_t type, enum gradd_redop op, size_t skew, double prescale)
{
    const size_t size = types[type].size, n = N - 7 * skew;
    const void *in[INPUTS], *host_in[INPUTS];
    void *out[1] = {(void *)(uintptr_t)(tensors[INPUTS] + skew * size)}, *host_out[1] = {expected};
    struct reduction r = {
        .dtype = types[type].dtype,
        .redop = op,
        .n_in = INPUTS,
        .n_out = 1,
        .in = in,
        .out = out,
        .n_zero = skew == 3,
        .divisor = skew == 2 ? 4 : 6,
        .prescale = prescale,
        .postscale = 1 / prescale,
    };

    for (unsigned i = 0; i < INPUTS; i++) {
        /* The last lies otherwise: then there is no way by vectors. */
        const size_t offset = (skew + (skew == 3 && i == INPUTS - 1)) * size;

        in[i] = (const void *)(uintptr_t)(tensors[i] + offset);
        host_in[i] = hosts[i] + offset;
    }
    check_cuda(cuda_kernels_reduce(&kernels, stream, &r, n), "cuda_kernels_reduce");
    CU(copy_async((uintptr_t)hosts[INPUTS], tensors[INPUTS] + skew * size, n * size, stream));
    CU(stream_synchronize(stream));
    r.in = host_in;
    r.out = host_out;
    reduce_run_scalar(&r, 0, n);
    for (size_t i = 0; i < n; i++) {
        const unsigned char *got = hosts[INPUTS] + i * size, *want = expected + i * size;

        if (memcmp(got, want, size) != 0 &&
            !(element_is_nan(r.dtype, got) && element_is_nan(r.dtype, want)))
            fail("type %d operator %d skew %zu: element %zu of %zu differs from the reference",
                 r.dtype, op, skew, i, n);
    }
}

static void check(void)
{
    unsigned n = 0;

    expected = malloc(BYTES);
    for (unsigned i = 0; i <= INPUTS; i++) {
        hosts[i] = malloc(BYTES);
        CU(mem_alloc(&tensors[i], BYTES));
        if (!hosts[i] || !expected)
            fail("out of memory");
        for (size_t b = 0; b < BYTES; b++) /* any bits: NaN, infinite and denormal ones too */
            hosts[i][b] = (unsigned char)rand();
        CU(copy_async(tensors[i], (uintptr_t)hosts[i], BYTES, stream));
        CU(stream_synchronize(stream));
    }
    for (size_t type = 0; type < sizeof(types) / sizeof(types[0]); type++)
        for (int op = GRADD_SUM; op <= GRADD_AVG; op++)
            for (size_t skew = 0; skew < 4; skew++, n++)
                check_one(type, (enum gradd_redop)op, skew, skew == 1 ? 0.3 : 1);
    report("\"what\": \"kernels\", \"cases\": %u, \"image\": \"%s\"", n, cuda_kernels_describe());
}

/* Launched at once, so that the time of a launch is not counted. */
enum { LAUNCHES = 10 };

/* Bytes read and written per second, in the best of a few rounds. */
static double copy_rate(CUdeviceptr to, CUdeviceptr from, size_t bytes, int rounds)
{
    double best = 1e9;

    for (int round = 0; round < rounds; round++) {
        const CUevent begin = timer_mark();

        for (int i = 0; i < LAUNCHES; i++)
            CU(copy_async(to, from, bytes, stream));
        const double seconds = timer_between(begin, timer_mark()) / LAUNCHES;
        best = seconds < best ? seconds : best;
    }
    return 2 * (double)bytes / best;
}

static double reduce_rate(const struct reduction *r, size_t bytes, size_t size, int rounds)
{
    double best = 1e9;

    for (int round = 0; round < rounds; round++) {
        const CUevent begin = timer_mark();

        for (int i = 0; i < LAUNCHES; i++)
            check_cuda(cuda_kernels_reduce(&kernels, stream, r, bytes / size),
                       "cuda_kernels_reduce");
        const double seconds = timer_between(begin, timer_mark()) / LAUNCHES;
        best = seconds < best ? seconds : best;
    }
    return (double)(r->n_in + r->n_out) * (double)bytes / best;
}

static void speed(size_t bytes, int rounds)
{
    CUdeviceptr p[INPUTS + 1];
    const void *in[INPUTS];
    void *out[INPUTS];

    for (int i = 0; i <= INPUTS; i++) {
        CU(mem_alloc(&p[i], bytes));
        CU(set8_async(p[i], 0, bytes, stream));
    }
    for (int i = 0; i < INPUTS; i++) {
        in[i] = (const void *)(uintptr_t)p[i];
        out[i] = (void *)(uintptr_t)p[i];
    }
    copy_rate(p[1], p[0], bytes, 3); /* clocks */
    const double copy = copy_rate(p[1], p[0], bytes, rounds);
    for (unsigned n_in = 2; n_in <= 4; n_in += 2)
        for (unsigned n_out = 1; n_out <= n_in; n_out += n_in - 1)
            for (int half = 0; half < 2; half++) {
                const struct reduction r = {
                    .dtype = half ? GRADD_BF16 : GRADD_F32,
                    .redop = GRADD_AVG,
                    .n_in = n_in,
                    .n_out = n_out,
                    .in = in,
                    .out = n_out == 1 ? &(void *){(void *)(uintptr_t)p[INPUTS]} : out,
                    .divisor = n_in,
                    .prescale = 1,
                    .postscale = 1,
                };
                const double rate = reduce_rate(&r, bytes, half ? 2 : 4, rounds);

                report("\"what\": \"kernel speed\", \"mib\": %zu, \"type\": \"%s\", \"in\": %u, "
                       "\"out\": %u, \"gb_s\": %.1f, \"copy_gb_s\": %.1f, \"share\": %.3f",
                       bytes >> 20, half ? "bf16" : "f32", n_in, n_out, rate / 1e9, copy / 1e9,
                       rate / copy);
            }
}

int main(int argc, char **argv)
{
    device_open(0);
    load();
    if (argc > 1 && strcmp(argv[1], "check") == 0)
        check();
    else if (argc > 1 && strcmp(argv[1], "speed") == 0)
        speed((argc > 2 ? strtoul(argv[2], NULL, 10) : 64) << 20, argc > 3 ? atoi(argv[3]) : 10);
    else
        fail("usage: gpu_kernels check | speed [MIB [N]]");
    return 0;
}
