/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What gradrun and its agent on a host say to each other, over the two ends of a remote shell:
 * frames of a length (4 bytes, big-endian), a kind and a body. Pure: bytes in, values out.
 *
 * The agent speaks first, one line of text, so that what a login script prints before it can be
 * told apart, and so that programs of different versions find each other out.
 *
 * Thread: any.
 *
 * Invariant: a length is checked against its kind's limit before anything is allocated or waited
 * for; texts are ended by a zero byte that is not part of their length.
 */
#ifndef GRADD_RUN_FRAME_H
#define GRADD_RUN_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The agent's first line is "gradrun-agent VERSION". */
#define FRAME_GREETING "gradrun-agent "

enum frame_kind {
    /* To the agent. */
    FRAME_JOB = 1, /* struct job, in job.h */
    FRAME_START,   /* all hosts are ready: text = address of host 0, port, master_port */
    FRAME_END,     /* end what runs, then everything */
    FRAME_KILL,    /* at once */
    FRAME_SIGNAL,  /* signal, for the ranks */
    FRAME_PING,
    FRAME_MUTE,  /* nobody reads stream any more */
    FRAME_INPUT, /* text for rank 0's standard input; empty: its end */
    FRAME_PROBE, /* --check: can you connect to text, port? */
    /* From the agent. */
    FRAME_READY = 64, /* text = address of this host, port, master_port: of its daemon, and free */
    FRAME_STARTED,    /* rank, pid */
    FRAME_OUTPUT,     /* a line of rank, on stream */
    FRAME_SAY,        /* a sentence for the user */
    FRAME_EXITED,     /* rank, pid, code, signal; is_asked: after it was told to end */
    FRAME_ENDING,     /* this host gives up, with exit code code */
    FRAME_PONG,       /* seconds, nanoseconds: this host's clock */
    FRAME_TAKEN,      /* rank 0 has read the last input */
    FRAME_RESULT,     /* --check: code is 0, or text says what is wrong */
    FRAME_DONE,       /* nothing is left on this host */
};

enum {
    FRAME_HEAD = 5,
    FRAME_LINE_MAX = 64 * 1024,
    FRAME_JOB_MAX = 4 * 1024 * 1024,
    FRAME_FROM_DAEMON = UINT16_MAX, /* as the rank of FRAME_OUTPUT: the private daemon's log */
};

/* A small message; which fields a kind has is in frame.c. Unused ones are 0. */
struct message {
    enum frame_kind kind;
    uint32_t rank, pid, code, signal, is_asked, stream, port, master_port, seconds, nanoseconds;
    const char *text; /* NULL is "" */
    size_t text_bytes;
};

/* A frame being written. Zeroed: empty. */
struct frame_writer {
    uint8_t *data;
    size_t n, capacity;
    bool has_failed; /* out of memory; nothing is added any more */
};
void frame_writer_deinit(struct frame_writer *writer);
void frame_begin(struct frame_writer *writer, enum frame_kind kind);
void frame_put_u32(struct frame_writer *writer, uint32_t value);
void frame_put_text(struct frame_writer *writer, const char *text, size_t bytes);
/* 0; -EMSGSIZE: longer than its kind allows; -ENOMEM. */
int frame_end(struct frame_writer *writer);

/* A whole small message as a frame. Results as frame_end(). */
int frame_put_message(struct frame_writer *writer, const struct message *message);

/* A frame being read; borrows the bytes it was found in. */
struct frame {
    enum frame_kind kind;
    const uint8_t *at, *end; /* of the body, advanced by reading */
    bool is_bad;             /* the body was shorter than what was read from it */
};
/* 1: a frame and *out_used; 0: not all of it is there yet; -EPROTO: this is none. */
int frame_find(const uint8_t *data, size_t bytes, struct frame *out, size_t *out_used);
uint32_t frame_get_u32(struct frame *frame);
/* Valid as long as the bytes are. "" when the frame is bad. */
const char *frame_get_text(struct frame *frame, size_t *out_bytes);

/* 0, or -EPROTO: not a small message, or one whose body does not fit. */
int frame_get_message(struct frame *frame, struct message *out);

#endif
