/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run over several hosts, as the launcher sees it: one agent on each, which is told what to
 * start, when, and when to end.
 *
 * Thread: loop.
 *
 * Invariant: ranks start only when every host is ready; when one rank or host fails, all end; the
 * first cause is named and gives the exit code.
 */
#ifndef GRADD_RUN_CLUSTER_H
#define GRADD_RUN_CLUSTER_H

#include "args.h"

/*
 * Place the ranks and run them; through launch_run() when all of them are on this host. The exit
 * code, as launch_run().
 */
int cluster_main(const struct args *args);

#endif
