/* SPDX-License-Identifier: Apache-2.0 */
#include "wire.h"

#include <errno.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fcntl.h>

enum {
    BUFFER_START = 16 * 1024,
    ARENA_START = 16 * 1024,
    /* An empty repeated message takes 2 bytes on the wire and the largest struct in memory. */
    ARENA_PER_BYTE = 160,
};

/* ------------------------------------------------------------------ in */

void wire_in_init(struct wire_in *in)
{
    *in = (struct wire_in){0};
}

void wire_in_deinit(struct wire_in *in)
{
    for (unsigned i = 0; i < in->n_fds; i++)
        close(in->fds[i]);
    free(in->data);
    free(in->arena);
    wire_in_init(in);
}

static int fail(struct wire_in *in, const char *sentence)
{
    in->error = sentence;
    return -EPROTO;
}

static int reserve(struct wire_in *in, size_t bytes)
{
    if (in->begin > 0 && in->begin == in->end)
        in->begin = in->end = 0;
    if (in->capacity - in->end >= bytes)
        return 0;
    if (in->begin > 0) {
        memmove(in->data, in->data + in->begin, in->end - in->begin);
        in->end -= in->begin;
        in->begin = 0;
    }
    if (in->capacity - in->end >= bytes)
        return 0;
    size_t capacity = in->capacity ? in->capacity : BUFFER_START;
    while (capacity - in->end < bytes)
        capacity *= 2;
    uint8_t *data = realloc(in->data, capacity);
    if (!data)
        return -ENOMEM;
    in->data = data;
    in->capacity = capacity;
    return 0;
}

/* Bytes that the frame at `begin` still lacks; a whole buffer when its header is not here yet. */
static size_t wanted(const struct wire_in *in)
{
    size_t have = in->end - in->begin;
    if (have < WIRE_HEADER_BYTES)
        return BUFFER_START / 2;
    const uint8_t *h = in->data + in->begin;
    size_t length = h[0] | h[1] << 8 | h[2] << 16 | (size_t)h[3] << 24;
    if (length > WIRE_FRAME_MAX || have >= WIRE_HEADER_BYTES + length)
        return BUFFER_START / 2;
    size_t lacking = WIRE_HEADER_BYTES + length - have;
    return lacking > BUFFER_START / 2 ? lacking : BUFFER_START / 2;
}

/* Keep the fds of one recvmsg; all of them are owned (kept or closed) on return. */
static int keep_fds(struct wire_in *in, struct msghdr *message)
{
    int rc = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (in->n_fds < WIRE_FDS_HELD) {
                in->fds[in->n_fds++] = fd;
            } else {
                close(fd);
                rc = fail(in, "more descriptors than a frame may carry");
            }
        }
    }
    if (message->msg_flags & MSG_CTRUNC)
        rc = fail(in, "truncated control data (too many descriptors, or none left here)");
    return rc;
}

int wire_in_read(struct wire_in *in, int fd)
{
    int rc = reserve(in, wanted(in));
    if (rc < 0)
        return rc;
    alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * WIRE_FDS_MAX)];
    struct iovec iov = {in->data + in->end, in->capacity - in->end};
    struct msghdr message = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = control,
        .msg_controllen = sizeof control,
    };
    ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    in->end += (size_t)n;
    in->is_eof = n == 0;
    /* Without room for any descriptor the kernel sets the flag and returns no control data. */
    bool has_control = message.msg_controllen > 0 || (message.msg_flags & MSG_CTRUNC);
    return has_control ? keep_fds(in, &message) : 0;
}

int wire_in_feed(struct wire_in *in, const void *data, size_t bytes)
{
    int rc = reserve(in, bytes);
    if (rc < 0)
        return rc;
    if (bytes)
        memcpy(in->data + in->end, data, bytes);
    in->end += bytes;
    return 0;
}

/* ------------------------------------------------------------------ unpacking into an arena */

/* Bump allocator with a budget: a frame can not make us allocate more than its size allows. */
struct arena {
    uint8_t *memory;
    size_t used, bytes;
    bool is_short;
};

static void *arena_alloc(void *data, size_t bytes)
{
    struct arena *arena = data;
    size_t rounded = (bytes + 15) & ~(size_t)15;
    if (rounded < bytes || arena->bytes - arena->used < rounded) {
        arena->is_short = true;
        return NULL;
    }
    void *memory = arena->memory + arena->used;
    arena->used += rounded;
    return memory;
}

static void arena_free(void *data, void *memory)
{
    (void)data;
    (void)memory;
}

static int arena_grow(struct wire_in *in, size_t bytes)
{
    void *memory = realloc(in->arena, bytes);
    if (!memory)
        return -ENOMEM;
    in->arena = memory;
    in->arena_bytes = bytes;
    return 0;
}

/* Unpack; grow the arena and try again while it is too small for an honest frame. */
static int unpack(struct wire_in *in, const uint8_t *data, size_t length,
                  const Pb__Envelope **out_envelope)
{
    const size_t budget = ARENA_START + length * ARENA_PER_BYTE;
    if (!in->arena_bytes && arena_grow(in, ARENA_START) < 0)
        return -ENOMEM;
    for (;;) {
        struct arena arena = {.memory = in->arena, .bytes = in->arena_bytes};
        ProtobufCAllocator allocator = {arena_alloc, arena_free, &arena};
        Pb__Envelope *envelope = pb__envelope__unpack(&allocator, length, data);
        if (envelope) {
            *out_envelope = envelope;
            return 0;
        }
        if (!arena.is_short)
            return fail(in, "bytes that are no message");
        if (in->arena_bytes >= budget)
            return fail(in, "a message too intricate for its size");
        if (arena_grow(in, in->arena_bytes * 2 < budget ? in->arena_bytes * 2 : budget) < 0)
            return -ENOMEM;
    }
}

int wire_in_next(struct wire_in *in, struct wire_frame *out_frame)
{
    size_t have = in->end - in->begin;
    if (have == 0 && in->n_fds > 0)
        return fail(in, "descriptors where none belong");
    if (have < WIRE_HEADER_BYTES)
        return 0;
    const uint8_t *h = in->data + in->begin;
    size_t length = h[0] | h[1] << 8 | h[2] << 16 | (size_t)h[3] << 24;
    unsigned n_fds = h[4];
    if (h[5] || h[6] || h[7])
        return fail(in, "not a gradd frame");
    if (length > WIRE_FRAME_MAX)
        return fail(in, "a frame longer than 1 MiB");
    if (n_fds > WIRE_FDS_MAX)
        return fail(in, "more descriptors than a frame may carry");
    if (have < WIRE_HEADER_BYTES + length)
        return 0;
    if (in->n_fds < n_fds)
        return fail(in, "fewer descriptors than the frame declares");
    if (in->n_fds > n_fds && have == WIRE_HEADER_BYTES + length)
        return fail(in, "descriptors where none belong");

    struct wire_frame frame = {.fds = {-1, -1, -1, -1}, .n_fds = n_fds};
    int rc = unpack(in, h + WIRE_HEADER_BYTES, length, &frame.envelope);
    if (rc < 0)
        return rc;
    memcpy(frame.fds, in->fds, n_fds * sizeof *in->fds);
    in->n_fds -= n_fds;
    memmove(in->fds, in->fds + n_fds, in->n_fds * sizeof *in->fds);
    in->begin += WIRE_HEADER_BYTES + length;
    *out_frame = frame;
    return 1;
}

void wire_frame_close_fds(struct wire_frame *frame)
{
    for (unsigned i = 0; i < frame->n_fds; i++) {
        if (frame->fds[i] >= 0)
            close(frame->fds[i]);
        frame->fds[i] = -1;
    }
}

/* ------------------------------------------------------------------ out */

struct wire_out_fds {
    struct wire_out_fds *next;
    size_t at; /* index into data of the frame's first byte */
    unsigned n;
    int fds[WIRE_FDS_MAX];
};

void wire_out_init(struct wire_out *out, size_t limit_bytes)
{
    *out = (struct wire_out){.limit = limit_bytes};
}

static void drop_first_fds(struct wire_out *out)
{
    struct wire_out_fds *first = out->fds;
    out->fds = first->next;
    for (unsigned i = 0; i < first->n; i++)
        close(first->fds[i]);
    free(first);
}

void wire_out_deinit(struct wire_out *out)
{
    while (out->fds)
        drop_first_fds(out);
    free(out->data);
    wire_out_init(out, out->limit);
}

static int out_reserve(struct wire_out *out, size_t bytes)
{
    if (out->begin == out->end)
        out->begin = out->end = 0;
    if (out->capacity - out->end >= bytes)
        return 0;
    if (out->begin > 0) {
        memmove(out->data, out->data + out->begin, out->end - out->begin);
        for (struct wire_out_fds *f = out->fds; f; f = f->next)
            f->at -= out->begin;
        out->end -= out->begin;
        out->begin = 0;
    }
    if (out->capacity - out->end >= bytes)
        return 0;
    size_t capacity = out->capacity ? out->capacity : BUFFER_START;
    while (capacity - out->end < bytes)
        capacity *= 2;
    uint8_t *data = realloc(out->data, capacity);
    if (!data)
        return -ENOMEM;
    out->data = data;
    out->capacity = capacity;
    return 0;
}

static int queue_fds(struct wire_out *out, const int *fds, unsigned n_fds)
{
    struct wire_out_fds *entry = calloc(1, sizeof *entry);
    if (!entry)
        return -ENOMEM;
    entry->at = out->end;
    for (unsigned i = 0; i < n_fds; i++) {
        int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
        if (fd < 0) {
            int rc = -errno;
            while (entry->n > 0)
                close(entry->fds[--entry->n]);
            free(entry);
            return rc;
        }
        entry->fds[entry->n++] = fd;
    }
    struct wire_out_fds **tail = &out->fds;
    while (*tail)
        tail = &(*tail)->next;
    *tail = entry;
    return 0;
}

int wire_out_push(struct wire_out *out, const Pb__Envelope *envelope, const int *fds,
                  unsigned n_fds)
{
    size_t length = pb__envelope__get_packed_size(envelope);
    if (length > WIRE_FRAME_MAX || n_fds > WIRE_FDS_MAX)
        return -EMSGSIZE;
    if (out->end - out->begin + WIRE_HEADER_BYTES + length > out->limit)
        return -ENOBUFS;
    int rc = out_reserve(out, WIRE_HEADER_BYTES + length);
    if (rc == 0 && n_fds > 0)
        rc = queue_fds(out, fds, n_fds);
    if (rc < 0)
        return rc;
    uint8_t *h = out->data + out->end;
    h[0] = (uint8_t)length;
    h[1] = (uint8_t)(length >> 8);
    h[2] = (uint8_t)(length >> 16);
    h[3] = (uint8_t)(length >> 24);
    h[4] = (uint8_t)n_fds;
    h[5] = h[6] = h[7] = 0;
    pb__envelope__pack(envelope, h + WIRE_HEADER_BYTES);
    out->end += WIRE_HEADER_BYTES + length;
    return 0;
}

int wire_out_move(struct wire_out *out, struct wire_out *from)
{
    size_t bytes = from->end - from->begin;
    if (out->end - out->begin + bytes > out->limit)
        return -ENOBUFS;
    int rc = out_reserve(out, bytes);
    if (rc < 0 || bytes == 0)
        return rc;
    memcpy(out->data + out->end, from->data + from->begin, bytes);
    out->end += bytes;
    from->begin = from->end = 0;
    return 0;
}

/* One sendmsg: up to the next frame that carries fds, or that frame's bytes with its fds. */
static ssize_t send_some(struct wire_out *out, int fd)
{
    alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * WIRE_FDS_MAX)];
    struct iovec iov = {out->data + out->begin, out->end - out->begin};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    struct wire_out_fds *first = out->fds;
    if (first && first->at == out->begin) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * first->n);
        memset(control, 0, sizeof control);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * first->n);
        memcpy(CMSG_DATA(c), first->fds, sizeof(int) * first->n);
        if (first->next)
            iov.iov_len = first->next->at - out->begin;
    } else if (first) {
        iov.iov_len = first->at - out->begin;
    }
    ssize_t n = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0 && message.msg_controllen)
        drop_first_fds(out);
    return n;
}

int wire_out_flush(struct wire_out *out, int fd)
{
    while (out->begin < out->end) {
        ssize_t n = send_some(out, fd);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 1 : -errno;
        out->begin += (size_t)n;
    }
    return 0;
}

unsigned wire_protocol_agree(unsigned min_a, unsigned max_a, unsigned min_b, unsigned max_b)
{
    unsigned low = min_a > min_b ? min_a : min_b;
    unsigned high = max_a < max_b ? max_a : max_b;
    return low <= high ? high : 0;
}
