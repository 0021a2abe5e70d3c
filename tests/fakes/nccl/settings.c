/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the fake behaves, by its environment (tests/fakes/README.md lists the variables), and the
 * texts that it leaves behind.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct fake_settings settings;
/* Process-wide, as the real one; a thread that asks gets a copy, which no other thread changes. */
static char last_error[256];
static pthread_mutex_t last_error_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    char *end;
    uint64_t value;

    if (text == NULL || *text == '\0')
        return otherwise;
    value = strtoull(text, &end, 10);
    if (*end != '\0')
        fake_die("%s=%s is no number", name, text);
    return value;
}

static void read_settings(void)
{
    const char *directory = getenv("GRADD_FAKE_NCCL_DIR"), *host = getenv("NCCL_HOSTID");
    const char *async = getenv("GRADD_FAKE_NCCL_ASYNC");

    if (!directory || !*directory)
        directory = getenv("GRADD_FAKE_CUDA_DIR");

    settings = (struct fake_settings){
        .version = (int)number("GRADD_FAKE_NCCL_VERSION", FAKE_VERSION),
        .init_ms = (unsigned)number("GRADD_FAKE_NCCL_INIT_MS", 0),
        .launch_ms = (unsigned)number("GRADD_FAKE_NCCL_LAUNCH_MS", 2),
        .in_progress = (unsigned)number("GRADD_FAKE_NCCL_IN_PROGRESS", 0),
        .hang_at = number("GRADD_FAKE_NCCL_HANG_AT", 0),
        .init_hangs = number("GRADD_FAKE_NCCL_INIT_HANGS", 0) != 0,
        .abort_hangs = number("GRADD_FAKE_NCCL_ABORT_HANGS", 0) != 0,
        .async_result = ncclRemoteError,
    };
    if (async && *async) { /* "3" or "3:2" */
        char *end;

        settings.async_at = strtoull(async, &end, 10);
        if (*end == ':')
            settings.async_result = (ncclResult_t)strtol(end + 1, &end, 10);
        if (*end != '\0' || settings.async_at == 0)
            fake_die("GRADD_FAKE_NCCL_ASYNC=%s: an operation's number, perhaps \":\" and a result",
                     async);
    }
    if (directory && *directory)
        snprintf(settings.directory, sizeof(settings.directory), "%s", directory);
    else
        snprintf(settings.directory, sizeof(settings.directory), "/dev/shm");
    if (host && *host)
        snprintf(settings.host, sizeof(settings.host), "%s", host);
    else
        gethostname(settings.host, sizeof(settings.host) - 1);
}

const struct fake_settings *fake_settings(void)
{
    pthread_once(&once, read_settings);
    return &settings;
}

void fake_die(const char *format, ...)
{
    char text[600];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    dprintf(STDERR_FILENO, "fake libnccl: %s (pid %d, %s)\n", text, getpid(),
            program_invocation_short_name);
    abort();
}

ncclResult_t fake_error(ncclResult_t rc, const char *format, ...)
{
    char text[sizeof(last_error)];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    pthread_mutex_lock(&last_error_lock);
    memcpy(last_error, text, sizeof(last_error));
    pthread_mutex_unlock(&last_error_lock);
    fake_log("error %d %s", rc, text);
    return rc;
}

void fake_log(const char *format, ...)
{
    const char *path = getenv("GRADD_FAKE_NCCL_LOG");
    char text[400];
    va_list args;
    int fd;

    if (path == NULL || *path == '\0')
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    dprintf(fd, "%d %s\n", getpid(), text);
    close(fd);
}

void fake_sleep_ms(unsigned ms)
{
    struct timespec left = {ms / 1000, (long)(ms % 1000) * 1000000};

    while (nanosleep(&left, &left) != 0)
        ;
}

/* The item "function:REST" of a list by commas; NULL: none. */
static const char *item(const char *variable, const char *function)
{
    const char *list = getenv(variable);
    const size_t bytes = strlen(function);

    while (list && *list) {
        if (strncmp(list, function, bytes) == 0 && list[bytes] == ':')
            return list + bytes + 1;
        list = strchr(list, ',');
        list += list != NULL;
    }
    return NULL;
}

/* How often each function that is listed has been called. */
static uint64_t count_call(const char *function)
{
    static struct {
        const char *function;
        uint64_t n;
    } calls[64];
    uint64_t n = 0;

    pthread_mutex_lock(&fake_lock);
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]) && n == 0; i++) {
        if (calls[i].function == NULL)
            calls[i].function = function;
        if (strcmp(calls[i].function, function) == 0)
            n = ++calls[i].n;
    }
    pthread_mutex_unlock(&fake_lock);
    return n;
}

/* "ncclAllReduce:3:6" the third call, "3+" from the third on; slow: "ncclAllReduce:20" ms. */
ncclResult_t fake_inject(const char *function)
{
    const uint64_t call = count_call(function);
    const char *rest = item("GRADD_FAKE_NCCL_SLOW", function);

    if (rest)
        fake_sleep_ms((unsigned)strtoul(rest, NULL, 10));
    rest = item("GRADD_FAKE_NCCL_FAIL", function);
    if (rest) {
        char *end;
        const uint64_t at = strtoull(rest, &end, 10);
        const bool and_later = *end == '+';

        end += and_later;
        if (*end != ':')
            fake_die("GRADD_FAKE_NCCL_FAIL: %s:%s: function:call:result", function, rest);
        if (call == at || (and_later && call > at))
            return fake_error((ncclResult_t)strtol(end + 1, NULL, 10),
                              "%s call %llu: injected by the test", function,
                              (unsigned long long)call);
    }
    return ncclSuccess;
}

FAKE_EXPORT const char *ncclGetLastError(ncclComm_t comm);
FAKE_EXPORT const char *ncclGetErrorString(ncclResult_t rc);

const char *ncclGetLastError(ncclComm_t comm)
{
    static _Thread_local char copy[sizeof(last_error)];

    pthread_mutex_lock(&last_error_lock);
    memcpy(copy, last_error, sizeof(copy));
    pthread_mutex_unlock(&last_error_lock);
    return copy;
}

const char *ncclGetErrorString(ncclResult_t rc)
{
    static const char *const texts[] = {
        "no error",
        "unhandled cuda error",
        "unhandled system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };

    return (unsigned)rc < sizeof(texts) / sizeof(texts[0]) ? texts[rc] : "unknown result code";
}
