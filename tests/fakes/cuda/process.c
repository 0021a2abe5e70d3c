/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The directory that the fakes of several processes share. Each process has a file p<pid> there,
 * with its interprocess events, under a record lock that the kernel releases with the process: so
 * others see who lives. Files of the dead are removed when the next process starts.
 *
 * Invariant: a process never opens its own file a second time, since closing that descriptor would
 * release the lock.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

enum { PROCESS_MAGIC = 0x636f7270 };

struct process_file *fake_process;

struct peer {
    struct peer *next;
    struct process_file *file;
    int pid;
    struct stat stat;
};
static struct peer *peers; /* under fake_lock */

const char *fake_path(const char *format, ...)
{
    static _Thread_local char path[512];
    int at = snprintf(path, sizeof path, "%s/", fake_settings.directory);
    va_list args;
    va_start(args, format);
    vsnprintf(path + at, sizeof path - (size_t)at, format, args);
    va_end(args);
    return path;
}

static bool is_locked(int fd)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* Not for ourselves once our own file is open. */
static bool has_locked_file(int pid)
{
    int fd = open(fake_path("p%d", pid), O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool is_held = is_locked(fd);
    close(fd);
    return is_held;
}

bool fake_process_is_alive(int pid)
{
    return pid == getpid() || has_locked_file(pid);
}

/* Remove what processes that are gone have left: files "<letter><pid>..." and counters. */
static void clean(void)
{
    DIR *directory = opendir(fake_settings.directory);
    if (directory == NULL)
        return;
    const struct dirent *entry;
    while ((entry = readdir(directory)) != NULL) {
        const char *name = entry->d_name;
        bool is_counts = strncmp(name, "counts.", 7) == 0;
        int pid = is_counts ? atoi(name + 7) : atoi(name + 1);
        if (pid <= 0 || (*name != 'p' && *name != 'm' && !is_counts))
            continue;
        if (!has_locked_file(pid) && !(is_counts && fake_settings.keep_counts))
            unlinkat(dirfd(directory), name, 0);
    }
    closedir(directory);
}

void fake_process_close(void)
{
    if (fake_process == NULL || fake_process->pid != getpid())
        return;
    DIR *directory = opendir(fake_settings.directory);
    const struct dirent *entry;
    while (directory != NULL && (entry = readdir(directory)) != NULL)
        if ((entry->d_name[0] == 'p' || entry->d_name[0] == 'm') &&
            atoi(entry->d_name + 1) == getpid())
            unlinkat(dirfd(directory), entry->d_name, 0);
    if (directory != NULL)
        closedir(directory);
}

static void create_own(void)
{
    if (has_locked_file(getpid()))
        fake_die("another process, of another container, has the same pid; handles go by it");
    int fd = open(fake_path("p%d", getpid()), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fd < 0 || fchmod(fd, 0666) != 0 || ftruncate(fd, sizeof *fake_process) != 0 ||
        fcntl(fd, F_SETLK, &lock) != 0)
        fake_die("cannot make %s: %s", fake_path("p%d", getpid()), strerror(errno));
    fake_process = mmap(NULL, sizeof *fake_process, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fake_process == MAP_FAILED)
        fake_die("cannot map %s: %s", fake_path("p%d", getpid()), strerror(errno));
    fake_process->magic = PROCESS_MAGIC;
    fake_process->pid = getpid();
    /* cppcheck-suppress resourceLeak; fd stays open, it holds the lock */
}

void fake_process_open(void)
{
    /* The default directory is the user's alone. */
    if (mkdir(fake_settings.directory, fake_settings.keep_counts ? 0777 : 0700) != 0 &&
        errno != EEXIST)
        fake_die("cannot make %s: %s", fake_settings.directory, strerror(errno));
    int lock = open(fake_path("lock"), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0)
        fake_die("cannot open %s: %s", fake_path("lock"), strerror(errno));
    fchmod(lock, 0666);
    while (flock(lock, LOCK_EX) != 0 && errno == EINTR)
        ;
    clean();
    create_own();
    close(lock);
}

static struct process_file *map_peer(int fd)
{
    struct process_file *file = mmap(NULL, sizeof *file, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (file == MAP_FAILED)
        return NULL;
    if (file->magic == PROCESS_MAGIC)
        return file;
    munmap(file, sizeof *file);
    return NULL;
}

struct process_file *fake_process_of(int pid)
{
    if (pid == getpid())
        return fake_process;
    int fd = open(fake_path("p%d", pid), O_RDWR | O_CLOEXEC);
    struct stat stat;
    if (fd < 0)
        return NULL;
    if (!is_locked(fd) || fstat(fd, &stat) != 0) {
        close(fd);
        return NULL;
    }
    struct peer *peer = peers;
    while (peer != NULL && !(peer->pid == pid && peer->stat.st_ino == stat.st_ino))
        peer = peer->next;
    if (peer == NULL) {
        struct process_file *file = map_peer(fd);
        peer = file != NULL ? malloc(sizeof *peer) : NULL;
        if (peer != NULL) {
            *peer = (struct peer){.next = peers, .file = file, .pid = pid, .stat = stat};
            peers = peer;
        }
    }
    close(fd);
    return peer != NULL ? peer->file : NULL;
}
