/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Values as people read them, with their units, and strings of others made harmless.
 *
 * Thread: any.
 */
#ifndef GRADD_CLI_FORMAT_H
#define GRADD_CLI_FORMAT_H

#include "writer.h"

/* A copy in valid UTF-8 without control characters; bytes that are neither become \xNN. The
 * caller frees it. NULL: out of memory. */
char *format_safe(const char *text);

/* A value in words; "-" when it is empty. The caller frees it. NULL: out of memory. */
char *format_value(const struct value *value);

/* "0-3, 7" for sorted ranks. The caller frees it. NULL: out of memory. */
char *format_ranks(const uint32_t *ranks, size_t n);

/* Is there nothing to show (an empty string or list)? */
bool format_is_empty(const struct value *value);

/* Columns that a string in UTF-8 takes on a terminal, wide characters counted as one. */
size_t format_width(const char *text);

#endif
