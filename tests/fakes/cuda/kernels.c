/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What stands for gradd's kernels on the CPU: the same names and parameters (cuda_params.h), the
 * arithmetic of the scalar reference. A launch that would leave work undone on a device does so
 * here as well (no block, no thread, too few rows); memory that is not mapped is a fault.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/worker/reduce/cuda_params.h"
#include "daemon/worker/reduce/reduce.h"

#include "fake.h"

static size_t element_bytes(enum gradd_dtype dtype)
{
    switch (dtype) {
    case GRADD_I8:
    case GRADD_U8:
        return 1;
    case GRADD_F16:
    case GRADD_BF16:
        return 2;
    case GRADD_I32:
    case GRADD_F32:
        return 4;
    case GRADD_I64:
    case GRADD_F64:
        break;
    }
    return 8;
}

/* Where the CPU finds n elements; NULL: the context has failed, as after an illegal access. */
static void *view(unsigned long long address, unsigned long long bytes, unsigned alignment)
{
    void *found = NULL;

    if (address % alignment == 0)
        found = fake_cuda_view((const void *)(uintptr_t)address, bytes); /* NOLINT */
    if (found == NULL)
        fake_stream_fault(CUDA_ERROR_ILLEGAL_ADDRESS);
    return found;
}

static bool has_threads(const struct fake_launch *launch)
{
    return launch->grid[0] > 0 && launch->block[0] > 0 && launch->block[0] % 32 == 0 &&
           launch->block[0] <= CUDA_KERNELS_THREADS;
}

static void reduce(const struct fake_launch *launch, const void *parameter, enum gradd_dtype dtype,
                   enum gradd_redop redop)
{
    const struct cuda_reduce_params *p = parameter;
    const unsigned bytes = (unsigned)element_bytes(dtype);
    const void *in[CUDA_REDUCE_MAX];
    void *out[CUDA_REDUCE_MAX];
    const struct reduction r = {
        .dtype = dtype,
        .redop = redop == GRADD_SUM && p->divisor != 0 ? GRADD_AVG : redop,
        .n_in = p->n_in,
        .n_out = p->n_out,
        .in = in,
        .out = out,
        .n_zero = p->n_zero,
        .divisor = p->divisor,
        .prescale = p->prescale,
        .postscale = p->postscale,
    };

    if (!has_threads(launch) || p->n == 0)
        return;
    if (p->n_in < 1 || p->n_in > CUDA_REDUCE_MAX || p->n_out < 1 || p->n_out > CUDA_REDUCE_MAX)
        fake_die("a reduction of %u inputs and %u outputs, at most %d", p->n_in, p->n_out,
                 CUDA_REDUCE_MAX);
    for (unsigned i = 0; i < p->n_in; i++)
        if ((in[i] = view(p->in[i], p->n * bytes, bytes)) == NULL)
            return;
    for (unsigned o = 0; o < p->n_out; o++)
        if ((out[o] = view(p->out[o], p->n * bytes, bytes)) == NULL)
            return;
    reduce_run_scalar(&r, 0, p->n);
}

static void copy(const struct fake_launch *launch, const void *parameter)
{
    const struct cuda_copy_params *p = parameter;

    if (!has_threads(launch))
        return;
    if (launch->grid[1] > CUDA_COPY_SEGMENTS)
        fake_die("a copy of %u segments, at most %d", launch->grid[1], CUDA_COPY_SEGMENTS);
    for (unsigned i = 0; i < launch->grid[1]; i++) {
        const struct cuda_copy_segment *s = &p->segments[i];
        const void *from;
        void *to;

        if (s->bytes == 0)
            continue;
        from = view(s->from, s->bytes, 1);
        to = view(s->to, s->bytes, 1);
        if (from == NULL || to == NULL)
            return;
        memcpy(to, from, s->bytes);
    }
}

static void nonfinite(const struct fake_launch *launch, const void *parameter,
                      enum gradd_dtype dtype)
{
    const struct cuda_nonfinite_params *p = parameter;
    const unsigned bytes = (unsigned)element_bytes(dtype);
    const void *in;
    uint64_t *count;

    if (!has_threads(launch))
        return;
    in = view(p->in, p->n * bytes, bytes);
    count = view(p->count, sizeof(*count), sizeof(*count));
    if (in != NULL && count != NULL)
        __atomic_fetch_add(count, reduce_count_nonfinite(dtype, in, p->n), __ATOMIC_RELAXED);
}

/* clang-format off */
#define TYPES(X) X(i8, I8) X(u8, U8) X(i32, I32) X(i64, I64) X(f16, F16) X(f32, F32) X(f64, F64) \
    X(bf16, BF16)
#define FLOATS(X) X(f16, F16) X(f32, F32) X(f64, F64) X(bf16, BF16)
#define OPS(X, type, TYPE) X(type, TYPE, sum, SUM) X(type, TYPE, prod, PROD) X(type, TYPE, max, MAX) \
    X(type, TYPE, min, MIN)
/* clang-format on */

#define REDUCE(type, TYPE, op, OP)                                                                 \
    static void reduce_##type##_##op(const struct fake_launch *launch, const void *parameter)      \
    {                                                                                              \
        reduce(launch, parameter, GRADD_##TYPE, GRADD_##OP);                                       \
    }
#define REDUCE_TYPE(type, TYPE) OPS(REDUCE, type, TYPE)
TYPES(REDUCE_TYPE)

#define NONFINITE(type, TYPE)                                                                      \
    static void nonfinite_##type(const struct fake_launch *launch, const void *parameter)          \
    {                                                                                              \
        nonfinite(launch, parameter, GRADD_##TYPE);                                                \
    }
FLOATS(NONFINITE)

static const struct fake_kernel kernels[] = {
#define REDUCE_ROW(type, TYPE, op, OP)                                                             \
    {"gradd_reduce_" #type "_" #op, sizeof(struct cuda_reduce_params), reduce_##type##_##op},
#define REDUCE_TYPE_ROWS(type, TYPE) OPS(REDUCE_ROW, type, TYPE)
    TYPES(REDUCE_TYPE_ROWS)
#define NONFINITE_ROW(type, TYPE)                                                                  \
    {"gradd_nonfinite_" #type, sizeof(struct cuda_nonfinite_params), nonfinite_##type},
        FLOATS(NONFINITE_ROW){"gradd_copy", sizeof(struct cuda_copy_params), copy},
};

const struct fake_kernel *fake_kernel_find(const char *name)
{
    for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++)
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    return NULL;
}
