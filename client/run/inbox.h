/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The receiving end of a conversation in frames: reads a descriptor and hands out whole frames.
 *
 * Thread: loop.
 *
 * Invariant: holds no more bytes than the largest frame and one read; what it hands out is valid
 * until its next function is called.
 */
#ifndef GRADD_RUN_INBOX_H
#define GRADD_RUN_INBOX_H

#include "frame.h"

struct inbox {
    int fd; /* owned; -1: closed */
    uint8_t *data;
    size_t begin, end, capacity;
};

/* Takes the fd and makes it non-blocking. */
void inbox_init(struct inbox *inbox, int take_fd);
void inbox_deinit(struct inbox *inbox);
/*
 * Keep the bytes of the frames handed out so far; go on reading in out_rest, which gets the fd and
 * what has come already. 0 or -ENOMEM.
 */
int inbox_split(struct inbox *inbox, struct inbox *out_rest);
/* Read once. 1: something came; 0: nothing is there now; -EPIPE: the end; or another -errno. */
int inbox_read(struct inbox *inbox);
/* 1: a frame; 0: none is whole yet; -EPROTO: no frame, nor will one follow. */
int inbox_next(struct inbox *inbox, struct frame *out);
/* The next line of text without its end, for what comes before the first frame. 1 or 0. */
int inbox_next_line(struct inbox *inbox, char *line, size_t bytes);

#endif
