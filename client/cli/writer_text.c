/* SPDX-License-Identifier: Apache-2.0 */
/* The writer for people: fields as "label: value", tables in columns as wide as what they hold. */
#include "format.h"

#include <stdlib.h>
#include <string.h>

enum { LABEL_WIDTH = 17, COLUMNS_MAX = 24 };

struct text_writer {
    struct writer writer; /* first */
    FILE *stream;
    const char *title;
    const struct column *columns;
    size_t n_columns, n_rows;
    bool is_number[COLUMNS_MAX]; /* aligned to the right */
    char **cells;                /* n_rows * n_columns, owned; NULL where memory ran out */
};

static void field(struct writer *w, const char *key, const char *label, struct value value)
{
    (void)key;
    struct text_writer *t = (struct text_writer *)w;
    if (format_is_empty(&value))
        return;
    char *text = format_value(&value);
    int width = LABEL_WIDTH;
    for (char *line = text, *next; line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        fprintf(t->stream, "%-*s %s\n", width, line == text ? label : "", line);
    }
    free(text);
}

static void table_begin(struct writer *w, const char *key, const char *title,
                        const struct column *columns, size_t n_columns)
{
    (void)key;
    struct text_writer *t = (struct text_writer *)w;
    t->title = title;
    t->columns = columns;
    t->n_columns = n_columns < COLUMNS_MAX ? n_columns : COLUMNS_MAX;
    t->n_rows = 0;
}

static void row(struct writer *w, const struct value *values)
{
    struct text_writer *t = (struct text_writer *)w;
    char **cells = realloc(t->cells, (t->n_rows + 1) * t->n_columns * sizeof *cells);
    if (!cells)
        return;
    t->cells = cells;
    for (size_t i = 0; i < t->n_columns; i++) {
        cells[t->n_rows * t->n_columns + i] = format_value(&values[i]);
        t->is_number[i] = values[i].kind != VALUE_TEXT && values[i].kind != VALUE_RANKS &&
                          values[i].kind != VALUE_TEXTS;
    }
    t->n_rows++;
}

static const char *cell(const struct text_writer *t, size_t row_index, size_t column)
{
    const char *text = t->cells[row_index * t->n_columns + column];
    return text ? text : "?";
}

static void print_cell(const struct text_writer *t, size_t column, const char *text, size_t width)
{
    size_t used = format_width(text);
    size_t pad = width > used ? width - used : 0;
    bool is_last = column + 1 == t->n_columns;
    if (t->is_number[column])
        fprintf(t->stream, "%*s%s", (int)pad, "", text);
    else
        fprintf(t->stream, "%s%*s", text, is_last ? 0 : (int)pad, "");
    fputs(is_last ? "\n" : "  ", t->stream);
}

static void table_end(struct writer *w)
{
    struct text_writer *t = (struct text_writer *)w;
    size_t width[COLUMNS_MAX];
    if (t->n_rows > 0 && t->title)
        fprintf(t->stream, "\n%s\n", t->title);
    for (size_t i = 0; t->n_rows > 0 && i < t->n_columns; i++) {
        width[i] = format_width(t->columns[i].heading);
        for (size_t r = 0; r < t->n_rows; r++)
            if (format_width(cell(t, r, i)) > width[i])
                width[i] = format_width(cell(t, r, i));
    }
    for (size_t i = 0; t->n_rows > 0 && i < t->n_columns; i++)
        print_cell(t, i, t->columns[i].heading, width[i]);
    for (size_t r = 0; r < t->n_rows; r++)
        for (size_t i = 0; i < t->n_columns; i++)
            print_cell(t, i, cell(t, r, i), width[i]);
    for (size_t i = 0; i < t->n_rows * t->n_columns; i++)
        free(t->cells[i]);
    free(t->cells);
    t->cells = NULL;
    t->n_rows = 0;
}

static void error(struct writer *w, int code, const char *text)
{
    (void)w;
    (void)code;
    (void)text;
}

static void end(struct writer *w)
{
    fflush(((struct text_writer *)w)->stream);
}

static void text_free(struct writer *w)
{
    free(w);
}

struct writer *writer_text_new(FILE *stream)
{
    static const struct writer_ops ops = {field, table_begin, row,      table_end,
                                          error, end,         text_free};
    struct text_writer *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->writer.ops = &ops;
    t->stream = stream;
    return &t->writer;
}
