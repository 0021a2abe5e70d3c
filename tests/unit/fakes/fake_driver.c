/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_driver.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

struct fake_driver cu;
static bool is_child;

void holds(bool condition, const char *text, int line)
{
    if (condition)
        return;
    if (!is_child)
        ck_abort_msg("line %d: %s", line, text);
    fprintf(stderr, "peer, line %d: %s\n", line, text);
    _exit(9);
}

void gives(CUresult wanted, CUresult got, const char *call, int line)
{
    char text[256];
    snprintf(text, sizeof text, "%s gives %d, not %d", call, got, wanted);
    holds(wanted == got, text, line);
}

static void *symbol(const char *name)
{
    return dlsym(cu.library, name);
}

void driver_load(void)
{
    cu.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    HOLDS(cu.library != NULL);
#define LOAD(name, parameters) *(void **)&cu.name = symbol(#name);
    FAKE_ENTRIES(LOAD)
#undef LOAD
    *(void **)&cu.stream_push = symbol("fake_cuda_stream_push");
    *(void **)&cu.view = symbol("fake_cuda_view");
    *(void **)&cu.count = symbol("fake_cuda_count");
    *(void **)&cu.pointer_device = symbol("fake_cuda_pointer_device");
    *(void **)&cu.stream_device = symbol("fake_cuda_stream_device");
    *(void **)&cu.physical_device = symbol("fake_cuda_physical_device");
    *(void **)&cu.context_fail = symbol("fake_cuda_context_fail");
}

void driver_open(int device)
{
    driver_load();
    CUcontext context;
    OK(cu.cuInit(0));
    OK(cu.cuDevicePrimaryCtxRetain(&context, device));
    OK(cu.cuCtxSetCurrent(context));
}

void driver_in_child(void)
{
    is_child = true;
}

struct peer peer_start(void (*run)(int fd))
{
    int fds[2];
    HOLDS(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    struct peer peer = {fork(), fds[0]};
    if (peer.pid == 0) {
        is_child = true;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        run(fds[1]);
        _exit(0);
    }
    close(fds[1]);
    return peer;
}

void peer_end(struct peer peer)
{
    int status;
    close(peer.fd);
    HOLDS(waitpid(peer.pid, &status, 0) == peer.pid);
    HOLDS(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void put(int fd, const void *bytes, size_t n)
{
    HOLDS(send(fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n);
}

void take(int fd, void *bytes, size_t n)
{
    HOLDS(recv(fd, bytes, n, MSG_WAITALL) == (ssize_t)n);
}

union control {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr head;
};

void put_fd(int fd, int sent)
{
    char byte = 0;
    struct iovec iov = {&byte, 1};
    union control control = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)),
                                      .cmsg_level = SOL_SOCKET,
                                      .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.head), &sent, sizeof sent);
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    HOLDS(sendmsg(fd, &message, 0) == 1);
}

int take_fd(int fd)
{
    char byte;
    struct iovec iov = {&byte, 1};
    union control control;
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    HOLDS(recvmsg(fd, &message, MSG_CMSG_CLOEXEC) == 1);
    int taken;
    memcpy(&taken, CMSG_DATA(&control.head), sizeof taken);
    return taken;
}

void dies(void (*breach)(void), int sig, const char *words)
{
    int fds[2], status;
    char text[1024];
    size_t n = 0;
    ssize_t got;
    HOLDS(pipe2(fds, O_CLOEXEC) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        is_child = true;
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        dup2(fds[1], 2);
        /* A sanitiser's handler would make an exit of it. */
        signal(sig, SIG_DFL);
        breach();
        _exit(0);
    }
    close(fds[1]);
    while (n < sizeof text - 1 && (got = read(fds[0], text + n, sizeof text - 1 - n)) > 0)
        n += (size_t)got;
    text[n] = '\0';
    close(fds[0]);
    HOLDS(waitpid(pid, &status, 0) == pid);
    ck_assert_msg(WIFSIGNALED(status) && WTERMSIG(status) == sig, "status %#x, stderr: %s",
                  (unsigned)status, text);
    ck_assert_msg(strstr(text, words) != NULL, "stderr: %s", text);
}

static void remove_directory(const char *path)
{
    DIR *directory = opendir(path);
    const struct dirent *entry;
    while (directory != NULL && (entry = readdir(directory)) != NULL)
        if (entry->d_name[0] != '.')
            unlinkat(dirfd(directory), entry->d_name, 0);
    if (directory != NULL)
        closedir(directory);
    rmdir(path);
}

int run_fake_suite(Suite *suite)
{
    char path[] = "/dev/shm/gradd-test-fakes-XXXXXX";
    if (mkdtemp(path) == NULL || setenv("GRADD_FAKE_CUDA_DIR", path, 1) != 0)
        return 1;
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    remove_directory(path);
    return n_failed > 0;
}
