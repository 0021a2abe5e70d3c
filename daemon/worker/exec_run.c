/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One op being executed: checked against what only all ranks together show, opened, and run slice
 * by slice as far as every rank has made its data ready. It starves in between.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "worker/exec_internal.h"

static void set_state(struct exec *exec, struct run *run, enum run_state state)
{
    run->state = state;
    if (state == RUN_STARTABLE) {
        TAILQ_INSERT_TAIL(&exec->startable, run, link);
        exec->n_startable++;
    } else if (state == RUN_STARVED) {
        run->starved_ns = clock_now_ns();
        run->is_stalled = false;
        TAILQ_INSERT_TAIL(&exec->starved, run, link);
    }
}

/* Elements that every rank has made ready. */
static uint64_t ready_of(const struct plan_op *op)
{
    uint64_t ready = op->signature.count;
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        const struct request *request = op->parts[i].request;
        if (request && request->ready < ready)
            ready = request->ready;
    }
    return ready;
}

static bool is_sliced(const struct plan_op *op)
{
    return op->signature.kind == GRADD_ALLREDUCE || op->signature.kind == GRADD_BROADCAST;
}

/* Startable when some element is; an op without elements is startable too. */
static void queue_run(struct exec *exec, struct run *run)
{
    uint64_t ready = ready_of(run->plan_op);
    bool is_startable =
        !is_sliced(run->plan_op) || ready > run->done || run->plan_op->signature.count == 0;
    if (is_startable)
        set_state(exec, run, RUN_STARTABLE);
    else if (exec->aborted)
        exec_end_run(exec, run, exec->aborted, exec->abort_text);
    else
        set_state(exec, run, RUN_STARVED);
}

/* All-gather and all-to-all learn only now how much arrives: does it fit everywhere? */
static const char *check_capacity(const struct plan_op *op, char *text, size_t bytes)
{
    if (op->signature.kind != GRADD_ALLGATHER && op->signature.kind != GRADD_ALLTOALL)
        return NULL;
    for (uint32_t to = 0; to < op->n_ranks; to++) {
        uint64_t sum = 0;
        for (uint32_t from = 0; from < op->n_ranks; from++) {
            uint64_t n = op->signature.kind == GRADD_ALLGATHER ? op->parts[from].count
                                                               : op->parts[from].counts[to];
            if (__builtin_add_overflow(sum, n, &sum))
                sum = UINT64_MAX;
        }
        if (sum > op->parts[to].out_capacity) {
            snprintf(text, bytes,
                     "\"%s\": the ranks give %llu elements to rank %u, whose output holds %llu",
                     op->name, (unsigned long long)sum, op->ranks[to],
                     (unsigned long long)op->parts[to].out_capacity);
            return text;
        }
    }
    return NULL;
}

static struct run *run_new(struct exec *exec, uint32_t n_ranks)
{
    struct run *run = TAILQ_FIRST(&exec->spare);
    if (run) {
        TAILQ_REMOVE(&exec->spare, run, link);
    } else {
        run = calloc(1, sizeof *run);
        if (!run)
            return NULL;
        SLIST_INSERT_HEAD(&exec->all_runs, run, in_all);
    }
    if (run->parts_capacity < n_ranks) {
        struct backend_part *parts = realloc(run->parts, n_ranks * sizeof *parts);
        if (!parts) {
            TAILQ_INSERT_HEAD(&exec->spare, run, link);
            return NULL;
        }
        run->parts = parts;
        free((void *)run->nonfinite);
        run->nonfinite = calloc(n_ranks, sizeof *run->nonfinite);
        run->parts_capacity = run->nonfinite ? n_ranks : 0;
        if (!run->nonfinite) {
            TAILQ_INSERT_HEAD(&exec->spare, run, link);
            return NULL;
        }
    }
    return run;
}

void exec_free_run(struct run *run)
{
    free(run->parts);
    free((void *)run->nonfinite);
    free(run);
}

static uint32_t index_of_rank(const struct plan_op *op, int32_t rank)
{
    for (uint32_t i = 0; i < op->n_ranks; i++)
        if (op->ranks[i] == (uint32_t)rank)
            return i;
    return 0;
}

/* The requests' own counts, so that nobody has to ask whether a rank is on this node. */
static void take_counts(struct plan_op *op)
{
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        const struct request *request = op->parts[i].request;
        if (request)
            op->parts[i].counts = request->part.counts;
    }
}

static void fill_run_parts(struct exec *exec, struct run *run, struct plan_op *op)
{
    if (op->finite_check)
        run->op.nonfinite = run->nonfinite; /* a rank of another node asks */
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        struct request *request = op->parts[i].request;
        struct backend_part *part = &run->parts[i];
        *part = request ? request->part : (struct backend_part){0};
        part->count = op->parts[i].count;
        part->counts = op->parts[i].counts;
        part->node = exec->node_of && !run->is_central ? exec->node_of[op->ranks[i]] : 0;
        if (!request)
            continue;
        if (request->member->is_remote && !run->is_central) /* what it has offered is not used */
            part->in = part->out = (struct backend_span){0};
        request->run = run;
        request->is_central = run->is_central;
        if (request->check_finite)
            run->op.nonfinite = run->nonfinite;
    }
    for (uint32_t i = 0; run->op.nonfinite && i < op->n_ranks; i++)
        atomic_store_explicit(&run->nonfinite[i], 0, memory_order_relaxed);
}

/* Ops on device memory have it on every rank: the plan sees to it, but cannot know who lies. */
static const char *check_memory(const struct exec *exec, const struct plan_op *op)
{
    if (!op->signature.is_device)
        return NULL;
    uint32_t n_device = 0, n_host = 0;
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        const struct request *request = op->parts[i].request;
        if (!request || request->member->is_remote)
            continue;
        *(request->part.queue ? &n_device : &n_host) += 1;
    }
    if (n_device > 0 && !exec->device_backend)
        return "is on device memory, and the worker has no backend for it";
    return n_device > 0 && n_host > 0
               ? "is on device memory on some ranks, and on host memory on others"
               : NULL;
}

/* Why the op cannot run, or NULL. */
static const char *check_op(const struct exec *exec, const struct plan_op *op, char *text,
                            size_t bytes)
{
    const char *wrong = check_capacity(op, text, bytes);
    if (wrong)
        return wrong;
    wrong = check_memory(exec, op);
    if (!wrong)
        return NULL;
    snprintf(text, bytes, "\"%s\": the op %s", op->name, wrong);
    return text;
}

void exec_open_run(struct exec *exec, struct plan_op *op)
{
    char text[400];
    take_counts(op);
    const char *wrong = check_op(exec, op, text, sizeof text);
    struct run *run = wrong ? NULL : run_new(exec, op->n_ranks);
    if (!run) {
        exec_refuse_op(exec, op, wrong ? GRADD_ERR_INVALID : GRADD_ERR_NO_MEMORY,
                       wrong ? wrong : "the worker has no memory for this op");
        return;
    }
    const struct signature *s = &op->signature;
    run->plan_op = op;
    run->done = 0;
    run->is_central = exec->ops->is_central && exec->ops->is_central(exec->data, op);
    run->op = (struct backend_op){
        .kind = s->kind,
        .dtype = s->dtype,
        .redop = s->redop,
        .prescale = s->prescale,
        .postscale = s->postscale,
        .n_ranks = op->n_ranks,
        .root = s->kind == GRADD_BROADCAST ? index_of_rank(op, s->root) : 0,
        .n_joined = op->n_joined,
        .is_device = s->is_device && exec->device_backend,
        .ranks = op->ranks,
        .parts = run->parts,
        .counts = s->counts,
    };
    fill_run_parts(exec, run, op);
    queue_run(exec, run);
}

void exec_begin_slice(struct exec *exec, struct run *run)
{
    TAILQ_REMOVE(&exec->startable, run, link);
    exec->n_startable--;
    run->op.number = run->plan_op->number;
    run->op.begin = run->done;
    run->op.end = is_sliced(run->plan_op) ? ready_of(run->plan_op) : 0;
    run->state = RUN_RUNNING;
    exec->n_running++;
}

static void on_slice_done(struct exec *exec, struct run *run)
{
    struct plan_op *op = run->plan_op;
    run->done = run->op.end;
    if (!is_sliced(op) || run->done == op->signature.count) {
        exec_end_run(exec, run, GRADD_OK, "");
        return;
    }
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        struct request *request = op->parts[i].request;
        if (request && request->is_streamed)
            member_progress(request, run->done);
    }
    queue_run(exec, run);
}

/* The backend knows that a link, a GPU or a rank is lost, and not why: that comes as the epoch's
 * failure. */
static void on_slice_failed(struct exec *exec, struct run *run)
{
    if (run->op.status != GRADD_ERR_RANK_LOST || !(exec->node_of || run->op.is_device)) {
        exec_end_run(exec, run, run->op.status, run->op.text);
    } else if (exec->aborted) {
        exec_end_run(exec, run, exec->aborted, exec->abort_text);
    } else {
        run->state = RUN_BROKEN;
        TAILQ_INSERT_TAIL(&exec->broken, run, link);
    }
}

void exec_end_slice(struct exec *exec, struct run *run)
{
    exec->n_running--;
    if (run->op.status == GRADD_OK)
        on_slice_done(exec, run);
    else
        on_slice_failed(exec, run);
}

void exec_feed(struct exec *exec, void *data)
{
    struct run *run = data;
    if (run->state != RUN_STARVED || ready_of(run->plan_op) <= run->done)
        return;
    TAILQ_REMOVE(&exec->starved, run, link);
    set_state(exec, run, RUN_STARTABLE);
}
