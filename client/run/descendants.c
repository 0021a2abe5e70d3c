/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the processes that ranks have started, through /proc. As a subreaper gradrun is the
 * ancestor of all of them, whatever sessions and groups they have made for themselves.
 */
#include "process.h"

#include <ctype.h>
#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <unistd.h>

struct entry {
    pid_t pid, parent, group;
    char state;
    unsigned long long start; /* clock ticks since boot: with pid, names a process for good */
    bool is_ours;
};

static bool read_entry(pid_t pid, struct entry *out)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = '\0';
    /* The command's name, in parentheses, may hold anything: count from the last one. */
    const char *after = strrchr(text, ')');
    int parent, group;
    if (!after || sscanf(after,
                         ") %c %d %d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d "
                         "%*d %*d %*d %llu",
                         &out->state, &parent, &group, &out->start) != 4)
        return false;
    out->pid = pid;
    out->parent = parent;
    out->group = group;
    out->is_ours = false;
    return true;
}

static size_t read_all(struct entry **out)
{
    size_t n = 0, capacity = 0;
    DIR *proc = opendir("/proc");
    struct dirent *d;
    while (proc && (d = readdir(proc))) {
        if (!isdigit((unsigned char)d->d_name[0]))
            continue;
        if (n == capacity) {
            size_t more = capacity ? capacity * 2 : 256;
            struct entry *longer = realloc(*out, more * sizeof *longer);
            if (!longer)
                break;
            *out = longer;
            capacity = more;
        }
        if (read_entry((pid_t)atoi(d->d_name), &(*out)[n]))
            n++;
    }
    if (proc)
        closedir(proc);
    return n;
}

/* Mark the descendants of this process; a pass marks at least one generation. */
static void mark(struct entry *entries, size_t n, pid_t except)
{
    pid_t self = getpid();
    for (bool has_changed = true; has_changed;) {
        has_changed = false;
        for (size_t i = 0; i < n; i++) {
            if (entries[i].is_ours || entries[i].pid == except)
                continue;
            bool is_child = entries[i].parent == self;
            for (size_t j = 0; j < n && !is_child; j++)
                is_child = entries[j].is_ours && entries[j].pid == entries[i].parent;
            entries[i].is_ours = is_child;
            has_changed |= is_child;
        }
    }
}

static void send_signal(const struct entry *entry, int signal)
{
    int fd = pidfd_open(entry->pid, 0);
    if (fd < 0)
        return;
    struct entry now;
    if (read_entry(entry->pid, &now) && now.start == entry->start)
        pidfd_send_signal(fd, signal, NULL, 0);
    close(fd);
}

static bool is_in_group(const struct entry *entry, const struct descendants *which)
{
    for (size_t i = 0; i < which->n_groups; i++)
        if (entry->group == which->groups[i])
            return true;
    return false;
}

size_t descendants_signal(const struct descendants *which, int signal)
{
    struct entry *entries = NULL;
    size_t n = read_all(&entries), living = 0;
    mark(entries, n, which->except);
    for (size_t i = 0; i < n; i++) {
        if (!entries[i].is_ours || entries[i].state == 'Z' || entries[i].state == 'X' ||
            is_in_group(&entries[i], which))
            continue;
        living++;
        if (signal)
            send_signal(&entries[i], signal);
    }
    free(entries);
    return living;
}
