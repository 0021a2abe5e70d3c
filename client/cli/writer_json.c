/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The writer for programs. Stability: keys and units of a schema number only ever gain company;
 * a change of meaning raises WRITER_SCHEMA.
 */
#include "format.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jansson.h>

struct json_writer {
    struct writer writer; /* first */
    FILE *stream;
    bool is_compact;
    json_t *root;
    json_t *table; /* borrowed from root */
    const struct column *columns;
    size_t n_columns;
};

static json_t *text_to_json(const char *text)
{
    char *safe = format_safe(text);
    json_t *json = safe ? json_string(safe) : NULL;
    free(safe);
    return json;
}

static json_t *time_to_json(double s)
{
    time_t t = (time_t)s;
    struct tm tm;
    char text[64] = "";
    gmtime_r(&t, &tm);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &tm);
    return json_string(text);
}

static json_t *list_to_json(const struct value *value)
{
    json_t *list = json_array();
    if (value->kind == VALUE_RANKS)
        for (size_t i = 0; i < value->ranks.n; i++)
            json_array_append_new(list, json_integer(value->ranks.items[i]));
    else
        for (size_t i = 0; i < value->texts.n; i++)
            json_array_append_new(list, text_to_json(value->texts.items[i]));
    return list;
}

static json_t *value_to_json(const struct value *value)
{
    switch (value->kind) {
    case VALUE_TEXT:
        return text_to_json(value->text);
    case VALUE_COUNT:
    case VALUE_BYTES:
        /* JSON's integers here are signed; a counter would need 292 years at 1 GB/s. */
        return json_integer(value->count > INT64_MAX ? INT64_MAX : (json_int_t)value->count);
    case VALUE_SECONDS:
    case VALUE_MICROSECONDS:
        return isfinite(value->number) ? json_real(value->number) : json_null();
    case VALUE_TIME:
        return time_to_json(value->number);
    case VALUE_BOOL:
        return json_boolean(value->is_true);
    case VALUE_RANKS:
    case VALUE_TEXTS:
        return list_to_json(value);
    }
    return NULL;
}

static void field(struct writer *w, const char *key, const char *label, struct value value)
{
    (void)label;
    json_object_set_new(((struct json_writer *)w)->root, key, value_to_json(&value));
}

static void table_begin(struct writer *w, const char *key, const char *title,
                        const struct column *columns, size_t n_columns)
{
    (void)title;
    struct json_writer *j = (struct json_writer *)w;
    j->columns = columns;
    j->n_columns = n_columns;
    j->table = json_array();
    json_object_set_new(j->root, key, j->table);
}

static void row(struct writer *w, const struct value *values)
{
    struct json_writer *j = (struct json_writer *)w;
    json_t *object = json_object();
    for (size_t i = 0; i < j->n_columns; i++)
        json_object_set_new(object, j->columns[i].key, value_to_json(&values[i]));
    json_array_append_new(j->table, object);
}

static void table_end(struct writer *w)
{
    ((struct json_writer *)w)->table = NULL;
}

static void error(struct writer *w, int code, const char *text)
{
    json_t *object = json_object();
    json_object_set_new(object, "code", json_integer(code));
    json_object_set_new(object, "text", text_to_json(text));
    json_object_set_new(((struct json_writer *)w)->root, "error", object);
}

static void end(struct writer *w)
{
    struct json_writer *j = (struct json_writer *)w;
    json_dumpf(j->root, j->stream,
               JSON_REAL_PRECISION(9) | (j->is_compact ? JSON_COMPACT : JSON_INDENT(2)));
    fputc('\n', j->stream);
    fflush(j->stream);
}

static void json_free(struct writer *w)
{
    json_decref(((struct json_writer *)w)->root);
    free(w);
}

struct writer *writer_json_new(FILE *stream, const char *command, bool is_compact)
{
    static const struct writer_ops ops = {field, table_begin, row,      table_end,
                                          error, end,         json_free};
    struct json_writer *j = calloc(1, sizeof *j);
    if (!j)
        return NULL;
    j->writer.ops = &ops;
    j->stream = stream;
    j->is_compact = is_compact;
    j->root = json_object();
    json_object_set_new(j->root, "schema", json_integer(WRITER_SCHEMA));
    json_object_set_new(j->root, "command", json_string(command));
    return &j->writer;
}
