/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

enum { READ_BYTES = 16 * 1024 };

static void on_line(void *owner, const char *line, size_t bytes)
{
    struct stream *stream = owner;
    if (stream->sink && stream->show)
        stream->show(stream, line, bytes);
    else if (stream->sink)
        sink_push(stream->sink, stream->prefix, line, bytes);
    if (stream->log)
        rank_log_write(stream->log, line, bytes);
}

void stream_init(struct stream *stream, int take_fd, const char *prefix, struct sink *sink,
                 struct rank_log *log)
{
    stream->fd = take_fd;
    stream->sink = sink;
    stream->show = NULL;
    stream->log = log;
    snprintf(stream->prefix, sizeof stream->prefix, "%s", prefix);
    lines_init(&stream->lines, on_line, stream);
    int flags = fcntl(take_fd, F_GETFL);
    fcntl(take_fd, F_SETFL, flags | O_NONBLOCK);
}

void stream_deinit(struct stream *stream)
{
    if (stream->fd >= 0)
        close(stream->fd);
    stream->fd = -1;
}

bool stream_wants_input(const struct stream *stream)
{
    return stream->fd >= 0 && (!stream->sink || sink_has_room(stream->sink));
}

static void end(struct stream *stream)
{
    lines_finish(&stream->lines);
    stream_deinit(stream);
}

static bool is_pointless(const struct stream *stream)
{
    return stream->sink && stream->sink->error == EPIPE && (!stream->log || stream->log->fd < 0);
}

/* false: nothing is there now, or nothing will be. */
static bool read_once(struct stream *stream)
{
    char data[READ_BYTES];
    if (is_pointless(stream)) {
        end(stream);
        return false;
    }
    ssize_t n = read(stream->fd, data, sizeof data);
    if (n > 0)
        lines_feed(&stream->lines, data, (size_t)n);
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        end(stream);
    return n > 0;
}

void stream_read(struct stream *stream)
{
    if (stream->fd >= 0)
        read_once(stream);
}

void stream_drain(struct stream *stream)
{
    /* A pipe holds a bounded amount; a writer that outlived the job may not keep us here. */
    for (size_t i = 0; i < 256 && stream->fd >= 0 && read_once(stream); i++)
        continue;
    if (stream->fd >= 0)
        end(stream);
}
