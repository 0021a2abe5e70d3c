/* SPDX-License-Identifier: Apache-2.0 */
#include "hosts.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "address.h"

enum { FILE_MAX = 1024 * 1024 };

void hosts_deinit(struct hosts *hosts)
{
    free(hosts->list);
    *hosts = (struct hosts){0};
}

static bool is_name(const char *text, size_t length)
{
    if (length == 0 || length > HOSTS_NAME_MAX || text[0] == '-')
        return false;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)text[i]) && !strchr(".-_:%@", text[i]))
            return false;
    return text[length - 1] != '@';
}

/* The same host twice: its slots add up, as MPI has it. */
static int add(struct hosts *hosts, const char *name, size_t length, unsigned n_slots, char *error,
               size_t bytes)
{
    struct host *host = NULL;
    for (unsigned i = 0; i < hosts->n && !host; i++)
        if (strlen(hosts->list[i].name) == length && memcmp(hosts->list[i].name, name, length) == 0)
            host = &hosts->list[i];
    if (!host && hosts->n == HOSTS_MAX)
        return snprintf(error, bytes, "more than %d hosts", HOSTS_MAX), -EINVAL;
    if (!host) {
        struct host *longer = realloc(hosts->list, (hosts->n + 1) * sizeof *longer);
        if (!longer)
            return snprintf(error, bytes, "out of memory"), -ENOMEM;
        hosts->list = longer;
        host = &hosts->list[hosts->n++];
        *host = (struct host){0};
        memcpy(host->name, name, length);
    }
    host->n_slots += n_slots;
    if (host->n_slots > HOSTS_SLOTS_MAX)
        return snprintf(error, bytes, "host %s: more than %d slots", host->name, HOSTS_SLOTS_MAX),
               -EINVAL;
    return 0;
}

static bool parse_slots(const char *text, size_t length, unsigned *out)
{
    unsigned long n = 0;
    if (length == 0 || length > 4)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (!isdigit((unsigned char)text[i]))
            return false;
        n = n * 10 + (unsigned long)(text[i] - '0');
    }
    *out = (unsigned)n;
    return n >= 1 && n <= HOSTS_SLOTS_MAX;
}

/* "host", "host:N", "[address]", "[address]:N". *out_slots is 0 when none are given. */
static bool parse_word(const char *word, size_t length, const char **out_name,
                       size_t *out_name_length, unsigned *out_slots)
{
    const char *end = word + length, *colon = NULL;
    *out_name = word;
    *out_name_length = length;
    *out_slots = 0;
    if (length > 0 && word[0] == '[') {
        const char *close = memchr(word, ']', length);
        if (!close || (close + 1 < end && close[1] != ':'))
            return false;
        *out_name = word + 1;
        *out_name_length = (size_t)(close - word) - 1;
        colon = close + 1 < end ? close + 1 : NULL;
    } else {
        colon = memchr(word, ':', length);
        /* More than one colon: an address of IPv6, whose last group is not a number of slots. */
        if (colon && memchr(colon + 1, ':', (size_t)(end - colon) - 1))
            colon = NULL;
        if (colon)
            *out_name_length = (size_t)(colon - word);
    }
    return is_name(*out_name, *out_name_length) &&
           (!colon || parse_slots(colon + 1, (size_t)(end - colon) - 1, out_slots));
}

int hosts_parse_list(struct hosts *hosts, const char *text, char *error, size_t bytes)
{
    for (const char *at = text;; at++) {
        size_t length = strcspn(at, ","), name_length;
        const char *name;
        unsigned n_slots;
        if (!parse_word(at, length, &name, &name_length, &n_slots))
            return snprintf(error, bytes, "-H %s: \"%.*s\" is not HOST[:SLOTS] with 1 to %d slots",
                            text, (int)length, at, HOSTS_SLOTS_MAX),
                   -EINVAL;
        int rc = add(hosts, name, name_length, n_slots ? n_slots : 1, error, bytes);
        if (rc < 0)
            return rc;
        at += length;
        if (!*at)
            return 0;
    }
}

static const char *skip_blanks(const char *at, const char *end)
{
    while (at < end && isspace((unsigned char)*at))
        at++;
    return at;
}

/* One "key=N" or "key = N" at *at, which is advanced. */
static bool parse_pair(const char **at, const char *end, unsigned *slots, unsigned *max_slots)
{
    const char *key = *at, *p = key;
    while (p < end && (isalpha((unsigned char)*p) || *p == '_' || *p == '-'))
        p++;
    size_t key_length = (size_t)(p - key);
    p = skip_blanks(p, end);
    if (p == end || *p != '=')
        return false;
    const char *value = skip_blanks(p + 1, end);
    for (p = value; p < end && !isspace((unsigned char)*p);)
        p++;
    *at = p;
    bool is_max =
        key_length == 9 && (memcmp(key, "max_slots", 9) == 0 || memcmp(key, "max-slots", 9) == 0);
    if (!is_max && (key_length != 5 || memcmp(key, "slots", 5) != 0))
        return false;
    return parse_slots(value, (size_t)(p - value), is_max ? max_slots : slots);
}

static int parse_line(struct hosts *hosts, const char *line, const char *end, const char *where,
                      char *error, size_t bytes)
{
    const char *word = skip_blanks(line, end), *at = word, *name;
    while (at < end && !isspace((unsigned char)*at))
        at++;
    if (at == word)
        return 0;
    size_t name_length;
    unsigned n_slots, max_slots = HOSTS_SLOTS_MAX;
    bool is_good = parse_word(word, (size_t)(at - word), &name, &name_length, &n_slots);
    while (is_good && (at = skip_blanks(at, end)) < end)
        is_good = parse_pair(&at, end, &n_slots, &max_slots);
    if (!is_good)
        return snprintf(error, bytes,
                        "%s: \"%.*s\" is neither HOST, HOST:N nor HOST slots=N [max_slots=M], "
                        "with N from 1 to %d",
                        where, (int)(end - word), word, HOSTS_SLOTS_MAX),
               -EINVAL;
    if (n_slots > max_slots)
        return snprintf(error, bytes, "%s: slots=%u is more than max_slots=%u", where, n_slots,
                        max_slots),
               -EINVAL;
    return add(hosts, name, name_length, n_slots ? n_slots : 1, error, bytes);
}

int hosts_parse_text(struct hosts *hosts, const char *file, const char *text, char *error,
                     size_t bytes)
{
    unsigned number = 0;
    while (*text) {
        char where[300];
        snprintf(where, sizeof where, "%s:%u", file, ++number);
        const char *end = text + strcspn(text, "\n");
        int rc = parse_line(hosts, text, text + strcspn(text, "#\n"), where, error, bytes);
        if (rc < 0)
            return rc;
        text = *end ? end + 1 : end;
    }
    if (hosts->n == 0)
        return snprintf(error, bytes, "%s: names no host", file), -EINVAL;
    return 0;
}

int hosts_read(struct hosts *hosts, const char *file, char *error, size_t bytes)
{
    char *text = malloc(FILE_MAX + 1);
    FILE *stream = text ? fopen(file, "re") : NULL;
    size_t n = stream ? fread(text, 1, FILE_MAX + 1, stream) : 0;
    int rc = 0;
    if (!stream || ferror(stream)) {
        rc = -errno;
        snprintf(error, bytes, "cannot read the host file %s: %s", file, strerror(-rc));
    } else if (n > FILE_MAX || memchr(text, '\0', n)) {
        rc = -EINVAL;
        snprintf(error, bytes, "%s: not a host file", file);
    } else {
        text[n] = '\0';
        rc = hosts_parse_text(hosts, file, text, error, bytes);
    }
    if (stream)
        fclose(stream);
    free(text);
    return rc;
}

int hosts_place(struct hosts *hosts, unsigned n_ranks, char *error, size_t bytes)
{
    unsigned n_slots = 0, placed = 0;
    for (unsigned i = 0; i < hosts->n; i++)
        n_slots += hosts->list[i].n_slots;
    if (n_ranks > n_slots)
        return snprintf(error, bytes,
                        "%u ranks do not fit into the %u slots of %u host(s): give more hosts or "
                        "more slots (HOST:SLOTS)",
                        n_ranks, n_slots, hosts->n),
               -EINVAL;
    if (n_ranks == 0)
        n_ranks = n_slots;
    if (n_ranks > HOSTS_SLOTS_MAX)
        return snprintf(error, bytes, "%u ranks: at most %d in a job", n_ranks, HOSTS_SLOTS_MAX),
               -EINVAL;
    unsigned used = 0;
    for (; used < hosts->n && placed < n_ranks; used++) {
        struct host *host = &hosts->list[used];
        unsigned left = n_ranks - placed;
        host->first_rank = placed;
        host->n_ranks = host->n_slots < left ? host->n_slots : left;
        placed += host->n_ranks;
    }
    hosts->n = used;
    return 0;
}

unsigned hosts_n_ranks(const struct hosts *hosts)
{
    unsigned n = 0;
    for (unsigned i = 0; i < hosts->n; i++)
        n += hosts->list[i].n_ranks;
    return n;
}

void hosts_cross(const struct hosts *hosts, unsigned index, unsigned local_rank,
                 unsigned *out_cross_rank, unsigned *out_cross_size)
{
    *out_cross_rank = *out_cross_size = 0;
    for (unsigned i = 0; i < hosts->n; i++) {
        bool has_it = hosts->list[i].n_ranks > local_rank;
        *out_cross_size += has_it;
        *out_cross_rank += has_it && i < index;
    }
}

const char *host_address(const struct host *host)
{
    const char *at = strrchr(host->name, '@');
    return at ? at + 1 : host->name;
}

bool host_is_local(const struct host *host)
{
    const char *name = host->name; /* user@localhost is another user: through the remote shell */
    char own[HOSTS_NAME_MAX + 1] = "";
    if (gethostname(own, sizeof own - 1) < 0)
        own[0] = '\0';
    size_t short_length = strcspn(own, ".");
    return strcasecmp(name, "localhost") == 0 || strcasecmp(name, own) == 0 ||
           (strlen(name) == short_length && strncasecmp(name, own, short_length) == 0) ||
           address_is_own(name);
}
