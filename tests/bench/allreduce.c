/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All-reduce through gradd, timed. Run it under any launcher that the library knows:
 *
 *     gradrun -np 2 allreduce -b 4 -e 256M -f 4 --check
 */
#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <gradd/gradd.h>

#include "bench.h"
#include "names.h"

struct trainer {
    struct gradd *g;
    void *tensor;
    int dtype, redop;
    size_t element;
};

static void check(int status)
{
    if (status != GRADD_OK)
        errx(EXIT_FAILURE, "%s", gradd_error());
}

static void allreduce(void *context, size_t bytes)
{
    struct trainer *t = context;
    check(gradd_allreduce(t->g, "bench", t->tensor, t->tensor, bytes / t->element, t->dtype,
                          t->redop));
}

static void barrier(void *context)
{
    struct trainer *t = context;
    check(gradd_barrier(t->g, 0));
}

static size_t sum(void *context, size_t value)
{
    struct trainer *t = context;
    int64_t total = (int64_t)value;
    check(gradd_allreduce(t->g, "sum", &total, &total, 1, GRADD_I64, GRADD_SUM));
    return (size_t)total;
}

/* Every rank but 0 waits for an op that rank 0 submits at the end: what waiting costs can be seen
 * from outside meanwhile. */
static void idle(struct trainer *t, double seconds)
{
    barrier(t);
    if (gradd_rank(t->g) == 0) {
        struct timespec left = {.tv_sec = (time_t)seconds};
        puts("{\"idle\":true}");
        fflush(stdout);
        while (nanosleep(&left, &left) != 0)
            ;
    }
    allreduce(t, t->element);
}

int main(int argc, char **argv)
{
    struct bench_options options;
    struct trainer t = {0};
    bench_parse(&options, argc, argv);
    t.dtype = options.dtype;
    t.redop = options.redop;
    t.element = dtype_size(options.dtype);
    check(gradd_init(NULL, &t.g));
    t.tensor = options.unregistered ? bench_memory(bench_max_size(&options))
                                    : gradd_alloc(t.g, bench_max_size(&options));
    if (!t.tensor)
        errx(EXIT_FAILURE, "%s", gradd_error());

    int status = EXIT_SUCCESS;
    if (options.idle_s > 0) {
        idle(&t, options.idle_s);
    } else {
        struct bench_collective collective = {
            .program = "gradd",
            .variant = options.unregistered ? "unregistered" : "registered",
            .rank = gradd_rank(t.g),
            .ranks = gradd_size(t.g),
            .tensors = &t.tensor,
            .n_tensors = 1,
            .context = &t,
            .allreduce = allreduce,
            .barrier = barrier,
            .sum = sum,
        };
        status = bench_run(&options, &collective);
    }
    if (!options.unregistered)
        gradd_free(t.g, t.tensor);
    gradd_shutdown(t.g);
    return status;
}
