/* SPDX-License-Identifier: Apache-2.0 */
#include "control/worker_spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/capability.h>
#include <linux/close_range.h>

enum {
    CHANNEL_FD = 3,
};

/* Exit statuses of a child that did not become a worker, above those that programs use. */
enum spawn_step {
    STEP_GROUP = 240,
    STEP_FDS,
    STEP_USER,
    STEP_CAPABILITIES,
    STEP_ORPHAN,
    STEP_EXEC,
};

static const char *const step_words[] = {
    [STEP_GROUP - STEP_GROUP] = "could not start: no process group of its own",
    [STEP_FDS - STEP_GROUP] = "could not start: its descriptors could not be set up",
    [STEP_USER - STEP_GROUP] = "could not start: it could not become the job's user",
    [STEP_CAPABILITIES - STEP_GROUP] = "could not start: its capabilities could not be dropped",
    [STEP_ORPHAN - STEP_GROUP] = "did not start: the daemon was gone",
    [STEP_EXEC - STEP_GROUP] = "could not start: the program can not be executed",
};

const char *worker_spawn_failure(int exit_status)
{
    return exit_status >= STEP_GROUP && exit_status <= STEP_EXEC
               ? step_words[exit_status - STEP_GROUP]
               : NULL;
}

/* The kernel's interface: libcap would be a dependency for two calls. */
static int capabilities(long call, struct __user_cap_data_struct data[2])
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    return (int)syscall(call, &header, data);
}

bool worker_spawn_may_change_user(void)
{
    struct __user_cap_data_struct data[2] = {{0}};
    const unsigned needed = 1u << CAP_SETUID | 1u << CAP_SETGID;
    return capabilities(SYS_capget, data) == 0 && (data[0].effective & needed) == needed;
}

/* ------------------------------------------------------------------ in the child */

static bool set_up_fds(int channel, bool is_output)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0)
        return false;
    /* dup2() onto itself would keep the close-on-exec flag. */
    if (channel == CHANNEL_FD ? fcntl(channel, F_SETFD, 0) < 0 : dup2(channel, CHANNEL_FD) < 0)
        /* cppcheck-suppress resourceLeak; a failure ends the child */
        return false;
    if (dup2(null, STDIN_FILENO) < 0 || dup2(is_output ? CHANNEL_FD : null, STDOUT_FILENO) < 0)
        return false;
    return syscall(SYS_close_range, CHANNEL_FD + 1, ~0u, 0) == 0;
}

static void reset_signals(void)
{
    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/*
 * A change between two ordinary uids keeps capabilities, so they are dropped in words. The bounding
 * set needs CAP_SETPCAP, which the service does not have; no_new_privs closes that way anyhow.
 */
static bool drop_capabilities(void)
{
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    for (unsigned long cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++)
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 && errno != EPERM)
            return false;
    return true;
}

static bool clear_capabilities(void)
{
    struct __user_cap_data_struct none[2] = {{0}};
    return capabilities(SYS_capset, none) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0;
}

static bool change_user(const struct worker_spawn *spawn)
{
    return setgroups((size_t)spawn->n_groups, spawn->groups) == 0 &&
           setresgid(spawn->gid, spawn->gid, spawn->gid) == 0 &&
           setresuid(spawn->uid, spawn->uid, spawn->uid) == 0;
}

/* What the service manager told the daemon is not meant for the worker. */
static void clean_environment(void)
{
    static const char *const names[] = {
        "NOTIFY_SOCKET",  "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS",   "LISTEN_PID",
        "LISTEN_FDNAMES", "INVOCATION_ID", "MAINPID",      "GRADD_WORKER",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
}

static _Noreturn void become_worker(const struct worker_spawn *spawn, pid_t parent)
{
    if (setpgid(0, 0) < 0)
        _exit(STEP_GROUP);
    reset_signals();
    if (!drop_capabilities())
        _exit(STEP_CAPABILITIES);
    if (spawn->changes_user && !change_user(spawn))
        _exit(STEP_USER);
    if (!clear_capabilities())
        _exit(STEP_CAPABILITIES);
    /* After the change of user, which clears it. The daemon may have died before. */
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != parent)
        _exit(STEP_ORPHAN);
    if (!set_up_fds(spawn->channel, spawn->option))
        _exit(STEP_FDS);
    clean_environment();
    char *arguments[] = {(char *)"gradd-worker", (char *)spawn->option, NULL};
    execv(spawn->program, arguments);
    _exit(STEP_EXEC);
}

pid_t worker_spawn(const struct worker_spawn *spawn)
{
    /* No signal handler of the daemon may run in the child, where it would write to the loop. */
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0)
        become_worker(spawn, parent);
    int rc = pid < 0 ? -errno : 0;
    sigprocmask(SIG_SETMASK, &before, NULL);
    return pid < 0 ? rc : pid;
}
