/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One output stream of one process (a rank's stdout or stderr, the private daemon's log): read
 * from its pipe, cut into lines, shown with a prefix and kept in the rank's log file.
 *
 * Thread: loop.
 *
 * Invariant: a process is never made to wait for a console or a log file that has failed; a
 * console that was closed is passed on (the pipe is closed, so that the process gets SIGPIPE, as
 * it would without gradrun in between).
 */
#ifndef GRADD_RUN_STREAM_H
#define GRADD_RUN_STREAM_H

#include "lines.h"
#include "rank_log.h"
#include "sink.h"

struct stream;
/* Shows one line (see lines.h) of a stream that has a sink. */
typedef void stream_show(struct stream *stream, const char *line, size_t bytes);

struct stream {
    int fd; /* the pipe's reading end, owned; -1: ended */
    char prefix[16];
    struct sink *sink;    /* borrowed; NULL: not shown */
    stream_show *show;    /* NULL: prefix and line, as text */
    unsigned rank, which; /* for show(): whose it is, and 1 or 2 */
    struct rank_log *log; /* borrowed; NULL: not kept */
    struct lines lines;
};

/* Takes the fd and makes it non-blocking. */
void stream_init(struct stream *stream, int take_fd, const char *prefix, struct sink *sink,
                 struct rank_log *log);
void stream_deinit(struct stream *stream);

/* Is it worth polling for input now? */
bool stream_wants_input(const struct stream *stream);
/* Read once. At end of stream the last line is handed on and fd becomes -1. */
void stream_read(struct stream *stream);
/* Read all that is there, then end the stream, whoever else may still hold the pipe. */
void stream_drain(struct stream *stream);

#endif
