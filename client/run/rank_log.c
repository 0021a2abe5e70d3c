/* SPDX-License-Identifier: Apache-2.0 */
#include "rank_log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void close_log(struct rank_log *log)
{
    if (log->fd >= 0)
        close(log->fd);
    log->fd = -1;
}

static int open_log(struct rank_log *log, const char *dir, unsigned rank)
{
    int n = snprintf(log->path, sizeof log->path, "%s/rank.%u.log", dir, rank);
    if (n < 0 || (size_t)n >= sizeof log->path)
        return -ENAMETOOLONG;
    log->fd = open(log->path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
    return log->fd < 0 ? -errno : 0;
}

int rank_logs_open(const char *dir, unsigned n, struct rank_log **out, char *error, size_t bytes)
{
    if (mkdir(dir, 0777) < 0 && errno != EEXIST) {
        int rc = -errno;
        snprintf(error, bytes, "cannot make the directory %s: %s", dir, strerror(-rc));
        return rc;
    }
    struct rank_log *logs = calloc(n, sizeof *logs);
    if (!logs)
        return snprintf(error, bytes, "out of memory for %u logs", n), -ENOMEM;
    for (unsigned i = 0; i < n; i++)
        logs[i].fd = -1;
    for (unsigned i = 0; i < n; i++) {
        int rc = open_log(&logs[i], dir, i);
        if (rc < 0) {
            snprintf(error, bytes, "cannot create %s: %s", logs[i].path, strerror(-rc));
            rank_logs_free(logs, n);
            return rc;
        }
    }
    *out = logs;
    return 0;
}

void rank_logs_free(struct rank_log *logs, unsigned n)
{
    for (unsigned i = 0; logs && i < n; i++)
        close_log(&logs[i]);
    free(logs);
}

static int write_all(int fd, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(fd, data, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        data += n;
        bytes -= (size_t)n;
    }
    return 0;
}

void rank_log_write(struct rank_log *log, const char *data, size_t bytes)
{
    int rc = log->fd < 0 ? 0 : write_all(log->fd, data, bytes);
    if (rc < 0) {
        log->error = -rc;
        close_log(log);
    }
}
