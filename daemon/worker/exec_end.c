/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How ops end: what each rank's request is told, once, and what the figures keep of it. An op whose
 * NaN are counted on several nodes has run before it ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "worker/exec_internal.h"

/* New sample into a mean over recent ones. */
static void mean_add(double *mean, double sample)
{
    *mean += (sample - *mean) / 64;
}

static void note_lateness(struct member_stats *stats, const struct plan_op *op,
                          const struct plan_part *part)
{
    double late_us = (double)(part->arrived_ns - op->first_ns) / 1e3;
    mean_add(&stats->late_mean_us, late_us);
    stats->late_max_us -= stats->late_max_us / 64;
    if (late_us > stats->late_max_us)
        stats->late_max_us = late_us;
    size_t length = strlen(op->name);
    memcpy(stats->last_tensor, op->name, length + 1);
}

static void tell_parts(struct plan_op *op, int status, const char *text,
                       const struct request_result *result)
{
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        struct request *request = op->parts[i].request;
        if (!request)
            continue;
        note_lateness(&request->member->stats, op, &op->parts[i]);
        member_complete(request, status, text, result);
    }
}

/* Each rank learns how much it received from each: that differs between ranks. */
static void tell_alltoall(struct plan_op *op, uint64_t *counts)
{
    for (uint32_t to = 0; to < op->n_ranks; to++) {
        struct request *request = op->parts[to].request;
        if (!request)
            continue; /* on another node */
        /* Requests before `to` are released, but not reused before this op is over. */
        for (uint32_t from = 0; from < op->n_ranks; from++)
            counts[from] = op->parts[from].counts[to];
        note_lateness(&request->member->stats, op, &op->parts[to]);
        member_complete(request, GRADD_OK, "",
                        &(struct request_result){.counts = counts, .n_counts = op->n_ranks});
    }
}

/* The lowest rank of this node with a NaN or an infinity; else no elements. */
static void find_nonfinite(const struct run *run, struct request_result *result)
{
    uint32_t input = 0;
    result->nonfinite = 0;
    for (uint32_t i = 0; run->op.nonfinite && i < run->op.n_ranks; i++) {
        if (!run->parts[i].in.base)
            continue;
        result->nonfinite = atomic_load_explicit(&run->nonfinite[input++], memory_order_relaxed);
        result->nonfinite_rank = run->plan_op->ranks[i];
        if (result->nonfinite > 0)
            return;
    }
}

static void tell_success(struct run *run, const struct request_result *nonfinite)
{
    struct plan_op *op = run->plan_op;
    struct request_result result = {.n_counts = op->n_ranks};
    uint64_t stack[64], *counts = op->n_ranks <= 64 ? stack : calloc(op->n_ranks, sizeof *counts);
    if (!counts) {
        tell_parts(op, GRADD_ERR_NO_MEMORY, "the worker has no memory for the result", NULL);
        return;
    }
    switch (op->signature.kind) {
    case GRADD_ALLGATHER:
        for (uint32_t i = 0; i < op->n_ranks; i++)
            counts[i] = op->parts[i].count;
        result.counts = counts;
        tell_parts(op, GRADD_OK, "", &result);
        break;
    case GRADD_ALLTOALL:
        tell_alltoall(op, counts);
        break;
    case GRADD_SET_ADD:
    case GRADD_JOIN:
        result.counts = &op->result;
        result.n_counts = 1;
        tell_parts(op, GRADD_OK, "", &result);
        break;
    default:
        tell_parts(op, GRADD_OK, "", nonfinite && nonfinite->nonfinite ? nonfinite : NULL);
    }
    if (counts != stack)
        free(counts);
}

/* nonfinite: what is told of a success. */
static void finish_run(struct exec *exec, struct run *run, int status, const char *text,
                       const struct request_result *nonfinite)
{
    struct plan_op *op = run->plan_op;
    if (status == GRADD_OK) {
        exec->stats.ops++;
        exec->stats.bytes += op->signature.count * dtype_bytes(op->signature.dtype);
        exec->stats.device_ops += run->op.is_device;
        exec->stats.staged_ops += op->signature.is_device && !run->op.is_device;
        mean_add(&exec->stats.wait_us, (double)(op->ready_ns - op->first_ns) / 1e3);
        mean_add(&exec->stats.run_us, (double)(clock_now_ns() - op->ready_ns) / 1e3);
        tell_success(run, nonfinite);
    } else {
        tell_parts(op, status, text, NULL);
    }
    exec->source.done(exec->source.data, op);
    TAILQ_INSERT_HEAD(&exec->spare, run, link);
}

/* The op has run; it ends when all of its nodes have counted. False: this node need not wait. */
static bool await_counts(struct exec *exec, struct run *run, const struct request_result *own)
{
    run->state = RUN_COUNTING;
    TAILQ_INSERT_TAIL(&exec->counting, run, link);
    if (exec->ops->on_counted(exec->data, run->plan_op, own->nonfinite_rank, own->nonfinite))
        return true;
    TAILQ_REMOVE(&exec->counting, run, link);
    return false;
}

void exec_end_run(struct exec *exec, struct run *run, int status, const char *text)
{
    struct request_result own = {.nonfinite = 0};
    if (status == GRADD_OK && run->plan_op->finite_check) {
        if (exec->aborted) {
            /* Nobody will say any more what the other nodes have counted. */
            finish_run(exec, run, exec->aborted, exec->abort_text, NULL);
            return;
        }
        find_nonfinite(run, &own);
        if (await_counts(exec, run, &own))
            return;
    } else if (status == GRADD_OK) {
        find_nonfinite(run, &own);
    }
    finish_run(exec, run, status, text, &own);
}

void exec_refuse_op(struct exec *exec, struct plan_op *op, int status, const char *text)
{
    tell_parts(op, status, text, NULL);
    exec->source.done(exec->source.data, op);
}

bool exec_counted(struct exec *exec, uint64_t finite_check, uint32_t rank, uint64_t count)
{
    struct run *run;
    TAILQ_FOREACH(run, &exec->counting, link)
    {
        if (run->plan_op->finite_check != finite_check)
            continue;
        const struct request_result whole = {.nonfinite = count, .nonfinite_rank = rank};
        TAILQ_REMOVE(&exec->counting, run, link);
        finish_run(exec, run, GRADD_OK, "", &whole);
        if (!exec->is_turning)
            exec->ops->on_flush(exec->data);
        return true;
    }
    return false;
}

void exec_abort(struct exec *exec, int status, const char *text)
{
    exec->aborted = status;
    snprintf(exec->abort_text, sizeof exec->abort_text, "%s", text);
    struct run *run;
    while ((run = TAILQ_FIRST(&exec->starved))) {
        TAILQ_REMOVE(&exec->starved, run, link);
        exec_end_run(exec, run, status, exec->abort_text);
    }
    while ((run = TAILQ_FIRST(&exec->counting))) {
        TAILQ_REMOVE(&exec->counting, run, link);
        finish_run(exec, run, status, exec->abort_text, NULL);
    }
    while ((run = TAILQ_FIRST(&exec->broken))) {
        TAILQ_REMOVE(&exec->broken, run, link);
        exec_end_run(exec, run, status, exec->abort_text);
    }
}
