/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer.h"

#include <errno.h>
#include <poll.h>
#include <pwd.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

/* PIDFD_GET_INFO of Linux 6.13, exit status since 6.15; absent from older headers. */
struct pidfd_exit_info {
    uint64_t mask;
    uint64_t cgroup_id;
    uint32_t pid, tgid, ppid, ids[8];
    int32_t exit_code;
};
_Static_assert(sizeof(struct pidfd_exit_info) == 64, "the size is a part of the request number");
static const uint64_t PIDFD_EXIT = UINT64_C(1) << 3;
#define PIDFD_GET_EXIT_INFO _IOWR(0xff, 11, struct pidfd_exit_info)

/* SO_PEERPIDFD can not be fooled by a pid that was used again; pidfd_open() serves older kernels.
 */
static int open_pidfd(int socket_fd, pid_t pid)
{
    int pidfd = -1;
    socklen_t length = sizeof pidfd;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0)
        return pidfd;
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

int peer_init(struct peer *peer, int socket_fd)
{
    *peer = (struct peer){.pidfd = -1};
    struct ucred credentials;
    socklen_t length = sizeof credentials;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0)
        return -errno;
    peer->uid = credentials.uid;
    peer->gid = credentials.gid;
    peer->pid = credentials.pid;
    length = sizeof peer->groups;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERGROUPS, peer->groups, &length) == 0)
        peer->n_groups = (int)(length / sizeof *peer->groups);
    peer->pidfd = open_pidfd(socket_fd, peer->pid);
    return 0;
}

void peer_deinit(struct peer *peer)
{
    if (peer->pidfd >= 0)
        close(peer->pidfd);
    peer->pidfd = -1;
}

bool peer_is_in_group(const struct peer *peer, gid_t group)
{
    if (peer->gid == group)
        return true;
    for (int i = 0; i < peer->n_groups; i++)
        if (peer->groups[i] == group)
            return true;
    return false;
}

bool peer_has_ended(const struct peer *peer)
{
    struct pollfd poll_fd = {.fd = peer->pidfd, .events = POLLIN};
    return peer->pidfd >= 0 && poll(&poll_fd, 1, 0) > 0;
}

void describe_wait_status(int status, char *out_text, size_t size)
{
    if (WIFSIGNALED(status))
        snprintf(out_text, size, "was killed by signal %d (%s)%s", WTERMSIG(status),
                 strsignal(WTERMSIG(status)), WCOREDUMP(status) ? " and dumped core" : "");
    else
        snprintf(out_text, size, "exited with status %d", WEXITSTATUS(status));
}

/*
 * A process that its parent has not waited for yet: the last field of /proc/PID/stat is its status,
 * shown to its own user and to root, 0 to others. False: no zombie, or not told.
 */
static bool read_zombie_status(const struct peer *peer, int *out_status)
{
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)peer->pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    char *got = fgets(line, sizeof line, file);
    fclose(file);
    const char *state = got ? strrchr(line, ')') : NULL;
    const char *status = got ? strrchr(line, ' ') : NULL;
    if (!state || !status || (state[2] != 'Z' && state[2] != 'X'))
        return false;
    /* Still not reaped: then the pid was not used again, and these were its lines. */
    if (syscall(SYS_pidfd_send_signal, peer->pidfd, 0, NULL, 0) < 0 && errno == ESRCH)
        return false;
    *out_status = atoi(status + 1);
    return *out_status != 0 || geteuid() == 0 || geteuid() == peer->uid;
}

/* A process that has been waited for, on Linux 6.15 and later. */
static bool read_reaped_status(const struct peer *peer, int *out_status)
{
    struct pidfd_exit_info info = {.mask = PIDFD_EXIT};
    if (ioctl(peer->pidfd, PIDFD_GET_EXIT_INFO, &info) < 0 || !(info.mask & PIDFD_EXIT))
        return false;
    *out_status = info.exit_code;
    return true;
}

bool peer_end_status(const struct peer *peer, int *out_status)
{
    /* Its parent may wait for it between the two: then the first question has an answer after all.
     */
    return peer->pidfd >= 0 && (read_reaped_status(peer, out_status) ||
                                (peer->pid > 0 && read_zombie_status(peer, out_status)) ||
                                read_reaped_status(peer, out_status));
}

bool peer_describe_end(const struct peer *peer, char *out_text, size_t size)
{
    int status;
    bool is_known = peer_end_status(peer, &status);
    if (is_known)
        describe_wait_status(status, out_text, size);
    else
        snprintf(out_text, size, "ended");
    return is_known;
}

void user_name(uid_t uid, char *out_name, size_t size)
{
    *out_name = '\0';
    FILE *file = fopen("/etc/passwd", "re");
    if (!file)
        return;
    struct passwd entry, *found;
    char memory[2048];
    /* cppcheck-suppress uninitvar; it is what fgetpwent_r() writes */
    while (fgetpwent_r(file, &entry, memory, sizeof memory, &found) == 0) {
        if (entry.pw_uid == uid) {
            snprintf(out_name, size, "%s", entry.pw_name);
            break;
        }
    }
    fclose(file);
}
