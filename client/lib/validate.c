/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is a request sound by itself? Everything that can be said without the other ranks is said here,
 * before anything is sent.
 */
#include <math.h>
#include <string.h>

#include "context.h"
#include "dtype.h"

enum { NAME_MAX_BYTES = 255 };

static const char *const kind_names[] = {
    [GRADD_ALLREDUCE] = "all-reduce",
    [GRADD_BROADCAST] = "broadcast",
    [GRADD_ALLGATHER] = "all-gather",
    [GRADD_REDUCE_SCATTER] = "reduce-scatter",
    [GRADD_ALLTOALL] = "all-to-all",
    [GRADD_BARRIER] = "barrier",
    [GRADD_SET_ADD] = "adding a process set",
    [GRADD_SET_REMOVE] = "removing a process set",
    [GRADD_JOIN] = "join",
};

static bool moves_data(int kind)
{
    return kind <= GRADD_ALLTOALL;
}

static bool reduces(int kind)
{
    return kind == GRADD_ALLREDUCE || kind == GRADD_REDUCE_SCATTER;
}

size_t gradd_dtype_size(int dtype)
{
    return element_size(dtype);
}

int validate_struct(void *dst, size_t known_bytes, const void *src, size_t first_bytes,
                    const char *what)
{
    size_t bytes;
    memcpy(&bytes, src, sizeof bytes);
    if (bytes < first_bytes || bytes > 4096)
        return error_set(GRADD_ERR_INVALID,
                         "%s: struct_size is %zu, at least %zu is expected: set it to sizeof", what,
                         bytes, first_bytes);
    const uint8_t *from = src;
    for (size_t at = known_bytes; at < bytes; at++)
        if (from[at])
            return error_set(GRADD_ERR_INVALID,
                             "%s: a field at byte %zu is set that libgradd %s does not know", what,
                             at, GRADD_VERSION);
    memcpy(dst, src, bytes < known_bytes ? bytes : known_bytes);
    return 0;
}

uint32_t validate_set_size(const struct gradd *g, uint32_t set)
{
    if (set == 0)
        return (uint32_t)g->identity.size;
    const struct process_set *found = context_find_set(g, set);
    return found ? found->size : 0;
}

static int my_index(const struct gradd *g, uint32_t set)
{
    return set == 0 ? g->identity.rank : context_find_set(g, set)->index;
}

/* ------------------------------------------------------------------ parts of the check */

static int check_names(const struct gradd_op *op)
{
    if ((unsigned)op->kind > GRADD_JOIN)
        return error_set(GRADD_ERR_INVALID, "kind %d is no enum gradd_kind", op->kind);
    if (!op->name || !op->name[0])
        return error_set(GRADD_ERR_INVALID, "%s: the op has no name", kind_names[op->kind]);
    size_t length = strnlen(op->name, NAME_MAX_BYTES + 1);
    if (length > NAME_MAX_BYTES)
        return error_set(GRADD_ERR_INVALID, "\"%.40s…\": a name has at most %d bytes", op->name,
                         NAME_MAX_BYTES);
    if (moves_data(op->kind) && !gradd_dtype_size(op->dtype))
        return error_set(GRADD_ERR_INVALID, "\"%s\": dtype %d is no enum gradd_dtype", op->name,
                         op->dtype);
    if (reduces(op->kind) && (unsigned)op->redop > GRADD_AVG)
        return error_set(GRADD_ERR_INVALID, "\"%s\": redop %d is no enum gradd_redop", op->name,
                         op->redop);
    return 0;
}

static int check_scales(const struct gradd_op *op, struct op_shape *out)
{
    out->prescale = op->prescale == 0 ? 1 : op->prescale;
    out->postscale = op->postscale == 0 ? 1 : op->postscale;
    if (!isfinite(out->prescale) || !isfinite(out->postscale))
        return error_set(GRADD_ERR_INVALID, "\"%s\": scales %g and %g: a factor is finite",
                         op->name, op->prescale, op->postscale);
    if (!reduces(op->kind) && op->check_finite)
        return error_set(GRADD_ERR_INVALID,
                         "\"%s\": check_finite is for all-reduce and reduce-scatter, not for %s",
                         op->name, kind_names[op->kind]);
    if (!reduces(op->kind) && (out->prescale != 1 || out->postscale != 1))
        return error_set(GRADD_ERR_INVALID,
                         "\"%s\": scales are for all-reduce and reduce-scatter, not for %s",
                         op->name, kind_names[op->kind]);
    return 0;
}

static int check_set(const struct gradd *g, const struct gradd_op *op)
{
    if (op->set == 0)
        return 0;
    const struct process_set *set = context_find_set(g, op->set);
    if (!set)
        return error_set(GRADD_ERR_INVALID, "\"%s\": there is no process set %u", op->name,
                         op->set);
    if (set->index < 0)
        return error_set(GRADD_ERR_INVALID, "\"%s\": rank %d is not in process set %u", op->name,
                         g->identity.rank, op->set);
    return 0;
}

/* Even parts, the remainder to the lowest ranks. */
static void divide(uint64_t count, uint32_t n, uint64_t *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = count / n + (i < count % n);
}

static int check_counts(const struct gradd *g, const struct gradd_op *op, uint64_t *even,
                        struct op_shape *out)
{
    if (op->kind == GRADD_SET_ADD) {
        if (!op->counts || op->count == 0 || op->count > (uint64_t)g->identity.size)
            return error_set(GRADD_ERR_INVALID,
                             "\"%s\": a process set needs its ranks in counts and their number in "
                             "count (1 to %d)",
                             op->name, g->identity.size);
        out->counts = op->counts;
        out->n_counts = op->count;
        return 0;
    }
    if (op->kind != GRADD_REDUCE_SCATTER && op->kind != GRADD_ALLTOALL)
        return 0;
    uint32_t n = validate_set_size(g, op->set);
    if (!op->counts)
        divide(op->count, n, even);
    out->counts = op->counts ? op->counts : even;
    out->n_counts = n;
    uint64_t sum = 0;
    bool is_over = false;
    for (uint32_t i = 0; i < n; i++)
        is_over |= __builtin_add_overflow(sum, out->counts[i], &sum);
    if (is_over || sum != op->count)
        return error_set(GRADD_ERR_INVALID,
                         "\"%s\": counts of %u ranks add up to %llu elements, count is %llu",
                         op->name, n, (unsigned long long)sum, (unsigned long long)op->count);
    return 0;
}

static int check_bytes(const struct gradd *g, const struct gradd_op *op, struct op_shape *out)
{
    uint64_t element = gradd_dtype_size(op->dtype);
    uint64_t n_out = op->count;
    bool is_root = op->root == g->identity.rank;
    if (op->kind == GRADD_ALLGATHER || op->kind == GRADD_ALLTOALL)
        n_out = op->out_capacity;
    if (op->kind == GRADD_REDUCE_SCATTER)
        n_out = out->counts[my_index(g, op->set)];
    if (op->count > INT64_MAX / element || n_out > INT64_MAX / element)
        return error_set(GRADD_ERR_INVALID, "\"%s\": %llu elements are beyond all memory", op->name,
                         (unsigned long long)(op->count > n_out ? op->count : n_out));
    out->out_count = n_out;
    out->in_bytes = op->count * element;
    out->out_bytes = n_out * element;
    if (op->kind == GRADD_BROADCAST && !is_root)
        out->in_bytes = 0;
    if (op->kind == GRADD_BROADCAST && is_root && !op->out)
        out->out_bytes = 0;
    return 0;
}

static int check_pointers(const struct gradd_op *op, const struct op_shape *shape)
{
    uintptr_t in = (uintptr_t)op->in, out = (uintptr_t)op->out;
    uint64_t in_bytes = shape->in_bytes, out_bytes = shape->out_bytes;
    if ((in_bytes && !in) || (out_bytes && !out))
        return error_set(GRADD_ERR_INVALID, "\"%s\": %s is NULL, %llu bytes are expected there",
                         op->name, in_bytes && !in ? "in" : "out",
                         (unsigned long long)(in_bytes && !in ? in_bytes : out_bytes));
    if (in + in_bytes < in || out + out_bytes < out)
        return error_set(GRADD_ERR_INVALID, "\"%s\": a buffer ends beyond the address space",
                         op->name);
    if (in_bytes && out_bytes && in != out && in < out + out_bytes && out < in + in_bytes)
        return error_set(GRADD_ERR_INVALID,
                         "\"%s\": in and out overlap without being equal (%p and %p)", op->name,
                         op->in, op->out);
    return 0;
}

int validate_op(const struct gradd *g, const struct gradd_op *op, uint64_t *even,
                struct op_shape *out)
{
    *out = (struct op_shape){0};
    int rc = check_names(op);
    if (rc == 0)
        rc = check_scales(op, out);
    if (rc == 0)
        rc = check_set(g, op);
    if (rc == 0)
        rc = check_counts(g, op, even, out);
    if (rc < 0 || !moves_data(op->kind))
        return rc;
    if (op->kind == GRADD_BROADCAST && (op->root < 0 || op->root >= g->identity.size))
        return error_set(GRADD_ERR_INVALID, "\"%s\": root %d is no rank of a job of %d", op->name,
                         op->root, g->identity.size);
    rc = check_bytes(g, op, out);
    return rc < 0 ? rc : check_pointers(op, out);
}
