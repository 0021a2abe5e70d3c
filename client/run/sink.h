/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the ranks' lines go: gradrun's standard output or error. A reader that pauses must not
 * make gradrun deaf to Ctrl-C, so writing never blocks; what can not be written yet waits here,
 * and whoever fills the sink asks sink_has_room() first.
 *
 * Thread: loop.
 *
 * Invariant: a line is queued whole; once writing has failed, everything is discarded.
 */
#ifndef GRADD_RUN_SINK_H
#define GRADD_RUN_SINK_H

#include <stdbool.h>
#include <stddef.h>

struct sink {
    int fd;          /* where to write and poll */
    bool is_own;     /* fd was opened here, without blocking, and is to be closed */
    bool is_regular; /* a file: never waits, and cannot be polled */
    int error;       /* errno that ended it, or 0 */
    char *data;      /* [begin, end) is unwritten */
    size_t begin, end, capacity;
};

void sink_init(struct sink *sink, int fd);
/* Takes an fd that nobody else shares; it is made non-blocking. */
void sink_init_own(struct sink *sink, int take_fd);
void sink_deinit(struct sink *sink);

static inline bool sink_is_empty(const struct sink *sink)
{
    return sink->begin == sink->end;
}

/* Is there room for what one read from a rank can bring? */
bool sink_has_room(const struct sink *sink);

/* Queue prefix and line; a line without an end gets a newline. */
void sink_push(struct sink *sink, const char *prefix, const char *line, size_t bytes);

/* Queue bytes as they are. false: out of memory, nothing was queued. */
bool sink_push_bytes(struct sink *sink, const void *data, size_t bytes);

/* Write what can be written. 0, or -errno the first time that it fails; the sink is dead then. */
int sink_flush(struct sink *sink);

/* Do both descriptors lead to the same file, so that they must share a sink? */
bool sink_is_same_file(int fd_a, int fd_b);

#endif
