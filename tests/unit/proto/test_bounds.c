/* SPDX-License-Identifier: Apache-2.0 */
/* What a peer can make the codec hold: the queue to a slow reader, the input buffer and the memory
 * of an unpacked message are bounded. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "run_suite.h"
#include "wire_pair.h"

START_TEST(a_slow_reader_is_refused_at_the_limit)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    enum { LIMIT = 64 * 1024 };
    struct wire_out out;
    wire_out_init(&out, LIMIT);
    char text[1001];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    struct error_envelope storage;
    Pb__Envelope *envelope = error_envelope(&storage, 1, text);
    /* Nobody reads: the socket fills, then the queue, then the push is refused. */
    unsigned n_pushed = 0;
    int rc;
    while ((rc = wire_out_push(&out, envelope, NULL, 0)) == 0) {
        ck_assert_int_ge(wire_out_flush(&out, pair.sock[0]), 0);
        ck_assert_uint_le(out.end - out.begin, LIMIT);
        ck_assert_uint_lt(++n_pushed, 100000);
    }
    ck_assert_int_eq(rc, -ENOBUFS);
    ck_assert_int_eq(wire_out_flush(&out, pair.sock[0]), 1);
    /* Once the reader reads again, all of it arrives and pushing works again. */
    unsigned n_read = 0;
    struct wire_frame frame;
    while (n_read < n_pushed) {
        ck_assert_int_eq(wire_in_read(&pair.in, pair.sock[1]), 0);
        while (wire_in_next(&pair.in, &frame) == 1)
            n_read++;
        ck_assert_int_ge(wire_out_flush(&out, pair.sock[0]), 0);
    }
    ck_assert_int_eq(wire_out_push(&out, envelope, NULL, 0), 0);
    ck_assert_uint_le(out.capacity, 2 * LIMIT);
    wire_out_deinit(&out);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(the_largest_frame_passes_and_one_byte_more_does_not)
{
    /* Tag and length of the envelope's field and of the text take 1+3 and 1+3 bytes; the code 2. */
    const size_t text_max = WIRE_FRAME_MAX - 10;
    char *text = malloc(text_max + 2);
    ck_assert_ptr_nonnull(text);
    memset(text, 'y', text_max + 1);
    text[text_max + 1] = 0;
    struct wire_out out;
    struct error_envelope storage;
    wire_out_init(&out, 2 * (WIRE_FRAME_MAX + WIRE_HEADER_BYTES));
    ck_assert_int_eq(wire_out_push(&out, error_envelope(&storage, 1, text), NULL, 0), -EMSGSIZE);
    text[text_max] = 0;
    ck_assert_int_eq(wire_out_push(&out, error_envelope(&storage, 1, text), NULL, 0), 0);
    ck_assert_uint_eq(out.end - out.begin, WIRE_HEADER_BYTES + WIRE_FRAME_MAX);

    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    ck_assert_int_eq(wire_in_feed(&in, out.data + out.begin, out.end - out.begin), 0);
    ck_assert_int_eq(wire_in_next(&in, &frame), 1);
    ck_assert_uint_eq(strlen(frame.envelope->error->text), text_max);
    wire_in_deinit(&in);
    wire_out_deinit(&out);
    free(text);
}
END_TEST

START_TEST(the_input_buffer_does_not_grow_with_the_stream)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    char text[5000];
    memset(text, 'z', sizeof text);
    text[sizeof text - 1] = 0;
    struct error_envelope storage;
    size_t n;
    uint8_t *bytes = pack_frame(error_envelope(&storage, 1, text), 0, &n);
    for (int i = 0; i < 2000; i++) {
        struct wire_frame frame;
        send_raw(pair.sock[0], bytes, n, NULL, 0);
        int rc;
        while ((rc = wire_in_next(&pair.in, &frame)) == 0)
            ck_assert_int_eq(wire_in_read(&pair.in, pair.sock[1]), 0);
        ck_assert_int_eq(rc, 1);
    }
    ck_assert_uint_le(pair.in.capacity, 64 * 1024);
    free(bytes);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(a_flood_without_frames_is_bounded_by_one_frame)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    uint8_t chunk[16 * 1024] = {0};
    put_header(chunk, WIRE_FRAME_MAX, 0);
    size_t total = 0;
    struct wire_frame frame;
    int rc = 0;
    while (rc == 0) {
        send_raw(pair.sock[0], chunk, sizeof chunk, NULL, 0);
        memset(chunk, 0, WIRE_HEADER_BYTES);
        total += sizeof chunk;
        ck_assert_uint_le(total, 2 * WIRE_FRAME_MAX);
        ck_assert_int_eq(wire_in_read(&pair.in, pair.sock[1]), 0);
        rc = wire_in_next(&pair.in, &frame);
    }
    ck_assert_int_eq(rc, -EPROTO);
    ck_assert_uint_le(pair.in.capacity, 2 * (WIRE_FRAME_MAX + WIRE_HEADER_BYTES));
    wire_pair_close(&pair);
}
END_TEST

/* A frame of `n` bytes that is one SubmitBatch full of empty submits: 2 bytes each. */
static uint8_t *empty_submits(size_t n_submits, size_t *out_bytes)
{
    size_t inner = 2 * n_submits;
    uint8_t *frame = calloc(1, WIRE_HEADER_BYTES + 6 + inner), *p = frame + WIRE_HEADER_BYTES;
    ck_assert_ptr_nonnull(frame);
    *p++ = 0xc2;
    *p++ = 0x01;
    size_t left = inner;
    do {
        *p++ = (uint8_t)(left | 0x80);
        left >>= 7;
    } while (left);
    p[-1] &= 0x7f;
    for (size_t i = 0; i < n_submits; i++) {
        *p++ = 0x12;
        *p++ = 0;
    }
    *out_bytes = (size_t)(p - frame);
    put_header(frame, (uint32_t)(*out_bytes - WIRE_HEADER_BYTES), 0);
    return frame;
}

START_TEST(an_intricate_message_stays_within_its_budget)
{
    for (size_t n_submits = 1; n_submits < WIRE_FRAME_MAX / 2; n_submits *= 4) {
        size_t n;
        uint8_t *bytes = empty_submits(n_submits, &n);
        struct wire_in in;
        struct wire_frame frame;
        wire_in_init(&in);
        ck_assert_int_eq(wire_in_feed(&in, bytes, n), 0);
        int rc = wire_in_next(&in, &frame);
        ck_assert(rc == 1 || rc == -EPROTO);
        if (rc == 1)
            ck_assert_uint_eq(frame.envelope->submit_batch->n_submits, n_submits);
        else
            ck_assert_str_eq(in.error, "a message too intricate for its size");
        ck_assert_uint_le(in.arena_bytes, 16 * 1024 + n * 160);
        wire_in_deinit(&in);
        free(bytes);
    }
}
END_TEST

START_TEST(repeating_the_body_does_not_multiply_memory)
{
    /* The body of a oneof sent again and again: each copy replaces the one before. */
    enum { N = 4000 };
    const uint8_t one[] = {0x1a, 0x05, 0x08, 1, 0x12, 1, 'x'};
    uint8_t *bytes = malloc(WIRE_HEADER_BYTES + N * sizeof one);
    ck_assert_ptr_nonnull(bytes);
    put_header(bytes, N * sizeof one, 0);
    for (int i = 0; i < N; i++)
        memcpy(bytes + WIRE_HEADER_BYTES + i * sizeof one, one, sizeof one);
    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    ck_assert_int_eq(wire_in_feed(&in, bytes, WIRE_HEADER_BYTES + N * sizeof one), 0);
    int rc = wire_in_next(&in, &frame);
    ck_assert(rc == 1 || rc == -EPROTO);
    ck_assert_uint_le(in.arena_bytes, 16 * 1024 + N * sizeof one * 160);
    wire_in_deinit(&in);
    free(bytes);
}
END_TEST

START_TEST(end_of_stream_is_seen_after_the_last_frame)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct error_envelope storage;
    size_t n;
    uint8_t *bytes = pack_frame(error_envelope(&storage, 3, (char *)"last"), 0, &n);
    send_raw(pair.sock[0], bytes, n, NULL, 0);
    shutdown(pair.sock[0], SHUT_WR);
    struct wire_frame frame;
    ck_assert_int_eq(wire_in_read(&pair.in, pair.sock[1]), 0);
    ck_assert(!pair.in.is_eof);
    ck_assert_int_eq(wire_in_next(&pair.in, &frame), 1);
    ck_assert_str_eq(frame.envelope->error->text, "last");
    ck_assert_int_eq(wire_in_next(&pair.in, &frame), 0);
    ck_assert_int_eq(wire_in_read(&pair.in, pair.sock[1]), 0);
    ck_assert(pair.in.is_eof);
    free(bytes);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(a_reader_that_went_away_is_an_error_and_no_signal)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct wire_out out;
    struct error_envelope storage;
    wire_out_init(&out, WIRE_FRAME_MAX);
    ck_assert_int_eq(wire_out_push(&out, error_envelope(&storage, 1, (char *)"x"), NULL, 0), 0);
    shutdown(pair.sock[1], SHUT_RDWR);
    ck_assert_int_eq(wire_out_flush(&out, pair.sock[0]), -EPIPE);
    wire_out_deinit(&out);
    wire_pair_close(&pair);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_slow_reader_is_refused_at_the_limit,
        the_largest_frame_passes_and_one_byte_more_does_not,
        the_input_buffer_does_not_grow_with_the_stream,
        a_flood_without_frames_is_bounded_by_one_frame,
        an_intricate_message_stays_within_its_budget,
        repeating_the_body_does_not_multiply_memory,
        end_of_stream_is_seen_after_the_last_frame,
        a_reader_that_went_away_is_an_error_and_no_signal,
    };
    return run_suite("bounds", tests, sizeof tests / sizeof *tests);
}
