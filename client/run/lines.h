/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cuts a stream of bytes into lines, so that the output of several ranks never mixes within one.
 * Pure: bytes in, lines out through a callback.
 *
 * Thread: any, one at a time per object.
 *
 * Invariant: the pieces given to the callback, put together, are the bytes fed in; no more than
 * LINES_MAX of them are held back.
 */
#ifndef GRADD_RUN_LINES_H
#define GRADD_RUN_LINES_H

#include <stddef.h>

/* A longer line is handed on in pieces of this many bytes. */
enum { LINES_MAX = 64 * 1024 };

/*
 * One line with its end: "\n", or a lone "\r" (a progress bar redraws itself so; "\r\n" is one
 * end). A piece without such an end is a cut of a very long line, or the last one of the stream.
 */
typedef void lines_on_line(void *owner, const char *line, size_t bytes);

struct lines {
    lines_on_line *on_line;
    void *owner;
    size_t used;
    char held[LINES_MAX];
};

void lines_init(struct lines *lines, lines_on_line *on_line, void *owner);
void lines_feed(struct lines *lines, const char *data, size_t bytes);
/* The stream has ended: hand on what is held. */
void lines_finish(struct lines *lines);

#endif
