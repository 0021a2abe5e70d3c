/* SPDX-License-Identifier: Apache-2.0 */
#include "console.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void console_init(struct console *console)
{
    bool is_one = sink_is_same_file(1, 2);
    sink_init(&console->sinks[0], 1);
    if (is_one)
        console->sinks[1] = (struct sink){.fd = -1};
    else
        sink_init(&console->sinks[1], 2);
    console->out = &console->sinks[0];
    console->err = is_one ? &console->sinks[0] : &console->sinks[1];
}

void console_deinit(struct console *console)
{
    sink_deinit(&console->sinks[0]);
    sink_deinit(&console->sinks[1]);
}

void console_flush(struct console *console)
{
    static const char *const names[] = {"standard output", "standard error"};
    for (int i = 0; i < 2; i++) {
        int rc = sink_flush(&console->sinks[i]);
        if (rc < 0 && rc != -EPIPE)
            console_say(console, "%s: %s; further output is dropped, the job goes on", names[i],
                        strerror(-rc));
    }
}

bool console_is_empty(const struct console *console)
{
    for (int i = 0; i < 2; i++)
        if (!sink_is_empty(&console->sinks[i]) && !console->sinks[i].error)
            return false;
    return true;
}

void console_poll(const struct console *console, struct pollfd out[2])
{
    for (int i = 0; i < 2; i++) {
        const struct sink *sink = &console->sinks[i];
        out[i] = (struct pollfd){sink_is_empty(sink) ? -1 : sink->fd, POLLOUT, 0};
    }
}

void console_say(struct console *console, const char *format, ...)
{
    char text[4608];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    sink_push(console->err, "gradrun: ", text, strlen(text));
}
