/* SPDX-License-Identifier: Apache-2.0 */
/* From text to values and back, by the type of the option. Thread: loop. */
#include "control/config_value.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

void *config_value_place(struct config *config, size_t i)
{
    return (char *)config + config_options[i].offset;
}

static uint64_t number_of(const struct config *config, size_t i)
{
    uint64_t value;
    memcpy(&value, (const char *)config + config_options[i].offset, sizeof value);
    return value;
}

/* Decimal digits, and nothing else, up to `end`. */
static bool parse_digits(const char *text, int base, char **out_end, uint64_t *out_value)
{
    if (!isdigit((unsigned char)*text))
        return false;
    errno = 0;
    *out_value = strtoull(text, out_end, base);
    return errno == 0;
}

static bool parse_bytes(const char *text, uint64_t *out_value)
{
    static const char suffixes[] = "kMGT";
    char *end;
    if (!parse_digits(text, 10, &end, out_value))
        return false;
    if (!*end)
        return true;
    const char *suffix = strchr(suffixes, *end == 'K' ? 'k' : *end);
    if (!suffix || end[1])
        return false;
    uint64_t unit = UINT64_C(1) << (10 * (suffix - suffixes + 1));
    return !__builtin_mul_overflow(*out_value, unit, out_value);
}

static bool parse_seconds(const char *text, uint64_t *out_ms)
{
    if (!isdigit((unsigned char)*text) || strspn(text, "0123456789.") != strlen(text))
        return false;
    char *end;
    double seconds = strtod(text, &end);
    if (*end || !(seconds <= 1e9))
        return false;
    *out_ms = (uint64_t)llround(seconds * 1000);
    return true;
}

static bool parse_number(const struct config_option *option, const char *text, uint64_t *out_value)
{
    char *end;
    enum log_level level;
    switch (option->type) {
    case CONFIG_NUMBER:
        return parse_digits(text, 10, &end, out_value) && !*end;
    case CONFIG_CHOICE:
        *out_value = CONFIG_AUTO;
        return strcmp(text, "auto") == 0 || (parse_digits(text, 10, &end, out_value) && !*end);
    case CONFIG_BYTES:
        return parse_bytes(text, out_value);
    case CONFIG_SECONDS:
        return parse_seconds(text, out_value);
    case CONFIG_MODE:
        return parse_digits(text, 8, &end, out_value) && !*end;
    case CONFIG_LEVEL:
        if (!log_level_parse(text, &level))
            return false;
        *out_value = level;
        return true;
    case CONFIG_WORD:
        for (*out_value = 0; *out_value < option->max; ++*out_value)
            if (strcmp(option->words[*out_value], text) == 0)
                return true;
        return false;
    case CONFIG_TEXT:
        break;
    }
    return false;
}

bool config_value_assign(struct config *config, size_t i, const char *text)
{
    const struct config_option *option = &config_options[i];
    if (option->type == CONFIG_TEXT) {
        size_t length = strlen(text);
        if (length < option->min || length > option->max)
            return false;
        memcpy(config_value_place(config, i), text, length + 1);
        return true;
    }
    uint64_t value;
    if (!parse_number(option, text, &value))
        return false;
    if (option->type == CONFIG_CHOICE && value == CONFIG_AUTO && strcmp(text, "auto") != 0)
        return false;
    bool is_free =
        option->type == CONFIG_LEVEL || (option->type == CONFIG_CHOICE && value == CONFIG_AUTO);
    if (!is_free && (value < option->min || value > option->max))
        return false;
    memcpy(config_value_place(config, i), &value, sizeof value);
    return true;
}

static void format_value(enum config_type type, uint64_t value, char *out_text, size_t size)
{
    static const char suffixes[] = "kMGT";
    switch (type) {
    case CONFIG_BYTES: {
        int power = 0;
        while (power < 4 && value && value % 1024 == 0) {
            value /= 1024;
            power++;
        }
        snprintf(out_text, size, "%" PRIu64 "%.*s", value, power > 0,
                 suffixes + power - (power > 0));
        return;
    }
    case CONFIG_SECONDS:
        if (value % 1000)
            snprintf(out_text, size, "%.3f", (double)value / 1000);
        else
            snprintf(out_text, size, "%" PRIu64, value / 1000);
        return;
    case CONFIG_MODE:
        snprintf(out_text, size, "%04" PRIo64, value);
        return;
    case CONFIG_LEVEL:
        snprintf(out_text, size, "%s", log_level_name((enum log_level)value));
        return;
    case CONFIG_CHOICE:
        if (value == CONFIG_AUTO)
            snprintf(out_text, size, "auto");
        else
            snprintf(out_text, size, "%" PRIu64, value);
        return;
    default:
        snprintf(out_text, size, "%" PRIu64, value);
    }
}

void config_format(const struct config *config, size_t i, char *out_text, size_t size)
{
    const struct config_option *option = &config_options[i];
    if (option->type == CONFIG_TEXT)
        snprintf(out_text, size, "%s", (const char *)config + option->offset);
    else if (option->type == CONFIG_WORD)
        snprintf(out_text, size, "%s", option->words[number_of(config, i)]);
    else
        format_value(option->type, number_of(config, i), out_text, size);
}

void config_allowed(size_t i, char *out_text, size_t size)
{
    static const char *const nouns[] = {
        [CONFIG_NUMBER] = "a number",          [CONFIG_BYTES] = "bytes (suffixes k, M, G, T)",
        [CONFIG_SECONDS] = "seconds",          [CONFIG_MODE] = "octal permissions",
        [CONFIG_CHOICE] = "auto, or a number",
    };
    const struct config_option *option = &config_options[i];
    char min[32], max[32];
    switch (option->type) {
    case CONFIG_TEXT:
        snprintf(out_text, size, "a text of %" PRIu64 " to %" PRIu64 " bytes", option->min,
                 option->max);
        return;
    case CONFIG_LEVEL:
        snprintf(out_text, size, "error, warning, notice, info or debug");
        return;
    case CONFIG_WORD:
        *out_text = '\0';
        for (size_t word = 0, used = 0; word < option->max && used < size; word++)
            used += (size_t)snprintf(out_text + used, size - used, "%s%s",
                                     !word                     ? ""
                                     : word + 1 == option->max ? " or "
                                                               : ", ",
                                     option->words[word]);
        return;
    default:
        format_value(option->type, option->min, min, sizeof min);
        format_value(option->type, option->max, max, sizeof max);
        snprintf(out_text, size, "%s from %s to %s", nouns[option->type], min, max);
    }
}
