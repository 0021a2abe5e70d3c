/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors beside frames: each reaches its own frame, none leaks, and none is accepted where it
 * does not belong. Every test ends with as many open descriptors as it began with. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "run_suite.h"
#include "wire_pair.h"

static ino_t inode_of(int fd)
{
    struct stat st;
    ck_assert_int_eq(fstat(fd, &st), 0);
    return st.st_ino;
}

/* Read until a verdict: 1 a frame, 0 nothing more to read, negative an error of either call. */
static int receive(struct wire_pair *pair, struct wire_frame *frame)
{
    int rc = wire_in_next(&pair->in, frame);
    if (rc != 0)
        return rc;
    rc = wire_in_read(&pair->in, pair->sock[1]);
    return rc < 0 ? rc : wire_in_next(&pair->in, frame);
}

START_TEST(each_fd_reaches_its_own_frame)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct wire_out out;
    wire_out_init(&out, WIRE_FRAME_MAX);
    ino_t inode[4];
    for (unsigned i = 0; i < 4; i++) {
        struct error_envelope storage;
        int fd = make_fd();
        inode[i] = inode_of(fd);
        /* Frames with and without an fd alternate. */
        ck_assert_int_eq(wire_out_push(&out, error_envelope(&storage, i, (char *)"fd"), &fd, 1), 0);
        ck_assert_int_eq(
            wire_out_push(&out, error_envelope(&storage, 100 + i, (char *)"no"), NULL, 0), 0);
        close(fd);
    }
    ck_assert_int_eq(wire_out_flush(&out, pair.sock[0]), 0);
    ck_assert(wire_out_is_empty(&out));
    for (unsigned i = 0; i < 4; i++) {
        struct wire_frame frame;
        ck_assert_int_eq(receive(&pair, &frame), 1);
        ck_assert_uint_eq(frame.envelope->error->code, i);
        ck_assert_uint_eq(frame.n_fds, 1);
        ck_assert_uint_eq(inode_of(frame.fds[0]), inode[i]);
        ck_assert_int_eq(fcntl(frame.fds[0], F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        wire_frame_close_fds(&frame);
        ck_assert_int_eq(receive(&pair, &frame), 1);
        ck_assert_uint_eq(frame.envelope->error->code, 100 + i);
        ck_assert_uint_eq(frame.n_fds, 0);
    }
    wire_out_deinit(&out);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(a_claimed_fd_stays_open)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct error_envelope storage;
    size_t n;
    uint8_t *bytes = pack_frame(error_envelope(&storage, 1, (char *)"x"), 2, &n);
    int fds[2] = {make_fd(), make_fd()};
    send_raw(pair.sock[0], bytes, n, fds, 2);
    struct wire_frame frame;
    ck_assert_int_eq(receive(&pair, &frame), 1);
    int claimed = frame.fds[1], other = frame.fds[0];
    frame.fds[1] = -1;
    wire_frame_close_fds(&frame);
    ck_assert_int_eq(fcntl(other, F_GETFD), -1);
    ck_assert_int_ge(fcntl(claimed, F_GETFD), 0);
    close(claimed);
    close(fds[0]);
    close(fds[1]);
    free(bytes);
    wire_pair_close(&pair);
}
END_TEST

/* Send one frame that declares `declared` fds and carries `carried`; expect an error sentence. */
static void expect_refusal(unsigned declared, unsigned carried, const char *sentence)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct error_envelope storage;
    size_t n;
    uint8_t *bytes = pack_frame(error_envelope(&storage, 1, (char *)"x"), (uint8_t)declared, &n);
    int fd = make_fd(), fds[32];
    for (unsigned i = 0; i < carried; i++)
        fds[i] = fd;
    send_raw(pair.sock[0], bytes, n, fds, carried);
    struct wire_frame frame;
    ck_assert_int_eq(receive(&pair, &frame), -EPROTO);
    ck_assert_str_eq(pair.in.error, sentence);
    close(fd);
    free(bytes);
    wire_pair_close(&pair);
}

START_TEST(surplus_fds_are_refused_and_closed)
{
    expect_refusal(0, 1, "descriptors where none belong");
    expect_refusal(1, 2, "descriptors where none belong");
}
END_TEST

START_TEST(missing_fds_are_refused)
{
    expect_refusal(1, 0, "fewer descriptors than the frame declares");
    expect_refusal(3, 2, "fewer descriptors than the frame declares");
}
END_TEST

START_TEST(more_fds_than_the_buffer_takes_are_truncated_control_data)
{
    expect_refusal(4, 5, "truncated control data (too many descriptors, or none left here)");
    expect_refusal(0, 32, "truncated control data (too many descriptors, or none left here)");
}
END_TEST

START_TEST(fds_hoarded_over_several_messages_are_refused)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    int fd = make_fd(), fds[3] = {fd, fd, fd};
    uint8_t header[WIRE_HEADER_BYTES];
    put_header(header, 100, 4);
    send_raw(pair.sock[0], header, 4, fds, 3);
    struct wire_frame frame;
    ck_assert_int_eq(receive(&pair, &frame), 0);
    send_raw(pair.sock[0], header + 4, 2, fds, 3);
    ck_assert_int_eq(receive(&pair, &frame), 0);
    send_raw(pair.sock[0], header + 6, 2, fds, 3);
    ck_assert_int_eq(wire_in_read(&pair.in, pair.sock[1]), -EPROTO);
    ck_assert_str_eq(pair.in.error, "more descriptors than a frame may carry");
    close(fd);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(an_fd_without_room_is_truncated_control_data)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct error_envelope storage;
    size_t n;
    uint8_t *bytes = pack_frame(error_envelope(&storage, 1, (char *)"x"), 1, &n);
    int fd = make_fd();
    send_raw(pair.sock[0], bytes, n, &fd, 1);
    /* Every number below the limit is taken, so that the kernel can not install the fd. */
    struct rlimit old, tight = {(rlim_t)fd + 1, 0};
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    tight.rlim_max = old.rlim_max;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &tight), 0);
    int filler[64], n_filler = 0;
    while (n_filler < 64 && (filler[n_filler] = dup(fd)) >= 0)
        n_filler++;
    ck_assert_int_eq(wire_in_read(&pair.in, pair.sock[1]), -EPROTO);
    ck_assert_str_eq(pair.in.error,
                     "truncated control data (too many descriptors, or none left here)");
    while (n_filler > 0)
        close(filler[--n_filler]);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
    close(fd);
    free(bytes);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(a_read_may_end_one_frame_and_bring_the_fds_of_the_next)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct error_envelope storage;
    size_t n;
    uint8_t *bytes = pack_frame(error_envelope(&storage, 1, (char *)"x"), 4, &n);
    int fd = make_fd(), fds[4] = {fd, fd, fd, fd};
    struct wire_frame frame;
    send_raw(pair.sock[0], bytes, 5, fds, 4);
    ck_assert_int_eq(receive(&pair, &frame), 0);
    send_raw(pair.sock[0], bytes + 5, n - 5, NULL, 0);
    send_raw(pair.sock[0], bytes, n, fds, 4);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(receive(&pair, &frame), 1);
        ck_assert_uint_eq(frame.n_fds, 4);
        wire_frame_close_fds(&frame);
    }
    close(fd);
    free(bytes);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(fds_of_an_unfinished_frame_are_closed_with_the_reader)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    uint8_t header[WIRE_HEADER_BYTES];
    put_header(header, 100, 2);
    int fd = make_fd(), fds[2] = {fd, fd};
    send_raw(pair.sock[0], header, sizeof header, fds, 2);
    struct wire_frame frame;
    ck_assert_int_eq(receive(&pair, &frame), 0);
    ck_assert_uint_eq(pair.in.n_fds, 2);
    close(fd);
    wire_pair_close(&pair);
}
END_TEST

START_TEST(fds_of_unsent_frames_are_closed_with_the_writer)
{
    int before = count_open_fds();
    struct wire_out out;
    wire_out_init(&out, WIRE_FRAME_MAX);
    struct error_envelope storage;
    int fd = make_fd(), fds[4] = {fd, fd, fd, fd};
    Pb__Envelope *envelope = error_envelope(&storage, 1, (char *)"x");
    ck_assert_int_eq(wire_out_push(&out, envelope, fds, 4), 0);
    ck_assert_int_eq(wire_out_push(&out, envelope, fds, 5), -EMSGSIZE);
    ck_assert_int_eq(count_open_fds(), before + 1 + 4);
    wire_out_deinit(&out);
    close(fd);
    ck_assert_int_eq(count_open_fds(), before);
}
END_TEST

START_TEST(a_failed_push_queues_nothing)
{
    struct wire_pair pair;
    wire_pair_open(&pair);
    struct wire_out out;
    wire_out_init(&out, WIRE_FRAME_MAX);
    struct error_envelope storage;
    Pb__Envelope *envelope = error_envelope(&storage, 1, (char *)"x");
    int good = make_fd(), fds[2] = {good, -1};
    ck_assert_int_eq(wire_out_push(&out, envelope, fds, 2), -EBADF);
    ck_assert(wire_out_is_empty(&out));
    ck_assert_int_eq(wire_out_push(&out, envelope, NULL, 0), 0);
    ck_assert_int_eq(wire_out_flush(&out, pair.sock[0]), 0);
    struct wire_frame frame;
    ck_assert_int_eq(receive(&pair, &frame), 1);
    ck_assert_uint_eq(frame.n_fds, 0);
    close(good);
    wire_out_deinit(&out);
    wire_pair_close(&pair);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        each_fd_reaches_its_own_frame,
        a_claimed_fd_stays_open,
        surplus_fds_are_refused_and_closed,
        missing_fds_are_refused,
        more_fds_than_the_buffer_takes_are_truncated_control_data,
        fds_hoarded_over_several_messages_are_refused,
        an_fd_without_room_is_truncated_control_data,
        a_read_may_end_one_frame_and_bring_the_fds_of_the_next,
        fds_of_an_unfinished_frame_are_closed_with_the_reader,
        fds_of_unsent_frames_are_closed_with_the_writer,
        a_failed_push_queues_nothing,
    };
    return run_suite("fds", tests, sizeof tests / sizeof *tests);
}
