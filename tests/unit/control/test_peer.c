/* SPDX-License-Identifier: Apache-2.0 */
/* Who connects, and how that process ended, before and after its parent has waited for it. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include "control/peer.h"
#include "run_suite.h"

/* A child that connects and then waits to be told; `fd` is our end of its connection. */
struct child {
    pid_t pid;
    int fd;
    struct peer peer;
};

static void child_start(struct child *child)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    /* Autobind: an abstract address of the kernel's choice. */
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, sizeof(sa_family_t)), 0);
    ck_assert_int_eq(listen(listener, 1), 0);
    socklen_t length = sizeof address;
    ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&address, &length), 0);
    child->pid = fork();
    if (child->pid == 0) {
        close(listener);
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        char byte;
        if (connect(fd, (struct sockaddr *)&address, length) < 0 || read(fd, &byte, 1) != 1)
            _exit(99);
        _exit(byte);
    }
    child->fd = accept(listener, NULL, NULL);
    ck_assert_int_ge(child->fd, 0);
    close(listener);
    ck_assert_int_eq(peer_init(&child->peer, child->fd), 0);
    ck_assert_int_ge(child->peer.pidfd, 0);
}

static void child_await_end(const struct child *child)
{
    struct pollfd poll_fd = {.fd = child->peer.pidfd, .events = POLLIN};
    ck_assert_int_eq(poll(&poll_fd, 1, 10000), 1);
    ck_assert(peer_has_ended(&child->peer));
}

static void child_finish(struct child *child)
{
    close(child->fd);
    peer_deinit(&child->peer);
}

static bool kernel_tells_after_reaping(void)
{
    struct utsname name;
    int major = 0, minor = 0;
    uname(&name);
    sscanf(name.release, "%d.%d", &major, &minor);
    return major > 6 || (major == 6 && minor >= 15);
}

static void assert_end(const struct child *child, const char *words)
{
    char text[160];
    ck_assert(peer_describe_end(&child->peer, text, sizeof text));
    ck_assert_str_eq(text, words);
}

/* The kernel's answer once it is reaped, or the honest "ended". */
static void reap_and_assert_end(const struct child *child, const char *words)
{
    ck_assert_int_eq(waitpid(child->pid, NULL, 0), child->pid);
    if (kernel_tells_after_reaping()) {
        assert_end(child, words);
        return;
    }
    char text[160];
    ck_assert(!peer_describe_end(&child->peer, text, sizeof text));
    ck_assert_str_eq(text, "ended");
}

START_TEST(the_kernel_says_who_connects)
{
    struct child child;
    child_start(&child);
    ck_assert_int_eq(child.peer.pid, child.pid);
    ck_assert_uint_eq(child.peer.uid, getuid());
    ck_assert(peer_is_in_group(&child.peer, getgid()));
    ck_assert(!peer_is_in_group(&child.peer, 54321));
    ck_assert(!peer_has_ended(&child.peer));
    kill(child.pid, SIGKILL);
    waitpid(child.pid, NULL, 0);
    child_finish(&child);
}
END_TEST

START_TEST(a_kill_is_told_before_and_after_reaping)
{
    struct child child;
    child_start(&child);
    kill(child.pid, SIGKILL);
    child_await_end(&child);
    assert_end(&child, "was killed by signal 9 (Killed)");
    reap_and_assert_end(&child, "was killed by signal 9 (Killed)");
    child_finish(&child);
}
END_TEST

START_TEST(an_exit_status_is_told_before_and_after_reaping)
{
    for (char status = 0; status <= 3; status += 3) {
        struct child child;
        char words[40];
        child_start(&child);
        ck_assert_int_eq(write(child.fd, &status, 1), 1);
        child_await_end(&child);
        snprintf(words, sizeof words, "exited with status %d", status);
        assert_end(&child, words);
        reap_and_assert_end(&child, words);
        child_finish(&child);
    }
}
END_TEST

START_TEST(users_of_this_machine_have_names)
{
    char name[64];
    user_name(0, name, sizeof name);
    ck_assert_str_eq(name, "root");
    user_name(3999999999u, name, sizeof name);
    ck_assert_str_eq(name, "");
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        the_kernel_says_who_connects,
        a_kill_is_told_before_and_after_reaping,
        an_exit_status_is_told_before_and_after_reaping,
        users_of_this_machine_have_names,
    };
    return run_suite("peer", tests, sizeof tests / sizeof *tests);
}
