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
    void *tensor; /* the first of n_tensors, which lie one after the other */
    int dtype, redop;
    size_t element, max_bytes;
    unsigned n_tensors;
    bool one_by_one;
    struct gradd_op *ops; /* n_tensors */
    char (*names)[24];
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

static void prepare_many(void *context, size_t bytes)
{
    struct trainer *t = context;
    for (unsigned i = 0; i < t->n_tensors; i++) {
        void *tensor = (char *)t->tensor + i * t->max_bytes;
        snprintf(t->names[i], sizeof t->names[i], "bench.%u", i);
        t->ops[i] = (struct gradd_op){.struct_size = sizeof(struct gradd_op),
                                      .kind = GRADD_ALLREDUCE,
                                      .dtype = t->dtype,
                                      .redop = t->redop,
                                      .name = t->names[i],
                                      .in = tensor,
                                      .out = tensor,
                                      .count = bytes / t->element};
    }
}

static void allreduce_many(void *context, size_t bytes)
{
    struct trainer *t = context;
    (void)bytes; /* prepared */
    unsigned n_calls = t->one_by_one ? t->n_tensors : 1;
    for (unsigned i = 0; i < n_calls; i++) {
        int64_t handle = gradd_submit(t->g, &t->ops[i], t->n_tensors / n_calls);
        if (handle < 0)
            errx(EXIT_FAILURE, "%s", gradd_error());
        check(gradd_wait(t->g, handle, -1));
    }
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

static void trainer_init(struct trainer *t, const struct bench_options *options)
{
    *t = (struct trainer){.dtype = options->dtype,
                          .redop = options->redop,
                          .element = dtype_size(options->dtype),
                          .max_bytes = bench_max_size(options),
                          .n_tensors = options->tensors,
                          .one_by_one = options->one_by_one};
    t->ops = calloc(t->n_tensors, sizeof *t->ops);
    t->names = calloc(t->n_tensors, sizeof *t->names);
    if (!t->ops || !t->names)
        err(EXIT_FAILURE, "%u tensors", t->n_tensors);
    check(gradd_init(NULL, &t->g));
    size_t bytes = t->max_bytes * t->n_tensors;
    t->tensor = options->unregistered ? bench_memory(bytes) : gradd_alloc(t->g, bytes);
    if (!t->tensor)
        errx(EXIT_FAILURE, "%s", gradd_error());
}

static const char *variant_of(const struct bench_options *options)
{
    if (options->tensors > 1)
        return options->one_by_one ? "one by one" : "at once";
    return options->unregistered ? "unregistered" : "registered";
}

int main(int argc, char **argv)
{
    struct bench_options options;
    struct trainer t;
    bench_parse(&options, argc, argv);
    trainer_init(&t, &options);

    int status = EXIT_SUCCESS;
    if (options.idle_s > 0) {
        idle(&t, options.idle_s);
    } else {
        struct bench_collective collective = {
            .program = "gradd",
            .variant = variant_of(&options),
            .rank = gradd_rank(t.g),
            .ranks = gradd_size(t.g),
            .tensors = &t.tensor,
            .n_tensors = 1,
            .context = &t,
            .prepare = options.tensors > 1 ? prepare_many : NULL,
            .allreduce = options.tensors > 1 ? allreduce_many : allreduce,
            .barrier = barrier,
            .sum = sum,
        };
        status = bench_run(&options, &collective);
    }
    if (!options.unregistered)
        gradd_free(t.g, t.tensor);
    gradd_shutdown(t.g);
    free(t.ops);
    free(t.names);
    return status;
}
