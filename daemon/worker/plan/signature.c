/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/plan/signature.h"

#include <stdio.h>
#include <string.h>

#include "dtype.h"

const char *kind_name(enum gradd_kind kind)
{
    switch (kind) {
    case GRADD_ALLREDUCE:
        return "all-reduce";
    case GRADD_BROADCAST:
        return "broadcast";
    case GRADD_ALLGATHER:
        return "all-gather";
    case GRADD_REDUCE_SCATTER:
        return "reduce-scatter";
    case GRADD_ALLTOALL:
        return "all-to-all";
    case GRADD_BARRIER:
        return "barrier";
    case GRADD_SET_ADD:
        return "add process set";
    case GRADD_SET_REMOVE:
        return "remove process set";
    case GRADD_JOIN:
        return "join";
    }
    return "unknown kind";
}

const char *redop_name(enum gradd_redop redop)
{
    switch (redop) {
    case GRADD_SUM:
        return "sum";
    case GRADD_PROD:
        return "product";
    case GRADD_MAX:
        return "max";
    case GRADD_MIN:
        return "min";
    case GRADD_AVG:
        return "average";
    }
    return "unknown operator";
}

static const char *const dtype_names[] = {
    [GRADD_I8] = "int8",     [GRADD_U8] = "uint8",      [GRADD_I32] = "int32",
    [GRADD_I64] = "int64",   [GRADD_F16] = "float16",   [GRADD_F32] = "float32",
    [GRADD_F64] = "float64", [GRADD_BF16] = "bfloat16",
};

const char *dtype_name(enum gradd_dtype dtype)
{
    return element_size((int)dtype) ? dtype_names[dtype] : "unknown type";
}

size_t dtype_bytes(enum gradd_dtype dtype)
{
    return element_size((int)dtype);
}

/* ------------------------------------------------------------------ agreement */

/* Which parts of a signature must be equal on all ranks, per kind. */
enum part {
    PART_DTYPE = 1,
    PART_COUNT = 2,
    PART_REDOP = 4,
    PART_ROOT = 8,
    PART_SCALE = 16,
    PART_COUNTS = 32,
    PART_SHAPE = 64,
    PART_INNER_SHAPE = 128, /* all dimensions but the first */
    PART_MEMORY = 256,      /* device or host */
};

static const unsigned parts_of[] = {
    [GRADD_ALLREDUCE] =
        PART_DTYPE | PART_COUNT | PART_REDOP | PART_SCALE | PART_SHAPE | PART_MEMORY,
    [GRADD_BROADCAST] = PART_DTYPE | PART_COUNT | PART_ROOT | PART_SHAPE | PART_MEMORY,
    [GRADD_ALLGATHER] = PART_DTYPE | PART_INNER_SHAPE | PART_MEMORY,
    [GRADD_REDUCE_SCATTER] =
        PART_DTYPE | PART_COUNT | PART_REDOP | PART_SCALE | PART_COUNTS | PART_SHAPE | PART_MEMORY,
    [GRADD_ALLTOALL] = PART_DTYPE | PART_INNER_SHAPE | PART_MEMORY,
    [GRADD_BARRIER] = PART_MEMORY,
    [GRADD_SET_ADD] = PART_COUNTS,
    [GRADD_SET_REMOVE] = PART_ROOT,
    [GRADD_JOIN] = 0,
};

static bool counts_equal(const struct signature *a, const struct signature *b)
{
    return a->n_counts == b->n_counts &&
           (a->n_counts == 0 || memcmp(a->counts, b->counts, a->n_counts * sizeof *a->counts) == 0);
}

/* Equal from dimension `first` on, or not known on one side. */
static bool shapes_equal(const struct signature *a, const struct signature *b, size_t first)
{
    if (a->n_dims == 0 || b->n_dims == 0)
        return true;
    return a->n_dims == b->n_dims &&
           (a->n_dims <= first ||
            memcmp(a->dims + first, b->dims + first, (a->n_dims - first) * sizeof *a->dims) == 0);
}

bool signature_matches(const struct signature *a, const struct signature *b)
{
    if (a->kind != b->kind)
        return false;
    unsigned parts = parts_of[a->kind];
    return (!(parts & PART_DTYPE) || a->dtype == b->dtype) &&
           (!(parts & PART_COUNT) || a->count == b->count) &&
           (!(parts & PART_REDOP) || a->redop == b->redop) &&
           (!(parts & PART_ROOT) || a->root == b->root) &&
           (!(parts & PART_SCALE) ||
            (a->prescale == b->prescale && a->postscale == b->postscale)) &&
           (!(parts & PART_COUNTS) || counts_equal(a, b)) &&
           (!(parts & PART_SHAPE) || shapes_equal(a, b, 0)) &&
           (!(parts & PART_INNER_SHAPE) || shapes_equal(a, b, 1)) &&
           (!(parts & PART_MEMORY) || a->is_device == b->is_device);
}

static void describe_counts(const struct signature *s, char *text, size_t bytes)
{
    int used = snprintf(text, bytes, "%s counts [", kind_name(s->kind));
    for (size_t i = 0; i < s->n_counts && used >= 0 && (size_t)used + 32 < bytes; i++)
        used += snprintf(text + used, bytes - (size_t)used, "%s%llu", i ? "," : "",
                         (unsigned long long)s->counts[i]);
    if (used >= 0 && (size_t)used + 1 < bytes)
        snprintf(text + used, bytes - (size_t)used, "]");
}

/* "float32[17,23]", or "float32[391]" when no shape is known. */
static void describe_tensor(const struct signature *s, char *text, size_t bytes)
{
    const uint64_t *dims = s->n_dims ? s->dims : &s->count;
    const size_t n = s->n_dims ? s->n_dims : 1;
    int used = snprintf(text, bytes, "%s[", dtype_name(s->dtype));
    for (size_t i = 0; i < n && used >= 0 && (size_t)used + 32 < bytes; i++)
        used += snprintf(text + used, bytes - (size_t)used, "%s%llu", i ? "," : "",
                         (unsigned long long)dims[i]);
    if (used >= 0 && (size_t)used + 1 < bytes)
        snprintf(text + used, bytes - (size_t)used, "]");
}

const char *signature_describe(const struct signature *a, const struct signature *b, char *text,
                               size_t bytes)
{
    unsigned parts = parts_of[a->kind];
    if (a->kind != b->kind) {
        int used = snprintf(text, bytes, "%s ", kind_name(a->kind));
        describe_tensor(a, text + used, bytes - (size_t)used);
    } else if ((parts & PART_DTYPE && a->dtype != b->dtype) ||
               (parts & PART_COUNT && a->count != b->count) ||
               (parts & PART_SHAPE && !shapes_equal(a, b, 0)) ||
               (parts & PART_INNER_SHAPE && !shapes_equal(a, b, 1)))
        describe_tensor(a, text, bytes);
    else if (parts & PART_REDOP && a->redop != b->redop)
        snprintf(text, bytes, "operator %s", redop_name(a->redop));
    else if (parts & PART_ROOT && a->root != b->root)
        snprintf(text, bytes, "root %d", a->root);
    else if (parts & PART_COUNTS && !counts_equal(a, b))
        describe_counts(a, text, bytes);
    else if (parts & PART_MEMORY && a->is_device != b->is_device)
        snprintf(text, bytes, "%s", a->is_device ? "device memory" : "host memory");
    else
        snprintf(text, bytes, "prescale %.17g postscale %.17g", a->prescale, a->postscale);
    return text;
}

/* ------------------------------------------------------------------ one rank by itself */

static bool sum_counts(const struct signature *s, uint64_t *out_sum)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < s->n_counts; i++)
        if (__builtin_add_overflow(sum, s->counts[i], &sum))
            return false;
    *out_sum = sum;
    return true;
}

const char *signature_check(const struct signature *s, uint32_t n_ranks)
{
    uint64_t sum, bytes;
    if ((unsigned)s->kind > GRADD_JOIN)
        return "an unknown kind of collective";
    if (parts_of[s->kind] & PART_DTYPE && !dtype_bytes(s->dtype))
        return "an unknown element type";
    if (__builtin_mul_overflow(s->count, (uint64_t)8, &bytes) ||
        __builtin_mul_overflow(s->out_capacity, (uint64_t)8, &bytes))
        return "a count beyond all memory";
    if (parts_of[s->kind] & PART_REDOP && (unsigned)s->redop > GRADD_AVG)
        return "an unknown reduction operator";
    if (s->kind == GRADD_REDUCE_SCATTER || s->kind == GRADD_ALLTOALL) {
        if (s->n_counts != n_ranks)
            return "counts that are not one per rank";
        if (!sum_counts(s, &sum) || sum != s->count)
            return "counts whose sum is not the tensor's count";
    }
    if (s->n_dims > PLAN_DIMS_MAX)
        return "too many dimensions";
    if (!s->group_size != !s->group[0])
        return "a group without a name or without a size";
    return NULL;
}
