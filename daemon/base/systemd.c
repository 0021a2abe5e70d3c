/* SPDX-License-Identifier: Apache-2.0 */
/* The service manager by way of libsystemd, whose headers are seen only here. */
#include "base/systemd.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>
#include <systemd/sd-journal.h>

#include "base/log.h"

void systemd_notify(const char *state)
{
    sd_notify(0, state);
}

uint64_t systemd_watchdog_us(void)
{
    uint64_t usec = 0;
    return sd_watchdog_enabled(0, &usec) > 0 ? usec : 0;
}

/* Sockets that were passed and not taken yet. */
static struct {
    bool is_read;
    int unix_fd, peer_fd;
} passed = {false, -1, -1};

static bool is_peer_listener(int fd, const char *name)
{
    bool is_tcp = sd_is_socket(fd, AF_INET, SOCK_STREAM, 1) > 0 ||
                  sd_is_socket(fd, AF_INET6, SOCK_STREAM, 1) > 0;
    return is_tcp && (passed.peer_fd < 0 || (name && strcmp(name, "peer") == 0));
}

static void read_passed(void)
{
    char **names = NULL;
    int n = passed.is_read ? 0 : sd_listen_fds_with_names(1, &names);
    passed.is_read = true;
    for (int i = 0; i < n; i++) {
        int fd = SD_LISTEN_FDS_START + i, other = fd;
        if (passed.unix_fd < 0 && sd_is_socket(fd, AF_UNIX, SOCK_STREAM, 1) > 0) {
            other = passed.unix_fd;
            passed.unix_fd = fd;
        } else if (is_peer_listener(fd, names ? names[i] : NULL)) {
            other = passed.peer_fd;
            passed.peer_fd = fd;
        }
        if (other >= 0)
            close(other);
    }
    for (int i = 0; names && i < n; i++)
        free(names[i]);
    free(names);
}

int systemd_take_listener(void)
{
    read_passed();
    int fd = passed.unix_fd;
    passed.unix_fd = -1;
    return fd;
}

int systemd_take_peer_listener(void)
{
    read_passed();
    int fd = passed.peer_fd;
    passed.peer_fd = -1;
    return fd;
}

bool systemd_has_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat status;
    return stream && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
           fstat(STDERR_FILENO, &status) == 0 && status.st_dev == device && status.st_ino == inode;
}

/* The fields of one entry, in memory of fixed size. */
struct entry {
    char memory[3072];
    size_t used;
    struct iovec fields[12];
    int n;
};

__attribute__((format(printf, 2, 3))) static void add(struct entry *entry, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    size_t room = sizeof entry->memory - entry->used;
    int n = vsnprintf(entry->memory + entry->used, room, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= room)
        return;
    entry->fields[entry->n++] = (struct iovec){entry->memory + entry->used, (size_t)n};
    entry->used += (size_t)n;
}

int systemd_journal(int level, const char *program, const char *subsystem,
                    const struct log_fields *fields, const char *text)
{
    struct entry entry = {.used = 0};
    add(&entry, "MESSAGE=%s", text);
    add(&entry, "PRIORITY=%d", level);
    add(&entry, "SYSLOG_IDENTIFIER=%s", program);
    add(&entry, "GRADD_SUBSYSTEM=%s", subsystem);
    if (fields && fields->job)
        add(&entry, "GRADD_JOB=%s", fields->job);
    if (fields && fields->epoch)
        add(&entry, "GRADD_EPOCH=%llu", (unsigned long long)fields->epoch);
    if (fields && fields->has_rank)
        add(&entry, "GRADD_RANK=%d", fields->rank);
    if (fields && fields->pid)
        add(&entry, "GRADD_PID=%d", fields->pid);
    return sd_journal_sendv(entry.fields, entry.n);
}
