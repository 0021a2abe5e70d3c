/* SPDX-License-Identifier: Apache-2.0 */
/* Random messages through a real socket, cut at random places, with random descriptors: all arrive
 * once, in order, unchanged. The seed is printed; GRADD_TEST_SEED repeats a run. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../support/random.h"
#include "run_suite.h"
#include "wire_pair.h"

static uint64_t pick_seed(void)
{
    const char *given = getenv("GRADD_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL) * 2654435761u + 1;
    printf("seed: GRADD_TEST_SEED=%llu\n", (unsigned long long)seed);
    fflush(stdout);
    return seed ? seed : 1;
}

enum { MAX_SUBMITS = 20, MAX_COUNTS = 8 };

/* A SubmitBatch with random content, or a Completion's worth of text. */
struct random_message {
    Pb__Envelope envelope;
    Pb__SubmitBatch batch;
    Pb__Submit submit[MAX_SUBMITS], *submits[MAX_SUBMITS];
    Pb__Buffer in[MAX_SUBMITS], out[MAX_SUBMITS];
    uint64_t counts[MAX_SUBMITS][MAX_COUNTS];
    char name[MAX_SUBMITS][300];
};

static void fill_submit(struct random_message *m, size_t i)
{
    Pb__Submit *submit = &m->submit[i];
    *submit = (Pb__Submit)PB__SUBMIT__INIT;
    size_t n_name = random_below(sizeof m->name[i]);
    for (size_t k = 0; k < n_name; k++)
        m->name[i][k] = (char)('a' + random_below(26));
    m->name[i][n_name] = 0;
    submit->name = m->name[i];
    submit->id = random_bits() >> random_below(64);
    submit->kind = (uint32_t)random_below(9);
    submit->count = random_bits() >> random_below(64);
    submit->root = (int32_t)random_bits();
    submit->prescale = (double)random_bits();
    m->in[i] = (Pb__Buffer)PB__BUFFER__INIT;
    m->in[i].region = (uint32_t)random_bits();
    m->in[i].offset = random_bits();
    submit->in = random_below(4) ? &m->in[i] : NULL;
    m->out[i] = (Pb__Buffer)PB__BUFFER__INIT;
    submit->out = random_below(4) ? &m->out[i] : NULL;
    submit->n_counts = random_below(MAX_COUNTS + 1);
    submit->counts = m->counts[i];
    for (size_t k = 0; k < submit->n_counts; k++)
        m->counts[i][k] = random_bits() >> random_below(64);
    m->submits[i] = submit;
}

static Pb__Envelope *fill_random(struct random_message *m)
{
    m->batch = (Pb__SubmitBatch)PB__SUBMIT_BATCH__INIT;
    m->batch.epoch = random_bits();
    m->batch.n_submits = random_below(MAX_SUBMITS + 1);
    m->batch.submits = m->submits;
    for (size_t i = 0; i < m->batch.n_submits; i++)
        fill_submit(m, i);
    m->envelope = (Pb__Envelope)PB__ENVELOPE__INIT;
    m->envelope.body_case = PB__ENVELOPE__BODY_SUBMIT_BATCH;
    m->envelope.submit_batch = &m->batch;
    return &m->envelope;
}

/* Equal when they pack to the same bytes (packing is deterministic). */
static void expect_equal(const Pb__Envelope *a, const Pb__Envelope *b)
{
    size_t n = pb__envelope__get_packed_size(a);
    ck_assert_uint_eq(pb__envelope__get_packed_size(b), n);
    uint8_t *x = malloc(2 * n + 2), *y = x + n + 1;
    ck_assert_ptr_nonnull(x);
    pb__envelope__pack(a, x);
    pb__envelope__pack(b, y);
    ck_assert_mem_eq(x, y, n);
    free(x);
}

START_TEST(random_messages_cut_anywhere_arrive_unchanged)
{
    random_state = pick_seed();
    struct wire_in in;
    wire_in_init(&in);
    for (int round = 0; round < 2000; round++) {
        struct random_message m;
        struct wire_frame frame;
        size_t n, sent = 0;
        uint8_t *bytes = pack_frame(fill_random(&m), 0, &n);
        while (sent < n) {
            ck_assert_int_eq(wire_in_next(&in, &frame), 0);
            size_t piece = 1 + random_below(n - sent);
            ck_assert_int_eq(wire_in_feed(&in, bytes + sent, piece), 0);
            sent += piece;
        }
        ck_assert_int_eq(wire_in_next(&in, &frame), 1);
        expect_equal(frame.envelope, &m.envelope);
        free(bytes);
    }
    wire_in_deinit(&in);
}
END_TEST

enum { N_MESSAGES = 1000, KEPT = 64 };

START_TEST(random_messages_with_fds_arrive_in_order_over_a_full_socket)
{
    random_state = pick_seed();
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct wire_out out;
    wire_out_init(&out, 1 << 20);
    int fd = make_fd(), fds[WIRE_FDS_MAX] = {fd, fd, fd, fd};
    static struct random_message kept[KEPT];
    unsigned n_fds[KEPT], pushed = 0, taken = 0;
    while (taken < N_MESSAGES) {
        if (pushed < N_MESSAGES && pushed - taken < KEPT && random_below(3)) {
            unsigned slot = pushed++ % KEPT;
            n_fds[slot] = random_below(3) ? 0 : (unsigned)random_below(WIRE_FDS_MAX + 1);
            ck_assert_int_eq(wire_out_push(&out, fill_random(&kept[slot]), fds, n_fds[slot]), 0);
        } else if (random_below(2)) {
            ck_assert_int_ge(wire_out_flush(&out, pair.sock[0]), 0);
        } else {
            struct wire_frame frame;
            ck_assert_int_eq(wire_in_read(&pair.in, pair.sock[1]), 0);
            int rc;
            while ((rc = wire_in_next(&pair.in, &frame)) == 1) {
                unsigned slot = taken++ % KEPT;
                expect_equal(frame.envelope, &kept[slot].envelope);
                ck_assert_uint_eq(frame.n_fds, n_fds[slot]);
                wire_frame_close_fds(&frame);
            }
            ck_assert_int_eq(rc, 0);
        }
    }
    close(fd);
    wire_out_deinit(&out);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(random_bytes_never_crash_the_reader)
{
    random_state = pick_seed();
    for (int round = 0; round < 5000; round++) {
        uint8_t bytes[256];
        size_t n = WIRE_HEADER_BYTES + random_below(sizeof bytes - WIRE_HEADER_BYTES);
        put_header(bytes, (uint32_t)(n - WIRE_HEADER_BYTES), 0);
        for (size_t i = WIRE_HEADER_BYTES; i < n; i++)
            bytes[i] = (uint8_t)random_bits();
        struct wire_in in;
        struct wire_frame frame;
        wire_in_init(&in);
        ck_assert_int_eq(wire_in_feed(&in, bytes, n), 0);
        int rc = wire_in_next(&in, &frame);
        ck_assert(rc == 1 || rc == -EPROTO);
        wire_in_deinit(&in);
    }
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        random_messages_cut_anywhere_arrive_unchanged,
        random_messages_with_fds_arrive_in_order_over_a_full_socket,
        random_bytes_never_crash_the_reader,
    };
    return run_suite("roundtrip", tests, sizeof tests / sizeof *tests);
}
