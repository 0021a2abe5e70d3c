/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's twins of the kernels in daemon/worker/reduce/kernels.cu, by name (cuda_params.h). They
 * read and write device memory through its view; an address that is not mapped is a fault of the
 * context, as on a device.
 */
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include <gradd/types.h>

#include "cuda_params.h"
#include "fake.h"
#include "reduce.h"
#include "tests/gpu/load.h"

static void *view(unsigned long long address, size_t bytes)
{
    void *p = fake_cuda_view((void *)(uintptr_t)address, bytes);
    if (p == NULL) {
        fake_warn("a kernel touches %zu bytes at %#llx, which are not mapped", bytes, address);
        fake_stream_fault(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    return p;
}

/* What is loaded and stored as elements: at a multiple of their size. */
static void *elements(unsigned long long address, unsigned long long n, size_t element)
{
    if (address % element != 0) {
        fake_warn("a kernel loads elements of %zu bytes at %#llx", element, address);
        fake_stream_fault(CUDA_ERROR_MISALIGNED_ADDRESS);
        return NULL;
    }
    return view(address, n * element);
}

static size_t element_bytes(enum gradd_dtype dtype)
{
    switch (dtype) {
    case GRADD_U8:
    case GRADD_I8:
        return 1;
    case GRADD_F16:
    case GRADD_BF16:
        return 2;
    case GRADD_I64:
    case GRADD_F64:
        return 8;
    default:
        return 4;
    }
}

static void reduce(const void *parameter, enum gradd_dtype dtype, enum gradd_redop redop)
{
    const struct cuda_reduce_params *p = parameter;
    const void *in[CUDA_REDUCE_MAX];
    void *out[CUDA_REDUCE_MAX];
    const size_t element = element_bytes(dtype);
    if (p->n_in == 0 || p->n_in > CUDA_REDUCE_MAX || p->n_out == 0 || p->n_out > CUDA_REDUCE_MAX)
        fake_die("a reduction of %u inputs and %u outputs", p->n_in, p->n_out);
    for (unsigned i = 0; i < p->n_in; i++)
        if ((in[i] = elements(p->in[i], p->n, element)) == NULL)
            return;
    for (unsigned i = 0; i < p->n_out; i++)
        if ((out[i] = elements(p->out[i], p->n, element)) == NULL)
            return;
    struct reduction reduction = {.dtype = dtype,
                                  .redop = p->divisor != 0 ? GRADD_AVG : redop,
                                  .n_in = p->n_in,
                                  .n_out = p->n_out,
                                  .in = in,
                                  .out = out,
                                  .n_zero = p->n_zero,
                                  .divisor = p->divisor,
                                  .prescale = p->prescale,
                                  .postscale = p->postscale};
    reduce_run(&reduction, 0, p->n);
}

static void copy(const struct fake_launch *launch, const void *parameter)
{
    const struct cuda_copy_params *p = parameter;
    if (launch->grid[1] > CUDA_COPY_SEGMENTS)
        fake_die("a copy of %u segments", launch->grid[1]);
    for (unsigned i = 0; i < launch->grid[1]; i++) {
        const struct cuda_copy_segment *segment = &p->segments[i];
        if (segment->bytes == 0)
            continue;
        void *to = view(segment->to, segment->bytes);
        const void *from = view(segment->from, segment->bytes);
        if (to == NULL || from == NULL)
            return;
        memmove(to, from, segment->bytes);
    }
}

static void nonfinite(const void *parameter, enum gradd_dtype dtype)
{
    const struct cuda_nonfinite_params *p = parameter;
    const void *in = elements(p->in, p->n, element_bytes(dtype));
    _Atomic uint64_t *count = elements(p->count, 1, sizeof *count);
    if (in != NULL && count != NULL)
        atomic_fetch_add(count, reduce_count_nonfinite(dtype, in, p->n));
}

static void sleep_ns(unsigned long long ns)
{
    struct timespec left = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    while (nanosleep(&left, &left) != 0)
        ;
}

/* The two of tests/gpu/load.cu. */
static void produce(const struct fake_launch *launch, const void *parameter)
{
    const struct load_produce *p = parameter;
    sleep_ns(p->ns);
    float *out = view(p->out, p->n * sizeof *out);
    for (unsigned long long i = 0; out != NULL && i < p->n; i++)
        out[i] = p->value;
}

static void multiply(const struct fake_launch *launch, const void *parameter)
{
    const struct load_multiply *p = parameter;
    sleep_ns(p->n * 10);
}

#define FOR_TYPES(X)  X(i8, I8) X(u8, U8) X(i32, I32) X(i64, I64) FOR_FLOATS(X)
#define FOR_FLOATS(X) X(f16, F16) X(f32, F32) X(f64, F64) X(bf16, BF16)
#define FOR_OPS(X, type, dtype)                                                                    \
    X(type, dtype, sum, SUM)                                                                       \
    X(type, dtype, prod, PROD) X(type, dtype, max, MAX) X(type, dtype, min, MIN)

#define REDUCE(type, dtype, op, redop)                                                             \
    static void reduce_##type##_##op(const struct fake_launch *launch, const void *parameter)      \
    {                                                                                              \
        reduce(parameter, GRADD_##dtype, GRADD_##redop);                                           \
    }
#define REDUCES(type, dtype) FOR_OPS(REDUCE, type, dtype)
FOR_TYPES(REDUCES)

#define NONFINITE(type, dtype)                                                                     \
    static void nonfinite_##type(const struct fake_launch *launch, const void *parameter)          \
    {                                                                                              \
        nonfinite(parameter, GRADD_##dtype);                                                       \
    }
FOR_FLOATS(NONFINITE)

static const struct fake_kernel kernels[] = {
#define REDUCE_ROW(type, dtype, op, redop)                                                         \
    {"gradd_reduce_" #type "_" #op, sizeof(struct cuda_reduce_params), reduce_##type##_##op},
#define REDUCE_ROWS(type, dtype) FOR_OPS(REDUCE_ROW, type, dtype)
    FOR_TYPES(REDUCE_ROWS)
#define NONFINITE_ROW(type, dtype)                                                                 \
    {"gradd_nonfinite_" #type, sizeof(struct cuda_nonfinite_params), nonfinite_##type},
        FOR_FLOATS(NONFINITE_ROW){"gradd_copy", sizeof(struct cuda_copy_params), copy},
    {"gradd_test_produce", sizeof(struct load_produce), produce},
    {"gradd_test_multiply", sizeof(struct load_multiply), multiply},
};

const struct fake_kernel *fake_kernel_find(const char *name)
{
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    return NULL;
}
