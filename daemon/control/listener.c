/* SPDX-License-Identifier: Apache-2.0 */
#include "control/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

enum {
    BACKLOG = 512,
    ACCEPTS_PER_TURN = 32,
};

static const uint64_t PAUSE_NS = UINT64_C(100) * 1000000;
static const uint64_t LOG_PERIOD_NS = UINT64_C(10) * 1000000000;

struct listener {
    int fd;
    int reserve_fd; /* given up to accept, and turn away, one client when none is left */
    struct watch *watch;
    struct watch *resume;
    listener_fn *fn;
    void *owner;
    uint64_t logged_ns; /* when trouble was last logged; 0: never */
};

/* ------------------------------------------------------------------ bind */

/* Nobody listens on the socket file at this address. */
static bool is_abandoned(const struct sockaddr_un *address)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return false;
    int rc = connect(fd, (const struct sockaddr *)address, sizeof *address);
    bool is_refused = rc < 0 && errno == ECONNREFUSED;
    close(fd);
    return is_refused;
}

/* bind() that creates the file closed to others until its mode is set. */
static int bind_private(int fd, const struct sockaddr_un *address)
{
    mode_t before = umask(0177);
    int rc = bind(fd, (const struct sockaddr *)address, sizeof *address) < 0 ? -errno : 0;
    umask(before);
    return rc;
}

int listener_bind(const char *path, mode_t mode, int *out_fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const size_t length = strlen(path);
    if (length >= sizeof address.sun_path)
        return -ENAMETOOLONG;
    memcpy(address.sun_path, path, length + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    int rc = bind_private(fd, &address);
    struct stat status;
    if (rc == -EADDRINUSE && lstat(path, &status) == 0 && S_ISSOCK(status.st_mode) &&
        is_abandoned(&address)) {
        unlink(path);
        rc = bind_private(fd, &address);
    }
    if (rc == 0 && (chmod(path, mode) < 0 || listen(fd, BACKLOG) < 0))
        rc = -errno;
    if (rc < 0) {
        close(fd);
        return rc;
    }
    *out_fd = fd;
    return 0;
}

/* ------------------------------------------------------------------ accept */

static int open_reserve(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void on_resume(void *data)
{
    struct listener *listener = data;
    if (listener->reserve_fd < 0)
        listener->reserve_fd = open_reserve();
    watch_set(listener->watch, WATCH_READ);
}

/* No descriptor is left: turn one client away rather than let it hang, and pause. */
static void pause_accepting(struct listener *listener, int error)
{
    uint64_t now = clock_now_ns();
    if (!listener->logged_ns || now - listener->logged_ns > LOG_PERIOD_NS) {
        listener->logged_ns = now;
        log_error("listener", "connections can not be accepted: %s; trying again every 100 ms",
                  strerror(error));
    }
    if (listener->reserve_fd >= 0) {
        close(listener->reserve_fd);
        /* cppcheck-suppress nullPointer; accept4() takes no address where none is wanted */
        int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            close(fd);
        listener->reserve_fd = open_reserve();
    }
    watch_set(listener->watch, 0);
    watch_arm(listener->resume, PAUSE_NS);
}

static void on_readable(void *data, int listen_fd, unsigned events)
{
    (void)events;
    struct listener *listener = data;
    for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
        /* cppcheck-suppress nullPointer; as above */
        int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            listener->fn(listener->owner, fd);
            continue;
        }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
            pause_accepting(listener, errno);
        if (errno != ECONNABORTED && errno != EINTR)
            return;
    }
}

struct listener *listener_new(struct loop *loop, int take_fd, listener_fn *fn, void *owner)
{
    struct listener *listener = calloc(1, sizeof *listener);
    if (!listener) {
        close(take_fd);
        return NULL;
    }
    listener->fd = take_fd;
    listener->fn = fn;
    listener->owner = owner;
    listener->reserve_fd = open_reserve();
    int flags = fcntl(take_fd, F_GETFL);
    fcntl(take_fd, F_SETFL, flags | O_NONBLOCK);
    fcntl(take_fd, F_SETFD, FD_CLOEXEC);
    listener->watch = watch_fd(loop, take_fd, WATCH_READ, on_readable, listener);
    listener->resume = watch_timer(loop, on_resume, listener);
    if (!listener->watch || !listener->resume) {
        listener_free(listener);
        return NULL;
    }
    return listener;
}

void listener_free(struct listener *listener)
{
    if (!listener)
        return;
    watch_free(listener->watch);
    watch_free(listener->resume);
    if (listener->reserve_fd >= 0)
        close(listener->reserve_fd);
    close(listener->fd);
    free(listener);
}
