/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Configurations as a whole: defaults, assignments from files and the command line, what a reload
 * takes over. config_options.c has the options, config_value.c knows their values. Thread: loop.
 */
#include "control/config.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <ini.h>

#include "control/config_value.h"

void config_init(struct config *config)
{
    memset(config, 0, sizeof *config);
    for (size_t i = 0; i < config_n_options(); i++) {
        if (!config_value_assign(config, i, config_options[i].default_value))
            abort(); /* a row of the table contradicts itself: the unit test says which */
        snprintf(config->sources[i], CONFIG_SOURCE_MAX, "default");
    }
}

/* ------------------------------------------------------------------ assignments */

__attribute__((format(printf, 2, 3))) static int fail(struct config_error *error,
                                                      const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    return -EINVAL;
}

/* Row of a key; section NULL: of any section. config_n_options(): none. */
static size_t find(const char *section, const char *key)
{
    for (size_t i = 0; i < config_n_options(); i++)
        if (strcmp(config_options[i].key, key) == 0 &&
            (!section || strcmp(config_options[i].section, section) == 0))
            return i;
    return config_n_options();
}

/* Where a key that is not in this section belongs, or which keys there are. */
static int fail_unknown(struct config_error *error, const char *where, const char *section,
                        const char *key)
{
    size_t elsewhere = find(NULL, key);
    if (elsewhere < config_n_options())
        return fail(error, "%s: \"%s\" belongs into section [%s], not [%s]", where, key,
                    config_options[elsewhere].section, section);
    char known[320] = "";
    size_t used = 0;
    for (size_t i = 0; i < config_n_options(); i++) {
        if (section && *section && strcmp(config_options[i].section, section) != 0)
            continue;
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "",
                                 config_options[i].key);
        if (used >= sizeof known)
            break;
    }
    if (!used)
        return fail(
            error,
            "%s: unknown section [%.64s]; there are [daemon], [job], [gpu], [peer] and [limits]",
            where, section);
    return fail(error, "%s: unknown key \"%.64s\"; known keys: %s", where, key, known);
}

static int apply(struct config *config, size_t i, const char *value, const char *where,
                 const char *source, struct config_error *error)
{
    if (!config_value_assign(config, i, value)) {
        char allowed[128];
        config_allowed(i, allowed, sizeof allowed);
        return fail(error, "%s: %s = \"%.64s\" is not allowed; allowed: %s", where,
                    config_options[i].key, value, allowed);
    }
    snprintf(config->sources[i], CONFIG_SOURCE_MAX, "%s", source);
    return 0;
}

int config_set(struct config *config, const char *assignment, const char *source,
               struct config_error *out_error)
{
    char key[64];
    const char *equals = strchr(assignment, '=');
    if (!equals || equals == assignment || (size_t)(equals - assignment) >= sizeof key)
        return fail(out_error, "%s: \"%.64s\" is not of the form key=value", source, assignment);
    memcpy(key, assignment, (size_t)(equals - assignment));
    key[equals - assignment] = '\0';
    size_t i = find(NULL, key);
    if (i == config_n_options())
        return fail_unknown(out_error, source, NULL, key);
    return apply(config, i, equals + 1, source, source, out_error);
}

/* ------------------------------------------------------------------ files */

/* State of one parse. inih tells its handler no line, so the reader counts them. */
struct parse {
    struct config fresh;
    const char *name;
    FILE *file;
    int line;
    int set_at[CONFIG_OPTIONS_MAX]; /* line of each key seen, 0: not seen */
    bool has_failed;
    struct config_error *error;
};

static char *read_line(char *buffer, int size, void *data)
{
    struct parse *parse = data;
    if (parse->has_failed || !fgets(buffer, size, parse->file))
        return NULL;
    parse->line++;
    if (!strchr(buffer, '\n') && !feof(parse->file)) {
        fail(parse->error, "%s:%d: the line is longer than %d bytes", parse->name, parse->line,
             size - 2);
        parse->has_failed = true;
        return NULL;
    }
    return buffer;
}

static int on_assignment(void *data, const char *section, const char *key, const char *value)
{
    struct parse *parse = data;
    if (parse->has_failed)
        return 0;
    char where[CONFIG_SOURCE_MAX];
    snprintf(where, sizeof where, "%s:%d", parse->name, parse->line);
    size_t i = find(section, key);
    int rc;
    if (i == config_n_options())
        rc = fail_unknown(parse->error, where, section, key);
    else if (parse->set_at[i])
        rc = fail(parse->error, "%s: \"%s\" is set already in line %d", where, key,
                  parse->set_at[i]);
    else
        rc = apply(&parse->fresh, i, value, where, where, parse->error);
    if (i < config_n_options())
        parse->set_at[i] = parse->line;
    parse->has_failed = rc < 0;
    return rc == 0;
}

static int read_stream(struct config *config, const char *name, FILE *file,
                       struct config_error *out_error)
{
    struct parse *parse = calloc(1, sizeof *parse);
    if (!parse)
        return -ENOMEM;
    parse->fresh = *config;
    parse->name = name;
    parse->file = file;
    parse->error = out_error;
    int line = ini_parse_stream(read_line, parse, on_assignment, parse);
    int rc = 0;
    if (parse->has_failed)
        rc = -EINVAL;
    else if (line != 0)
        rc = fail(out_error, "%s:%d: expected \"key = value\", \"[section]\" or a comment", name,
                  line);
    else if (ferror(file))
        rc = fail(out_error, "%s: can not be read: %s", name, strerror(errno));
    else
        *config = parse->fresh;
    free(parse);
    return rc;
}

int config_read_file(struct config *config, const char *path, struct config_error *out_error)
{
    FILE *file = fopen(path, "re");
    if (!file) {
        int rc = -errno;
        fail(out_error, "%s: can not be opened: %s", path, strerror(-rc));
        return rc;
    }
    int rc = read_stream(config, path, file, out_error);
    fclose(file);
    return rc;
}

int config_read_text(struct config *config, const char *name, const char *text,
                     struct config_error *out_error)
{
    if (!*text)
        return 0; /* fmemopen() refuses an empty buffer */
    FILE *file = fmemopen((char *)text, strlen(text), "r");
    if (!file)
        return -ENOMEM;
    int rc = read_stream(config, name, file, out_error);
    fclose(file);
    return rc;
}

size_t config_take_reloadable(struct config *config, const struct config *fresh, char *out_fixed,
                              size_t size)
{
    size_t n_fixed = 0, used = 0;
    *out_fixed = '\0';
    for (size_t i = 0; i < config_n_options(); i++) {
        const struct config_option *option = &config_options[i];
        size_t bytes = option->type == CONFIG_TEXT ? CONFIG_TEXT_MAX : sizeof(uint64_t);
        const void *value = (const char *)fresh + option->offset;
        if (option->reload == CONFIG_RELOADABLE) {
            memcpy(config_value_place(config, i), value, bytes);
            memcpy(config->sources[i], fresh->sources[i], CONFIG_SOURCE_MAX);
        } else if (option->type == CONFIG_TEXT
                       ? strcmp(config_value_place(config, i), value) != 0
                       : memcmp(config_value_place(config, i), value, bytes) != 0) {
            n_fixed++;
            if (used < size)
                used += (size_t)snprintf(out_fixed + used, size - used, "%s%s", used ? ", " : "",
                                         option->key);
        }
    }
    return n_fixed;
}

void config_print_options(FILE *file)
{
    const char *section = "";
    for (size_t i = 0; i < config_n_options(); i++) {
        const struct config_option *option = &config_options[i];
        if (strcmp(section, option->section) != 0)
            fprintf(file, "# SECTION [%s]\n\n", section = option->section);
        char allowed[128];
        config_allowed(i, allowed, sizeof allowed);
        fprintf(file, "*%s* = %s\n", option->key, allowed);
        fprintf(file, "\t%s\n\n\tDefault: %s. %s\n\n", option->doc,
                *option->default_value ? option->default_value : "empty",
                option->reload == CONFIG_RELOADABLE ? "Takes effect on reload."
                                                    : "A change needs a restart.");
    }
}
