/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/host/strip.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "worker/plan/signature.h"
#include "worker/reduce/reduce.h"

enum {
    BUFFERS_MAX = 4096, /* ranks of a job */
    CHECK_BLOCK_BYTES = 4096,
};

void strip_list_init(struct strip_list *list)
{
    *list = (struct strip_list){.piece_bytes = STRIP_PIECE_BYTES};
}

void strip_list_deinit(struct strip_list *list)
{
    free(list->strips);
    free(list->spans);
    strip_list_init(list);
}

void strip_list_clear(struct strip_list *list)
{
    list->n_strips = list->n_spans = 0;
    list->n_pieces = list->bytes = 0;
}

/* ------------------------------------------------------------------ lowering */

/* Spans are kept as indexes while the array may move; strip_list_seal() makes them pointers. */
static const struct backend_span *span_index(size_t index)
{
    return (const struct backend_span *)(uintptr_t)index;
}

static int add_span(struct strip_list *list, struct backend_span span, uint64_t shift_bytes)
{
    if (list->n_spans == list->span_capacity) {
        size_t capacity = list->span_capacity ? 2 * list->span_capacity : 64;
        struct backend_span *spans = realloc(list->spans, capacity * sizeof *spans);
        if (!spans)
            return -ENOMEM;
        list->spans = spans;
        list->span_capacity = capacity;
    }
    if (span.base) /* none where a rank has nothing to give */
        span.base += shift_bytes;
    list->spans[list->n_spans++] = span;
    return 0;
}

static struct strip *add_strip(struct strip_list *list, const struct backend_op *op)
{
    if (list->n_strips == list->strip_capacity) {
        size_t capacity = list->strip_capacity ? 2 * list->strip_capacity : 64;
        struct strip *strips = realloc(list->strips, capacity * sizeof *strips);
        if (!strips)
            return NULL;
        list->strips = strips;
        list->strip_capacity = capacity;
    }
    struct strip *strip = &list->strips[list->n_strips++];
    *strip = (struct strip){
        .is_copy = true,
        .dtype = op->dtype,
        .redop = op->redop,
        .prescale = op->prescale,
        .postscale = op->postscale,
        .divisor = op->n_ranks,
    };
    return strip;
}

/* All inputs, shifted by so many bytes, become the strip's. */
static int add_inputs(struct strip_list *list, struct strip *strip, const struct backend_op *op,
                      uint64_t shift_bytes)
{
    strip->is_copy = false;
    strip->nonfinite = op->nonfinite;
    strip->in = span_index(list->n_spans);
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        if (!op->parts[i].in.base)
            continue;
        if (add_span(list, op->parts[i].in, shift_bytes) < 0)
            return -ENOMEM;
        strip->n_in++;
    }
    return 0;
}

static int add_outputs(struct strip_list *list, struct strip *strip, const struct backend_op *op,
                       uint64_t shift_bytes, const uint8_t *except)
{
    strip->out = span_index(list->n_spans);
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        const struct backend_span out = op->parts[i].out;
        if (!out.base || out.base + shift_bytes == except)
            continue;
        if (add_span(list, out, shift_bytes) < 0)
            return -ENOMEM;
        strip->n_out++;
    }
    return 0;
}

static int lower_allreduce(struct strip_list *list, const struct backend_op *op)
{
    struct strip *strip = add_strip(list, op);
    if (!strip || add_inputs(list, strip, op, 0) < 0 || add_outputs(list, strip, op, 0, NULL) < 0)
        return -ENOMEM;
    strip->n_zero = op->n_joined;
    strip->begin = op->begin;
    strip->end = op->end;
    return 0;
}

static int lower_broadcast(struct strip_list *list, const struct backend_op *op)
{
    const struct backend_span source = op->parts[op->root].in;
    struct strip *strip = add_strip(list, op);
    if (!strip)
        return -ENOMEM;
    strip->in = span_index(list->n_spans);
    strip->n_in = 1;
    if (add_span(list, source, 0) < 0 || add_outputs(list, strip, op, 0, source.base) < 0)
        return -ENOMEM;
    strip->begin = op->begin;
    strip->end = op->end;
    return 0;
}

static int lower_allgather(struct strip_list *list, const struct backend_op *op)
{
    const size_t size = dtype_bytes(op->dtype);
    uint64_t at = 0;
    for (uint32_t i = 0; i < op->n_ranks; at += op->parts[i].count, i++) {
        struct strip *strip = add_strip(list, op);
        if (!strip)
            return -ENOMEM;
        strip->in = span_index(list->n_spans);
        strip->n_in = 1;
        strip->end = op->parts[i].count;
        if (add_span(list, op->parts[i].in, 0) < 0 ||
            add_outputs(list, strip, op, at * size, op->parts[i].in.base) < 0)
            return -ENOMEM;
    }
    return 0;
}

static int lower_reduce_scatter(struct strip_list *list, const struct backend_op *op)
{
    const size_t size = dtype_bytes(op->dtype);
    uint64_t at = 0;
    for (uint32_t i = 0; i < op->n_ranks; at += op->counts[i], i++) {
        struct strip *strip = add_strip(list, op);
        if (!strip || add_inputs(list, strip, op, at * size) < 0)
            return -ENOMEM;
        strip->out = span_index(list->n_spans);
        strip->n_out = 1;
        strip->end = op->counts[i];
        if (add_span(list, op->parts[i].out, 0) < 0)
            return -ENOMEM;
    }
    return 0;
}

static int lower_alltoall(struct strip_list *list, const struct backend_op *op)
{
    const size_t size = dtype_bytes(op->dtype);
    for (uint32_t to = 0; to < op->n_ranks; to++) {
        uint64_t out_at = 0;
        for (uint32_t from = 0; from < op->n_ranks; from++) {
            const struct backend_part *part = &op->parts[from];
            uint64_t in_at = 0;
            for (uint32_t i = 0; i < to; i++)
                in_at += part->counts[i];
            struct strip *strip = add_strip(list, op);
            if (!strip)
                return -ENOMEM;
            strip->in = span_index(list->n_spans);
            strip->out = span_index(list->n_spans + 1);
            strip->n_in = strip->n_out = 1;
            strip->end = part->counts[to];
            if (add_span(list, part->in, in_at * size) < 0 ||
                add_span(list, op->parts[to].out, out_at * size) < 0)
                return -ENOMEM;
            out_at += part->counts[to];
        }
    }
    return 0;
}

int strip_list_add(struct strip_list *list, const struct backend_op *op)
{
    switch (op->kind) {
    case GRADD_ALLREDUCE:
        return lower_allreduce(list, op);
    case GRADD_BROADCAST:
        return lower_broadcast(list, op);
    case GRADD_ALLGATHER:
        return lower_allgather(list, op);
    case GRADD_REDUCE_SCATTER:
        return lower_reduce_scatter(list, op);
    case GRADD_ALLTOALL:
        return lower_alltoall(list, op);
    case GRADD_BARRIER:
    case GRADD_SET_ADD:
    case GRADD_SET_REMOVE:
    case GRADD_JOIN:
        return 0; /* nothing to move */
    }
    return 0;
}

static uint64_t elements_per_piece(const struct strip_list *list, const struct strip *strip)
{
    return list->piece_bytes / dtype_bytes(strip->dtype);
}

void strip_list_seal(struct strip_list *list)
{
    for (size_t i = 0; i < list->n_strips; i++) {
        struct strip *strip = &list->strips[i];
        strip->in = strip->n_in ? &list->spans[(uintptr_t)strip->in] : NULL;
        strip->out = strip->n_out ? &list->spans[(uintptr_t)strip->out] : NULL;
        if (!strip->in || !strip->out)
            strip->end = strip->begin; /* nobody to read from or write to */
        uint64_t n = strip->end - strip->begin, each = elements_per_piece(list, strip);
        strip->first_piece = list->n_pieces;
        list->n_pieces += (n + each - 1) / each;
        list->bytes += n * dtype_bytes(strip->dtype);
    }
}

/* ------------------------------------------------------------------ execution */

static uint8_t *span_at(const struct backend_span *span, uint64_t byte)
{
    return span->base + (span->ring_bytes ? byte % span->ring_bytes : byte);
}

/* How far from `byte` all spans are contiguous. */
static uint64_t contiguous(const struct backend_span *spans, uint32_t n, uint64_t byte,
                           uint64_t bytes)
{
    for (uint32_t i = 0; i < n; i++) {
        if (!spans[i].ring_bytes)
            continue;
        uint64_t left = spans[i].ring_bytes - byte % spans[i].ring_bytes;
        if (left < bytes)
            bytes = left;
    }
    return bytes;
}

/* Add up what is not finite, block by block, so that the reduction finds the block in the L1. */
static void count_nonfinite(const struct strip *strip, const void *const *in, uint64_t at,
                            uint64_t count)
{
    for (uint32_t i = 0; i < strip->n_in; i++) {
        const uint8_t *block = (const uint8_t *)in[i] + at * dtype_bytes(strip->dtype);
        uint64_t n = reduce_count_nonfinite(strip->dtype, block, count);
        if (n > 0)
            atomic_fetch_add_explicit(&strip->nonfinite[i], n, memory_order_relaxed);
    }
}

static void run_checked(const struct strip *strip, const struct reduction *reduction,
                        uint64_t count)
{
    const uint64_t block = CHECK_BLOCK_BYTES / dtype_bytes(strip->dtype);
    for (uint64_t at = 0; at < count; at += block) {
        uint64_t n = count - at < block ? count - at : block;
        count_nonfinite(strip, reduction->in, at, n);
        reduce_run(reduction, at, at + n);
    }
}

/* Elements [0, count) of these addresses. */
static void run_span(const struct strip *strip, const void *const *in, void *const *out,
                     uint64_t count)
{
    assert(strip->n_in > 0);
    if (strip->is_copy) {
        for (uint32_t i = 0; i < strip->n_out; i++)
            if (out[i] != in[0]) /* they overlap if a trainer says so */
                memmove(out[i], in[0], count * dtype_bytes(strip->dtype));
        return;
    }
    const struct reduction reduction = {
        .dtype = strip->dtype,
        .redop = strip->redop,
        .n_in = strip->n_in,
        .n_out = strip->n_out,
        .in = in,
        .out = out,
        .n_zero = strip->n_zero,
        .divisor = strip->divisor,
        .prescale = strip->prescale,
        .postscale = strip->postscale,
    };
    if (strip->nonfinite)
        run_checked(strip, &reduction, count);
    else
        reduce_run(&reduction, 0, count);
}

static const struct strip *find_strip(const struct strip_list *list, uint64_t piece)
{
    size_t low = 0, high = list->n_strips;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (list->strips[middle].first_piece <= piece)
            low = middle;
        else
            high = middle;
    }
    return &list->strips[low];
}

void strip_list_run_piece(const struct strip_list *list, uint64_t piece)
{
    const struct strip *strip = find_strip(list, piece);
    const uint64_t size = dtype_bytes(strip->dtype), each = elements_per_piece(list, strip);
    uint64_t byte = (strip->begin + (piece - strip->first_piece) * each) * size;
    uint64_t end = byte + each * size;
    const void *in[BUFFERS_MAX];
    void *out[BUFFERS_MAX];
    if (end > strip->end * size)
        end = strip->end * size;
    while (byte < end) {
        uint64_t bytes = contiguous(strip->in, strip->n_in, byte, end - byte);
        bytes = contiguous(strip->out, strip->n_out, byte, bytes);
        for (uint32_t i = 0; i < strip->n_in; i++)
            in[i] = span_at(&strip->in[i], byte);
        for (uint32_t i = 0; i < strip->n_out; i++)
            out[i] = span_at(&strip->out[i], byte);
        run_span(strip, in, out, bytes / size);
        byte += bytes;
    }
}
