/* SPDX-License-Identifier: Apache-2.0 */
#include "inbox.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { READ_BYTES = 64 * 1024 };

void inbox_init(struct inbox *inbox, int take_fd)
{
    *inbox = (struct inbox){.fd = take_fd};
    fcntl(take_fd, F_SETFL, fcntl(take_fd, F_GETFL) | O_NONBLOCK);
}

void inbox_deinit(struct inbox *inbox)
{
    if (inbox->fd >= 0)
        close(inbox->fd);
    /* It may have carried the cluster key. */
    if (inbox->data)
        explicit_bzero(inbox->data, inbox->capacity);
    free(inbox->data);
    *inbox = (struct inbox){.fd = -1};
}

int inbox_split(struct inbox *inbox, struct inbox *out_rest)
{
    size_t n = inbox->end - inbox->begin;
    *out_rest = (struct inbox){.fd = inbox->fd, .end = n, .capacity = n + READ_BYTES};
    out_rest->data = malloc(out_rest->capacity);
    if (!out_rest->data) {
        out_rest->fd = -1;
        return -ENOMEM;
    }
    if (n > 0)
        memcpy(out_rest->data, inbox->data + inbox->begin, n);
    inbox->fd = -1;
    return 0;
}

static int make_room(struct inbox *inbox)
{
    if (inbox->begin > 0)
        memmove(inbox->data, inbox->data + inbox->begin, inbox->end - inbox->begin);
    inbox->end -= inbox->begin;
    inbox->begin = 0;
    if (inbox->capacity - inbox->end >= READ_BYTES)
        return 0;
    size_t capacity = 2 * inbox->capacity + READ_BYTES;
    uint8_t *data = malloc(capacity);
    if (!data)
        return -ENOMEM;
    if (inbox->data) {
        memcpy(data, inbox->data, inbox->end);
        explicit_bzero(inbox->data, inbox->capacity);
    }
    free(inbox->data);
    inbox->data = data;
    inbox->capacity = capacity;
    return 0;
}

int inbox_read(struct inbox *inbox)
{
    if (inbox->fd < 0)
        return -EPIPE;
    int rc = make_room(inbox);
    if (rc < 0)
        return rc;
    ssize_t n = read(inbox->fd, inbox->data + inbox->end, READ_BYTES);
    if (n == 0)
        return -EPIPE;
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    inbox->end += (size_t)n;
    return 1;
}

int inbox_next(struct inbox *inbox, struct frame *out)
{
    size_t used;
    if (!inbox->data)
        return 0;
    int rc = frame_find(inbox->data + inbox->begin, inbox->end - inbox->begin, out, &used);
    if (rc > 0)
        inbox->begin += used;
    return rc;
}

int inbox_next_line(struct inbox *inbox, char *line, size_t bytes)
{
    const uint8_t *begin = inbox->data + inbox->begin;
    size_t there = inbox->end - inbox->begin;
    const uint8_t *newline = there ? memchr(begin, '\n', there) : NULL;
    /* A line without end, from a host that is no friend, may not grow for ever. */
    if (!newline && there < READ_BYTES)
        return 0;
    size_t length = newline ? (size_t)(newline - begin) : there;
    size_t kept = length < bytes ? length : bytes - 1;
    memcpy(line, begin, kept);
    line[kept] = '\0';
    inbox->begin += length + (newline ? 1 : 0);
    return 1;
}
