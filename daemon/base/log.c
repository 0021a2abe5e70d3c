/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/systemd.h"

enum {
    TEXT_MAX = 1024,
    LIMIT_LINES = 10,
};

static const uint64_t LIMIT_WINDOW_NS = 10u * 1000000000u;

static const struct {
    enum log_level level;
    const char *name;
} levels[] = {
    {LOG_LEVEL_ERROR, "error"}, {LOG_LEVEL_WARNING, "warning"}, {LOG_LEVEL_NOTICE, "notice"},
    {LOG_LEVEL_INFO, "info"},   {LOG_LEVEL_DEBUG, "debug"},
};

static const char *program_name = "gradd";
static atomic_int max_level = LOG_LEVEL_INFO;
static bool has_journal;

void log_init(const char *program, enum log_level level)
{
    program_name = program;
    has_journal = systemd_has_journal();
    log_set_level(level);
}

void log_set_level(enum log_level level)
{
    atomic_store_explicit(&max_level, (int)level, memory_order_relaxed);
}

bool log_level_parse(const char *word, enum log_level *out_level)
{
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        if (strcmp(word, levels[i].name) == 0) {
            *out_level = levels[i].level;
            return true;
        }
    }
    return false;
}

const char *log_level_name(enum log_level level)
{
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (levels[i].level == level)
            return levels[i].name;
    return "?";
}

/* A client's words must not forge lines or move the reader's cursor. */
static void replace_control_bytes(char *text)
{
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
}

/* snprintf() that appends at *used and stops at the end. */
__attribute__((format(printf, 4, 5))) static void append(char *line, size_t size, size_t *used,
                                                         const char *format, ...)
{
    if (*used >= size)
        return;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line + *used, size - *used, format, args);
    va_end(args);
    if (n > 0)
        *used += (size_t)n;
}

static void append_fields(char *line, size_t size, size_t *used, const struct log_fields *fields)
{
    if (fields->job)
        append(line, size, used, " job=%s", fields->job);
    if (fields->epoch)
        append(line, size, used, " epoch=%llu", (unsigned long long)fields->epoch);
    if (fields->has_rank)
        append(line, size, used, " rank=%d", fields->rank);
    if (fields->pid)
        append(line, size, used, " pid=%d", fields->pid);
}

static void write_to_stderr(enum log_level level, const char *subsystem,
                            const struct log_fields *fields, const char *text)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    struct tm local;
    localtime_r(&now.tv_sec, &local);
    char line[TEXT_MAX + 512];
    size_t used = strftime(line, sizeof line, "%H:%M:%S", &local);
    append(line, sizeof line, &used, ".%03ld %s[%d] %s %s: %s", now.tv_nsec / 1000000, program_name,
           (int)getpid(), log_level_name(level), subsystem, text);
    if (fields) {
        size_t before = used;
        append_fields(line, sizeof line, &used, fields);
        if (used > before && before < sizeof line)
            replace_control_bytes(line + before);
    }
    if (used > sizeof line - 1)
        used = sizeof line - 1;
    line[used++] = '\n';
    /* A log that can not be written is nobody's error. */
    ssize_t n = write(STDERR_FILENO, line, used);
    (void)n;
}

void log_line(enum log_level level, const char *subsystem, const struct log_fields *fields,
              const char *format, ...)
{
    if ((int)level > atomic_load_explicit(&max_level, memory_order_relaxed))
        return;
    char text[TEXT_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    replace_control_bytes(text);
    if (has_journal && systemd_journal((int)level, program_name, subsystem, fields, text) == 0)
        return;
    write_to_stderr(level, subsystem, fields, text);
}

bool log_limit_allows(struct log_limit *limit, unsigned *out_dropped)
{
    uint64_t now = clock_now_ns();
    *out_dropped = 0;
    if (limit->window_start_ns == 0 || now - limit->window_start_ns >= LIMIT_WINDOW_NS) {
        *out_dropped = limit->n_dropped;
        *limit = (struct log_limit){.window_start_ns = now};
    }
    if (limit->n_lines >= LIMIT_LINES) {
        limit->n_dropped++;
        return false;
    }
    limit->n_lines++;
    return true;
}
