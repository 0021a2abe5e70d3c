/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A world of one: every op is a copy, scaled where a factor is given.
 *
 * Invariant: the result is what the worker would give for one rank, so that a program may count on
 * it whether it was launched or just started. Factors are applied one after the other: floating
 * types in their own precision (half types in float32, rounded once at the end), integers in
 * double, truncated and saturating after each factor.
 */
#include <math.h>
#include <string.h>

#include "context.h"
#include "cuda.h"
#include "finite.h"
#include "half.h"

/* ------------------------------------------------------------------ scaling */

struct integer_range {
    double low, beyond; /* beyond: the first value above that a double can hold */
    int64_t low_int, high_int;
};

static int64_t scale_integer(int64_t value, double factor, const struct integer_range *range)
{
    if (factor == 1)
        return value;
    double scaled = trunc((double)value * factor);
    if (scaled <= range->low)
        return range->low_int;
    return scaled >= range->beyond ? range->high_int : (int64_t)scaled;
}

#define SCALE_FLOATS(name, type, wide, widen, narrow)                                              \
    static void name(const void *in, void *out, size_t n, double pre, double post)                 \
    {                                                                                              \
        for (size_t i = 0; i < n; i++) {                                                           \
            type element;                                                                          \
            memcpy(&element, (const uint8_t *)in + i * sizeof element, sizeof element);            \
            wide value = widen(element);                                                           \
            if (pre != 1)                                                                          \
                value *= (wide)pre;                                                                \
            if (post != 1)                                                                         \
                value *= (wide)post;                                                               \
            element = narrow(value);                                                               \
            memcpy((uint8_t *)out + i * sizeof element, &element, sizeof element);                 \
        }                                                                                          \
    }

#define SCALE_INTEGERS(name, type, low, high)                                                      \
    static void name(const void *in, void *out, size_t n, double pre, double post)                 \
    {                                                                                              \
        const struct integer_range range = {(double)(low), (double)(high), (low), (high)};         \
        for (size_t i = 0; i < n; i++) {                                                           \
            type element;                                                                          \
            memcpy(&element, (const uint8_t *)in + i * sizeof element, sizeof element);            \
            int64_t value = scale_integer(element, pre, &range);                                   \
            element = (type)scale_integer(value, post, &range);                                    \
            memcpy((uint8_t *)out + i * sizeof element, &element, sizeof element);                 \
        }                                                                                          \
    }

SCALE_FLOATS(scale_f32, float, float, , )
SCALE_FLOATS(scale_f64, double, double, , )
SCALE_FLOATS(scale_f16, uint16_t, float, float_of_f16, f16_of_float)
SCALE_FLOATS(scale_bf16, uint16_t, float, float_of_bf16, bf16_of_float)
SCALE_INTEGERS(scale_i8, int8_t, INT8_MIN, INT8_MAX)
SCALE_INTEGERS(scale_u8, uint8_t, 0, UINT8_MAX)
SCALE_INTEGERS(scale_i32, int32_t, INT32_MIN, INT32_MAX)
SCALE_INTEGERS(scale_i64, int64_t, INT64_MIN, INT64_MAX)

static void (*const scale[])(const void *in, void *out, size_t n, double pre, double post) = {
    [GRADD_I8] = scale_i8,   [GRADD_U8] = scale_u8,     [GRADD_I32] = scale_i32,
    [GRADD_I64] = scale_i64, [GRADD_F16] = scale_f16,   [GRADD_F32] = scale_f32,
    [GRADD_F64] = scale_f64, [GRADD_BF16] = scale_bf16,
};

uint64_t solo_count_nonfinite(const struct gradd_op *request)
{
    return finite_count(request->dtype, request->in, request->count);
}

void solo_reduce(const struct gradd_op *request, const struct op_shape *shape)
{
    if (shape->prescale != 1 || shape->postscale != 1)
        scale[request->dtype](request->in, request->out, request->count, shape->prescale,
                              shape->postscale);
    else if (request->out != request->in && shape->in_bytes)
        memcpy(request->out, request->in, shape->in_bytes);
}

/* ------------------------------------------------------------------ kinds */

static int copy_if_it_fits(const struct gradd_op *request, const struct op_shape *shape,
                           struct op *op, const char **out_text)
{
    if (request->count > request->out_capacity) {
        *out_text = "the elements of all ranks do not fit into out_capacity";
        return GRADD_ERR_INVALID;
    }
    if (request->in != request->out && shape->in_bytes)
        memcpy(request->out, request->in, shape->in_bytes);
    return op_set_counts(op, &request->count, 1) < 0 ? GRADD_ERR_NO_MEMORY : GRADD_OK;
}

static int set_result(struct op *op, uint64_t result)
{
    return op_set_counts(op, &result, 1) < 0 ? GRADD_ERR_NO_MEMORY : GRADD_OK;
}

/* The only set of a world of one is {0}; asking for it again gives the same id. */
static int add_set(struct gradd *g, struct op *op, const struct op_shape *shape,
                   const char **out_text)
{
    if (shape->counts[0] != 0) {
        *out_text = "a process set of a world of one can contain rank 0 only";
        return GRADD_ERR_INVALID;
    }
    return set_result(op, g->n_sets > 0 ? g->sets[0].id : ++g->n_sets_made);
}

static int remove_set(const struct gradd *g, const struct op *op, const char **out_text)
{
    if (context_find_set(g, op->set.id))
        return GRADD_OK;
    *out_text = "there is no such process set";
    return GRADD_ERR_INVALID;
}

int solo_run(struct gradd *g, struct op *op, const struct gradd_op *request,
             const struct op_shape *shape, const char **out_text)
{
    if (op->cuda)
        return cuda_alone_run(g, op, request, shape, out_text);
    switch ((enum gradd_kind)request->kind) {
    case GRADD_ALLREDUCE:
    case GRADD_REDUCE_SCATTER:
        if (request->check_finite)
            op->nonfinite = solo_count_nonfinite(request);
        solo_reduce(request, shape);
        return GRADD_OK;
    case GRADD_BROADCAST:
        if (shape->out_bytes && request->out != request->in)
            memcpy(request->out, request->in, shape->in_bytes);
        return GRADD_OK;
    case GRADD_ALLGATHER:
    case GRADD_ALLTOALL:
        return copy_if_it_fits(request, shape, op, out_text);
    case GRADD_BARRIER:
        return GRADD_OK;
    case GRADD_SET_ADD:
        return add_set(g, op, shape, out_text);
    case GRADD_SET_REMOVE:
        return remove_set(g, op, out_text);
    case GRADD_JOIN:
        return set_result(op, 0);
    }
    *out_text = "an unknown kind of collective";
    return GRADD_ERR_INTERNAL;
}
