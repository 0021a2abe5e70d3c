/* SPDX-License-Identifier: Apache-2.0 */
#include "front.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "launch.h"
#include "process.h"

/* Tenths of a second, for private daemons and agents to see that their lifeline has ended. */
enum { CLOSE_TENTHS = 150 };

/*
 * The child was killed: its ranks have died with it, what they started is ours now, and so is
 * the private daemon, which is ending by itself.
 */
static void clean_up_after(void)
{
    const struct descendants all = {0};
    const struct timespec tenth = {.tv_nsec = 100 * 1000 * 1000};
    for (int i = 0; descendants_signal(&all, i < CLOSE_TENTHS ? 0 : SIGKILL) > 0; i++)
        nanosleep(&tenth, NULL);
    while (waitpid(-1, NULL, WNOHANG) > 0)
        continue;
}

/* As the kernel does it, so that a shell sees it; it does not where nobody could let us go on. */
static void stop(void)
{
    sigset_t stopping;
    sigemptyset(&stopping);
    sigaddset(&stopping, SIGTSTP);
    raise(SIGTSTP);
    sigprocmask(SIG_UNBLOCK, &stopping, NULL); /* here */
    sigprocmask(SIG_BLOCK, &stopping, NULL);
}

/* The child only hears of a stop: it is the one that ends everything when we are killed. */
static void pass_on(pid_t child, int signal)
{
    kill(child, signal);
    if (signal == SIGTSTP) {
        stop();
        kill(child, SIGCONT);
    }
}

static int wait_for(pid_t child, const sigset_t *watched)
{
    siginfo_t info;
    struct ending ending;
    while (!process_poll(child, &ending)) {
        int signal = sigwaitinfo(watched, &info);
        if (signal > 0 && signal != SIGCHLD)
            pass_on(child, signal);
    }
    process_reap(child);
    if (ending.signal) {
        char how[64];
        ending_describe(ending, how, sizeof how);
        fprintf(stderr, "gradrun: its supervising process (pid %d) %s; the ranks died with it\n",
                (int)child, how);
        clean_up_after();
    }
    return ending_exit_code(ending);
}

int front_run(front_body *body, const struct args *args)
{
    static const int passed_on[] = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT, SIGUSR1,
                                    SIGUSR2, SIGTSTP, SIGCONT, SIGCHLD};
    sigset_t watched, old_mask;
    sigemptyset(&watched);
    for (size_t i = 0; i < sizeof passed_on / sizeof passed_on[0]; i++)
        sigaddset(&watched, passed_on[i]);
    sigprocmask(SIG_BLOCK, &watched, &old_mask);
    signal(SIGCHLD, SIG_DFL); /* an ignored SIGCHLD would reap children behind our back */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    pid_t self = getpid();
    pid_t child = fork();
    if (child < 0) {
        fprintf(stderr, "gradrun: cannot fork: %s\n", strerror(errno));
        return LAUNCH_EXIT_FAILED;
    }
    if (child > 0)
        return wait_for(child, &watched);
    /* Signals stay blocked until the body watches for them: none is lost in between. */
    if (prctl(PR_SET_PDEATHSIG, SIGTERM) < 0 || getppid() != self)
        return LAUNCH_EXIT_FAILED;
    return body(args, &old_mask);
}
