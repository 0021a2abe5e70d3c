/* SPDX-License-Identifier: Apache-2.0 */
/* Every kind of op on device memory, on all ranks, against values known beforehand. */
#include <math.h>
#include <poll.h>
#include <stdio.h>

#include "trainer.h"

static void check_reductions(float *in, float *out)
{
    const float mine = (float)rank + 1, n = (float)size;
    float product = 1;

    for (int i = 1; i <= size; i++)
        product *= (float)i;
    const struct {
        const char *name;
        int redop;
        double prescale, postscale;
        float value;
    } rows[] = {
        {"sum", GRADD_SUM, 0, 0, sum_of_ranks()},
        {"prod", GRADD_PROD, 0, 0, product},
        {"max", GRADD_MAX, 0, 0, n},
        {"min", GRADD_MIN, 0, 0, 1},
        {"avg", GRADD_AVG, 0, 0, sum_of_ranks() / n},
        {"scaled", GRADD_SUM, 0.5, 4, 2 * sum_of_ranks()},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        floats_fill(in, N, mine, 0);
        struct gradd_op op = make_sum(rows[i].name, in, out, N);
        op.redop = rows[i].redop;
        op.prescale = rows[i].prescale;
        op.postscale = rows[i].postscale;
        run(op);
        expect(out, N, rows[i].value, 0, rows[i].name);
        expect(in, N, mine, 0, "the input");
    }
    floats_fill(in, N, mine, 0.5f);
    run(make_sum("in place", in, in, N));
    expect(in, N, sum_of_ranks(), 0.5f * n, "in place");
}

static void check_moves(float *in, float *all)
{
    const float mine = (float)rank + 1;
    const size_t n_all = (size_t)size * N;
    float *to = floats_new(n_all);

    floats_fill(in, N, mine, 0);
    struct gradd_op op = make_op(GRADD_BROADCAST, "broadcast", in, in, N);
    op.root = size - 1;
    run(op);
    expect(in, N, (float)size, 0, "broadcast");
    floats_fill(in, N, mine, 0);
    op = make_op(GRADD_ALLGATHER, "gather", in, all, N);
    op.out_capacity = n_all;
    run(op);
    for (int i = 0; i < size; i++)
        expect(all + (size_t)i * N, N, (float)i + 1, 0, "all-gather");
    floats_fill(all, n_all, mine, 0);
    run(make_op(GRADD_REDUCE_SCATTER, "scatter", all, in, n_all));
    expect(in, N, sum_of_ranks(), 0, "reduce-scatter");
    floats_fill(all, n_all, mine, 0);
    op = make_op(GRADD_ALLTOALL, "alltoall", all, to, n_all);
    op.out_capacity = n_all;
    run(op);
    for (int i = 0; i < size; i++)
        expect(to + (size_t)i * N, N, (float)i + 1, 0, "all-to-all");
    check(gradd_barrier(g, 0), "barrier");
}

/* Wait for the end of the op without ending the handle. */
static void await_end(gradd_handle handle)
{
    struct pollfd fd = {.fd = gradd_fd(g), .events = POLLIN};

    while (gradd_test(g, handle) == GRADD_PENDING) {
        if (poll(&fd, 1, 60000) != 1)
            fail("rank %d: an op that does not end", rank);
        check(gradd_progress(g), "gradd_progress");
    }
}

/* Small tensors of one submission, and one that is not finite. */
static void check_group(float *p)
{
    enum { TENSORS = 20, EACH = 500 };
    struct gradd_op ops[TENSORS];
    char names[TENSORS][16];
    gradd_handle handle;
    int32_t who = -1;
    uint64_t count = 0;

    floats_fill(p, TENSORS * EACH, (float)rank + 1, 0);
    for (int i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof(names[i]), "small %d", i);
        ops[i] = make_average(names[i], p + i * EACH, (size_t)(EACH - i));
    }
    handle = submit(ops, TENSORS);
    check(gradd_wait_stream(g, handle, stream, 60), "group");
    check(gradd_wait(g, handle, 60), "group");
    expect(p, EACH, sum_of_ranks() / (float)size, 0, "group");
    floats_fill(p, 100, rank == size - 1 ? (float)NAN : 1, 0);
    struct gradd_op checked = make_sum("nan", p, p, 100);
    checked.check_finite = 1;
    handle = start(checked);
    await_end(handle);
    if (gradd_nonfinite(g, handle, 0, &who, &count) != 1 || who != size - 1 || count != 100)
        fail("rank %d: 100 NaN of rank %d: %llu of rank %d were counted", rank, size - 1,
             (unsigned long long)count, who);
    check(gradd_wait(g, handle, 60), "nan");
}

void collectives(void)
{
    float *in = floats_new(N), *out = floats_new(N), *all = floats_new((size_t)size * N);
    const double before = device_free_mib();

    if (size > 8)
        fail("at most 8 ranks");
    check_reductions(in, out);
    check_moves(in, all);
    check_group(in);
    report("\"what\": \"collectives\", \"rank\": %d, \"size\": %d, \"path\": %d, "
           "\"worker_mib\": %.0f",
           rank, size, gradd_device_path(g, NULL), before - device_free_mib());
}
