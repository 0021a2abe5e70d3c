/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our standard output and error, as sinks. Where both lead to the same file they share one, so
 * that lines keep their order.
 *
 * Thread: loop.
 *
 * Invariant: out and err are always valid; they may be the same.
 */
#ifndef GRADD_RUN_CONSOLE_H
#define GRADD_RUN_CONSOLE_H

#include <poll.h>

#include "sink.h"

struct console {
    struct sink sinks[2]; /* the second is unused when they are one */
    struct sink *out, *err;
};

void console_init(struct console *console);
/* Idempotent, also before console_init() when zeroed but for the fds, which are -1. */
void console_deinit(struct console *console);

/* Write what can be written. A stream that fails is reported once; the job goes on without it. */
void console_flush(struct console *console);
/* Has all been written, or given up? */
bool console_is_empty(const struct console *console);
/* What to poll for, two entries. */
void console_poll(const struct console *console, struct pollfd out[2]);

/* A line of gradrun's own, to standard error. */
__attribute__((format(printf, 2, 3))) void console_say(struct console *console, const char *format,
                                                       ...);

#endif
