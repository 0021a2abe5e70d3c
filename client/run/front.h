/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The process that the user sees. It does the work in a child and passes signals on, so that
 * neither of the two can be killed without the other cleaning up: the child is told of our death
 * by the kernel and ends the job in order; of its death we hear as its parent. Ctrl-Z stops us and
 * the ranks, never the child, so that this holds meanwhile.
 *
 * Thread: any; forks, so before other threads exist.
 */
#ifndef GRADD_RUN_FRONT_H
#define GRADD_RUN_FRONT_H

#include <signal.h>

#include "args.h"

/* What the child does. The mask is that of the processes which it starts. Gives the exit code. */
typedef int front_body(const struct args *args, const sigset_t *rank_mask);

/* Run the body. The exit code for the shell. */
int front_run(front_body *body, const struct args *args);

#endif
