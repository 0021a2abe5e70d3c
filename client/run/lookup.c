/* SPDX-License-Identifier: Apache-2.0 */
#include "lookup.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "process.h"

int lookup_main(const char *name)
{
    char address[ADDRESS_BYTES];
    if (!address_resolve(name, address))
        return 1;
    return puts(address) < 0 || fflush(stdout) != 0;
}

static void spawn(struct lookup *lookup, const char *program, const char *name,
                  const sigset_t *mask)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), out[2] = {-1, -1};
    const char *argv[] = {program, "--lookup", name, NULL};
    if (null >= 0 && pipe2(out, O_CLOEXEC) == 0) {
        struct spawn spawn = {
            .argv = (char **)argv,
            .envp = environ,
            .stdio = {null, out[1], null},
            .keep = {-1, -1, -1},
            .death_signal = SIGKILL,
            .mask = mask,
        };
        if (process_spawn(&spawn, &lookup->pid) == 0)
            lookup->fd = out[0];
        else
            close(out[0]);
        close(out[1]);
    }
    if (null >= 0)
        close(null);
}

void lookup_start(struct lookup *lookup, const char *program, const char *name,
                  const sigset_t *mask)
{
    *lookup = (struct lookup){.fd = -1};
    if (address_is_numeric(name))
        address_resolve(name, lookup->address);
    else
        spawn(lookup, program, name, mask);
}

void lookup_read(struct lookup *lookup)
{
    /* One line, written at once. */
    char line[ADDRESS_BYTES];
    ssize_t n = read(lookup->fd, line, sizeof line - 1);
    if (n < 0 && errno == EINTR)
        return;
    line[n > 0 ? n : 0] = '\0';
    line[strcspn(line, "\n")] = '\0';
    snprintf(lookup->address, sizeof lookup->address, "%s", line);
    lookup_stop(lookup);
}

void lookup_stop(struct lookup *lookup)
{
    if (lookup->fd >= 0)
        close(lookup->fd);
    lookup->fd = -1;
    if (lookup->pid > 0) {
        kill(-lookup->pid, SIGKILL);
        process_reap(lookup->pid);
    }
    lookup->pid = 0;
}

void lookup_wait(struct lookup *lookup, int timeout_ms)
{
    struct pollfd p = {lookup->fd, POLLIN, 0};
    while (!lookup_is_over(lookup) && poll(&p, 1, timeout_ms) > 0)
        lookup_read(lookup);
    lookup_stop(lookup);
}
