/* SPDX-License-Identifier: Apache-2.0 */
/* What gradrun and its agents say to each other: every message, every limit, and nonsense. */
#include "frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "inbox.h"
#include "job.h"
#include "run_suite.h"

static struct frame_writer writer;

static struct frame found(void)
{
    struct frame frame;
    size_t used;
    ck_assert_int_eq(frame_find(writer.data, writer.n, &frame, &used), 1);
    ck_assert_uint_eq(used, writer.n);
    return frame;
}

START_TEST(a_message_comes_back_as_it_was)
{
    const struct message messages[] = {
        {.kind = FRAME_START, .port = 1, .master_port = 2, .text = "10.0.0.1", .text_bytes = 8},
        {.kind = FRAME_EXITED, .rank = 3, .pid = 4, .code = 5, .signal = 6, .is_asked = 1},
        {.kind = FRAME_OUTPUT, .rank = 7, .stream = 2, .text = "a\0b\n", .text_bytes = 4},
        {.kind = FRAME_PONG, .seconds = 4000000000u, .nanoseconds = 9},
        {.kind = FRAME_END, .text = ""},
    };
    for (size_t i = 0; i < sizeof messages / sizeof messages[0]; i++) {
        const struct message *m = &messages[i];
        struct message back;
        ck_assert_int_eq(frame_put_message(&writer, m), 0);
        struct frame frame = found();
        ck_assert_int_eq(frame_get_message(&frame, &back), 0);
        ck_assert_int_eq(back.kind, m->kind);
        ck_assert_uint_eq(back.rank, m->rank);
        ck_assert_uint_eq(back.pid, m->pid);
        ck_assert_uint_eq(back.code, m->code);
        ck_assert_uint_eq(back.signal, m->signal);
        ck_assert_uint_eq(back.is_asked, m->is_asked);
        ck_assert_uint_eq(back.stream, m->stream);
        ck_assert_uint_eq(back.port, m->port);
        ck_assert_uint_eq(back.master_port, m->master_port);
        ck_assert_uint_eq(back.seconds, m->seconds);
        ck_assert_uint_eq(back.nanoseconds, m->nanoseconds);
        ck_assert_uint_eq(back.text_bytes, m->text_bytes);
        ck_assert_mem_eq(back.text, m->text ? m->text : "", m->text_bytes + 1);
    }
}
END_TEST

START_TEST(a_text_longer_than_its_kind_allows_is_not_sent)
{
    static char text[FRAME_LINE_MAX + 1];
    struct message m = {.kind = FRAME_OUTPUT, .text = text, .text_bytes = FRAME_LINE_MAX};
    ck_assert_int_eq(frame_put_message(&writer, &m), 0);
    m.text_bytes++;
    ck_assert_int_eq(frame_put_message(&writer, &m), -EMSGSIZE);
    m = (struct message){.kind = FRAME_SAY, .text = text, .text_bytes = 4097};
    ck_assert_int_eq(frame_put_message(&writer, &m), -EMSGSIZE);
}
END_TEST

START_TEST(a_length_is_refused_before_its_bytes_arrive)
{
    struct frame frame;
    size_t used;
    const uint8_t too_long[] = {0x00, 0x00, 0x20, 0x00, FRAME_SAY};
    const uint8_t huge[] = {0xff, 0xff, 0xff, 0xff, FRAME_JOB};
    const uint8_t empty[] = {0, 0, 0, 0, FRAME_END};
    const uint8_t unknown[] = {0, 0, 0, 1, 200};
    const uint8_t none[] = {0, 0, 0, 1, 0};
    ck_assert_int_eq(frame_find(too_long, 5, &frame, &used), -EPROTO);
    ck_assert_int_eq(frame_find(huge, 5, &frame, &used), -EPROTO);
    ck_assert_int_eq(frame_find(empty, 5, &frame, &used), -EPROTO);
    ck_assert_int_eq(frame_find(unknown, 5, &frame, &used), -EPROTO);
    ck_assert_int_eq(frame_find(none, 5, &frame, &used), -EPROTO);
}
END_TEST

START_TEST(a_part_of_a_frame_is_waited_for)
{
    struct frame frame;
    size_t used;
    struct message m = {.kind = FRAME_SAY, .text = "hello", .text_bytes = 5};
    ck_assert_int_eq(frame_put_message(&writer, &m), 0);
    for (size_t n = 0; n < writer.n; n++)
        ck_assert_int_eq(frame_find(writer.data, n, &frame, &used), 0);
}
END_TEST

START_TEST(a_body_that_does_not_fit_is_refused)
{
    struct message back;
    frame_begin(&writer, FRAME_EXITED);
    frame_put_u32(&writer, 1);
    ck_assert_int_eq(frame_end(&writer), 0);
    struct frame frame = found();
    ck_assert_int_eq(frame_get_message(&frame, &back), -EPROTO);

    frame_begin(&writer, FRAME_END);
    frame_put_u32(&writer, 1); /* more than there should be */
    ck_assert_int_eq(frame_end(&writer), 0);
    frame = found();
    ck_assert_int_eq(frame_get_message(&frame, &back), -EPROTO);

    frame_begin(&writer, FRAME_SAY);
    frame_put_u32(&writer, 0xffffffffu); /* a text of 4 GiB */
    ck_assert_int_eq(frame_end(&writer), 0);
    frame = found();
    ck_assert_int_eq(frame_get_message(&frame, &back), -EPROTO);
}
END_TEST

static const char *command[] = {"python3", "train.py", "", NULL};
static const char *variables[] = {"PATH=/bin", "A=b=c", NULL};
static const char *none[] = {NULL};
static struct place places[] = {
    {.rank = 2, .local_rank = 0, .local_size = 2, .cross_rank = 1, .cross_size = 2},
    {.rank = 3, .local_rank = 1, .local_size = 2, .cross_rank = 1, .cross_size = 2},
};

static struct job a_job(void)
{
    return (struct job){
        .name = "j",
        .directory = "/home/me",
        .socket = "/s",
        .host = "b",
        .address = "10.0.0.2",
        .key = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        .daemon = JOB_DAEMON_PRIVATE,
        .is_verbose = true,
        .wants_output = true,
        .n_ranks = 4,
        .n_hosts = 2,
        .host_index = 1,
        .places = places,
        .n_places = 2,
        .command = command,
        .environment = variables,
        .exports = none,
        .settings = none,
    };
}

static int round_trip(const struct job *job, struct job *back)
{
    ck_assert_int_eq(job_pack(&writer, job), 0);
    struct frame frame = found();
    return job_unpack(&frame, back);
}

START_TEST(a_job_comes_back_as_it_was)
{
    struct job job = a_job(), back;
    ck_assert_int_eq(round_trip(&job, &back), 0);
    ck_assert_str_eq(back.name, "j");
    ck_assert_str_eq(back.directory, "/home/me");
    ck_assert_str_eq(back.key, job.key);
    ck_assert(back.is_verbose && back.wants_output && !back.is_check && !back.wants_input);
    ck_assert_uint_eq(back.n_places, 2);
    ck_assert_uint_eq(back.places[1].rank, 3);
    ck_assert_uint_eq(back.places[1].cross_size, 2);
    ck_assert_str_eq(back.command[0], "python3");
    ck_assert_str_eq(back.command[2], "");
    ck_assert_ptr_null(back.command[3]);
    ck_assert_str_eq(back.environment[1], "A=b=c");
    ck_assert_ptr_null(back.exports[0]);
    job_deinit(&back);
}
END_TEST

START_TEST(a_job_out_of_bounds_is_refused)
{
    struct job back;
    const char *not_variables[] = {"NOVALUE", NULL};
    for (int i = 0; i < 10; i++) {
        struct job job = a_job();
        struct place far[] = {{.rank = 4}};
        switch (i) {
        case 0:
            job.n_ranks = 0;
            break;
        case 1:
            job.n_ranks = 1025;
            break;
        case 2:
            job.n_places = 0;
            break;
        case 3:
            job.host_index = 2;
            break;
        case 4:
            job.directory = "relative";
            break;
        case 5:
            job.command = none;
            break;
        case 6:
            job.environment = not_variables;
            break;
        case 7:
            job.key = "short";
            break;
        case 8:
            job.daemon = 7;
            break;
        case 9:
            job.places = far;
            job.n_places = 1;
            break;
        }
        ck_assert_msg(round_trip(&job, &back) == -EPROTO, "case %d was taken", i);
    }
}
END_TEST

/* Whatever a byte is changed to, and wherever a job is cut: an error or a valid job. */
START_TEST(a_damaged_job_does_no_harm)
{
    struct job job = a_job(), back;
    ck_assert_int_eq(job_pack(&writer, &job), 0);
    for (size_t i = FRAME_HEAD; i < writer.n; i++) {
        const uint8_t values[] = {0x00, 0x7f, 0xff};
        for (size_t v = 0; v < 3; v++) {
            /* A copy of its own, so that a sanitiser sees every step beyond it. */
            uint8_t *copy = malloc(writer.n - FRAME_HEAD);
            ck_assert_ptr_nonnull(copy);
            memcpy(copy, writer.data + FRAME_HEAD, writer.n - FRAME_HEAD);
            copy[i - FRAME_HEAD] = values[v];
            struct frame frame = {FRAME_JOB, copy, copy + writer.n - FRAME_HEAD, false};
            if (job_unpack(&frame, &back) == 0)
                job_deinit(&back);
            struct frame cut = {FRAME_JOB, copy, copy + (i - FRAME_HEAD), false};
            ck_assert_int_eq(job_unpack(&cut, &back), -EPROTO);
            free(copy);
        }
    }
}
END_TEST

START_TEST(an_inbox_finds_lines_and_then_frames)
{
    int fds[2];
    char line[64];
    struct inbox inbox, rest;
    struct frame frame;
    struct message m = {.kind = FRAME_SAY, .text = "x", .text_bytes = 1};
    ck_assert_int_eq(pipe(fds), 0);
    inbox_init(&inbox, fds[0]);
    ck_assert_int_eq(inbox_read(&inbox), 0);
    ck_assert_int_eq(write(fds[1], "noise\nhello\n", 12), 12);
    ck_assert_int_eq(frame_put_message(&writer, &m), 0);
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(write(fds[1], writer.data, writer.n), (ssize_t)writer.n);
    ck_assert_int_eq(inbox_read(&inbox), 1);
    ck_assert_int_eq(inbox_next_line(&inbox, line, sizeof line), 1);
    ck_assert_str_eq(line, "noise");
    ck_assert_int_eq(inbox_next_line(&inbox, line, 3), 1);
    ck_assert_str_eq(line, "he");
    ck_assert_int_eq(inbox_next(&inbox, &frame), 1);
    ck_assert_int_eq(inbox_split(&inbox, &rest), 0);
    ck_assert_int_eq(inbox_next(&rest, &frame), 1);
    ck_assert_int_eq(inbox_next(&rest, &frame), 0);
    close(fds[1]);
    ck_assert_int_eq(inbox_read(&rest), -EPIPE);
    inbox_deinit(&inbox);
    inbox_deinit(&rest);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_message_comes_back_as_it_was,
        a_text_longer_than_its_kind_allows_is_not_sent,
        a_length_is_refused_before_its_bytes_arrive,
        a_part_of_a_frame_is_waited_for,
        a_body_that_does_not_fit_is_refused,
        a_job_comes_back_as_it_was,
        a_job_out_of_bounds_is_refused,
        a_damaged_job_does_no_harm,
        an_inbox_finds_lines_and_then_frames,
    };
    int rc = run_suite("frame", tests, sizeof tests / sizeof *tests);
    frame_writer_deinit(&writer);
    return rc;
}
