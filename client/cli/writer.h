/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a command has to say, stated once and written either as text for people or as JSON for
 * programs. A value carries its unit: text shows "1.5 MiB", JSON the number of bytes.
 *
 * Thread: any, one at a time per object.
 *
 * Invariant: control characters and bytes that are no UTF-8, which may come from another user's
 * process, reach neither the terminal nor the JSON. JSON has every field, always; text leaves out
 * only what is empty.
 */
#ifndef GRADD_CLI_WRITER_H
#define GRADD_CLI_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { WRITER_SCHEMA = 1 };

enum value_kind {
    VALUE_TEXT,
    VALUE_COUNT,
    VALUE_BYTES,
    VALUE_SECONDS,
    VALUE_MICROSECONDS,
    VALUE_TIME, /* seconds since the epoch; text: local time, JSON: UTC in ISO 8601 */
    VALUE_BOOL,
    VALUE_RANKS, /* text: "0-3, 7" */
    VALUE_TEXTS, /* text: one line each */
};

/* Pointers are borrowed for the call. */
struct value {
    enum value_kind kind;
    union {
        const char *text;
        uint64_t count; /* VALUE_COUNT, VALUE_BYTES */
        double number;  /* VALUE_SECONDS, VALUE_MICROSECONDS, VALUE_TIME */
        bool is_true;
        struct {
            const uint32_t *items;
            size_t n;
        } ranks;
        struct {
            char *const *items;
            size_t n;
        } texts;
    };
};

static inline struct value value_text(const char *text)
{
    return (struct value){.kind = VALUE_TEXT, .text = text ? text : ""};
}
static inline struct value value_count(uint64_t count)
{
    return (struct value){.kind = VALUE_COUNT, .count = count};
}
static inline struct value value_bytes(uint64_t bytes)
{
    return (struct value){.kind = VALUE_BYTES, .count = bytes};
}
static inline struct value value_seconds(double s)
{
    return (struct value){.kind = VALUE_SECONDS, .number = s};
}
static inline struct value value_us(double us)
{
    return (struct value){.kind = VALUE_MICROSECONDS, .number = us};
}
static inline struct value value_time(double s)
{
    return (struct value){.kind = VALUE_TIME, .number = s};
}
static inline struct value value_bool(bool is_true)
{
    return (struct value){.kind = VALUE_BOOL, .is_true = is_true};
}
static inline struct value value_ranks(const uint32_t *items, size_t n)
{
    return (struct value){.kind = VALUE_RANKS, .ranks = {items, n}};
}
static inline struct value value_texts(char *const *items, size_t n)
{
    return (struct value){.kind = VALUE_TEXTS, .texts = {items, n}};
}

/* A column of a table: its key in JSON, its heading in text. */
struct column {
    const char *key;
    const char *heading;
};

struct writer;
struct writer_ops {
    void (*field)(struct writer *w, const char *key, const char *label, struct value value);
    void (*table_begin)(struct writer *w, const char *key, const char *title,
                        const struct column *columns, size_t n_columns);
    void (*row)(struct writer *w, const struct value *values);
    void (*table_end)(struct writer *w);
    void (*error)(struct writer *w, int code, const char *text);
    void (*end)(struct writer *w);
    void (*free)(struct writer *w);
};

struct writer {
    const struct writer_ops *ops;
};

/* One document for one command, written to stream at writer_end(). NULL: out of memory. */
struct writer *writer_text_new(FILE *stream);
/* is_compact: on one line, for --watch. */
struct writer *writer_json_new(FILE *stream, const char *command, bool is_compact);

static inline void writer_field(struct writer *w, const char *key, const char *label,
                                struct value value)
{
    w->ops->field(w, key, label, value);
}

/* Tables do not nest. Each row has one value per column. */
static inline void writer_table_begin(struct writer *w, const char *key, const char *title,
                                      const struct column *columns, size_t n_columns)
{
    w->ops->table_begin(w, key, title, columns, n_columns);
}
static inline void writer_row(struct writer *w, const struct value *values)
{
    w->ops->row(w, values);
}
static inline void writer_table_end(struct writer *w)
{
    w->ops->table_end(w);
}

/* Why the command failed. Text has nothing here: the sentence goes to standard error. */
static inline void writer_error(struct writer *w, int code, const char *text)
{
    w->ops->error(w, code, text);
}

static inline void writer_end(struct writer *w)
{
    w->ops->end(w);
}
static inline void writer_free(struct writer *w)
{
    if (w)
        w->ops->free(w);
}

#endif
