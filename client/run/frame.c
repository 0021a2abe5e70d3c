/* SPDX-License-Identifier: Apache-2.0 */
#include "frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { N_FIELDS = 5, BODY_SMALL = 64 };

#define NO                                                                                         \
    {                                                                                              \
        0                                                                                          \
    }
#define FIELD(f) (offsetof(struct message, f))

/* One row per kind: the numbers in their order, and how long a text may be (0: none). */
static const struct row {
    enum frame_kind kind;
    unsigned text_max;
    unsigned n_fields;
    size_t fields[N_FIELDS];
} rows[] = {
    {FRAME_START, 256, 2, {FIELD(port), FIELD(master_port)}},
    {FRAME_END, 0, 0, NO},
    {FRAME_KILL, 0, 0, NO},
    {FRAME_SIGNAL, 0, 1, {FIELD(signal)}},
    {FRAME_PING, 0, 0, NO},
    {FRAME_MUTE, 0, 1, {FIELD(stream)}},
    {FRAME_INPUT, FRAME_LINE_MAX, 0, NO},
    {FRAME_PROBE, 256, 1, {FIELD(port)}},
    {FRAME_READY, 256, 2, {FIELD(port), FIELD(master_port)}},
    {FRAME_STARTED, 0, 2, {FIELD(rank), FIELD(pid)}},
    {FRAME_OUTPUT, FRAME_LINE_MAX, 2, {FIELD(rank), FIELD(stream)}},
    {FRAME_SAY, 4096, 0, NO},
    {FRAME_EXITED, 0, 5, {FIELD(rank), FIELD(pid), FIELD(code), FIELD(signal), FIELD(is_asked)}},
    {FRAME_ENDING, 0, 1, {FIELD(code)}},
    {FRAME_PONG, 0, 2, {FIELD(seconds), FIELD(nanoseconds)}},
    {FRAME_TAKEN, 0, 0, NO},
    {FRAME_RESULT, 4096, 1, {FIELD(code)}},
    {FRAME_DONE, 0, 1, {FIELD(code)}},
};

static const struct row *row_of(enum frame_kind kind)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].kind == kind)
            return &rows[i];
    return NULL;
}

/* How long a body of this kind may be; 0: there is no such kind. */
static size_t body_max(enum frame_kind kind)
{
    const struct row *row = row_of(kind);
    if (kind == FRAME_JOB)
        return FRAME_JOB_MAX;
    return row ? row->text_max + BODY_SMALL : 0;
}

static void store_u32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (24 - 8 * i));
}

static uint32_t load_u32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

void frame_writer_deinit(struct frame_writer *writer)
{
    /* It may have carried the cluster key. */
    if (writer->data)
        explicit_bzero(writer->data, writer->capacity);
    free(writer->data);
    *writer = (struct frame_writer){0};
}

static uint8_t *reserve(struct frame_writer *writer, size_t bytes)
{
    if (writer->has_failed)
        return NULL;
    if (writer->capacity - writer->n < bytes) {
        size_t capacity = 2 * writer->capacity + bytes + 256;
        uint8_t *data = malloc(capacity);
        if (!data) {
            writer->has_failed = true;
            return NULL;
        }
        if (writer->n > 0)
            memcpy(data, writer->data, writer->n);
        if (writer->data)
            explicit_bzero(writer->data, writer->capacity);
        free(writer->data);
        writer->data = data;
        writer->capacity = capacity;
    }
    uint8_t *at = writer->data + writer->n;
    writer->n += bytes;
    return at;
}

void frame_begin(struct frame_writer *writer, enum frame_kind kind)
{
    writer->n = 0;
    uint8_t *at = reserve(writer, FRAME_HEAD);
    if (at)
        at[4] = (uint8_t)kind;
}

void frame_put_u32(struct frame_writer *writer, uint32_t value)
{
    uint8_t *at = reserve(writer, 4);
    if (at)
        store_u32(at, value);
}

void frame_put_text(struct frame_writer *writer, const char *text, size_t bytes)
{
    if (bytes > FRAME_JOB_MAX) { /* no kind allows it, and the length must fit */
        writer->has_failed = true;
        return;
    }
    frame_put_u32(writer, (uint32_t)bytes);
    uint8_t *at = reserve(writer, bytes + 1);
    if (!at)
        return;
    if (bytes > 0)
        memcpy(at, text, bytes);
    at[bytes] = 0;
}

int frame_end(struct frame_writer *writer)
{
    if (writer->has_failed)
        return -ENOMEM;
    size_t body = writer->n - FRAME_HEAD;
    if (body > body_max((enum frame_kind)writer->data[4]))
        return -EMSGSIZE;
    store_u32(writer->data, (uint32_t)body + 1);
    return 0;
}

int frame_put_message(struct frame_writer *writer, const struct message *message)
{
    const struct row *row = row_of(message->kind);
    if (!row)
        return -EINVAL;
    frame_begin(writer, message->kind);
    for (unsigned i = 0; i < row->n_fields; i++)
        frame_put_u32(writer,
                      *(const uint32_t *)(const void *)((const char *)message + row->fields[i]));
    if (row->text_max > 0) {
        if (message->text_bytes > row->text_max)
            return -EMSGSIZE;
        frame_put_text(writer, message->text, message->text_bytes);
    }
    return frame_end(writer);
}

int frame_find(const uint8_t *data, size_t bytes, struct frame *out, size_t *out_used)
{
    if (bytes < FRAME_HEAD)
        return 0;
    size_t length = load_u32(data);
    enum frame_kind kind = (enum frame_kind)data[4];
    size_t max = body_max(kind);
    if (max == 0 || length < 1 || length - 1 > max)
        return -EPROTO;
    if (bytes < 4 + length)
        return 0;
    *out = (struct frame){.kind = kind, .at = data + FRAME_HEAD, .end = data + 4 + length};
    *out_used = 4 + length;
    return 1;
}

uint32_t frame_get_u32(struct frame *frame)
{
    if (frame->is_bad || frame->end - frame->at < 4) {
        frame->is_bad = true;
        return 0;
    }
    frame->at += 4;
    return load_u32(frame->at - 4);
}

const char *frame_get_text(struct frame *frame, size_t *out_bytes)
{
    size_t bytes = frame_get_u32(frame);
    const char *text = (const char *)frame->at;
    if (out_bytes)
        *out_bytes = 0;
    if (frame->is_bad || (size_t)(frame->end - frame->at) < bytes + 1 || text[bytes] != '\0') {
        frame->is_bad = true;
        return "";
    }
    frame->at += bytes + 1;
    if (out_bytes)
        *out_bytes = bytes;
    else
        frame->is_bad |= memchr(text, '\0', bytes) != NULL;
    return text;
}

int frame_get_message(struct frame *frame, struct message *out)
{
    const struct row *row = row_of(frame->kind);
    *out = (struct message){.kind = frame->kind, .text = ""};
    if (!row)
        return -EPROTO;
    for (unsigned i = 0; i < row->n_fields; i++)
        *(uint32_t *)(void *)((char *)out + row->fields[i]) = frame_get_u32(frame);
    if (row->text_max > 0)
        out->text = frame_get_text(frame, &out->text_bytes);
    return frame->is_bad || frame->at != frame->end || out->text_bytes > row->text_max ? -EPROTO
                                                                                       : 0;
}
