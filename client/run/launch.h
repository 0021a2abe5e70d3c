/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One run of gradrun, from the daemon's start to the last process's end.
 *
 * Thread: loop.
 *
 * Invariant: when launch_run() returns, no process that it started, and none that those started,
 * is alive; no socket and no directory of a private daemon is left.
 */
#ifndef GRADD_RUN_LAUNCH_H
#define GRADD_RUN_LAUNCH_H

#include <signal.h>

#include "args.h"

enum launch_exit {
    LAUNCH_EXIT_FAILED = 1, /* gradrun itself could not do its part */
    LAUNCH_EXIT_USAGE = 2,
    LAUNCH_EXIT_TIMEOUT = 124, /* --timeout passed */
    LAUNCH_EXIT_CANNOT_RUN = 126,
    LAUNCH_EXIT_NOT_FOUND = 127,
};

/*
 * Run the job. rank_mask is the signal mask that ranks get. The exit code: that of the rank that
 * failed first, 128 + signal, or one of ours.
 */
int launch_run(const struct args *args, const sigset_t *rank_mask);

#endif
