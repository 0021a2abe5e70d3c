/* SPDX-License-Identifier: Apache-2.0 */
#include "lines.h"

#include <string.h>

void lines_init(struct lines *lines, lines_on_line *on_line, void *owner)
{
    lines->on_line = on_line;
    lines->owner = owner;
    lines->used = 0;
}

/* The length of the first line in data with its end, or 0 when its end is not known yet. */
static size_t first_line(const char *data, size_t bytes)
{
    const char *newline = memchr(data, '\n', bytes);
    size_t before = newline ? (size_t)(newline - data) : bytes;
    const char *cr = memchr(data, '\r', before);
    /* A carriage return that is last of all may yet be followed by its newline. */
    if (cr && cr + 1 < data + before)
        return (size_t)(cr - data) + 1;
    return newline ? before + 1 : 0;
}

static void emit(struct lines *lines)
{
    size_t begin = 0, length;
    while ((length = first_line(lines->held + begin, lines->used - begin)) > 0) {
        lines->on_line(lines->owner, lines->held + begin, length);
        begin += length;
    }
    if (begin == 0 && lines->used == LINES_MAX) {
        lines->on_line(lines->owner, lines->held, lines->used);
        begin = lines->used;
    }
    memmove(lines->held, lines->held + begin, lines->used - begin);
    lines->used -= begin;
}

void lines_feed(struct lines *lines, const char *data, size_t bytes)
{
    while (bytes > 0) {
        size_t room = LINES_MAX - lines->used;
        size_t n = bytes < room ? bytes : room;
        memcpy(lines->held + lines->used, data, n);
        lines->used += n;
        data += n;
        bytes -= n;
        emit(lines);
    }
}

void lines_finish(struct lines *lines)
{
    if (lines->used > 0)
        lines->on_line(lines->owner, lines->held, lines->used);
    lines->used = 0;
}
