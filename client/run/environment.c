/* SPDX-License-Identifier: Apache-2.0 */
#include "environment.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum value {
    RANK,
    SIZE,
    LOCAL_RANK,
    LOCAL_SIZE,
    CROSS_RANK,
    CROSS_SIZE,
    HOST,
    HOSTS,
    ONE,
    SOCKET,
    JOB,
    LIBRARY,
    COORDINATOR,
    ADDRESS,
    PORT
};

/*
 * Names by launcher: gradd's; torchrun's (PyTorch, "torchrun" manual: environment variables);
 * Horovod's (horovod/runner).
 */
static const struct variable {
    const char *name;
    enum value value;
    bool is_identity; /* -x may not set it */
} variables[] = {
    {"GRADD_SOCKET", SOCKET, true},
    {"GRADD_JOB", JOB, true},
    {"GRADD_RANK", RANK, true},
    {"GRADD_WORLD_SIZE", SIZE, true},
    {"GRADD_LOCAL_RANK", LOCAL_RANK, true},
    {"GRADD_LOCAL_SIZE", LOCAL_SIZE, true},
    {"GRADD_COORDINATOR", COORDINATOR, true},
    {"GRADD_LIBRARY", LIBRARY, false},
    {"RANK", RANK, true},
    {"WORLD_SIZE", SIZE, true},
    {"LOCAL_RANK", LOCAL_RANK, true},
    {"LOCAL_WORLD_SIZE", LOCAL_SIZE, true},
    {"GROUP_RANK", HOST, true},
    {"GROUP_WORLD_SIZE", HOSTS, true},
    {"MASTER_ADDR", ADDRESS, false},
    {"MASTER_PORT", PORT, false},
    {"HOROVOD_RANK", RANK, true},
    {"HOROVOD_SIZE", SIZE, true},
    {"HOROVOD_LOCAL_RANK", LOCAL_RANK, true},
    {"HOROVOD_LOCAL_SIZE", LOCAL_SIZE, true},
    {"HOROVOD_CROSS_RANK", CROSS_RANK, true},
    {"HOROVOD_CROSS_SIZE", CROSS_SIZE, true},
    {"PYTHONUNBUFFERED", ONE, false},
};
enum { N_VARIABLES = sizeof variables / sizeof variables[0] };

static bool has_name(const char *entry, const char *name, size_t length)
{
    return strncmp(entry, name, length) == 0 && (entry[length] == '=' || entry[length] == '\0');
}

bool environment_is_identity(const char *entry)
{
    size_t length = strcspn(entry, "=");
    for (size_t i = 0; i < N_VARIABLES; i++)
        if (variables[i].is_identity && has_name(variables[i].name, entry, length))
            return true;
    return false;
}

int environment_check_export(const char *export, char **inherited, char *error, size_t bytes)
{
    size_t length = strcspn(export, "=");
    if (environment_is_identity(export))
        return snprintf(error, bytes,
                        "-x %s: gradrun sets %.*s itself, for each rank (see --job, --socket, "
                        "-np)",
                        export, (int)length, export),
               -EINVAL;
    if (export[length] == '=')
        return 0;
    for (char **e = inherited; *e; e++)
        if (has_name(*e, export, length))
            return 0;
    return snprintf(error, bytes, "-x %s: not set here; give -x %s=VALUE", export, export), -EINVAL;
}

/* The values that are numbers. */
static unsigned number_of(const struct environment *environment, enum value value,
                          const struct place *place)
{
    switch (value) {
    case RANK:
        return place->rank;
    case SIZE:
        return environment->n_ranks;
    case LOCAL_RANK:
        return place->local_rank;
    case LOCAL_SIZE:
        return place->local_size;
    case CROSS_RANK:
        return place->cross_rank;
    case CROSS_SIZE:
        return place->cross_size;
    case HOST:
        return environment->host_index;
    case HOSTS:
        return environment->n_hosts;
    case PORT:
        return environment->master_port;
    default:
        return 1;
    }
}

/* The values that are texts; NULL: this one is none, or is not known. */
static const char *text_of(const struct environment *environment, enum value value)
{
    switch (value) {
    case SOCKET:
        return environment->socket;
    case JOB:
        return environment->job;
    case LIBRARY:
        return environment->library;
    case COORDINATOR:
        return environment->coordinator;
    case ADDRESS:
        return environment->master_address ? environment->master_address : "127.0.0.1";
    default:
        return NULL;
    }
}

static bool is_text(enum value value)
{
    return value == SOCKET || value == JOB || value == LIBRARY || value == COORDINATOR ||
           value == ADDRESS;
}

/* The value in words, into a buffer; false: this variable is to be left alone. */
static bool value_of(const struct environment *environment, enum value value,
                     const struct place *place, char *buffer, size_t bytes)
{
    const char *text = text_of(environment, value);
    unsigned number = number_of(environment, value, place);
    if (is_text(value) ? !text : value == PORT && number == 0)
        return false;
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

/* A coordinator that another launcher left behind would mislead the ranks of one host. */
static bool is_stale(const struct environment *environment, const char *entry)
{
    return !environment->coordinator &&
           has_name(entry, "GRADD_COORDINATOR", strlen("GRADD_COORDINATOR"));
}

static bool fill(const struct environment *environment, const struct place *place, char **inherited,
                 char **list)
{
    size_t n = 0;
    for (char **e = inherited; *e; e++) {
        if (is_stale(environment, *e))
            continue;
        if (!(list[n] = strdup(*e)))
            return false;
        n++;
    }
    for (size_t i = 0; i < N_VARIABLES; i++) {
        char value[4096], entry[4200];
        if (!value_of(environment, variables[i].value, place, value, sizeof value))
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

char **environment_of_rank(const struct environment *environment, const struct place *place,
                           char **inherited)
{
    size_t room = N_VARIABLES + 1;
    for (char **e = inherited; *e; e++)
        room++;
    for (const char **x = environment->exports; x && *x; x++)
        room++;
    char **list = calloc(room, sizeof *list);
    if (!list)
        return NULL;
    if (fill(environment, place, inherited, list))
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
