/* SPDX-License-Identifier: Apache-2.0 */
#include "wire_pair.h"

#include <check.h>
#include <dirent.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

int count_open_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    ck_assert_ptr_nonnull(dir);
    int n = 0;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

int make_fd(void)
{
    int fd = memfd_create("test", MFD_CLOEXEC);
    ck_assert_int_ge(fd, 0);
    return fd;
}

void wire_pair_open(struct wire_pair *pair)
{
    pair->n_fds_before = count_open_fds();
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair->sock),
                     0);
    wire_in_init(&pair->in);
}

void wire_pair_close(struct wire_pair *pair)
{
    wire_in_deinit(&pair->in);
    close(pair->sock[0]);
    close(pair->sock[1]);
    ck_assert_int_eq(count_open_fds(), pair->n_fds_before);
}

void send_raw(int sock, const void *bytes, size_t n, const int *fds, unsigned n_fds)
{
    alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * 64)] = {0};
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n_fds > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * n_fds);
    }
    ck_assert_int_eq(sendmsg(sock, &message, MSG_NOSIGNAL), (ssize_t)n);
}

void put_header(uint8_t header[WIRE_HEADER_BYTES], uint32_t length, uint8_t n_fds)
{
    for (int i = 0; i < 4; i++)
        header[i] = (uint8_t)(length >> (8 * i));
    header[4] = n_fds;
    header[5] = header[6] = header[7] = 0;
}

Pb__Envelope *error_envelope(struct error_envelope *storage, unsigned code, char *text)
{
    storage->error = (Pb__Error)PB__ERROR__INIT;
    storage->error.code = code;
    storage->error.text = text;
    storage->envelope = (Pb__Envelope)PB__ENVELOPE__INIT;
    storage->envelope.body_case = PB__ENVELOPE__BODY_ERROR;
    storage->envelope.error = &storage->error;
    return &storage->envelope;
}

uint8_t *pack_frame(const Pb__Envelope *envelope, uint8_t n_fds, size_t *out_bytes)
{
    size_t length = pb__envelope__get_packed_size(envelope);
    uint8_t *frame = malloc(WIRE_HEADER_BYTES + length);
    ck_assert_ptr_nonnull(frame);
    put_header(frame, (uint32_t)length, n_fds);
    pb__envelope__pack(envelope, frame + WIRE_HEADER_BYTES);
    *out_bytes = WIRE_HEADER_BYTES + length;
    return frame;
}
