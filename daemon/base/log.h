/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Log lines: to the journal with fields when stderr is the journal, else to stderr.
 *
 * Thread: any (one write per line). The second argument names the subsystem ("session", "job",
 * "worker", "plan", …). Control bytes in a text are replaced. A line that
 * a client can cause at will goes through a struct log_limit, so that nobody can flood the log.
 */
#ifndef GRADD_LOG_H
#define GRADD_LOG_H

#include <stdbool.h>
#include <stdint.h>

enum log_level {
    LOG_LEVEL_ERROR = 3, /* syslog's numbers */
    LOG_LEVEL_WARNING = 4,
    LOG_LEVEL_NOTICE = 5,
    LOG_LEVEL_INFO = 6,
    LOG_LEVEL_DEBUG = 7,
};

/* Fields of one line, for the journal and for the text; zero or NULL: absent. rank counts when
 * has_rank. */
struct log_fields {
    const char *job;
    uint64_t epoch;
    bool has_rank;
    int rank;
    int pid;
};

void log_init(const char *program, enum log_level level);
void log_set_level(enum log_level level);
bool log_level_parse(const char *word, enum log_level *out_level); /* "error" … "debug" */
const char *log_level_name(enum log_level level);

void log_line(enum log_level level, const char *subsystem, const struct log_fields *fields,
              const char *format, ...) __attribute__((format(printf, 4, 5)));

#define log_error(subsystem, ...)   log_line(LOG_LEVEL_ERROR, subsystem, NULL, __VA_ARGS__)
#define log_warning(subsystem, ...) log_line(LOG_LEVEL_WARNING, subsystem, NULL, __VA_ARGS__)
#define log_notice(subsystem, ...)  log_line(LOG_LEVEL_NOTICE, subsystem, NULL, __VA_ARGS__)
#define log_info(subsystem, ...)    log_line(LOG_LEVEL_INFO, subsystem, NULL, __VA_ARGS__)
#define log_debug(subsystem, ...)   log_line(LOG_LEVEL_DEBUG, subsystem, NULL, __VA_ARGS__)

/* At most 10 lines per 10 s; the first line afterwards says how many were dropped. */
struct log_limit {
    uint64_t window_start_ns;
    unsigned n_lines, n_dropped;
};
/* True: log now (and *out_dropped lines were suppressed before). */
bool log_limit_allows(struct log_limit *limit, unsigned *out_dropped);

#endif
