/* SPDX-License-Identifier: Apache-2.0 */
#include "format.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Bytes of the UTF-8 character at text if it is a printable one, else 0. (RFC 3629, table 3-7 of
 * Unicode: no overlong forms, no surrogates, nothing above U+10FFFF.) */
static size_t printable(const unsigned char *t)
{
    if (t[0] >= 0x20 && t[0] < 0x7f)
        return 1;
    size_t n = t[0] >= 0xc2 && t[0] < 0xe0   ? 2
               : t[0] >= 0xe0 && t[0] < 0xf0 ? 3
               : t[0] >= 0xf0 && t[0] < 0xf5 ? 4
                                             : 0;
    for (size_t i = 1; i < n; i++)
        if ((t[i] & 0xc0) != 0x80)
            return 0;
    bool is_control = t[0] == 0xc2 && t[1] < 0xa0;
    bool is_overlong = (t[0] == 0xe0 && t[1] < 0xa0) || (t[0] == 0xf0 && t[1] < 0x90);
    bool is_surrogate = t[0] == 0xed && t[1] >= 0xa0;
    bool is_too_high = t[0] == 0xf4 && t[1] >= 0x90;
    /* U+202A to U+202E and U+2066 to U+2069 reorder what stands around them. */
    bool is_bidi = t[0] == 0xe2 && ((t[1] == 0x80 && t[2] >= 0xaa && t[2] <= 0xae) ||
                                    (t[1] == 0x81 && t[2] >= 0xa6 && t[2] <= 0xa9));
    return is_control || is_overlong || is_surrogate || is_too_high || is_bidi ? 0 : n;
}

char *format_safe(const char *text)
{
    char *safe = malloc(4 * strlen(text) + 1);
    if (!safe)
        return NULL;
    char *to = safe;
    for (const unsigned char *t = (const unsigned char *)text; *t;) {
        size_t n = printable(t);
        if (n == 0) {
            to += sprintf(to, "\\x%02x", *t++);
            continue;
        }
        memcpy(to, t, n);
        to += n;
        t += n;
    }
    *to = '\0';
    return safe;
}

char *format_ranks(const uint32_t *ranks, size_t n)
{
    char *text = malloc(n * 24 + 1); /* "4294967295-4294967295, " at most for each */
    if (!text)
        return NULL;
    char *to = text;
    *to = '\0';
    for (size_t i = 0; i < n;) {
        size_t last = i;
        while (last + 1 < n && ranks[last + 1] == ranks[last] + 1)
            last++;
        to += sprintf(to, "%s%" PRIu32, i ? ", " : "", ranks[i]);
        if (last > i)
            to += sprintf(to, "%s%" PRIu32, last == i + 1 ? ", " : "-", ranks[last]);
        i = last + 1;
    }
    return text;
}

static char *format_bytes(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double number = (double)bytes;
    size_t unit = 0;
    while (number >= 1024 && unit + 1 < sizeof units / sizeof units[0]) {
        number /= 1024;
        unit++;
    }
    char *text = NULL;
    if (asprintf(&text, unit == 0 || number >= 100 ? "%.0f %s" : "%.1f %s", number, units[unit]) <
        0)
        return NULL;
    return text;
}

static char *format_seconds(double s)
{
    char *text = NULL;
    int rc;
    double a = fabs(s);
    if (a == 0 || !isfinite(s))
        rc = asprintf(&text, "%g s", a);
    else if (a < 1e-3)
        rc = asprintf(&text, "%.0f us", s * 1e6);
    else if (a < 1)
        rc = asprintf(&text, "%.1f ms", s * 1e3);
    else if (a < 120)
        rc = asprintf(&text, "%.1f s", s);
    else if (a < 7200)
        rc = asprintf(&text, "%.0f min %02.0f s", floor(s / 60), floor(fmod(s, 60)));
    else if (a < 172800)
        rc = asprintf(&text, "%.0f h %02.0f min", floor(s / 3600), floor(fmod(s, 3600) / 60));
    else
        rc = asprintf(&text, "%.0f d %02.0f h", floor(s / 86400), floor(fmod(s, 86400) / 3600));
    return rc < 0 ? NULL : text;
}

static char *format_time(double s)
{
    time_t t = (time_t)s;
    struct tm tm;
    char text[64] = "";
    localtime_r(&t, &tm);
    strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &tm);
    return strdup(text);
}

/* Texts on lines of their own; safe each. */
static char *format_texts(char *const *items, size_t n)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    if (!stream)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        char *safe = format_safe(items[i]);
        fprintf(stream, "%s%s", i ? "\n" : "", safe ? safe : "");
        free(safe);
    }
    fclose(stream);
    return text;
}

bool format_is_empty(const struct value *value)
{
    return (value->kind == VALUE_TEXT && !value->text[0]) ||
           (value->kind == VALUE_RANKS && value->ranks.n == 0) ||
           (value->kind == VALUE_TEXTS && value->texts.n == 0);
}

char *format_value(const struct value *value)
{
    char *text = NULL;
    if (format_is_empty(value))
        return strdup("-");
    switch (value->kind) {
    case VALUE_TEXT:
        return format_safe(value->text);
    case VALUE_COUNT:
        return asprintf(&text, "%" PRIu64, value->count) < 0 ? NULL : text;
    case VALUE_BYTES:
        return format_bytes(value->count);
    case VALUE_SECONDS:
        return format_seconds(value->number);
    case VALUE_MICROSECONDS:
        return format_seconds(value->number / 1e6);
    case VALUE_TIME:
        return format_time(value->number);
    case VALUE_BOOL:
        return strdup(value->is_true ? "yes" : "no");
    case VALUE_RANKS:
        return format_ranks(value->ranks.items, value->ranks.n);
    case VALUE_TEXTS:
        return format_texts(value->texts.items, value->texts.n);
    }
    return NULL;
}

size_t format_width(const char *text)
{
    size_t n = 0;
    for (; *text; text++)
        n += ((unsigned char)*text & 0xc0) != 0x80;
    return n;
}
