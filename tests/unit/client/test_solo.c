/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A world of one: every kind and type, against the reduction kernels that the worker uses; and the
 * words for what is refused.
 */
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include <gradd/gradd.h>

#include "../../support/element.h"
#include "reduce.h"
#include "run_suite.h"

static const int dtypes[] = {GRADD_I8,  GRADD_U8,  GRADD_I32, GRADD_I64,
                             GRADD_F16, GRADD_F32, GRADD_F64, GRADD_BF16};
enum { N_DTYPES = sizeof dtypes / sizeof *dtypes, N = 257 };

static struct gradd *world_of_one(void)
{
    const struct gradd_options options = {.struct_size = sizeof options, .size = 1, .job = "solo"};
    struct gradd *g = NULL;
    ck_assert_msg(gradd_init(&options, &g) == GRADD_OK, "%s", gradd_error());
    return g;
}

static void expect_reduced(int dtype, const uint8_t *got, const uint8_t *in, double pre,
                           double post)
{
    uint8_t expected[N * 8];
    const void *ins[] = {in};
    void *outs[] = {expected};
    struct reduction r = {.dtype = dtype,
                          .redop = GRADD_AVG,
                          .n_in = 1,
                          .n_out = 1,
                          .in = ins,
                          .out = outs,
                          .divisor = 1,
                          .prescale = pre,
                          .postscale = post};
    reduce_run_scalar(&r, 0, N);
    size_t element = gradd_dtype_size(dtype);
    for (size_t i = 0; i < N; i++) {
        const uint8_t *a = got + i * element, *b = expected + i * element;
        if (memcmp(a, b, element) != 0 && !(element_is_nan(dtype, a) && element_is_nan(dtype, b)))
            ck_abort_msg("dtype %d, scales %g %g, element %zu", dtype, pre, post, i);
    }
}

START_TEST(all_reduce_scales_as_the_worker_does)
{
    static const double scales[] = {1, 0.5, -3.25, 1e-5, 1e9};
    struct gradd *g = world_of_one();
    srand(3);
    for (int d = 0; d < N_DTYPES; d++) {
        for (int s = 0; s < 25; s++) {
            /* Odd addresses: alignment is not required. */
            uint8_t in[N * 8 + 1], out[N * 8 + 1], before[N * 8];
            for (size_t i = 0; i < sizeof in; i++)
                in[i] = (uint8_t)rand();
            memcpy(before, in + 1, sizeof before);
            struct gradd_op op = {.struct_size = sizeof op,
                                  .kind = GRADD_ALLREDUCE,
                                  .dtype = dtypes[d],
                                  .redop = GRADD_AVG,
                                  .name = "t",
                                  .in = in + 1,
                                  .out = out + 1,
                                  .count = N,
                                  .prescale = scales[s / 5],
                                  .postscale = scales[s % 5]};
            gradd_handle handle = gradd_submit(g, &op, 1);
            ck_assert_msg(handle > 0, "%s", gradd_error());
            ck_assert_int_eq(gradd_wait(g, handle, -1), GRADD_OK);
            expect_reduced(dtypes[d], out + 1, in + 1, scales[s / 5], scales[s % 5]);
            ck_assert_mem_eq(in + 1, before, sizeof before);
            op.out = in + 1;
            handle = gradd_submit(g, &op, 1);
            ck_assert_int_eq(gradd_wait(g, handle, 0), GRADD_OK);
            ck_assert_mem_eq(in + 1, out + 1, N * gradd_dtype_size(dtypes[d]));
        }
    }
    gradd_shutdown(g);
}
END_TEST

/* Every one of the 65536 patterns, so that subnormals, ties and infinities are among them; also of
 * a NaN every bit. */
START_TEST(half_types_round_as_the_worker_does)
{
    struct gradd *g = world_of_one();
    static uint16_t in[65536], out[65536];
    const void *ins[] = {in};
    static uint16_t expected[65536];
    void *outs[] = {expected};
    for (uint32_t i = 0; i < 65536; i++)
        in[i] = (uint16_t)i;
    for (int d = 0; d < 2; d++) {
        int dtype = d ? GRADD_BF16 : GRADD_F16;
        static const double factors[] = {0.3, 1.0 / 4096, 1.7};
        for (int f = 0; f < 3; f++) {
            struct gradd_op op = {.struct_size = sizeof op,
                                  .kind = GRADD_ALLREDUCE,
                                  .dtype = dtype,
                                  .redop = GRADD_SUM,
                                  .name = "h",
                                  .in = in,
                                  .out = out,
                                  .count = 65536,
                                  .prescale = factors[f]};
            ck_assert_int_eq(gradd_wait(g, gradd_submit(g, &op, 1), -1), GRADD_OK);
            struct reduction r = {.dtype = dtype,
                                  .redop = GRADD_SUM,
                                  .n_in = 1,
                                  .n_out = 1,
                                  .in = ins,
                                  .out = outs,
                                  .divisor = 1,
                                  .prescale = factors[f],
                                  .postscale = 1};
            reduce_run_scalar(&r, 0, 65536);
            for (uint32_t i = 0; i < 65536; i++)
                if (out[i] != expected[i])
                    ck_abort_msg("dtype %d, %#x * %g: %#x, expected %#x", dtype, i, factors[f],
                                 out[i], expected[i]);
        }
    }
    gradd_shutdown(g);
}
END_TEST

START_TEST(the_other_kinds_copy_and_count)
{
    struct gradd *g = world_of_one();
    int32_t in[5] = {1, 2, 3, 4, 5}, out[5] = {0};
    uint64_t count = 0, five = 5;
    ck_assert_int_eq(gradd_allgather(g, "ag", in, 5, out, 5, GRADD_I32, &count), GRADD_OK);
    ck_assert_mem_eq(out, in, sizeof in);
    ck_assert_uint_eq(count, 5);
    memset(out, 0, sizeof out);
    count = 0;
    ck_assert_int_eq(gradd_alltoall(g, "a2a", in, 5, &five, out, 5, GRADD_I32, &count), GRADD_OK);
    ck_assert_mem_eq(out, in, sizeof in);
    ck_assert_uint_eq(count, 5);
    memset(out, 0, sizeof out);
    ck_assert_int_eq(gradd_reduce_scatter(g, "rs", in, 5, out, NULL, GRADD_I32, GRADD_MAX), 0);
    ck_assert_mem_eq(out, in, sizeof in);
    ck_assert_int_eq(gradd_broadcast(g, "bc", in, 5, GRADD_I32, 0), GRADD_OK);
    ck_assert_mem_eq(out, in, sizeof in);
    ck_assert_int_eq(gradd_barrier(g, 0), GRADD_OK);
    struct gradd_op join = {.struct_size = sizeof join, .kind = GRADD_JOIN, .name = "j"};
    gradd_handle handle = gradd_submit(g, &join, 1);
    count = 9;
    ck_assert_int_eq(gradd_counts(g, handle, 0, &count, 1), 1);
    ck_assert_uint_eq(count, 0);
    ck_assert_int_eq(gradd_release(g, handle), GRADD_OK);
    gradd_shutdown(g);
}
END_TEST

START_TEST(nan_and_infinity_are_counted_where_asked)
{
    static const uint16_t f16[] = {0x7c00, 0xfc01, 0x7bff, 0};
    static const uint16_t bf16[] = {0x7f80, 0xffff, 0x7f7f, 0};
    const float f32[] = {NAN, -INFINITY, 1, 0};
    const double f64[] = {NAN, -INFINITY, 1, 0};
    const int32_t i32[] = {-1, -1, -1, -1};
    static const int types[] = {GRADD_F16, GRADD_BF16, GRADD_F32, GRADD_F64, GRADD_I32};
    const void *values[] = {f16, bf16, f32, f64, i32};
    struct gradd *g = world_of_one();
    for (int i = 0; i < 5; i++) {
        double out[4];
        struct gradd_op op = {.struct_size = sizeof op,
                              .kind = GRADD_REDUCE_SCATTER,
                              .dtype = types[i],
                              .name = "n",
                              .in = values[i],
                              .out = out,
                              .count = 4,
                              .check_finite = 1};
        gradd_handle handle = gradd_submit(g, &op, 1);
        int32_t rank = -1;
        uint64_t count = 0;
        ck_assert_int_eq(gradd_nonfinite(g, handle, 0, &rank, &count), types[i] != GRADD_I32);
        ck_assert_uint_eq(count, types[i] != GRADD_I32 ? 2 : 0);
        ck_assert_int_eq(rank, types[i] != GRADD_I32 ? 0 : -1);
        gradd_release(g, handle);
    }
    gradd_shutdown(g);
}
END_TEST

START_TEST(results_that_do_not_fit_fail_the_op)
{
    struct gradd *g = world_of_one();
    int32_t in[5] = {1, 2, 3, 4, 5}, out[4];
    ck_assert_int_eq(gradd_allgather(g, "ag", in, 5, out, 4, GRADD_I32, NULL), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(gradd_error(), "out_capacity"));
    gradd_shutdown(g);
}
END_TEST

START_TEST(a_process_set_lives_from_add_to_remove)
{
    struct gradd *g = world_of_one();
    uint64_t rank = 0, id = 0, again = 0;
    struct gradd_op add = {
        .struct_size = sizeof add, .kind = GRADD_SET_ADD, .name = "s", .count = 1, .counts = &rank};
    gradd_handle handle = gradd_submit(g, &add, 1);
    ck_assert_int_eq(gradd_counts(g, handle, 0, &id, 1), 1);
    ck_assert_uint_gt(id, 0);
    handle = gradd_submit(g, &add, 1);
    ck_assert_int_eq(gradd_counts(g, handle, 0, &again, 1), 1);
    ck_assert_uint_eq(again, id);
    ck_assert_int_eq(gradd_barrier(g, (uint32_t)id), GRADD_OK);
    struct gradd_op del = {
        .struct_size = sizeof del, .kind = GRADD_SET_REMOVE, .name = "d", .root = (int32_t)id};
    ck_assert_int_eq(gradd_wait(g, gradd_submit(g, &del, 1), -1), GRADD_OK);
    ck_assert_int_eq(gradd_barrier(g, (uint32_t)id), GRADD_ERR_INVALID);
    ck_assert_int_eq(gradd_wait(g, gradd_submit(g, &del, 1), -1), GRADD_ERR_INVALID);
    gradd_shutdown(g);
}
END_TEST

START_TEST(the_descriptor_tells_of_ended_ops)
{
    struct gradd *g = world_of_one();
    struct pollfd poll_fd = {.fd = gradd_fd(g), .events = POLLIN};
    ck_assert_int_ge(poll_fd.fd, 0);
    ck_assert_int_eq(gradd_progress(g), GRADD_OK);
    ck_assert_int_eq(poll(&poll_fd, 1, 0), 0);
    float x = 1;
    gradd_handle handle = gradd_allreduce_async(g, "x", &x, &x, 1, GRADD_F32, GRADD_SUM);
    ck_assert_int_eq(poll(&poll_fd, 1, 0), 1);
    ck_assert_int_eq(gradd_progress(g), GRADD_OK);
    ck_assert_int_eq(poll(&poll_fd, 1, 0), 0);
    ck_assert_int_eq(gradd_test(g, handle), GRADD_OK);
    ck_assert_int_eq(gradd_wait(g, handle, -1), GRADD_OK);
    ck_assert_int_eq(gradd_wait(g, handle, -1), GRADD_ERR_INVALID);
    gradd_shutdown(g);
}
END_TEST

START_TEST(memory_is_zeroed_and_freed_once)
{
    struct gradd *g = world_of_one();
    uint8_t *memory = gradd_alloc(g, 5000);
    ck_assert_ptr_nonnull(memory);
    for (int i = 0; i < 5000; i++)
        ck_assert_uint_eq(memory[i], 0);
    ck_assert_int_eq(gradd_free(g, memory + 1), GRADD_ERR_INVALID);
    ck_assert_int_eq(gradd_free(g, memory), GRADD_OK);
    ck_assert_int_eq(gradd_free(g, memory), GRADD_ERR_INVALID);
    ck_assert_int_eq(gradd_free(g, NULL), GRADD_OK);
    memory = gradd_alloc(g, 0);
    ck_assert_ptr_nonnull(memory);
    gradd_shutdown(g);
}
END_TEST

struct refusal {
    struct gradd_op op;
    const char *words;
};

static float data[8];
static const uint64_t seven = 7;
static char long_name[257];

#define OP        .struct_size = sizeof(struct gradd_op)
#define ALLREDUCE OP, .kind = GRADD_ALLREDUCE
#define TYPE      .dtype = GRADD_F32
#define DATA      .in = data, .out = data, .count = 4

static const struct refusal refusals[] = {
    {{OP, .kind = 9, .name = "n"}, "kind 9"},
    {{ALLREDUCE, TYPE, DATA}, "no name"},
    {{ALLREDUCE, TYPE, DATA, .name = ""}, "no name"},
    {{ALLREDUCE, TYPE, DATA, .name = long_name}, "at most 255 bytes"},
    {{ALLREDUCE, DATA, .name = "n", .dtype = 3}, "\"n\": dtype 3"},
    {{ALLREDUCE, TYPE, DATA, .name = "n", .redop = 5}, "\"n\": redop 5"},
    {{ALLREDUCE, TYPE, .name = "n", .out = data, .count = 4}, "in is NULL"},
    {{ALLREDUCE, TYPE, .name = "n", .in = data, .count = 4}, "out is NULL"},
    {{ALLREDUCE, TYPE, .name = "n", .in = data, .out = data + 1, .count = 4}, "overlap"},
    {{ALLREDUCE, TYPE, .name = "n", .in = data, .count = UINT64_MAX / 4 + 2}, "beyond all memory"},
    {{ALLREDUCE, TYPE, .name = "n", .in = data, .count = UINT64_MAX / 4 - 1}, "beyond all memory"},
    {{ALLREDUCE, TYPE, DATA, .name = "n", .prescale = INFINITY}, "finite"},
    {{ALLREDUCE, TYPE, DATA, .name = "n", .set = 4}, "no process set 4"},
    {{OP, .kind = GRADD_BROADCAST, .dtype = GRADD_F32, .name = "n", .root = 1}, "root 1"},
    {{OP, .kind = GRADD_BROADCAST, .dtype = GRADD_F32, .name = "n", .root = -1}, "root -1"},
    {{OP, .kind = GRADD_BROADCAST, .dtype = GRADD_F32, .name = "n", .prescale = 2}, "scales"},
    {{OP, .kind = GRADD_REDUCE_SCATTER, .dtype = GRADD_F32, .name = "n", .in = data,
      .out = data + 4, .count = 4, .counts = &seven},
     "add up to 7"},
    {{OP, .kind = GRADD_SET_ADD, .name = "n"}, "counts"},
    {{OP, .kind = GRADD_BARRIER, .name = "n", .check_finite = 1}, "check_finite"},
    {{.struct_size = 8, .name = "n"}, "struct_size is 8"},
};

START_TEST(what_makes_no_sense_is_refused_in_words)
{
    memset(long_name, 'n', 256);
    struct gradd *g = world_of_one();
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        ck_assert_msg(gradd_submit(g, &refusals[i].op, 1) == GRADD_ERR_INVALID,
                      "case %zu (%s) was accepted", i, refusals[i].words);
        ck_assert_msg(strstr(gradd_error(), refusals[i].words), "case %zu: %s", i, gradd_error());
    }
    ck_assert_int_eq(gradd_submit(g, NULL, 0), GRADD_ERR_INVALID);
    ck_assert_int_eq(gradd_submit(NULL, &refusals[0].op, 1), GRADD_ERR_INVALID);
    gradd_shutdown(g);
}
END_TEST

START_TEST(later_structs_are_taken_while_their_new_fields_are_zero)
{
    struct {
        struct gradd_op op;
        uint64_t later;
    } ops[2] = {0};
    float x[2] = {1, 2}, y[2] = {0};
    struct gradd *g = world_of_one();
    for (int i = 0; i < 2; i++)
        ops[i].op = (struct gradd_op){.struct_size = sizeof ops[i],
                                      .kind = GRADD_ALLREDUCE,
                                      .dtype = GRADD_F32,
                                      .name = i ? "b" : "a",
                                      .in = &x[i],
                                      .out = &y[i],
                                      .count = 1};
    gradd_handle handle = gradd_submit(g, &ops[0].op, 2);
    ck_assert_msg(handle > 0, "%s", gradd_error());
    ck_assert_int_eq(gradd_wait(g, handle, -1), GRADD_OK);
    ck_assert_mem_eq(x, y, sizeof x);
    ops[1].later = 1;
    ck_assert_int_eq(gradd_submit(g, &ops[0].op, 2), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(gradd_error(), "does not know"));
    gradd_shutdown(g);
}
END_TEST

START_TEST(statuses_have_names_and_types_have_sizes)
{
    for (int status = GRADD_ERR_INTERNAL; status <= GRADD_PENDING; status++)
        ck_assert_int_eq(strncmp(gradd_status_name(status), "GRADD_", 6), 0);
    ck_assert_str_eq(gradd_status_name(-99), "(no gradd status)");
    ck_assert_uint_eq(gradd_dtype_size(3), 0);
    ck_assert_uint_eq(gradd_dtype_size(-1), 0);
    ck_assert_uint_eq(gradd_dtype_size(GRADD_BF16), 2);
    ck_assert_int_eq(gradd_rank(NULL), GRADD_ERR_INVALID);
}
END_TEST

int main(void)
{
    const TTest *tests[] = {
        all_reduce_scales_as_the_worker_does,
        half_types_round_as_the_worker_does,
        the_other_kinds_copy_and_count,
        nan_and_infinity_are_counted_where_asked,
        results_that_do_not_fit_fail_the_op,
        a_process_set_lives_from_add_to_remove,
        the_descriptor_tells_of_ended_ops,
        memory_is_zeroed_and_freed_once,
        what_makes_no_sense_is_refused_in_words,
        later_structs_are_taken_while_their_new_fields_are_zero,
        statuses_have_names_and_types_have_sizes,
    };
    return run_suite("client/solo", tests, sizeof tests / sizeof *tests);
}
