/* SPDX-License-Identifier: Apache-2.0 */
/* Starting processes, how they ended, and finding those that they left behind. */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "run_suite.h"

static sigset_t no_signals;

static int spawn_to(const char *script, int out, pid_t *out_pid)
{
    char *argv[] = {(char *)"sh", (char *)"-c", (char *)script, NULL};
    struct spawn spawn = {.argv = argv,
                          .envp = environ,
                          .stdio = {0, out, 2},
                          .keep = {-1, -1, -1},
                          .death_signal = SIGKILL,
                          .mask = &no_signals};
    return process_spawn(&spawn, out_pid);
}

static struct ending end_of(const char *script)
{
    pid_t pid;
    struct ending ending;
    ck_assert_int_eq(spawn_to(script, 1, &pid), 0);
    siginfo_t info;
    ck_assert_int_eq(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
    ck_assert_int_eq(process_poll(pid, &ending), 1);
    process_reap(pid);
    return ending;
}

START_TEST(an_ending_is_told_as_a_shell_tells_it)
{
    char text[64];
    struct ending ending = end_of("exit 3");
    ck_assert_int_eq(ending_exit_code(ending), 3);
    ending_describe(ending, text, sizeof text);
    ck_assert_str_eq(text, "exited with code 3");
    ending = end_of("kill -9 $$");
    ck_assert_int_eq(ending_exit_code(ending), 137);
    ending_describe(ending, text, sizeof text);
    ck_assert_str_eq(text, "was killed by signal 9 (SIGKILL)");
}
END_TEST

START_TEST(a_command_that_cannot_run_is_an_error_here)
{
    char *argv[] = {(char *)"/nonexistent/program", NULL};
    struct spawn spawn = {.argv = argv,
                          .envp = environ,
                          .stdio = {0, 1, 2},
                          .keep = {-1, -1, -1},
                          .mask = &no_signals};
    pid_t pid = 0;
    ck_assert_int_eq(process_spawn(&spawn, &pid), -ENOENT);
    argv[0] = (char *)"/etc/passwd";
    ck_assert_int_eq(process_spawn(&spawn, &pid), -EACCES);
    ck_assert_int_eq(pid, 0);
    ck_assert_int_eq(waitpid(-1, NULL, WNOHANG), -1);
}
END_TEST

START_TEST(a_process_leads_its_group_and_gets_no_descriptor_of_ours)
{
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
    struct stat st;
    ck_assert_int_eq(fstat(fds[0], &st), 0);
    /* Both ends of the pipe have its inode: the child is to hold its standard output and no more.
     */
    char script[128];
    snprintf(script, sizeof script,
             "cut -d' ' -f1,5 /proc/$$/stat; ls -l /proc/$$/fd | grep -c 'pipe:.%llu.'",
             (unsigned long long)st.st_ino);
    pid_t pid;
    ck_assert_int_eq(spawn_to(script, fds[1], &pid), 0);
    close(fds[1]);
    int leader = 0, group = 0, n_held = -1;
    FILE *stream = fdopen(fds[0], "r");
    ck_assert_int_eq(fscanf(stream, "%d %d %d", &leader, &group, &n_held), 3);
    fclose(stream);
    process_reap(pid);
    ck_assert_int_eq(leader, pid);
    ck_assert_int_eq(group, pid);
    ck_assert_int_eq(n_held, 1);
}
END_TEST

START_TEST(descendants_in_sessions_of_their_own_are_found_and_ended)
{
    ck_assert_int_eq(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
    pid_t pid;
    /* The shell ends at once; sleep, in its own session, holds the pipe. */
    ck_assert_int_eq(spawn_to("setsid sh -c 'echo up; exec sleep 1000' & exit 0", fds[1], &pid), 0);
    close(fds[1]);
    char data[16];
    ck_assert_int_eq(read(fds[0], data, 3), 3);
    process_reap(pid);
    const struct descendants all = {0}, but_group = {.groups = &pid, .n_groups = 1};
    ck_assert_uint_eq(descendants_signal(&all, 0), 1);
    ck_assert_uint_eq(descendants_signal(&but_group, 0), 1);
    ck_assert_uint_eq(descendants_signal(&all, SIGKILL), 1);
    ck_assert_int_eq(read(fds[0], data, 1), 0);
    ck_assert_int_gt(waitpid(-1, NULL, 0), 0);
    ck_assert_uint_eq(descendants_signal(&all, 0), 0);
    close(fds[0]);
}
END_TEST

START_TEST(an_excepted_child_and_an_excepted_group_are_spared)
{
    pid_t pid;
    ck_assert_int_eq(spawn_to("sleep 1000", 1, &pid), 0);
    const struct descendants but_child = {.except = pid};
    const struct descendants but_group = {.groups = &pid, .n_groups = 1};
    ck_assert_uint_eq(descendants_signal(&but_child, SIGKILL), 0);
    ck_assert_uint_eq(descendants_signal(&but_group, SIGKILL), 0);
    struct ending ending;
    ck_assert_int_eq(process_poll(pid, &ending), 0);
    kill(-pid, SIGKILL);
    process_reap(pid);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        an_ending_is_told_as_a_shell_tells_it,
        a_command_that_cannot_run_is_an_error_here,
        a_process_leads_its_group_and_gets_no_descriptor_of_ours,
        descendants_in_sessions_of_their_own_are_found_and_ended,
        an_excepted_child_and_an_excepted_group_are_spared,
    };
    return run_suite("process", tests, sizeof tests / sizeof *tests);
}
