/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/net/sums.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "worker/backend/net/schedule.h"
#include "worker/plan/signature.h"
#include "worker/reduce/convert.h"
#include "worker/reduce/reduce.h"

static bool is_half(enum gradd_dtype dtype)
{
    return dtype == GRADD_F16 || dtype == GRADD_BF16;
}

static bool is_reduced(const struct backend_op *op)
{
    return op->kind == GRADD_ALLREDUCE || op->kind == GRADD_REDUCE_SCATTER;
}

void sum_init(struct sum *sum, const struct backend_op *op, uint32_t node, int wire,
              const void **in_out)
{
    const bool is_average = op->redop == GRADD_AVG;
    *sum = (struct sum){
        .op = op,
        .size = (uint32_t)dtype_bytes(op->dtype),
        .wire_size = schedule_wire_bytes(op, wire),
        .prescale = op->prescale,
        .first_redop = is_average ? GRADD_SUM : op->redop,
        .last_redop = op->redop,
        .in = in_out,
        .out = (void **)(in_out + op->n_ranks),
    };
    if (is_reduced(op) && sum->wire_size != sum->size) {
        sum->form = op->dtype == GRADD_F32 ? SUM_HALF : SUM_WIDE;
        sum->wire = wire;
    }
    if (is_average && (is_half(op->dtype) || sum->form == SUM_HALF)) {
        sum->prescale /= op->n_ranks;
        sum->last_redop = GRADD_SUM;
    }
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        if (op->parts[i].node != node)
            continue;
        if (op->parts[i].in.base)
            sum->in[sum->n_in++] = op->parts[i].in.base;
        if (op->parts[i].out.base)
            sum->out[sum->n_out++] = op->parts[i].out.base;
    }
}

int sum_scratch_reserve(struct sum_scratch *scratch, uint32_t n)
{
    if (!scratch->a)
        scratch->a = malloc(SUM_SCRATCH_BYTES);
    if (!scratch->b)
        scratch->b = malloc(SUM_SCRATCH_BYTES);
    if (!scratch->a || !scratch->b)
        return -ENOMEM;
    if (n <= scratch->capacity)
        return 0;
    const void **in = realloc(scratch->in, n * sizeof *in);
    if (in)
        scratch->in = in;
    void **out = realloc(scratch->out, n * sizeof *out);
    if (out)
        scratch->out = out;
    if (!in || !out)
        return -ENOMEM;
    scratch->capacity = n;
    return 0;
}

void sum_scratch_deinit(struct sum_scratch *scratch)
{
    free(scratch->a);
    free(scratch->b);
    free(scratch->in);
    free(scratch->out);
    *scratch = (struct sum_scratch){0};
}

/* ------------------------------------------------------------------ local inputs */

static void count_nonfinite(const struct sum *sum, uint64_t begin, uint64_t count)
{
    for (uint32_t i = 0; i < sum->n_in; i++) {
        const uint8_t *in = (const uint8_t *)sum->in[i] + begin * sum->size;
        uint64_t n = reduce_count_nonfinite(sum->op->dtype, in, count);
        if (n > 0)
            atomic_fetch_add_explicit(&sum->op->nonfinite[i], n, memory_order_relaxed);
    }
}

/* Local inputs behind `first` (may be NULL): how many there are in scratch->in. */
static uint32_t gather_inputs(const struct sum *sum, struct sum_scratch *scratch, const void *first,
                              uint64_t begin)
{
    uint32_t n = 0;
    if (first)
        scratch->in[n++] = first;
    for (uint32_t i = 0; i < sum->n_in; i++)
        scratch->in[n++] = (const uint8_t *)sum->in[i] + begin * sum->size;
    return n;
}

static uint32_t gather_outputs(const struct sum *sum, struct sum_scratch *scratch, void *first,
                               uint64_t at)
{
    uint32_t n = 0;
    if (first)
        scratch->out[n++] = first;
    for (uint32_t i = 0; i < sum->n_out; i++)
        scratch->out[n++] = (uint8_t *)sum->out[i] + at * sum->size;
    return n;
}

/* Add scratch->in in the element type, scaled by `prescale`. */
static void add_up(const struct sum *sum, struct sum_scratch *scratch, uint32_t n_in,
                   double prescale, uint64_t count, void *to)
{
    void *out[1] = {to};
    const struct reduction r = {
        .dtype = sum->op->dtype,
        .redop = sum->first_redop,
        .n_in = n_in,
        .n_out = 1,
        .in = scratch->in,
        .out = out,
        .divisor = 1,
        .prescale = prescale,
        .postscale = 1,
    };
    reduce_run(&r, 0, count);
}

/* The same for the result, with all that comes last, into scratch->out. */
static void add_up_last(const struct sum *sum, struct sum_scratch *scratch, uint32_t n_in,
                        uint64_t count, void *const *out, uint32_t n_out)
{
    const struct reduction r = {
        .dtype = sum->op->dtype,
        .redop = sum->last_redop,
        .n_in = n_in,
        .n_out = n_out,
        .in = scratch->in,
        .out = out,
        .n_zero = sum->op->n_joined,
        .divisor = sum->op->n_ranks,
        .prescale = 1,
        .postscale = sum->op->postscale,
    };
    if (n_out > 0)
        reduce_run(&r, 0, count);
}

/* Local inputs as int64, added to sums. */
static void add_wide(const struct sum *sum, struct sum_scratch *scratch, uint64_t begin,
                     uint64_t count, void *sums)
{
    for (uint32_t i = 0; i < sum->n_in; i++) {
        const void *in = (const uint8_t *)sum->in[i] + begin * sum->size;
        if (sum->prescale != 1) {
            scratch->in[0] = in;
            add_up(sum, scratch, 1, sum->prescale, count, scratch->b);
            in = scratch->b;
        }
        convert_add_int(sum->op->dtype, in, sums, count);
    }
}

void sum_local(const struct sum *sum, struct sum_scratch *scratch, uint64_t begin, uint64_t count,
               void *out_wire)
{
    if (sum->op->nonfinite)
        count_nonfinite(sum, begin, count);
    if (sum->n_in == 0 || sum->form == SUM_WIDE)
        memset(out_wire, 0, count * sum->wire_size);
    if (sum->n_in == 0)
        return;
    if (sum->form == SUM_WIDE) {
        add_wide(sum, scratch, begin, count, out_wire);
        return;
    }
    uint32_t n = gather_inputs(sum, scratch, NULL, begin);
    if (sum->form == SUM_PLAIN) {
        add_up(sum, scratch, n, sum->prescale, count, out_wire);
        return;
    }
    const void *whole = scratch->in[0];
    if (n > 1 || sum->prescale != 1) {
        add_up(sum, scratch, n, sum->prescale, count, scratch->a);
        whole = scratch->a;
    }
    convert_narrow((enum gradd_dtype)sum->wire, whole, out_wire, count);
}

/* ------------------------------------------------------------------ additions */

/* `partial` and the local inputs, ready to be added without a factor, in scratch->in. */
static uint32_t gather_partial(const struct sum *sum, struct sum_scratch *scratch,
                               const void *partial, uint64_t begin, uint64_t count)
{
    if (sum->n_in > 0 && sum->prescale != 1) {
        uint32_t n = gather_inputs(sum, scratch, NULL, begin);
        add_up(sum, scratch, n, sum->prescale, count, scratch->b);
        scratch->in[0] = partial;
        scratch->in[1] = scratch->b;
        return 2;
    }
    return gather_inputs(sum, scratch, partial, begin);
}

void sum_add(const struct sum *sum, struct sum_scratch *scratch, uint64_t begin, uint64_t count,
             void *wire)
{
    if (sum->n_in == 0)
        return;
    if (sum->op->nonfinite)
        count_nonfinite(sum, begin, count);
    switch (sum->form) {
    case SUM_WIDE:
        add_wide(sum, scratch, begin, count, wire);
        return;
    case SUM_PLAIN:
        add_up(sum, scratch, gather_partial(sum, scratch, wire, begin, count), 1, count, wire);
        return;
    case SUM_HALF:
        convert_widen((enum gradd_dtype)sum->wire, wire, scratch->a, count);
        add_up(sum, scratch, gather_partial(sum, scratch, scratch->a, begin, count), 1, count,
               scratch->a);
        convert_narrow((enum gradd_dtype)sum->wire, scratch->a, wire, count);
        return;
    }
}

/* The average of int64 sums, in place. */
static void divide_wide(const struct sum *sum, void *wire, uint64_t count)
{
    const void *in[1] = {wire};
    void *out[1] = {wire};
    const struct reduction r = {
        .dtype = GRADD_I64,
        .redop = GRADD_AVG,
        .n_in = 1,
        .n_out = 1,
        .in = in,
        .out = out,
        .divisor = sum->op->n_ranks,
        .prescale = 1,
        .postscale = 1,
    };
    reduce_run(&r, 0, count);
}

void sum_finish(const struct sum *sum, struct sum_scratch *scratch, uint64_t begin, uint64_t count,
                void *wire)
{
    uint32_t n, n_out;
    if (sum->op->nonfinite)
        count_nonfinite(sum, begin, count);
    switch (sum->form) {
    case SUM_WIDE:
        add_wide(sum, scratch, begin, count, wire);
        divide_wide(sum, wire, count);
        sum_store(sum, begin, count, wire);
        return;
    case SUM_PLAIN:
        n = gather_partial(sum, scratch, wire, begin, count);
        n_out = gather_outputs(sum, scratch, wire, begin);
        add_up_last(sum, scratch, n, count, scratch->out, n_out);
        return;
    case SUM_HALF:
        convert_widen((enum gradd_dtype)sum->wire, wire, scratch->a, count);
        n = gather_partial(sum, scratch, scratch->a, begin, count);
        scratch->out[0] = scratch->a;
        add_up_last(sum, scratch, n, count, scratch->out, 1);
        convert_narrow((enum gradd_dtype)sum->wire, scratch->a, wire, count);
        sum_store(sum, begin, count, wire);
        return;
    }
}

/* ------------------------------------------------------------------ results */

static void store_wide(const struct sum *sum, uint64_t count, const void *wire, void *out)
{
    convert_narrow_int(sum->op->dtype, wire, out, count);
    if (sum->op->postscale == 1)
        return;
    const void *in[1] = {out};
    void *outs[1] = {out};
    const struct reduction r = {
        .dtype = sum->op->dtype,
        .redop = GRADD_SUM,
        .n_in = 1,
        .n_out = 1,
        .in = in,
        .out = outs,
        .divisor = 1,
        .prescale = 1,
        .postscale = sum->op->postscale,
    };
    reduce_run(&r, 0, count);
}

static void store_one(const struct sum *sum, uint64_t count, const void *wire, void *out)
{
    switch (sum->form) {
    case SUM_PLAIN:
        if (out != wire) /* it was received right there */
            memcpy(out, wire, count * sum->size);
        return;
    case SUM_HALF:
        convert_widen((enum gradd_dtype)sum->wire, wire, out, count);
        return;
    case SUM_WIDE:
        store_wide(sum, count, wire, out);
        return;
    }
}

void sum_store(const struct sum *sum, uint64_t at, uint64_t count, const void *wire)
{
    for (uint32_t i = 0; i < sum->n_out; i++)
        store_one(sum, count, wire, (uint8_t *)sum->out[i] + at * sum->size);
}

/* Partial sums in float32: one after the other, which is the same order. */
static void combine_half(const struct sum *sum, struct sum_scratch *scratch,
                         const void *const *wires, uint32_t n, uint64_t count, void *const *out,
                         uint32_t n_out)
{
    const enum gradd_dtype wire = (enum gradd_dtype)sum->wire;
    convert_widen(wire, wires[0], scratch->a, count);
    for (uint32_t i = 1; i < n; i++) {
        convert_widen(wire, wires[i], scratch->b, count);
        scratch->in[0] = scratch->a;
        scratch->in[1] = scratch->b;
        if (i + 1 == n)
            break;
        add_up(sum, scratch, 2, 1, count, scratch->a);
    }
    add_up_last(sum, scratch, 2, count, out, n_out);
}

static void combine_wide(const struct sum *sum, struct sum_scratch *scratch,
                         const void *const *wires, uint32_t n, uint64_t count, void *const *out,
                         uint32_t n_out)
{
    const void **in = scratch->in;
    void *total[1] = {scratch->a};
    const struct reduction r = {
        .dtype = GRADD_I64,
        .redop = GRADD_AVG,
        .n_in = n,
        .n_out = 1,
        .in = in,
        .out = total,
        .divisor = sum->op->n_ranks,
        .prescale = 1,
        .postscale = 1,
    };
    memcpy(in, wires, n * sizeof *in);
    reduce_run(&r, 0, count);
    for (uint32_t i = 0; i < n_out; i++)
        store_wide(sum, count, scratch->a, out[i]);
}

void sum_combine(const struct sum *sum, struct sum_scratch *scratch, const void *const *wires,
                 uint32_t n, uint64_t at, uint64_t count, void *const *out, uint32_t n_out)
{
    for (uint32_t i = 0; i < n_out; i++)
        scratch->out[i] = (uint8_t *)out[i] + at * sum->size;
    switch (sum->form) {
    case SUM_PLAIN:
        memcpy(scratch->in, wires, n * sizeof *wires);
        add_up_last(sum, scratch, n, count, scratch->out, n_out);
        return;
    case SUM_HALF:
        combine_half(sum, scratch, wires, n, count, scratch->out, n_out);
        return;
    case SUM_WIDE:
        combine_wide(sum, scratch, wires, n, count, scratch->out, n_out);
        return;
    }
}
