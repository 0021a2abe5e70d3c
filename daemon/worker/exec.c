/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches and turns: what the source has decided becomes runs, and those that are startable go to
 * the backends together.
 */
#include "worker/exec.h"

#include <stdio.h>
#include <stdlib.h>

#include "worker/exec_internal.h"

struct batch {
    struct backend_batch base; /* first */
    size_t capacity;
    SLIST_ENTRY(batch) link; /* while spare */
    SLIST_ENTRY(batch) in_all;
};

struct exec *exec_new(const struct exec_source *source, const struct exec_ops *ops, void *data)
{
    struct exec *exec = calloc(1, sizeof *exec);
    if (!exec)
        return NULL;
    exec->source = *source;
    exec->ops = ops;
    exec->data = data;
    TAILQ_INIT(&exec->startable);
    TAILQ_INIT(&exec->starved);
    TAILQ_INIT(&exec->counting);
    TAILQ_INIT(&exec->broken);
    TAILQ_INIT(&exec->spare);
    SLIST_INIT(&exec->spare_batches);
    SLIST_INIT(&exec->all_batches);
    SLIST_INIT(&exec->all_runs);
    return exec;
}

void exec_set_backend(struct exec *exec, const struct backend_ops *ops, struct backend *backend,
                      const uint32_t *node_of)
{
    exec->backend_ops = ops;
    exec->backend = backend;
    exec->node_of = node_of;
}

void exec_set_device_backend(struct exec *exec, const struct backend_ops *ops,
                             struct backend *backend)
{
    exec->device_ops = ops;
    exec->device_backend = backend;
}

void exec_free(struct exec *exec)
{
    if (!exec)
        return;
    struct run *run;
    while ((run = SLIST_FIRST(&exec->all_runs))) {
        SLIST_REMOVE_HEAD(&exec->all_runs, in_all);
        exec_free_run(run);
    }
    struct batch *batch;
    while ((batch = SLIST_FIRST(&exec->all_batches))) {
        SLIST_REMOVE_HEAD(&exec->all_batches, in_all);
        free(batch->base.ops);
        free(batch);
    }
    free(exec->batch_ops);
    free(exec);
}

bool exec_is_idle(const struct exec *exec)
{
    return exec->n_running == 0 && TAILQ_EMPTY(&exec->starved) && TAILQ_EMPTY(&exec->counting) &&
           TAILQ_EMPTY(&exec->broken) && TAILQ_EMPTY(&exec->startable);
}

bool exec_has_broken(const struct exec *exec)
{
    return !TAILQ_EMPTY(&exec->broken);
}

bool exec_has_starved(const struct exec *exec)
{
    return !TAILQ_EMPTY(&exec->starved);
}

const struct exec_stats *exec_stats(const struct exec *exec)
{
    return &exec->stats;
}

static void on_batch_enqueued(void *data, struct backend_batch *base)
{
    struct exec *exec = data;
    for (size_t i = 0; i < base->n_ops; i++) {
        const struct plan_op *op = ((struct run *)base->ops[i])->plan_op;
        if (base->ops[i]->status != GRADD_OK)
            continue;
        for (uint32_t part = 0; part < op->n_ranks; part++) {
            struct request *request = op->parts[part].request;
            if (request && request->part.queue)
                member_enqueued(request);
        }
    }
    if (!exec->is_turning)
        exec->ops->on_flush(exec->data);
}

static void on_batch_done(void *data, struct backend_batch *base)
{
    struct exec *exec = data;
    for (size_t i = 0; i < base->n_ops; i++)
        exec_end_slice(exec, (struct run *)base->ops[i]);
    SLIST_INSERT_HEAD(&exec->spare_batches, (struct batch *)base, link);
    if (exec->is_turning)
        return; /* exec_turn() goes on */
    exec_turn(exec);
    exec->ops->on_flush(exec->data);
}

static struct batch *batch_new(struct exec *exec, size_t n_ops)
{
    struct batch *batch = SLIST_FIRST(&exec->spare_batches);
    if (batch) {
        SLIST_REMOVE_HEAD(&exec->spare_batches, link);
    } else {
        batch = calloc(1, sizeof *batch);
        if (!batch)
            return NULL;
        SLIST_INSERT_HEAD(&exec->all_batches, batch, in_all);
    }
    if (batch->capacity < n_ops) {
        struct backend_op **ops = realloc(batch->base.ops, n_ops * sizeof(*ops));
        if (!ops) {
            SLIST_INSERT_HEAD(&exec->spare_batches, batch, link);
            return NULL;
        }
        batch->base.ops = ops;
        batch->capacity = n_ops;
    }
    batch->base.n_ops = 0;
    batch->base.enqueued = NULL;
    batch->base.done = on_batch_done;
    batch->base.data = exec;
    return batch;
}

/* Tell who wants to know what starts now, as one batch on every node: so many of the startable runs
 * that are not central. 0: none can, or there is no memory. */
static size_t announce(struct exec *exec)
{
    if (!exec->ops->on_batch)
        return SIZE_MAX;
    if (exec->batch_ops_capacity < exec->n_startable) {
        struct plan_op **ops = realloc(exec->batch_ops, exec->n_startable * sizeof(*ops));
        if (!ops)
            return 0;
        exec->batch_ops = ops;
        exec->batch_ops_capacity = exec->n_startable;
    }
    size_t n = 0;
    struct run *run;
    TAILQ_FOREACH(run, &exec->startable, link)
    if (!run->is_central)
        exec->batch_ops[n++] = run->plan_op;
    return n == 0 ? SIZE_MAX : exec->ops->on_batch(exec->data, exec->batch_ops, n);
}

static size_t count_device_runs(const struct exec *exec)
{
    size_t n = 0;
    const struct run *run;
    if (!exec->device_backend)
        return 0;
    TAILQ_FOREACH(run, &exec->startable, link)
    n += run->op.is_device;
    return n;
}

static void fail_startable(struct exec *exec)
{
    const int status = exec->aborted ? exec->aborted : GRADD_ERR_NO_MEMORY;
    const char *text = exec->aborted ? exec->abort_text : "the worker has no memory for a batch";
    struct run *run;
    while ((run = TAILQ_FIRST(&exec->startable))) {
        TAILQ_REMOVE(&exec->startable, run, link);
        exec->n_startable--;
        exec_end_run(exec, run, status, text);
    }
}

/* n_announced: the startable runs that start, not counting central ones. */
static void fill_batches(struct exec *exec, size_t n_announced, struct batch *host,
                         struct batch *device)
{
    struct run *run;
    while ((run = TAILQ_FIRST(&exec->startable))) {
        if (!run->is_central && n_announced-- == 0)
            break;
        struct batch *batch = run->op.is_device ? device : host;
        exec_begin_slice(exec, run);
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): a kind with runs has its batch */
        batch->base.ops[batch->base.n_ops++] = &run->op;
    }
}

static void batch_put_back(struct exec *exec, struct batch *batch)
{
    if (batch)
        SLIST_INSERT_HEAD(&exec->spare_batches, batch, link);
}

static void start_batch(struct exec *exec)
{
    const size_t n_device = count_device_runs(exec), n_host = exec->n_startable - n_device;
    struct batch *host = n_host > 0 ? batch_new(exec, n_host) : NULL;
    struct batch *device = n_device > 0 ? batch_new(exec, n_device) : NULL;
    const bool has_memory = (host || n_host == 0) && (device || n_device == 0);
    const size_t n_announced = has_memory ? announce(exec) : 0;
    if (n_announced == 0) {
        batch_put_back(exec, host);
        batch_put_back(exec, device);
        fail_startable(exec);
        return;
    }
    exec->stats.batches++;
    fill_batches(exec, n_announced, host, device);
    if (device && device->base.n_ops > 0) {
        device->base.enqueued = on_batch_enqueued;
        exec->device_ops->run(exec->device_backend, &device->base);
    } else {
        batch_put_back(exec, device);
    }
    if (host && host->base.n_ops > 0)
        exec->backend_ops->run(exec->backend, &host->base);
    else
        batch_put_back(exec, host);
}

/* Take what the source gives, up to the end of a batch. Returns how many. */
static size_t take_ops(struct exec *exec)
{
    struct plan_op *op;
    size_t n = 0;
    uint64_t bytes = 0;
    while (exec->n_startable < exec->source.batch_max && bytes < exec->source.batch_bytes &&
           (op = exec->source.next(exec->source.data))) {
        n++;
        bytes += op->signature.count * dtype_bytes(op->signature.dtype);
        if (op->status == GRADD_OK)
            exec_open_run(exec, op);
        else
            exec_refuse_op(exec, op, op->status, op->text);
    }
    return n;
}

void exec_turn(struct exec *exec)
{
    if (!exec->backend || exec->is_turning) /* who announces a batch may fail the epoch */
        return;
    size_t n;
    exec->is_turning = true;
    do {
        n = take_ops(exec);
        if (exec->n_startable > 0)
            start_batch(exec);
    } while (n > 0 || exec->n_startable > 0);
    exec->is_turning = false;
}
