/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gradrun --agent: the part of a run over several hosts that one host has. It takes a job and
 * orders on its standard input and tells on its standard output what happens (frame.h); it starts
 * the host's private daemon and its ranks, and ends them.
 *
 * Thread: loop.
 *
 * Invariant: when its input ends, or brings nothing for AGENT_SILENCE_S, whatever happened to the
 * launcher or to the network, everything that it has started ends.
 */
#ifndef GRADD_RUN_AGENT_H
#define GRADD_RUN_AGENT_H

#include <signal.h>

#include "args.h"

/* The launcher speaks every AGENT_PING_S seconds, and so does the agent in answer. */
enum { AGENT_PING_S = 5, AGENT_SILENCE_S = 30 };

/* A front_body; args are not used. */
int agent_run(const struct args *args, const sigset_t *rank_mask);

#endif
