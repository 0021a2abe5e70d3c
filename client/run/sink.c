/* SPDX-License-Identifier: Apache-2.0 */
#include "sink.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ROOM_BELOW = 256 * 1024 };

void sink_init(struct sink *sink, int fd)
{
    *sink = (struct sink){.fd = fd};
    struct stat st;
    if (fstat(fd, &st) < 0)
        return;
    sink->is_regular = S_ISREG(st.st_mode);
    if (!S_ISFIFO(st.st_mode) && !S_ISCHR(st.st_mode))
        return;
    /* O_NONBLOCK on fd itself would reach everyone who shares it, the user's shell for one; a
     * second opening is ours alone. Where it is not allowed, writes stay below PIPE_BUF. */
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int own = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (own >= 0) {
        sink->fd = own;
        sink->is_own = true;
    }
}

void sink_init_own(struct sink *sink, int take_fd)
{
    *sink = (struct sink){.fd = take_fd, .is_own = true};
    fcntl(take_fd, F_SETFL, fcntl(take_fd, F_GETFL) | O_NONBLOCK);
}

void sink_deinit(struct sink *sink)
{
    if (sink->is_own)
        close(sink->fd);
    free(sink->data);
    *sink = (struct sink){.fd = -1};
}

bool sink_has_room(const struct sink *sink)
{
    return sink->end - sink->begin < ROOM_BELOW;
}

static int reserve(struct sink *sink, size_t bytes)
{
    if (sink->begin > 0)
        memmove(sink->data, sink->data + sink->begin, sink->end - sink->begin);
    sink->end -= sink->begin;
    sink->begin = 0;
    if (sink->capacity - sink->end >= bytes)
        return 0;
    size_t capacity =
        sink->capacity * 2 > sink->end + bytes ? sink->capacity * 2 : sink->end + bytes;
    char *data = realloc(sink->data, capacity);
    if (!data)
        return -ENOMEM;
    sink->data = data;
    sink->capacity = capacity;
    return 0;
}

static void append(struct sink *sink, const char *data, size_t bytes)
{
    memcpy(sink->data + sink->end, data, bytes);
    sink->end += bytes;
}

void sink_push(struct sink *sink, const char *prefix, const char *line, size_t bytes)
{
    size_t prefix_bytes = strlen(prefix);
    if (sink->error || bytes == 0)
        return;
    if (sink->capacity - sink->end < prefix_bytes + bytes + 1 &&
        reserve(sink, prefix_bytes + bytes + 1) < 0)
        return;
    append(sink, prefix, prefix_bytes);
    append(sink, line, bytes);
    if (line[bytes - 1] != '\n' && line[bytes - 1] != '\r')
        append(sink, "\n", 1);
}

bool sink_push_bytes(struct sink *sink, const void *data, size_t bytes)
{
    if (sink->error || bytes == 0)
        return true;
    if (sink->capacity - sink->end < bytes && reserve(sink, bytes) < 0)
        return false;
    append(sink, data, bytes);
    return true;
}

/* May a write be tried? A borrowed pipe or terminal would block when it is full. */
static bool is_writable(const struct sink *sink)
{
    if (sink->is_own || sink->is_regular)
        return true;
    struct pollfd p = {sink->fd, POLLOUT, 0};
    return poll(&p, 1, 0) > 0;
}

int sink_flush(struct sink *sink)
{
    while (!sink_is_empty(sink) && !sink->error && is_writable(sink)) {
        size_t bytes = sink->end - sink->begin;
        if (!sink->is_own && !sink->is_regular && bytes > PIPE_BUF)
            bytes = PIPE_BUF;
        ssize_t n = write(sink->fd, sink->data + sink->begin, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return 0;
        if (n < 0) {
            sink->error = errno;
            sink->begin = sink->end = 0;
            return -sink->error;
        }
        sink->begin += (size_t)n;
    }
    if (sink_is_empty(sink))
        sink->begin = sink->end = 0;
    return 0;
}

bool sink_is_same_file(int fd_a, int fd_b)
{
    struct stat a, b;
    return fstat(fd_a, &a) == 0 && fstat(fd_b, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}
