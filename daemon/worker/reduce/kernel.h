/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop of the vectorised variants: one pass over memory. A step of some 256 bytes of all the
 * inputs is read and combined in registers before its result is written to any output, so outputs
 * may equal inputs, and nothing is read or written twice.
 *
 * Included by a unit that has defined the vectors (vector.h)
 * and wants one function, kernel_run().
 *
 * Integer averages and scaled integers are left to the scalar reference: they are rare, and their
 * 64-bit division and saturation would gain little.
 */
#ifndef GRADD_REDUCE_KERNEL_H
#define GRADD_REDUCE_KERNEL_H

#include "reduce.h"
#include "vector.h"

/* The accumulators of a step stay in registers: constant loops over them are unrolled. */
#define MAX_ACCUMULATORS 8
#define STEP_BYTES       256
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif
/* Half type loops have many instructions a line, which keeps Intel's cores (measured: Sapphire
 * Rapids) from running far enough ahead by themselves. AMD's (Zen 4) need no help, and lose up to a
 * third by it. */
#define PREFETCH_BYTES 2048
#define LINE_BYTES     64

/* What is constant in a loop. n_in and n_out 0: any number, taken from the reduction. */
struct shape {
    enum gradd_dtype dtype;
    enum gradd_redop op;
    unsigned n_in, n_out;
    bool is_plain; /* neither factors nor zero operands */
};

/* What a call's loop decides once. */
struct choices {
    double divisor;
    double inverse; /* of a divisor that is a power of two, which is exact and faster; 0: divide */
    bool prefetches;
};

INLINE struct choices choose(struct shape s, const struct reduction *r)
{
    const bool is_power_of_two = (r->divisor & (r->divisor - 1)) == 0 && r->divisor != 0;

    return (struct choices){
        .divisor = r->divisor,
        .inverse = is_power_of_two ? 1.0 / r->divisor : 0,
        .prefetches = is_half(s.dtype) && __builtin_cpu_is("intel"),
    };
}

INLINE struct block average(struct shape s, const struct choices *c, struct block sum)
{
    if (c->inverse != 0)
        return block_multiply(s.dtype, sum, c->inverse);
    return block_divide(s.dtype, sum, c->divisor);
}

/* One input's part of a step, combined into acc (i > 0) or starting it. */
INLINE void add_input(struct shape s, const struct reduction *r, const struct choices *c,
                      const char *in, unsigned i, size_t n_blocks, struct block *acc)
{
    if (is_half(s.dtype) && n_blocks > 1 && c->prefetches) {
        for (size_t line = 0; line < n_blocks * VECTOR_BYTES; line += LINE_BYTES)
            __builtin_prefetch(in + PREFETCH_BYTES + line);
    }
    UNROLL
    for (size_t b = 0; b < n_blocks; b++) {
        struct block x = block_load(s.dtype, in + b * VECTOR_BYTES);

        /* Multiplying by 1 changes nothing, so that one loop serves with and without factors. */
        if (!s.is_plain && is_float(s.dtype))
            x = block_multiply(s.dtype, x, r->prescale);
        acc[b] = i == 0 ? x : block_combine(s.dtype, s.op, acc[b], x);
    }
}

INLINE void finish(struct shape s, const struct reduction *r, const struct choices *c,
                   size_t n_blocks, struct block *acc)
{
    const struct block zeros = {0};

    UNROLL
    for (size_t b = 0; b < n_blocks; b++) {
        /* The second zero operand changes nothing any more, whatever the operator. */
        if (!s.is_plain && r->n_zero > 0)
            acc[b] = block_combine(s.dtype, s.op, acc[b], zeros);
        if (s.op == GRADD_AVG && is_float(s.dtype))
            acc[b] = average(s, c, acc[b]);
        if (!s.is_plain && is_float(s.dtype))
            acc[b] = block_multiply(s.dtype, acc[b], r->postscale);
        if (!s.is_plain && s.dtype == GRADD_BF16)
            acc[b] = (struct block){canonical_nans(acc[b].a), canonical_nans(acc[b].b)};
        acc[b] = block_narrow(s.dtype, acc[b]);
    }
}

INLINE void step(struct shape s, const struct reduction *r, const void *const *in, void *const *out,
                 const struct choices *c, size_t at, size_t n_blocks)
{
    const unsigned n_in = s.n_in != 0 ? s.n_in : r->n_in;
    const unsigned n_out = s.n_out != 0 ? s.n_out : r->n_out;
    struct block acc[MAX_ACCUMULATORS];

    add_input(s, r, c, (const char *)in[0] + at, 0, n_blocks, acc);
    for (unsigned i = 1; i < n_in; i++)
        add_input(s, r, c, (const char *)in[i] + at, i, n_blocks, acc);
    finish(s, r, c, n_blocks, acc);
    for (unsigned o = 0; o < n_out; o++) {
        char *p = (char *)out[o] + at;

        UNROLL
        for (size_t b = 0; b < n_blocks; b++)
            block_store(s.dtype, p + b * VECTOR_BYTES, acc[b]);
    }
}

INLINE size_t step_blocks(enum gradd_dtype dtype)
{
    const size_t n = STEP_BYTES / VECTOR_BYTES;
    const size_t most = is_half(dtype) ? MAX_ACCUMULATORS / 2 : MAX_ACCUMULATORS;

    return n < most ? n : most;
}

INLINE void loop(struct shape s, const struct reduction *r, const void *const *in, void *const *out,
                 size_t begin, size_t end)
{
    const size_t step_bytes = step_blocks(s.dtype) * VECTOR_BYTES;
    const size_t end_bytes = end * element_size(s.dtype);
    const struct choices c = choose(s, r);
    size_t at = begin * element_size(s.dtype);

    for (; end_bytes - at >= step_bytes; at += step_bytes)
        step(s, r, in, out, &c, at, step_blocks(s.dtype));
    for (; end_bytes - at >= VECTOR_BYTES; at += VECTOR_BYTES)
        step(s, r, in, out, &c, at, 1);
    if (at < end_bytes)
        reduce_run_scalar(r, at / element_size(s.dtype), end);
}

/* The usual numbers of local ranks, in place: the pointers stay in registers. */
INLINE void loop_in_place(struct shape s, const struct reduction *r, size_t begin, size_t end)
{
    const void *in[4];
    void *out[4];

    for (unsigned i = 0; i < s.n_in; i++) {
        in[i] = r->in[i];
        out[i] = r->out[i];
    }
    loop(s, r, in, out, begin, end);
}

INLINE void run_typed(enum gradd_dtype dtype, enum gradd_redop op, const struct reduction *r,
                      size_t begin, size_t end)
{
    const bool has_factors = r->prescale != 1 || r->postscale != 1;
    const bool is_plain = !has_factors && r->n_zero == 0;

    if (!is_float(dtype) && (has_factors || op == GRADD_AVG))
        reduce_run_scalar(r, begin, end);
    else if (is_plain && r->n_in == 2 && r->n_out == 2)
        loop_in_place((struct shape){dtype, op, 2, 2, true}, r, begin, end);
    else if (is_plain && r->n_in == 4 && r->n_out == 4)
        loop_in_place((struct shape){dtype, op, 4, 4, true}, r, begin, end);
    else if (is_plain && (op == GRADD_SUM || op == GRADD_AVG))
        loop((struct shape){dtype, op, 0, 0, true}, r, r->in, r->out, begin, end);
    else
        loop((struct shape){dtype, op, 0, 0, false}, r, r->in, r->out, begin, end);
}

INLINE void run_op(enum gradd_dtype dtype, const struct reduction *r, size_t begin, size_t end)
{
    switch (r->redop) {
    case GRADD_SUM:
        return run_typed(dtype, GRADD_SUM, r, begin, end);
    case GRADD_PROD:
        return run_typed(dtype, GRADD_PROD, r, begin, end);
    case GRADD_MAX:
        return run_typed(dtype, GRADD_MAX, r, begin, end);
    case GRADD_MIN:
        return run_typed(dtype, GRADD_MIN, r, begin, end);
    case GRADD_AVG:
        return run_typed(dtype, GRADD_AVG, r, begin, end);
    }
}

/* kernel_run_<name>(): all operators of one type, one function so that each is optimised alone. */
#define DEFINE_KERNEL(name, dtype)                                                                 \
    static __attribute__((noinline)) void kernel_run_##name(const struct reduction *r,             \
                                                            size_t begin, size_t end)              \
    {                                                                                              \
        run_op(dtype, r, begin, end);                                                              \
    }

DEFINE_KERNEL(i8, GRADD_I8)
DEFINE_KERNEL(u8, GRADD_U8)
DEFINE_KERNEL(i32, GRADD_I32)
DEFINE_KERNEL(i64, GRADD_I64)
DEFINE_KERNEL(f16, GRADD_F16)
DEFINE_KERNEL(f32, GRADD_F32)
DEFINE_KERNEL(f64, GRADD_F64)
DEFINE_KERNEL(bf16, GRADD_BF16)

INLINE void kernel_run(const struct reduction *r, size_t begin, size_t end)
{
    switch (r->dtype) {
    case GRADD_I8:
        return kernel_run_i8(r, begin, end);
    case GRADD_U8:
        return kernel_run_u8(r, begin, end);
    case GRADD_I32:
        return kernel_run_i32(r, begin, end);
    case GRADD_I64:
        return kernel_run_i64(r, begin, end);
    case GRADD_F16:
        return kernel_run_f16(r, begin, end);
    case GRADD_F32:
        return kernel_run_f32(r, begin, end);
    case GRADD_F64:
        return kernel_run_f64(r, begin, end);
    case GRADD_BF16:
        return kernel_run_bf16(r, begin, end);
    }
}

#endif
