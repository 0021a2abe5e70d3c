/* SPDX-License-Identifier: Apache-2.0 */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "descriptors.h"

/* In the child: everything up to exec(). Returns errno's negative when that fails. */
static int become(const struct spawn *spawn, pid_t parent)
{
    if (setpgid(0, 0) < 0)
        return -errno;
    if (spawn->death_signal && prctl(PR_SET_PDEATHSIG, spawn->death_signal) < 0)
        return -errno;
    if (spawn->death_signal && getppid() != parent)
        _exit(1);
    /* Above 2 first: a descriptor to be moved may itself be numbered 0, 1 or 2. */
    int stdio[3];
    for (int i = 0; i < 3; i++)
        if ((stdio[i] = fcntl(spawn->stdio[i], F_DUPFD_CLOEXEC, 3)) < 0)
            return -errno;
    for (int i = 0; i < 3; i++)
        if (dup2(stdio[i], i) < 0)
            return -errno;
    for (int i = 0; i < 3; i++)
        if (spawn->keep[i] >= 0 && fcntl(spawn->keep[i], F_SETFD, 0) < 0)
            return -errno;
    signal(SIGPIPE, SIG_DFL);
    descriptors_restore();
    sigprocmask(SIG_SETMASK, spawn->mask, NULL);
    execvpe(spawn->argv[0], spawn->argv, spawn->envp);
    return -errno;
}

int process_spawn(const struct spawn *spawn, pid_t *out_pid)
{
    int report[2]; /* closed by exec(), or carries why there was none */
    if (pipe2(report, O_CLOEXEC) < 0)
        return -errno;
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0) {
        int rc = become(spawn, parent);
        ssize_t n = write(report[1], &rc, sizeof rc);
        _exit(n == sizeof rc ? 127 : 126);
    }
    int rc = pid < 0 ? -errno : 0;
    close(report[1]);
    if (pid > 0) {
        setpgid(pid, pid); /* here too: the group must exist before anyone signals it */
        ssize_t n;
        while ((n = read(report[0], &rc, sizeof rc)) < 0 && errno == EINTR)
            continue;
        if (n != sizeof rc)
            rc = 0;
        if (rc < 0)
            process_reap(pid);
    }
    close(report[0]);
    if (rc == 0)
        *out_pid = pid;
    return rc;
}

int signals_watch(void)
{
    static const int watched[] = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT, SIGCHLD,
                                  SIGTSTP, SIGCONT, SIGUSR1, SIGUSR2};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof watched / sizeof watched[0]; i++)
        sigaddset(&set, watched[i]);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return fd < 0 ? -errno : fd;
}

int ending_exit_code(struct ending ending)
{
    return ending.signal ? 128 + ending.signal : ending.code;
}

void ending_describe(struct ending ending, char *text, size_t bytes)
{
    const char *name = ending.signal ? sigabbrev_np(ending.signal) : NULL;
    if (name)
        snprintf(text, bytes, "was killed by signal %d (SIG%s)", ending.signal, name);
    else if (ending.signal)
        snprintf(text, bytes, "was killed by signal %d", ending.signal);
    else
        snprintf(text, bytes, "exited with code %d", ending.code);
}

int process_poll(pid_t pid, struct ending *out_ending)
{
    siginfo_t info = {0};
    if (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 || info.si_pid == 0)
        return 0;
    if (info.si_code == CLD_EXITED)
        *out_ending = (struct ending){.code = info.si_status};
    else
        *out_ending = (struct ending){.signal = info.si_status};
    return 1;
}

void process_reap(pid_t pid)
{
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        continue;
}
