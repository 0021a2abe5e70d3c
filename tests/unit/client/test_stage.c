/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring's arithmetic, driven by a worker that finishes arbitrary amounts: every byte arrives,
 * and none overwrites a byte that is still needed.
 */
#include <stdlib.h>
#include <string.h>

#include "op.h"
#include "region.h"
#include "run_suite.h"
#include "stage.h"

START_TEST(classes_hold_what_was_asked_and_waste_a_quarter_at_most)
{
    for (uint64_t bytes = 1; bytes < (uint64_t)1 << 34; bytes += bytes / 3 + 1) {
        uint64_t held = stage_class_bytes(stage_class(bytes));
        ck_assert_uint_ge(held, bytes);
        if (bytes > 4096)
            ck_assert_uint_le(held, bytes + bytes / 4);
    }
    for (unsigned class = 0; class < STAGE_CLASSES; class ++) {
        ck_assert_uint_eq(stage_class(stage_class_bytes(class)), class);
        ck_assert_uint_gt(stage_class(stage_class_bytes(class) + 1), class);
    }
}
END_TEST

START_TEST(limit_never_passes_a_slot_that_is_needed)
{
    struct flow flow = {.total = 1000, .window = 64, .chunk = 16, .is_drained = true};
    ck_assert_uint_eq(flow_limit(&flow), 64);
    flow.fed = 64;
    flow.done = 40;
    ck_assert_uint_eq(flow_limit(&flow), 64);
    flow.drained = 40;
    ck_assert_uint_eq(flow_limit(&flow), 96);
    flow.is_drained = false;
    flow.drained = 0;
    ck_assert_uint_eq(flow_limit(&flow), 96);
    flow.done = flow.fed = 944;
    ck_assert_uint_eq(flow_limit(&flow), 1000);
}
END_TEST

START_TEST(span_ends_at_the_end_of_the_ring)
{
    struct flow flow = {.total = 1000, .window = 64, .chunk = 16};
    ck_assert_uint_eq(flow_span(&flow, 0, 1000), 64);
    ck_assert_uint_eq(flow_span(&flow, 60, 1000), 4);
    ck_assert_uint_eq(flow_span(&flow, 64, 70), 6);
}
END_TEST

enum sides { IN_ONLY, OUT_ONLY, BOTH, N_SIDES };

/* The worker's side of a piece: out = in + 1, in the ring or in registered memory. */
static void work(struct op *op, uint64_t from, uint64_t to, const uint8_t *plain_in,
                 uint8_t *plain_out, uint8_t *ring)
{
    for (uint64_t at = from; at < to; at++) {
        uint8_t value = op->in.user ? ring[at % op->flow.window] : plain_in[at];
        *(op->out.user ? &ring[at % op->flow.window] : &plain_out[at]) = (uint8_t)(value + 1);
    }
}

static void stream(enum sides sides, uint64_t total, uint64_t window, uint64_t chunk)
{
    uint8_t *in = malloc(total + 1), *out = calloc(1, total + 1), *ring = malloc(window);
    struct region region = {.base = ring, .bytes = window};
    struct op op = {.is_flowing = true, .in.region = &region, .out.region = &region};
    op.flow = (struct flow){.total = total, .window = window, .chunk = chunk};
    op.in.user = sides != OUT_ONLY ? in : NULL;
    op.out.user = sides != IN_ONLY ? out : NULL;
    op.flow.is_drained = op.out.user != NULL;
    for (uint64_t i = 0; i < total; i++)
        in[i] = (uint8_t)rand();
    uint64_t done = 0;
    while (done < total) {
        while (stage_fill_chunk(&op))
            continue;
        ck_assert_uint_gt(op.flow.fed, done); /* it never gets stuck */
        uint64_t to = done + 1 + (uint64_t)rand() % (op.flow.fed - done);
        work(&op, done, to, in, out, ring);
        done = to;
        stage_drain(&op, done);
    }
    uint64_t n_wrong = 0;
    for (uint64_t i = 0; i < total; i++)
        n_wrong += out[i] != (uint8_t)(in[i] + 1);
    ck_assert_uint_eq(n_wrong, 0);
    free(in);
    free(out);
    free(ring);
}

START_TEST(every_byte_passes_the_ring_once)
{
    srand(7);
    for (int sides = 0; sides < N_SIDES; sides++) {
        for (int round = 0; round < 100; round++) {
            uint64_t chunk = 8u << rand() % 4;
            stream((enum sides)sides, 1 + (uint64_t)rand() % 5000,
                   chunk * (1 + (uint64_t)rand() % 8), chunk);
        }
        stream((enum sides)sides, 4096, 4096, 512);
    }
}
END_TEST

int main(void)
{
    const TTest *tests[] = {classes_hold_what_was_asked_and_waste_a_quarter_at_most,
                            limit_never_passes_a_slot_that_is_needed,
                            span_ends_at_the_end_of_the_ring, every_byte_passes_the_ring_once};
    return run_suite("client/stage", tests, sizeof tests / sizeof *tests);
}
