/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The address of a host's name, found by a process of its own: the resolver blocks for as long as
 * a name server does not answer, and gradrun must hear signals meanwhile.
 *
 * Thread: loop.
 *
 * Invariant: fd is open exactly while the process is looking; {.fd = -1} is a lookup that is over.
 */
#ifndef GRADD_RUN_LOOKUP_H
#define GRADD_RUN_LOOKUP_H

#include <signal.h>
#include <stdbool.h>

#include "address.h"

struct lookup {
    pid_t pid;                   /* 0: none */
    int fd;                      /* readable when there is something for lookup_read(); -1: over */
    char address[ADDRESS_BYTES]; /* "": none */
};

/*
 * Begin; program is this gradrun. A numeric address, and a process that cannot be started, are over
 * at once.
 */
void lookup_start(struct lookup *lookup, const char *program, const char *name,
                  const sigset_t *mask);
/* Take what there is. */
void lookup_read(struct lookup *lookup);
/* Wait until it is over, at most so long. */
void lookup_wait(struct lookup *lookup, int timeout_ms);
/* Give up; also at the end. The process is killed and reaped. */
void lookup_stop(struct lookup *lookup);

static inline bool lookup_is_over(const struct lookup *lookup)
{
    return lookup->fd < 0;
}

/* gradrun --lookup NAME: prints the address. The exit code. */
int lookup_main(const char *name);

#endif
