/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small all-reduces of a job on several nodes: their inputs travel with the submissions, the
 * coordinator's worker sums them by itself and sends the results where it would send the order to
 * execute. That is two messages one after the other, where an exchange between the nodes is a third
 * and wakes everybody once more.
 *
 * Which way an op takes depends on what it is, never on timing: the ranks agree on it, and a rank
 * offers its input whenever the op fits. Where one does not, the op takes the usual way.
 *
 * Thread: loop.
 */
#ifndef GRADD_CENTRAL_H
#define GRADD_CENTRAL_H

#include "worker/layout.h"
#include "worker/member.h"
#include "worker/plan/plan.h"

/* On a node that follows: shall the request's input go with its submission? */
bool central_offers(const struct layout *layout, const struct signature *signature,
                    const struct request *request);

/* On a node that follows: may so much be this request's result? */
bool central_awaits(const struct request *request, size_t bytes);

/* On the coordinator: may a submission carry so much data? */
bool central_accepts(const Pb__RemoteSubmit *submit);

/* On the coordinator: are all inputs of the op here? */
bool central_takes(const struct plan_op *op);

#endif
