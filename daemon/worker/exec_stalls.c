/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ops that have started and wait for a rank that stopped feeding its data: they are reported, and
 * end, like those that wait for a rank's submission (plan/stall.c).
 */
#include <stdio.h>
#include <stdlib.h>

#include "worker/exec_internal.h"

/* Whose data is missing, whose is there; the arrays hold n_ranks each. */
static void split_ranks(const struct run *run, uint32_t *missing, uint32_t *present,
                        struct plan_stall *stall)
{
    const struct plan_op *op = run->plan_op;
    stall->n_missing = stall->n_present = 0;
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        const struct request *request = op->parts[i].request;
        if (request && request->ready <= run->done)
            missing[stall->n_missing++] = op->ranks[i];
        else
            present[stall->n_present++] = op->ranks[i];
    }
    stall->missing = missing;
    stall->present = present;
}

static void end_late(struct exec *exec, struct run *run, const struct plan_stall *stall)
{
    char text[400];
    snprintf(
        text, sizeof text,
        "\"%.200s\": rank %u%s stopped copying its data to the worker for %.3g s (op_timeout_s)",
        stall->name, stall->missing[0], stall->n_missing > 1 ? " and others" : "",
        (double)stall->waited_ns / 1e9);
    TAILQ_REMOVE(&exec->starved, run, link);
    exec_end_run(exec, run, GRADD_ERR_TIMEOUT, text);
}

/* What a starved op waits for; the array belongs to the caller. False: it is not late, or no
 * memory. */
static bool describe_stall(const struct run *run, uint64_t now_ns, uint64_t stall_warn_ns,
                           struct plan_stall *stall, uint32_t **out_ranks)
{
    *stall = (struct plan_stall){
        .name = run->plan_op->name,
        .kind = run->plan_op->signature.kind,
        .waited_ns = now_ns - run->starved_ns,
        .is_new = !run->is_stalled,
    };
    if (stall->waited_ns < stall_warn_ns)
        return false;
    *out_ranks = calloc(run->plan_op->n_ranks, 2 * sizeof **out_ranks);
    if (!*out_ranks)
        return false;
    split_ranks(run, *out_ranks, *out_ranks + run->plan_op->n_ranks, stall);
    return true;
}

void exec_check(struct exec *exec, uint64_t now_ns, uint64_t stall_warn_ns, uint64_t op_timeout_ns,
                plan_stall_fn *on_stall, void *data)
{
    struct run *run, *next;
    for (run = TAILQ_FIRST(&exec->starved); run; run = next) {
        struct plan_stall stall;
        uint32_t *ranks;
        next = TAILQ_NEXT(run, link);
        if (stall_warn_ns && describe_stall(run, now_ns, stall_warn_ns, &stall, &ranks)) {
            run->is_stalled = true;
            on_stall(data, &stall);
            free(ranks);
        }
        if (op_timeout_ns && describe_stall(run, now_ns, op_timeout_ns, &stall, &ranks)) {
            end_late(exec, run, &stall);
            free(ranks);
        }
    }
}

void exec_list_stalls(const struct exec *exec, uint64_t now_ns, uint64_t stall_warn_ns,
                      plan_stall_fn *on_stall, void *data)
{
    const struct run *run;
    TAILQ_FOREACH(run, &exec->starved, link)
    {
        struct plan_stall stall;
        uint32_t *ranks;
        if (!stall_warn_ns || !describe_stall(run, now_ns, stall_warn_ns, &stall, &ranks))
            continue;
        on_stall(data, &stall);
        free(ranks);
    }
}
