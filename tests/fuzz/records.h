/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a fuzzer's input becomes a conversation: records of { who | length, 2 bytes, little-endian |
 * bytes }, handed out one by one. A length beyond the end takes what is there.
 */
#ifndef FUZZ_RECORDS_H
#define FUZZ_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

struct record {
    unsigned who;
    const uint8_t *bytes;
    size_t n;
};

static inline bool record_next(const uint8_t **data, size_t *size, struct record *out)
{
    if (*size < 3)
        return false;
    size_t n = (*data)[1] | (size_t)(*data)[2] << 8;
    out->who = (*data)[0];
    out->bytes = *data + 3;
    out->n = n < *size - 3 ? n : *size - 3;
    *data += 3 + out->n;
    *size -= 3 + out->n;
    return true;
}

/* Send an envelope's bytes as a frame; a full socket drops it. */
static inline void send_frame(int fd, const uint8_t *bytes, size_t n)
{
    uint8_t header[8] = {(uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16)};
    struct iovec parts[2] = {{header, sizeof header}, {(void *)(uintptr_t)bytes, n}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    (void)sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* The same with a descriptor. */
static inline void send_frame_fd(int socket, const uint8_t *bytes, size_t n, int fd)
{
    uint8_t header[8] = {(uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16), 0, 1};
    struct iovec parts[2] = {{header, sizeof header}, {(void *)(uintptr_t)bytes, n}};
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof fd)];
    } control = {.head = {.cmsg_len = CMSG_LEN(sizeof fd),
                          .cmsg_level = SOL_SOCKET,
                          .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    struct msghdr message = {.msg_iov = parts,
                             .msg_iovlen = 2,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    (void)sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Throw away what the other side said. */
static inline void drain_socket(int fd)
{
    uint8_t trash[4096];
    while (recv(fd, trash, sizeof trash, MSG_DONTWAIT) > 0)
        continue;
}

#endif
