/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one codec of gradd: frames of protobuf envelopes over a byte stream, with fds on Unix
 * sockets. Daemon, worker, library and CLI use it alike. It neither logs nor blocks nor knows an
 * event loop; its owner polls the fd and calls in.
 *
 * Thread: any, one at a time per object.
 *
 * Frame: { uint32 little-endian length of the envelope | uint8 number of fds | 3 zero bytes }
 * then the envelope. Lengths above WIRE_FRAME_MAX, non-zero padding, more fds than a frame
 * declares or fewer, and bytes that do not unpack are -EPROTO: the connection must be closed.
 *
 * Invariant: nothing that a peer sends makes wire_in hold more than WIRE_FRAME_MAX bytes of
 * input, WIRE_FDS_HELD descriptors and a budget of unpacked memory proportional to the frame.
 */
#ifndef GRADD_WIRE_H
#define GRADD_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "envelope.pb-c.h"

enum {
    WIRE_HEADER_BYTES = 8,
    WIRE_FRAME_MAX = 1 << 20, /* bytes of one envelope */
    WIRE_FDS_MAX = 4,         /* fds of one frame */
    /* fds held for frames to come: one read may end a frame and bring the fds of the next. */
    WIRE_FDS_HELD = 2 * WIRE_FDS_MAX,
    WIRE_PROTOCOL_MIN = 1,
    WIRE_PROTOCOL_MAX = 1,
};

/* The incoming half of a connection. Zeroed is not valid: call wire_in_init(). */
struct wire_in {
    uint8_t *data; /* [begin, end) is unread; capacity grows up to header + WIRE_FRAME_MAX */
    size_t begin, end, capacity;
    int fds[WIRE_FDS_HELD]; /* received, not yet claimed by a frame: the first n_fds */
    unsigned n_fds;
    void *arena; /* memory of the envelope last returned, reused for the next */
    size_t arena_bytes;
    bool is_eof;
    const char *error; /* static sentence for the last -EPROTO */
};

/* A received frame. Valid until the next wire_in_next() or wire_in_deinit(). */
struct wire_frame {
    const Pb__Envelope
        *envelope;         /* body_case PB__ENVELOPE__BODY__NOT_SET: a message unknown here */
    int fds[WIRE_FDS_MAX]; /* owned by the receiver from here on; -1 where taken or absent */
    unsigned n_fds;
};

void wire_in_init(struct wire_in *in);
/* Free memory, close unclaimed fds. Idempotent. */
void wire_in_deinit(struct wire_in *in);

/*
 * Read what the socket has, without blocking, at most one buffer's worth.
 * 0: read something, or nothing was there (call wire_in_next() until 0 either way). At end of
 * stream sets is_eof (frames read before it are still to be taken). -errno on a socket error,
 * -EPROTO on surplus fds or truncated control data.
 */
int wire_in_read(struct wire_in *in, int fd);

/* For tests and fuzzers: append bytes (and no fds) as if they had been read. */
int wire_in_feed(struct wire_in *in, const void *data, size_t bytes);

/*
 * Take the next whole frame. 1: *out_frame is set; 0: more bytes are needed; -EPROTO: see error;
 * -ENOMEM. The caller closes the fds it does not keep with wire_frame_close_fds().
 */
int wire_in_next(struct wire_in *in, struct wire_frame *out_frame);

/* Close the fds that the handler did not claim (claiming: read fds[i], set it to -1). */
void wire_frame_close_fds(struct wire_frame *frame);

/* The outgoing half: a bounded queue of bytes and fds. Call wire_out_init(). */
struct wire_out {
    uint8_t *data; /* [begin, end) is unsent */
    size_t begin, end, capacity, limit;
    struct wire_out_fds *fds; /* fds waiting for their frame's first byte, in order */
};

/* limit_bytes: how much may be queued before wire_out_push() says -ENOBUFS (a slow reader). */
void wire_out_init(struct wire_out *out, size_t limit_bytes);
void wire_out_deinit(struct wire_out *out);

/*
 * Queue one envelope. fds (may be NULL when n_fds is 0) are duplicated: the caller keeps its own.
 * 0, -ENOBUFS (limit), -EMSGSIZE (over WIRE_FRAME_MAX), -ENOMEM, -EMFILE.
 */
int wire_out_push(struct wire_out *out, const Pb__Envelope *envelope, const int *fds,
                  unsigned n_fds);

/* Move what `from` holds, which has no fds, behind what `out` holds. 0, -ENOBUFS or -ENOMEM; then
 * nothing was moved. */
int wire_out_move(struct wire_out *out, struct wire_out *from);

/* Send without blocking. 0: the queue is empty; 1: the socket is full, poll for writing; -errno. */
int wire_out_flush(struct wire_out *out, int fd);

static inline bool wire_out_is_empty(const struct wire_out *out)
{
    return out->begin == out->end;
}

/* Agree on a protocol version: the highest that both ranges contain, or 0 when there is none. */
unsigned wire_protocol_agree(unsigned min_a, unsigned max_a, unsigned min_b, unsigned max_b);

#endif
