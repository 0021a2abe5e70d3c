/* SPDX-License-Identifier: Apache-2.0 */
#include "environment.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum value { RANK, SIZE, ZERO, ONE, SOCKET, JOB, LIBRARY, ADDRESS, PORT };

/*
 * Names by launcher: gradd's; torchrun's (PyTorch, "torchrun" manual: environment variables);
 * Horovod's (horovod/runner). All ranks are on this node, so that local equals global.
 */
static const struct variable {
    const char *name;
    enum value value;
    bool is_identity; /* -x may not set it */
} variables[] = {
    {"GRADD_SOCKET", SOCKET, true},     {"GRADD_JOB", JOB, true},
    {"GRADD_RANK", RANK, true},         {"GRADD_WORLD_SIZE", SIZE, true},
    {"GRADD_LOCAL_RANK", RANK, true},   {"GRADD_LOCAL_SIZE", SIZE, true},
    {"GRADD_LIBRARY", LIBRARY, false},  {"RANK", RANK, true},
    {"WORLD_SIZE", SIZE, true},         {"LOCAL_RANK", RANK, true},
    {"LOCAL_WORLD_SIZE", SIZE, true},   {"GROUP_RANK", ZERO, true},
    {"MASTER_ADDR", ADDRESS, false},    {"MASTER_PORT", PORT, false},
    {"HOROVOD_RANK", RANK, true},       {"HOROVOD_SIZE", SIZE, true},
    {"HOROVOD_LOCAL_RANK", RANK, true}, {"HOROVOD_LOCAL_SIZE", SIZE, true},
    {"HOROVOD_CROSS_RANK", ZERO, true}, {"HOROVOD_CROSS_SIZE", ONE, true},
    {"PYTHONUNBUFFERED", ONE, false},
};
enum { N_VARIABLES = sizeof variables / sizeof variables[0] };

static bool has_name(const char *entry, const char *name, size_t length)
{
    return strncmp(entry, name, length) == 0 && (entry[length] == '=' || entry[length] == '\0');
}

int environment_check_export(const char *export, char **inherited, char *error, size_t bytes)
{
    size_t length = strcspn(export, "=");
    for (size_t i = 0; i < N_VARIABLES; i++)
        if (variables[i].is_identity && has_name(variables[i].name, export, length))
            return snprintf(error, bytes,
                            "-x %s: gradrun sets %s itself, for each rank (see --job, --socket, "
                            "-np)",
                            export, variables[i].name),
                   -EINVAL;
    if (export[length] == '=')
        return 0;
    for (char **e = inherited; *e; e++)
        if (has_name(*e, export, length))
            return 0;
    return snprintf(error, bytes, "-x %s: not set here; give -x %s=VALUE", export, export), -EINVAL;
}

/* The value in words, into a buffer; false: this variable is to be left alone. */
static bool value_of(const struct environment *environment, enum value value, unsigned rank,
                     char *buffer, size_t bytes)
{
    const char *text = NULL;
    unsigned number = 0;
    switch (value) {
    case RANK:
        number = rank;
        break;
    case SIZE:
        number = environment->n_ranks;
        break;
    case ZERO:
        break;
    case ONE:
        number = 1;
        break;
    case SOCKET:
        if (!environment->socket)
            return false;
        text = environment->socket;
        break;
    case JOB:
        text = environment->job;
        break;
    case LIBRARY:
        if (!environment->library)
            return false;
        text = environment->library;
        break;
    case ADDRESS:
        text = "127.0.0.1";
        break;
    case PORT:
        if (environment->master_port == 0)
            return false;
        number = environment->master_port;
        break;
    }
    if (text)
        snprintf(buffer, bytes, "%s", text);
    else
        snprintf(buffer, bytes, "%u", number);
    return true;
}

/* Put a copy of "NAME=VALUE" into the list (which has room), in place of the name's old entry. */
static bool put(char **list, size_t *n, const char *entry)
{
    size_t length = strcspn(entry, "=");
    char *copy = strdup(entry);
    if (!copy)
        return false;
    for (size_t i = 0; i < *n; i++) {
        if (has_name(list[i], entry, length)) {
            free(list[i]);
            list[i] = copy;
            return true;
        }
    }
    list[(*n)++] = copy;
    return true;
}

static bool fill(const struct environment *environment, unsigned rank, char **inherited,
                 char **list)
{
    size_t n = 0;
    for (char **e = inherited; *e; e++) {
        if (!(list[n] = strdup(*e)))
            return false;
        n++;
    }
    for (size_t i = 0; i < N_VARIABLES; i++) {
        char value[4096], entry[4200];
        if (!value_of(environment, variables[i].value, rank, value, sizeof value))
            continue;
        snprintf(entry, sizeof entry, "%s=%s", variables[i].name, value);
        if (!put(list, &n, entry))
            return false;
    }
    for (const char **x = environment->exports; x && *x; x++)
        if (strchr(*x, '=') && !put(list, &n, *x))
            return false;
    return true;
}

char **environment_of_rank(const struct environment *environment, unsigned rank, char **inherited)
{
    size_t room = N_VARIABLES + 1;
    for (char **e = inherited; *e; e++)
        room++;
    for (const char **x = environment->exports; x && *x; x++)
        room++;
    char **list = calloc(room, sizeof *list);
    if (!list)
        return NULL;
    if (fill(environment, rank, inherited, list))
        return list;
    environment_free(list);
    return NULL;
}

void environment_free(char **list)
{
    for (char **e = list; e && *e; e++)
        free(*e);
    free(list);
}
