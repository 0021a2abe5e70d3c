/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The process that the user sees. It runs launch_run() in a child and passes signals on, so that
 * neither of the two can be killed without the other cleaning up: the child is told of our death
 * by the kernel and ends the job in order; of its death we hear as its parent.
 *
 * Thread: any; forks, so before other threads exist.
 */
#ifndef GRADD_RUN_FRONT_H
#define GRADD_RUN_FRONT_H

#include "args.h"

/* Run the job. The exit code for the shell. */
int front_run(const struct args *args);

#endif
