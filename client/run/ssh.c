/* SPDX-License-Identifier: Apache-2.0 */
#include "ssh.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>

#include "process.h"

enum { ASK_MS = 5000 };

/* A dead network is noticed within 15 s; what ssh says of a failure is needed to explain it. */
#define FOR_ALL                                                                                    \
    "ssh", "-T", "-x", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5",        \
        "-oServerAliveCountMax=3", "-oClearAllForwardings=yes", "-oEscapeChar=none",               \
        "-oControlMaster=no", "-oPermitLocalCommand=no", "-oLogLevel=INFO"
#define SINCE_7_6 "-oRemoteCommand=none"
#define SINCE_8_7 "-oSessionType=default", "-oStdinNull=no", "-oForkAfterAuthentication=no"

static const char *const words[][24] = {
    [SSH_OLD] = {FOR_ALL},
    [SSH_7_6] = {FOR_ALL, SINCE_7_6},
    [SSH_8_7] = {FOR_ALL, SINCE_7_6, SINCE_8_7},
};

const char *const *ssh_words(enum ssh_age age)
{
    return words[age];
}

/* -G prints what would hold for a host, or fails at the first option that it does not know. */
static const char *const questions[][16] = {
    [SSH_7_6] = {"ssh", "-F", "/dev/null", "-G", SINCE_7_6, "--", "localhost"},
    [SSH_8_7] = {"ssh", "-F", "/dev/null", "-G", SINCE_7_6, SINCE_8_7, "--", "localhost"},
};

/* Until it has ended, for so long, or until there is another signal, which is left to be read. */
static void wait_for(pid_t pid, int signal_fd, struct ending *out_ending)
{
    const struct timespec at_once = {0};
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    struct pollfd p = {signal_fd, POLLIN, 0};
    while (!process_poll(pid, out_ending))
        if (poll(&p, 1, ASK_MS) <= 0 || sigtimedwait(&child, NULL, &at_once) < 0)
            break;
    kill(-pid, SIGKILL);
    process_reap(pid);
    sigtimedwait(&child, NULL, &at_once);
}

static bool knows(enum ssh_age age, int null, const sigset_t *mask, int signal_fd)
{
    struct ending ending = {.code = 1};
    pid_t pid;
    struct spawn spawn = {
        .argv = (char **)questions[age],
        .envp = environ,
        .stdio = {null, null, null},
        .keep = {-1, -1, -1},
        .death_signal = SIGKILL,
        .mask = mask,
    };
    if (process_spawn(&spawn, &pid) < 0)
        return false;
    wait_for(pid, signal_fd, &ending);
    return ending_exit_code(ending) == 0;
}

enum ssh_age ssh_find_age(const sigset_t *mask, int signal_fd)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), age = SSH_8_7;
    while (age > SSH_OLD && (null < 0 || !knows(age, null, mask, signal_fd)))
        age--;
    if (null >= 0)
        close(null);
    return age;
}
