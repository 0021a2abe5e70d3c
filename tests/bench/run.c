/* SPDX-License-Identifier: Apache-2.0 */
/* The measurement that every program shares: how often to call, what is timed, the median, and the
 * rows, with columns as nccl-tests define them. */
#include "bench.h"

#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "names.h"
#include "tensor.h"

enum { MIN_ITERS = 3, MAX_ITERS = 1500 };

/* Calls of one size move about this many bytes a rank: a second or two for the slowest program. */
static const size_t bytes_per_size = (size_t)512 << 20;

struct row {
    size_t bytes, n_wrong;
    unsigned iters;
    uint64_t p50_ns;
};

void *bench_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        err(EXIT_FAILURE, "%zu bytes", bytes);
    return memory;
}

static unsigned iters_for(const struct bench_options *options, size_t bytes)
{
    size_t iters = bytes_per_size / bytes;
    if (options->iters)
        return options->iters;
    if (iters < MIN_ITERS)
        return MIN_ITERS;
    return iters > MAX_ITERS ? MAX_ITERS : (unsigned)iters;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void fill(const struct bench_options *options, const struct bench_collective *c,
                 size_t bytes)
{
    for (unsigned i = 0; i < c->n_tensors; i++)
        tensor_fill(options, c->tensors[i], bytes, c->rank + (int)i);
}

/* Bytes that differ from the exact result, over all ranks. */
static size_t check(const struct bench_options *options, const struct bench_collective *c,
                    size_t bytes)
{
    size_t n_wrong = 0;
    fill(options, c, bytes);
    c->allreduce(c->context, bytes);
    for (unsigned i = 0; i < c->n_tensors; i++)
        n_wrong += tensor_n_wrong(options, c->tensors[i], bytes, c->ranks);
    return c->sum(c->context, n_wrong);
}

static uint64_t time_call(const struct bench_options *options, const struct bench_collective *c,
                          size_t bytes)
{
    if (options->dirty) {
        fill(options, c, bytes);
        c->barrier(c->context);
    }
    uint64_t begin = now_ns();
    c->allreduce(c->context, bytes);
    return now_ns() - begin;
}

static int compare_ns(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The median of the calls. Tensors left alone are zeros: sums in place never overflow. */
static uint64_t time_calls(const struct bench_options *options, const struct bench_collective *c,
                           size_t bytes, unsigned iters)
{
    uint64_t *ns = calloc(iters, sizeof *ns);
    if (!ns)
        err(EXIT_FAILURE, "samples");
    for (unsigned i = 0; i < c->n_tensors; i++)
        memset(c->tensors[i], 0, bytes);
    c->barrier(c->context);
    for (unsigned i = 0; i < 1 + iters / 10; i++)
        time_call(options, c, bytes); /* warm-up */
    for (unsigned i = 0; i < iters; i++)
        ns[i] = time_call(options, c, bytes);
    qsort(ns, iters, sizeof *ns, compare_ns);
    uint64_t p50 = ns[iters / 2];
    free(ns);
    return p50;
}

static void print_header(const struct bench_options *options)
{
    static const char format[] = "# %12s %12s %9s %6s %12s %8s %8s %7s\n";
    if (options->json)
        return;
    printf(format, "size", "count", "type", "redop", "time p50", "algbw", "busbw", "wrong");
    printf(format, "(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "(B)");
}

static void print_row(const struct bench_options *options, const struct bench_collective *c,
                      const struct row *row)
{
    double us = (double)row->p50_ns / 1e3;
    double algbw = (double)row->bytes / (double)(row->p50_ns ? row->p50_ns : 1);
    double busbw = algbw * 2 * (c->ranks - 1) / c->ranks;
    size_t count = row->bytes / dtype_size(options->dtype);
    const char *dtype = dtype_name(options->dtype), *redop = redop_name(options->redop);
    char wrong[24] = "-";
    if (options->check)
        snprintf(wrong, sizeof wrong, "%zu", row->n_wrong);
    if (options->json)
        printf("{\"program\":\"%s\",\"variant\":\"%s\",\"ranks\":%d,\"dirty\":%s,\"size\":%zu,"
               "\"count\":%zu,\"type\":\"%s\",\"redop\":\"%s\",\"iters\":%u,\"p50_us\":%.3f,"
               "\"algbw_gbs\":%.3f,\"busbw_gbs\":%.3f,\"wrong\":%zu}\n",
               c->program, c->variant, c->ranks, options->dirty ? "true" : "false", row->bytes,
               count, dtype, redop, row->iters, us, algbw, busbw, row->n_wrong);
    else
        printf("  %12zu %12zu %9s %6s %12.2f %8.2f %8.2f %7s\n", row->bytes, count, dtype, redop,
               us, algbw, busbw, wrong);
    fflush(stdout);
}

int bench_run(const struct bench_options *options, const struct bench_collective *c)
{
    size_t n_wrong = 0;
    if (c->rank == 0)
        print_header(options);
    for (unsigned i = 0; i < options->n_sizes; i++) {
        struct row row = {.bytes = options->sizes[i]};
        row.iters = iters_for(options, row.bytes);
        if (c->prepare)
            c->prepare(c->context, row.bytes);
        if (options->check)
            row.n_wrong = check(options, c, row.bytes);
        row.p50_ns = time_calls(options, c, row.bytes, row.iters);
        if (c->rank == 0)
            print_row(options, c, &row);
        n_wrong += row.n_wrong;
    }
    return n_wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
