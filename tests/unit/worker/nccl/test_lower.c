/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ops on device memory, lowered for every node of a random layout, executed on ordinary memory by a
 * plain interpreter, and compared with the CPU reduction over all ranks. The interpreter insists
 * that all GPUs make the same collective calls in the same order.
 */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "reduce.h"
#include "worker/backend/nccl/lower.h"
#include "worker/plan/signature.h"

enum { RANKS_MAX = 8, NODES_MAX = 3, ROUNDS = 3000, COUNT_MAX = 70 };

static uint64_t random_state;

static uint32_t draw(uint32_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % n;
}

static bool is_float(int dtype)
{
    return dtype >= GRADD_F16;
}

/* ------------------------------------------------------------------ a world */

struct world {
    uint32_t n_ranks, n_nodes, n_gpus;
    uint32_t node_of[RANKS_MAX], gpu_of[RANKS_MAX];
    uint32_t node_of_gpu[RANKS_MAX];
    bool is_joined[RANKS_MAX];
    struct backend_op op;
    uint64_t in_count[RANKS_MAX], out_count[RANKS_MAX];
    uint64_t counts[RANKS_MAX], part_counts[RANKS_MAX][RANKS_MAX];
    uint8_t *in[RANKS_MAX], *out[RANKS_MAX], *expected[RANKS_MAX], *original[RANKS_MAX];
    bool in_place;
    /* By node, and by GPU over all nodes. */
    struct lower_list lists[NODES_MAX];
    uint32_t local_of[NODES_MAX][RANKS_MAX], n_local[NODES_MAX];
    uint8_t *scratch[RANKS_MAX];
    uint64_t scratch_max; /* as node 0 finds it */
    size_t size;
};

static void place_ranks(struct world *w)
{
    uint32_t keys[RANKS_MAX];
    w->n_ranks = 1 + draw(RANKS_MAX);
    w->n_nodes = 1 + draw(NODES_MAX);
    const uint32_t gpus_per_node = 1 + draw(4);
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        w->node_of[i] = draw(w->n_nodes);
        w->is_joined[i] = w->op.kind == GRADD_ALLREDUCE && i > 0 && draw(6) == 0;
        keys[i] =
            w->is_joined[i] && draw(2) ? LOWER_NO_GPU : w->node_of[i] * 16 + draw(gpus_per_node);
        w->op.n_joined += w->is_joined[i];
    }
    w->n_gpus = lower_number_gpus(keys, w->n_ranks, w->gpu_of);
    for (uint32_t i = 0; i < w->n_ranks; i++)
        if (w->gpu_of[i] != LOWER_NO_GPU)
            w->node_of_gpu[w->gpu_of[i]] = w->node_of[i];
    for (uint32_t node = 0; node < w->n_nodes; node++)
        for (uint32_t gpu = 0; gpu < w->n_gpus; gpu++)
            w->local_of[node][gpu] =
                w->node_of_gpu[gpu] == node ? w->n_local[node]++ : LOWER_NO_GPU;
}

static void set_counts(struct world *w)
{
    const bool is_even = draw(2);
    const uint64_t count = draw(COUNT_MAX);
    uint64_t total = 0;
    for (uint32_t i = 0; i < w->n_ranks; i++)
        total += w->counts[i] = is_even ? count : draw(COUNT_MAX);
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        uint64_t in = count, out = count;
        if (w->op.kind == GRADD_ALLGATHER) {
            in = w->counts[i];
            out = total;
        } else if (w->op.kind == GRADD_REDUCE_SCATTER) {
            in = total;
            out = w->counts[i];
        }
        w->in_count[i] = in;
        w->out_count[i] = out;
    }
    for (uint32_t i = 0; w->op.kind == GRADD_ALLTOALL && i < w->n_ranks; i++)
        w->in_count[i] = w->out_count[i] = 0;
    for (uint32_t i = 0; w->op.kind == GRADD_ALLTOALL && i < w->n_ranks; i++)
        for (uint32_t to = 0; to < w->n_ranks; to++) {
            w->part_counts[i][to] = draw(9);
            w->in_count[i] += w->part_counts[i][to];
            w->out_count[to] += w->part_counts[i][to];
        }
    w->op.end = count;
    w->op.counts = w->op.kind == GRADD_REDUCE_SCATTER ? w->counts : NULL;
}

static void fill(struct world *w, uint8_t *to, uint64_t count)
{
    for (uint64_t e = 0; e < count; e++) {
        uint8_t *at = to + e * w->size;
        const int value = (int)draw(256) - (w->op.dtype == GRADD_U8 ? 0 : 128);
        const float small =
            w->op.redop == GRADD_PROD ? 0.5f + (float)draw(8) / 8 : (float)value / 16;
        switch (w->op.dtype) {
        case GRADD_I8:
        case GRADD_U8:
            *at = (uint8_t)value;
            break;
        case GRADD_I32:
            *(int32_t *)at = value * 8000000;
            break;
        case GRADD_I64:
            *(int64_t *)at = (int64_t)value * 8000000000;
            break;
        case GRADD_F32:
            *(float *)at = small;
            break;
        case GRADD_F64:
            *(double *)at = small;
            break;
        case GRADD_F16:
        case GRADD_BF16:
            convert_narrow(w->op.dtype, &small, at, 1);
            break;
        }
    }
}

static uint8_t *memory(uint64_t count, size_t size)
{
    uint8_t *p = calloc(count + 1, size);
    ck_assert_ptr_nonnull(p);
    return p;
}

static uint64_t offset_of(const struct world *w, uint32_t rank)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < rank; i++)
        at += w->counts[i];
    return at;
}

static void place_memory(struct world *w)
{
    w->in_place = draw(2) && w->op.kind != GRADD_ALLTOALL;
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        w->in[i] = memory(w->in_count[i], w->size);
        w->out[i] = memory(w->out_count[i], w->size);
        w->expected[i] = memory(w->out_count[i], w->size);
        w->original[i] = memory(w->in_count[i], w->size);
        fill(w, w->in[i], w->in_count[i]);
        memcpy(w->original[i], w->in[i], w->in_count[i] * w->size);
    }
    for (uint32_t i = 0; w->in_place && i < w->n_ranks; i++) {
        const uint64_t at = offset_of(w, i) * w->size;
        if (w->op.kind == GRADD_ALLGATHER) {
            memcpy(w->out[i] + at, w->in[i], w->in_count[i] * w->size);
            free(w->in[i]);
            w->in[i] = w->out[i] + at;
        } else {
            free(w->out[i]);
            w->out[i] = w->in[i] + (w->op.kind == GRADD_REDUCE_SCATTER ? at : 0);
        }
    }
}

static void world_free(struct world *w)
{
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        if (!w->in_place || w->op.kind == GRADD_ALLGATHER)
            free(w->out[i]);
        if (!w->in_place || w->op.kind != GRADD_ALLGATHER)
            free(w->in[i]);
        free(w->expected[i]);
        free(w->original[i]);
        free(w->scratch[i]);
    }
    for (uint32_t node = 0; node < w->n_nodes; node++)
        lower_list_deinit(&w->lists[node]);
}

/* ------------------------------------------------------------------ what is right */

static void expect_reduction(struct world *w, uint64_t at, uint64_t count, void *const *outs,
                             unsigned n_out)
{
    const void *in[RANKS_MAX];
    unsigned n_in = 0;
    for (uint32_t i = 0; i < w->n_ranks; i++)
        if (!w->is_joined[i])
            in[n_in++] = w->original[i] + at * w->size;
    const struct reduction r = {
        .dtype = w->op.dtype,
        .redop = w->op.redop,
        .n_in = n_in,
        .n_out = n_out,
        .in = in,
        .out = outs,
        .n_zero = w->op.n_joined,
        .divisor = w->n_ranks,
        .prescale = w->op.prescale,
        .postscale = w->op.postscale,
    };
    reduce_run_scalar(&r, 0, count);
}

static void expect(struct world *w)
{
    void *outs[RANKS_MAX];
    for (uint32_t i = 0; i < w->n_ranks; i++)
        outs[i] = w->expected[i];
    switch (w->op.kind) {
    case GRADD_ALLREDUCE:
        expect_reduction(w, 0, w->op.end, outs, w->n_ranks);
        break;
    case GRADD_BROADCAST:
        for (uint32_t i = 0; i < w->n_ranks; i++)
            memcpy(outs[i], w->original[w->op.root], w->op.end * w->size);
        break;
    case GRADD_ALLGATHER:
        for (uint32_t i = 0; i < w->n_ranks; i++)
            for (uint32_t from = 0; from < w->n_ranks; from++)
                memcpy(w->expected[i] + offset_of(w, from) * w->size, w->original[from],
                       w->counts[from] * w->size);
        break;
    case GRADD_REDUCE_SCATTER:
        for (uint32_t i = 0; i < w->n_ranks; i++)
            expect_reduction(w, offset_of(w, i), w->counts[i], &outs[i], 1);
        break;
    default:
        for (uint32_t to = 0; to < w->n_ranks; to++) {
            uint64_t out_at = 0;
            for (uint32_t from = 0; from < w->n_ranks; from++) {
                uint64_t in_at = 0;
                for (uint32_t i = 0; i < to; i++)
                    in_at += w->part_counts[from][i];
                memcpy(w->expected[to] + out_at * w->size, w->original[from] + in_at * w->size,
                       w->part_counts[from][to] * w->size);
                out_at += w->part_counts[from][to];
            }
        }
    }
}

static double value_at(const struct world *w, const uint8_t *from, uint64_t e)
{
    const uint8_t *at = from + e * w->size;
    float wide;
    switch (w->op.dtype) {
    case GRADD_I8:
        return *(const int8_t *)at;
    case GRADD_U8:
        return *at;
    case GRADD_I32:
        return *(const int32_t *)at;
    case GRADD_I64:
        return (double)*(const int64_t *)at;
    case GRADD_F32:
        return *(const float *)at;
    case GRADD_F64:
        return *(const double *)at;
    default:
        convert_widen(w->op.dtype, at, &wide, 1);
        return wide;
    }
}

static double tolerance(const struct world *w, double value)
{
    const double each = w->op.dtype == GRADD_F64    ? 1e-13
                        : w->op.dtype == GRADD_F32  ? 1e-5
                        : w->op.dtype == GRADD_F16  ? 1.0 / 128
                        : w->op.dtype == GRADD_BF16 ? 1.0 / 16
                                                    : 0;
    return each * (fabs(value) + 16);
}

static void check_outputs(const struct world *w, uint64_t seed)
{
    for (uint32_t i = 0; i < w->n_ranks; i++)
        for (uint64_t e = 0; !w->is_joined[i] && e < w->out_count[i]; e++) {
            const double got = value_at(w, w->out[i], e), want = value_at(w, w->expected[i], e);
            ck_assert_msg(fabs(got - want) <= tolerance(w, want),
                          "seed %llu: %s of %s, operator %d, %u ranks on %u GPUs of %u nodes, "
                          "rank %u, element %llu: %g instead of %g",
                          (unsigned long long)seed, kind_name(w->op.kind), dtype_name(w->op.dtype),
                          w->op.redop, w->n_ranks, w->n_gpus, w->n_nodes, i, (unsigned long long)e,
                          got, want);
        }
}

/* ------------------------------------------------------------------ an interpreter */

struct call {
    const struct lower_step *step;
    uint8_t *from, *to;
};

static uint8_t *resolve(const struct world *w, uint32_t gpu, uint64_t address)
{
    return (uint8_t *)(uintptr_t)lower_address(address, (uint64_t)(uintptr_t)w->scratch[gpu]);
}

static uint32_t gpu_of_step(const struct world *w, uint32_t node, const struct lower_step *step)
{
    for (uint32_t gpu = 0; gpu < w->n_gpus; gpu++)
        if (w->local_of[node][gpu] == step->gpu)
            return gpu;
    ck_abort_msg("a step for no GPU of its node");
}

static void run_kernel(struct world *w, uint32_t node, const struct lower_step *step)
{
    const uint32_t gpu = gpu_of_step(w, node, step);
    const uint64_t *addresses = w->lists[node].addresses + step->first_address;
    const void *in[2 * RANKS_MAX];
    void *out[RANKS_MAX];
    for (uint32_t i = 0; i < step->n_in; i++)
        in[i] = resolve(w, gpu, addresses[i]);
    for (uint32_t i = 0; i < step->n_out; i++)
        out[i] = resolve(w, gpu, addresses[step->n_in + i]);
    const struct reduction r = {
        .dtype = step->dtype,
        .redop = step->redop,
        .n_in = step->n_in,
        .n_out = step->n_out,
        .in = in,
        .out = out,
        .n_zero = step->n_zero,
        .divisor = step->divisor,
        .prescale = step->prescale,
        .postscale = step->postscale,
    };
    ck_assert_uint_ge(step->n_in, 1);
    reduce_run_scalar(&r, 0, step->count);
}

static void run_phase(struct world *w, uint32_t node, enum lower_phase phase)
{
    const struct lower_steps *steps = &w->lists[node].phases[phase];
    for (size_t i = 0; i < steps->n; i++) {
        const struct lower_step *step = &steps->steps[i];
        const uint32_t gpu = gpu_of_step(w, node, step);
        if (step->kind == LOWER_REDUCE)
            run_kernel(w, node, step);
        else if (step->kind == LOWER_COPY)
            memmove(resolve(w, gpu, step->to), resolve(w, gpu, step->from), step->count);
        else if (step->kind == LOWER_ZERO)
            memset(resolve(w, gpu, step->to), 0, step->count);
        else
            ck_abort_msg("a call outside its phase");
    }
}

/* The n-th call of a GPU, or NULL. */
static const struct lower_step *nth_call(const struct world *w, uint32_t gpu, size_t n)
{
    const uint32_t node = w->node_of_gpu[gpu];
    const struct lower_steps *steps = &w->lists[node].phases[LOWER_CALLS];
    for (size_t i = 0; i < steps->n; i++)
        if (steps->steps[i].gpu == w->local_of[node][gpu] && n-- == 0)
            return &steps->steps[i];
    return NULL;
}

static void reduce_calls(const struct world *w, const struct call *calls, uint64_t from_at,
                         uint64_t count, void *const *outs, unsigned n_out)
{
    const struct lower_step *step = calls[0].step;
    const void *in[RANKS_MAX];
    for (uint32_t gpu = 0; gpu < w->n_gpus; gpu++)
        in[gpu] = calls[gpu].from + from_at * w->size;
    const struct reduction r = {
        .dtype = step->dtype,
        .redop = step->redop == LOWER_PREMUL_SUM ? GRADD_SUM : step->redop,
        .n_in = w->n_gpus,
        .n_out = n_out,
        .in = in,
        .out = outs,
        .divisor = w->n_gpus,
        .prescale = step->redop == LOWER_PREMUL_SUM ? step->factor : 1,
        .postscale = 1,
    };
    reduce_run_scalar(&r, 0, count);
}

/* NCCL reads all inputs before results meet them only element by element: copies stand for that. */
static void run_collective(struct world *w, struct call *calls)
{
    const struct lower_step *step = calls[0].step;
    uint8_t *copies[RANKS_MAX];
    const uint64_t in_count =
        step->kind == LOWER_REDUCE_SCATTER ? step->count * w->n_gpus : step->count;
    void *outs[RANKS_MAX];
    for (uint32_t gpu = 0; gpu < w->n_gpus; gpu++) {
        copies[gpu] = memory(in_count, w->size);
        memcpy(copies[gpu], calls[gpu].from, in_count * w->size);
        calls[gpu].from = copies[gpu];
        outs[gpu] = calls[gpu].to;
    }
    for (uint32_t gpu = 0; gpu < w->n_gpus; gpu++) {
        if (step->kind == LOWER_BROADCAST)
            memcpy(outs[gpu], copies[step->peer], step->count * w->size);
        for (uint32_t from = 0; step->kind == LOWER_ALL_GATHER && from < w->n_gpus; from++)
            memcpy((uint8_t *)outs[gpu] + from * step->count * w->size, copies[from],
                   step->count * w->size);
        if (step->kind == LOWER_REDUCE_SCATTER)
            reduce_calls(w, calls, gpu * step->count, step->count, &outs[gpu], 1);
    }
    if (step->kind == LOWER_ALL_REDUCE)
        reduce_calls(w, calls, 0, step->count, outs, w->n_gpus);
    if (step->kind == LOWER_REDUCE_TO)
        reduce_calls(w, calls, 0, step->count, &outs[step->peer], 1);
    for (uint32_t gpu = 0; gpu < w->n_gpus; gpu++)
        free(copies[gpu]);
}

static void check_same(const struct lower_step *a, const struct lower_step *b)
{
    ck_assert_ptr_nonnull(b);
    ck_assert_int_eq(a->kind, b->kind);
    ck_assert_uint_eq(a->count, b->count);
    ck_assert_uint_eq(a->peer, b->peer);
    ck_assert_int_eq(a->dtype, b->dtype);
    ck_assert_int_eq(a->redop, b->redop);
    ck_assert(a->factor == b->factor);
}

/* The n-th receive of `to` from a peer matches the n-th send of the peer to it. */
static void run_messages(struct world *w)
{
    for (uint32_t to = 0; to < w->n_gpus; to++) {
        size_t taken[RANKS_MAX] = {0};
        const struct lower_step *recv;
        for (size_t n = 0; (recv = nth_call(w, to, n)); n++) {
            if (recv->kind != LOWER_RECV)
                continue;
            const struct lower_step *send;
            do {
                send = nth_call(w, recv->peer, taken[recv->peer]++);
                ck_assert_msg(send != NULL, "a receive without a send");
            } while (send->kind != LOWER_SEND || send->peer != to);
            ck_assert_uint_eq(send->count, recv->count);
            memcpy(resolve(w, to, recv->to), resolve(w, recv->peer, send->from),
                   send->count * w->size);
        }
    }
}

static void run_calls(struct world *w)
{
    const struct lower_step *first;
    if (w->op.kind == GRADD_ALLTOALL) {
        run_messages(w);
        return;
    }
    for (size_t n = 0; (first = nth_call(w, 0, n)); n++) {
        struct call calls[RANKS_MAX] = {0};
        ck_assert_uint_ge(w->n_gpus, 2);
        for (uint32_t gpu = 0; gpu < w->n_gpus; gpu++) {
            const struct lower_step *step = nth_call(w, gpu, n);
            check_same(first, step);
            calls[gpu] = (struct call){step, resolve(w, gpu, step->from), NULL};
            if (step->kind != LOWER_REDUCE_TO || step->peer == gpu)
                calls[gpu].to = resolve(w, gpu, step->to);
        }
        run_collective(w, calls);
    }
}

/* ------------------------------------------------------------------ the tests */

static void lower_world(struct world *w)
{
    for (uint32_t node = 0; node < w->n_nodes; node++) {
        struct backend_part parts[RANKS_MAX] = {0};
        for (uint32_t i = 0; i < w->n_ranks; i++) {
            parts[i].node = w->node_of[i];
            parts[i].count = w->in_count[i];
            parts[i].counts = w->part_counts[i];
            if (w->node_of[i] != node || w->is_joined[i])
                continue;
            parts[i].in.base = w->in[i];
            parts[i].out.base = w->out[i];
        }
        const struct lower_map map = {
            .n_ranks = w->n_ranks,
            .n_gpus = w->n_gpus,
            .gpu_of = w->gpu_of,
            .local_of = w->local_of[node],
            .n_local = w->n_local[node],
        };
        struct backend_op op = w->op;
        op.n_ranks = w->n_ranks;
        op.parts = parts;
        ck_assert_int_eq(lower_op(&w->lists[node], &op, &map), 0);
        const uint64_t scratch_max = lower_scratch_max(&op, &map);
        for (uint32_t local = 0; local < w->n_local[node]; local++)
            ck_assert_uint_le(w->lists[node].scratch_bytes[local], scratch_max);
        if (node == 0)
            w->scratch_max = scratch_max;
        ck_assert_uint_eq(scratch_max, w->scratch_max);
    }
    for (uint32_t gpu = 0; gpu < w->n_gpus; gpu++) {
        const uint32_t node = w->node_of_gpu[gpu];
        w->scratch[gpu] = memory(w->lists[node].scratch_bytes[w->local_of[node][gpu]], 1);
    }
}

static void run_world(struct world *w, uint64_t seed)
{
    place_ranks(w);
    w->op.root = draw(w->n_ranks);
    w->size = dtype_bytes(w->op.dtype);
    set_counts(w);
    place_memory(w);
    expect(w);
    for (uint32_t node = 0; node < w->n_nodes; node++)
        lower_list_init(&w->lists[node]);
    lower_world(w);
    for (uint32_t node = 0; node < w->n_nodes; node++)
        run_phase(w, node, LOWER_BEFORE);
    run_calls(w);
    for (uint32_t node = 0; node < w->n_nodes; node++)
        run_phase(w, node, LOWER_AFTER);
    check_outputs(w, seed);
    world_free(w);
}

static void draw_factors(struct world *w)
{
    static const double factors[] = {1, 1, 1, 0.5, 3, 0.25};
    w->op.prescale = factors[draw(6)];
    w->op.postscale = factors[draw(6)];
    /* Integers saturate where a factor takes them out of range: a matter of the kernels. */
    if (!is_float(w->op.dtype))
        w->op.prescale = w->op.prescale > 1 ? 1 : w->op.prescale;
    if (!is_float(w->op.dtype) && w->op.redop != GRADD_AVG)
        w->op.postscale = w->op.postscale > 1 ? 1 : w->op.postscale;
}

START_TEST(any_op_on_any_layout_gives_what_the_cpu_gives)
{
    static const int dtypes[] = {GRADD_I8,  GRADD_U8,  GRADD_I32, GRADD_I64,
                                 GRADD_F16, GRADD_F32, GRADD_F64, GRADD_BF16};
    const char *text = getenv("GRADD_TEST_SEED");
    const uint64_t first = text ? strtoull(text, NULL, 10) : 1;
    for (uint64_t seed = first; seed < first + (text ? 1 : ROUNDS); seed++) {
        static struct world world;
        world = (struct world){0};
        random_state = seed;
        draw(2);
        world.op.kind = (int)draw(GRADD_ALLTOALL + 1);
        world.op.dtype = dtypes[draw(8)];
        world.op.redop = (int)draw(5);
        draw_factors(&world);
        run_world(&world, seed);
    }
}
END_TEST

/* The map of two ranks: both on GPU 0, or one on each of two. */
static void lower_pair(struct lower_list *list, bool is_shared, struct backend_op *op)
{
    static float memory_of_both[4][8];
    static uint32_t gpu_of[2], local_of[2] = {0, 1};
    static struct backend_part parts[2];
    gpu_of[1] = is_shared ? 0 : 1;
    for (int i = 0; i < 2; i++)
        parts[i] = (struct backend_part){.in.base = (uint8_t *)memory_of_both[i],
                                         .out.base = (uint8_t *)memory_of_both[2 + i],
                                         .count = 8};
    op->n_ranks = 2;
    op->parts = parts;
    op->end = 8;
    op->dtype = GRADD_F32;
    const uint32_t n_gpus = is_shared ? 1 : 2;
    const struct lower_map map = {2, n_gpus, gpu_of, local_of, n_gpus};
    lower_list_init(list);
    ck_assert_int_eq(lower_op(list, op, &map), 0);
}

START_TEST(ranks_that_share_the_only_gpu_need_one_kernel_and_no_nccl)
{
    struct lower_list list;
    struct backend_op op = {.kind = GRADD_ALLREDUCE, .prescale = 1, .postscale = 1};
    lower_pair(&list, true, &op);
    ck_assert_uint_eq(list.phases[LOWER_BEFORE].n, 1);
    ck_assert_int_eq(list.phases[LOWER_BEFORE].steps[0].kind, LOWER_REDUCE);
    ck_assert_uint_eq(list.phases[LOWER_BEFORE].steps[0].n_out, 2);
    ck_assert_uint_eq(list.phases[LOWER_CALLS].n, 0);
    ck_assert_uint_eq(list.phases[LOWER_AFTER].n, 0);
    lower_list_deinit(&list);
}
END_TEST

START_TEST(one_rank_per_gpu_needs_nothing_but_nccl)
{
    static const int redops[] = {GRADD_SUM, GRADD_AVG, GRADD_MAX};
    for (int i = 0; i < 3; i++) {
        struct lower_list list;
        struct backend_op op = {
            .kind = GRADD_ALLREDUCE, .redop = redops[i], .prescale = 1, .postscale = 1};
        lower_pair(&list, false, &op);
        ck_assert_uint_eq(list.phases[LOWER_BEFORE].n, 0);
        ck_assert_uint_eq(list.phases[LOWER_CALLS].n, 2);
        ck_assert_int_eq(list.phases[LOWER_CALLS].steps[0].redop, redops[i]);
        ck_assert_uint_eq(list.phases[LOWER_AFTER].n, 0);
        ck_assert_uint_eq(list.scratch_bytes[0], 0);
        lower_list_deinit(&list);
    }
}
END_TEST

START_TEST(a_factor_on_a_sum_is_nccls_where_ranks_have_their_own_gpus)
{
    struct lower_list list;
    struct backend_op op = {.kind = GRADD_ALLREDUCE, .prescale = 0.5, .postscale = 1};
    lower_pair(&list, false, &op);
    ck_assert_uint_eq(list.phases[LOWER_BEFORE].n, 0);
    ck_assert_int_eq(list.phases[LOWER_CALLS].steps[1].redop, LOWER_PREMUL_SUM);
    ck_assert(list.phases[LOWER_CALLS].steps[1].factor == 0.5);
    lower_list_deinit(&list);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("lower");
    TCase *tcase = tcase_create("lower");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, any_op_on_any_layout_gives_what_the_cpu_gives);
    tcase_add_test(tcase, ranks_that_share_the_only_gpu_need_one_kernel_and_no_nccl);
    tcase_add_test(tcase, one_rank_per_gpu_needs_nothing_but_nccl);
    tcase_add_test(tcase, a_factor_on_a_sum_is_nccls_where_ranks_have_their_own_gpus);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
