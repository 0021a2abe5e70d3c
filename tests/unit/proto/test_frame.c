/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of frames and messages, and how the reader takes them apart: golden bytes keep every
 * later version able to talk to this one. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "run_suite.h"
#include "wire_pair.h"

/* What wire_out_push() queued must be exactly these bytes, and reading them must give it back. */
static void expect_golden(const Pb__Envelope *envelope, const uint8_t *golden, size_t n)
{
    struct wire_out out;
    wire_out_init(&out, WIRE_FRAME_MAX);
    ck_assert_int_eq(wire_out_push(&out, envelope, NULL, 0), 0);
    ck_assert_uint_eq(out.end - out.begin, n);
    ck_assert_mem_eq(out.data + out.begin, golden, n);
    wire_out_deinit(&out);

    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    ck_assert_int_eq(wire_in_feed(&in, golden, n), 0);
    ck_assert_int_eq(wire_in_next(&in, &frame), 1);
    ck_assert_int_eq(frame.envelope->body_case, envelope->body_case);
    ck_assert_uint_eq(frame.n_fds, 0);
    ck_assert_int_eq(wire_in_next(&in, &frame), 0);
    wire_in_deinit(&in);
}

START_TEST(hello_has_its_golden_bytes)
{
    Pb__Hello hello = PB__HELLO__INIT;
    hello.protocol_min = 1;
    hello.protocol_max = 1;
    hello.program = (char *)"libgradd";
    hello.version = (char *)"0.1.0";
    hello.role = PB__ROLE__ADMIN;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_HELLO;
    envelope.hello = &hello;
    const uint8_t golden[] = {
        0x19, 0,    0,    0,   0,   0,   0,   0,             /* 25 bytes, no fds */
        0x0a, 0x17,                                          /* field 1, 23 bytes: Hello */
        0x08, 1,    0x10, 1,                                 /* protocol_min, protocol_max */
        0x1a, 8,    'l',  'i', 'b', 'g', 'r', 'a', 'd', 'd', /* program */
        0x22, 5,    '0',  '.', '1', '.', '0',                /* version */
        0x30, 1,                                             /* role */
    };
    expect_golden(&envelope, golden, sizeof golden);
}
END_TEST

START_TEST(join_has_its_golden_bytes)
{
    Pb__Join join = PB__JOIN__INIT;
    join.job = (char *)"train7";
    join.rank = 1;
    join.size = 2;
    join.source = (char *)"arguments";
    join.timeout_ms = 300;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_JOIN;
    envelope.join = &join;
    const uint8_t golden[] = {
        0x1d, 0,    0,    0,   0,   0,   0,   0,                  /* 29 bytes, no fds */
        0x82, 0x01, 0x1a,                                         /* field 16, 26 bytes: Join */
        0x0a, 6,    't',  'r', 'a', 'i', 'n', '7',                /* job */
        0x10, 1,    0x18, 2,                                      /* rank, size */
        0x32, 9,    'a',  'r', 'g', 'u', 'm', 'e', 'n', 't', 's', /* source */
        0x38, 0xac, 0x02,                                         /* timeout_ms */
    };
    expect_golden(&envelope, golden, sizeof golden);
}
END_TEST

START_TEST(submit_batch_has_its_golden_bytes)
{
    Pb__Buffer buffer = PB__BUFFER__INIT;
    buffer.region = 3;
    buffer.offset = 4096;
    Pb__Submit submit = PB__SUBMIT__INIT;
    submit.id = 9;
    submit.name = (char *)"w";
    submit.dtype = 7;
    submit.redop = 4;
    submit.count = 1024;
    submit.in = &buffer;
    submit.prescale = 1.0;
    uint64_t counts[] = {1, 300};
    submit.counts = counts;
    submit.n_counts = 2;
    Pb__Submit *submits[] = {&submit};
    Pb__SubmitBatch batch = PB__SUBMIT_BATCH__INIT;
    batch.epoch = 5;
    batch.submits = submits;
    batch.n_submits = 1;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_SUBMIT_BATCH;
    envelope.submit_batch = &batch;
    const uint8_t golden[] = {
        0x28, 0,    0,    0,    0,    0,    0,    0,          /* 40 bytes, no fds */
        0xc2, 0x01, 0x25,                                     /* field 24, 37 bytes: SubmitBatch */
        0x08, 5,                                              /* epoch */
        0x12, 0x21,                                           /* submits[0], 33 bytes */
        0x08, 9,                                              /* id */
        0x12, 1,    'w',                                      /* name */
        0x20, 7,    0x28, 4,                                  /* dtype, redop */
        0x30, 0x80, 0x08,                                     /* count */
        0x3a, 5,    0x08, 3,    0x10, 0x80, 0x20,             /* in: region, offset */
        0x52, 3,    1,    0xac, 0x02,                         /* counts, packed */
        0x61, 0,    0,    0,    0,    0,    0,    0xf0, 0x3f, /* prescale, binary64 */
    };
    expect_golden(&envelope, golden, sizeof golden);
}
END_TEST

START_TEST(frames_arrive_whole_when_fed_byte_by_byte)
{
    struct error_envelope storage;
    size_t n;
    uint8_t *bytes = pack_frame(error_envelope(&storage, 7, (char *)"slow"), 0, &n);
    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < n; i++) {
            ck_assert_int_eq(wire_in_next(&in, &frame), 0);
            ck_assert_int_eq(wire_in_feed(&in, bytes + i, 1), 0);
        }
        ck_assert_int_eq(wire_in_next(&in, &frame), 1);
        ck_assert_uint_eq(frame.envelope->error->code, 7);
        ck_assert_str_eq(frame.envelope->error->text, "slow");
    }
    wire_in_deinit(&in);
    free(bytes);
}
END_TEST

START_TEST(several_frames_of_one_read_come_in_order)
{
    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    for (unsigned code = 1; code <= 100; code++) {
        struct error_envelope storage;
        size_t n;
        uint8_t *bytes = pack_frame(error_envelope(&storage, code, (char *)"x"), 0, &n);
        ck_assert_int_eq(wire_in_feed(&in, bytes, n), 0);
        free(bytes);
    }
    for (unsigned code = 1; code <= 100; code++) {
        ck_assert_int_eq(wire_in_next(&in, &frame), 1);
        ck_assert_uint_eq(frame.envelope->error->code, code);
    }
    ck_assert_int_eq(wire_in_next(&in, &frame), 0);
    wire_in_deinit(&in);
}
END_TEST

static void expect_refusal(const uint8_t *bytes, size_t n, const char *sentence)
{
    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    ck_assert_int_eq(wire_in_feed(&in, bytes, n), 0);
    ck_assert_int_eq(wire_in_next(&in, &frame), -EPROTO);
    ck_assert_str_eq(in.error, sentence);
    wire_in_deinit(&in);
}

START_TEST(nonzero_padding_is_refused)
{
    for (int i = 5; i < WIRE_HEADER_BYTES; i++) {
        uint8_t header[WIRE_HEADER_BYTES] = {0};
        header[i] = 1;
        expect_refusal(header, sizeof header, "not a gradd frame");
    }
    expect_refusal((const uint8_t *)"GET / HTTP/1.1\r\n", 16, "not a gradd frame");
}
END_TEST

START_TEST(oversize_is_refused_from_the_header_alone)
{
    uint8_t header[WIRE_HEADER_BYTES];
    put_header(header, WIRE_FRAME_MAX + 1, 0);
    expect_refusal(header, sizeof header, "a frame longer than 1 MiB");
    put_header(header, UINT32_MAX, 0);
    expect_refusal(header, sizeof header, "a frame longer than 1 MiB");
}
END_TEST

START_TEST(more_fds_than_a_frame_may_carry_is_refused)
{
    uint8_t header[WIRE_HEADER_BYTES];
    put_header(header, 100, WIRE_FDS_MAX + 1);
    expect_refusal(header, sizeof header, "more descriptors than a frame may carry");
}
END_TEST

START_TEST(bytes_that_do_not_unpack_are_refused)
{
    /* Field 1 (Hello) claims 100 bytes, and two are there. */
    uint8_t bytes[WIRE_HEADER_BYTES + 4] = {4, 0, 0, 0, 0, 0, 0, 0, 0x0a, 100, 0x08, 1};
    expect_refusal(bytes, sizeof bytes, "bytes that are no message");
}
END_TEST

static void expect_frame_without_body(const uint8_t *bytes, size_t n)
{
    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    ck_assert_int_eq(wire_in_feed(&in, bytes, n), 0);
    ck_assert_int_eq(wire_in_next(&in, &frame), 1);
    ck_assert_int_eq(frame.envelope->body_case, PB__ENVELOPE__BODY__NOT_SET);
    wire_in_deinit(&in);
}

START_TEST(an_unknown_message_is_a_frame_without_body)
{
    /* Field 1000, a length-delimited message of two bytes. */
    const uint8_t bytes[] = {5, 0, 0, 0, 0, 0, 0, 0, 0xc2, 0x3e, 2, 0x08, 1};
    expect_frame_without_body(bytes, sizeof bytes);
}
END_TEST

START_TEST(an_empty_frame_is_a_frame_without_body)
{
    const uint8_t bytes[WIRE_HEADER_BYTES] = {0};
    expect_frame_without_body(bytes, sizeof bytes);
}
END_TEST

START_TEST(frames_that_were_packed_apart_move_behind_what_is_queued)
{
    struct wire_out out, apart;
    struct error_envelope storage;
    wire_out_init(&out, 900);
    wire_out_init(&apart, SIZE_MAX);
    char first[] = "first", second[] = "second", big[900];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = 0;
    ck_assert_int_eq(wire_out_push(&out, error_envelope(&storage, 1, first), NULL, 0), 0);
    ck_assert_int_eq(wire_out_push(&apart, error_envelope(&storage, 2, second), NULL, 0), 0);
    ck_assert_int_eq(wire_out_move(&out, &apart), 0);
    ck_assert(wire_out_is_empty(&apart));

    /* Beyond the limit nothing moves. */
    ck_assert_int_eq(wire_out_push(&apart, error_envelope(&storage, 3, big), NULL, 0), 0);
    ck_assert_int_eq(wire_out_push(&apart, error_envelope(&storage, 4, second), NULL, 0), 0);
    size_t before = apart.end - apart.begin;
    ck_assert_int_eq(wire_out_move(&out, &apart), -ENOBUFS);
    ck_assert_uint_eq(apart.end - apart.begin, before);

    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    ck_assert_int_eq(wire_in_feed(&in, out.data + out.begin, out.end - out.begin), 0);
    for (unsigned code = 1; code <= 2; code++) {
        ck_assert_int_eq(wire_in_next(&in, &frame), 1);
        ck_assert_uint_eq(frame.envelope->error->code, code);
    }
    ck_assert_int_eq(wire_in_next(&in, &frame), 0);
    wire_in_deinit(&in);
    wire_out_deinit(&out);
    wire_out_deinit(&apart);
}
END_TEST

START_TEST(protocols_agree_on_the_highest_common_version)
{
    ck_assert_uint_eq(wire_protocol_agree(1, 1, 1, 1), 1);
    ck_assert_uint_eq(wire_protocol_agree(1, 3, 2, 5), 3);
    ck_assert_uint_eq(wire_protocol_agree(2, 5, 1, 3), 3);
    ck_assert_uint_eq(wire_protocol_agree(1, 1, 2, 9), 0);
    ck_assert_uint_eq(wire_protocol_agree(4, 9, 1, 3), 0);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        hello_has_its_golden_bytes,
        join_has_its_golden_bytes,
        submit_batch_has_its_golden_bytes,
        frames_arrive_whole_when_fed_byte_by_byte,
        several_frames_of_one_read_come_in_order,
        nonzero_padding_is_refused,
        oversize_is_refused_from_the_header_alone,
        more_fds_than_a_frame_may_carry_is_refused,
        bytes_that_do_not_unpack_are_refused,
        an_unknown_message_is_a_frame_without_body,
        an_empty_frame_is_a_frame_without_body,
        frames_that_were_packed_apart_move_behind_what_is_queued,
        protocols_agree_on_the_highest_common_version,
    };
    return run_suite("frame", tests, sizeof tests / sizeof *tests);
}
