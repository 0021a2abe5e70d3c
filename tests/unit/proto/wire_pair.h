/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the codec's tests share: a connected pair of sockets, envelopes to send, and counting of
 * this process's descriptors, so that each test can assert that none leaked.
 */
#ifndef TEST_WIRE_PAIR_H
#define TEST_WIRE_PAIR_H

#include <stddef.h>
#include <stdint.h>

#include "wire.h"

/* sock[0] belongs to the side that sends, sock[1] to the side that reads with `in`. */
struct wire_pair {
    int sock[2];
    struct wire_in in;
    int n_fds_before; /* open descriptors of the process before the pair was made */
};

void wire_pair_open(struct wire_pair *pair);
/* Close everything and assert that the process holds as many descriptors as before. */
void wire_pair_close(struct wire_pair *pair);

int count_open_fds(void);
/* A new descriptor that has nothing to do with the sockets. */
int make_fd(void);

/* Write a header, with as many bytes as given, and n_fds descriptors beside the first byte. */
void send_raw(int sock, const void *bytes, size_t n, const int *fds, unsigned n_fds);

/* Fill a frame's 8 header bytes. */
void put_header(uint8_t header[WIRE_HEADER_BYTES], uint32_t length, uint8_t n_fds);

/* An Error envelope: the shortest message with a text of any length. */
struct error_envelope {
    Pb__Envelope envelope;
    Pb__Error error;
};
Pb__Envelope *error_envelope(struct error_envelope *storage, unsigned code, char *text);

/* Pack an envelope into a malloced frame. */
uint8_t *pack_frame(const Pb__Envelope *envelope, uint8_t n_fds, size_t *out_bytes);

#endif
