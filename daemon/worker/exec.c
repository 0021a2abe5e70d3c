/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/exec.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/clock.h"

enum run_state {
    RUN_STARTABLE, /* on exec->startable */
    RUN_RUNNING,   /* in a batch */
    RUN_STARVED,   /* on exec->starved: a rank has not fed enough */
    RUN_COUNTING,  /* on exec->counting: it has run, other nodes still count its NaN */
    RUN_BROKEN,    /* on exec->broken: something is lost; the epoch's failure ends it in words */
};

/* An op being executed. Recycled. */
struct run {
    struct backend_op op; /* first: batches hold pointers to it */
    struct plan_op *plan_op;
    struct backend_part *parts;
    _Atomic uint64_t *nonfinite; /* as many as parts */
    uint32_t parts_capacity;
    uint64_t done;       /* elements */
    uint64_t starved_ns; /* since when, while RUN_STARVED */
    bool is_stalled;     /* reported by exec_check() */
    bool is_central;     /* runs on this node alone, for ranks of others too */
    enum run_state state;
    TAILQ_ENTRY(run) link; /* startable, starved, counting, broken or spare */
    SLIST_ENTRY(run) in_all;
};
TAILQ_HEAD(run_list, run);

struct batch {
    struct backend_batch base; /* first */
    struct exec *exec;
    size_t capacity;
    SLIST_ENTRY(batch) link; /* while spare */
    SLIST_ENTRY(batch) in_all;
};

struct exec {
    struct exec_source source;
    const struct exec_ops *ops;
    void *data;
    const struct backend_ops *backend_ops;
    struct backend *backend; /* NULL: not yet */
    const struct backend_ops *device_ops;
    struct backend *device_backend; /* NULL: none */
    const uint32_t *node_of;
    struct plan_op **batch_ops; /* scratch for on_batch() */
    size_t batch_ops_capacity;
    struct run_list startable, starved, counting, broken, spare;
    size_t n_startable, n_running;
    SLIST_HEAD(, batch) spare_batches, all_batches;
    SLIST_HEAD(, run) all_runs;
    bool is_turning;
    int aborted; /* exec_abort(): a status for runs that starve from now on */
    char abort_text[512];
    struct exec_stats stats;
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
        free(run->parts);
        free((void *)run->nonfinite);
        free(run);
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

const struct exec_stats *exec_stats(const struct exec *exec)
{
    return &exec->stats;
}

/* ------------------------------------------------------------------ ends */

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

static void end_run(struct exec *exec, struct run *run, int status, const char *text)
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

/* ------------------------------------------------------------------ starts */

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
        end_run(exec, run, exec->aborted, exec->abort_text);
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

static void open_run(struct exec *exec, struct plan_op *op)
{
    char text[400];
    take_counts(op);
    const char *wrong = check_op(exec, op, text, sizeof text);
    struct run *run = wrong ? NULL : run_new(exec, op->n_ranks);
    if (!run) {
        tell_parts(op, wrong ? GRADD_ERR_INVALID : GRADD_ERR_NO_MEMORY,
                   wrong ? wrong : "the worker has no memory for this op", NULL);
        exec->source.done(exec->source.data, op);
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

/* ------------------------------------------------------------------ batches */

static void on_batch_enqueued(void *data, struct backend_batch *base);
static void on_batch_done(void *data, struct backend_batch *base);

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
    batch->exec = exec;
    batch->base.n_ops = 0;
    batch->base.enqueued = NULL;
    batch->base.done = on_batch_done;
    batch->base.data = exec;
    return batch;
}

/* Tell who wants to know what starts now, as one batch on every node. False: no memory. */
static bool announce(struct exec *exec)
{
    if (!exec->ops->on_batch)
        return true;
    if (exec->batch_ops_capacity < exec->n_startable) {
        struct plan_op **ops = realloc(exec->batch_ops, exec->n_startable * sizeof(*ops));
        if (!ops)
            return false;
        exec->batch_ops = ops;
        exec->batch_ops_capacity = exec->n_startable;
    }
    size_t n = 0;
    struct run *run;
    TAILQ_FOREACH(run, &exec->startable, link)
    if (!run->is_central)
        exec->batch_ops[n++] = run->plan_op;
    if (n > 0)
        exec->ops->on_batch(exec->data, exec->batch_ops, n);
    return true;
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
    struct run *run;
    while ((run = TAILQ_FIRST(&exec->startable))) {
        TAILQ_REMOVE(&exec->startable, run, link);
        exec->n_startable--;
        end_run(exec, run, GRADD_ERR_NO_MEMORY, "the worker has no memory for a batch");
    }
}

static void fill_batches(struct exec *exec, struct batch *host, struct batch *device)
{
    struct run *run;
    while ((run = TAILQ_FIRST(&exec->startable))) {
        struct batch *batch = run->op.is_device ? device : host;
        TAILQ_REMOVE(&exec->startable, run, link);
        exec->n_startable--;
        run->op.begin = run->done;
        run->op.end = is_sliced(run->plan_op) ? ready_of(run->plan_op) : 0;
        run->state = RUN_RUNNING;
        exec->n_running++;
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
    if ((n_host > 0 && !host) || (n_device > 0 && !device) || !announce(exec)) {
        batch_put_back(exec, host);
        batch_put_back(exec, device);
        fail_startable(exec);
        return;
    }
    exec->stats.batches++;
    fill_batches(exec, host, device);
    if (device) {
        device->base.enqueued = on_batch_enqueued;
        exec->device_ops->run(exec->device_backend, &device->base);
    }
    if (host)
        exec->backend_ops->run(exec->backend, &host->base);
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

static void on_slice_done(struct exec *exec, struct run *run)
{
    struct plan_op *op = run->plan_op;
    run->done = run->op.end;
    if (!is_sliced(op) || run->done == op->signature.count) {
        end_run(exec, run, GRADD_OK, "");
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
        end_run(exec, run, run->op.status, run->op.text);
    } else if (exec->aborted) {
        end_run(exec, run, exec->aborted, exec->abort_text);
    } else {
        run->state = RUN_BROKEN;
        TAILQ_INSERT_TAIL(&exec->broken, run, link);
    }
}

static void on_batch_done(void *data, struct backend_batch *base)
{
    struct exec *exec = data;
    for (size_t i = 0; i < base->n_ops; i++) {
        struct run *run = (struct run *)base->ops[i];
        exec->n_running--;
        if (run->op.status == GRADD_OK)
            on_slice_done(exec, run);
        else
            on_slice_failed(exec, run);
    }
    SLIST_INSERT_HEAD(&exec->spare_batches, (struct batch *)base, link);
    if (exec->is_turning)
        return; /* exec_turn() goes on */
    exec_turn(exec);
    exec->ops->on_flush(exec->data);
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
        if (op->status == GRADD_OK) {
            open_run(exec, op);
        } else {
            tell_parts(op, op->status, op->text, NULL);
            exec->source.done(exec->source.data, op);
        }
    }
    return n;
}

void exec_turn(struct exec *exec)
{
    if (!exec->backend)
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

void exec_feed(struct exec *exec, void *data)
{
    struct run *run = data;
    if (run->state != RUN_STARVED || ready_of(run->plan_op) <= run->done)
        return;
    TAILQ_REMOVE(&exec->starved, run, link);
    set_state(exec, run, RUN_STARTABLE);
}

bool exec_has_broken(const struct exec *exec)
{
    return !TAILQ_EMPTY(&exec->broken);
}

bool exec_has_starved(const struct exec *exec)
{
    return !TAILQ_EMPTY(&exec->starved);
}

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
    end_run(exec, run, GRADD_ERR_TIMEOUT, text);
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

void exec_abort(struct exec *exec, int status, const char *text)
{
    exec->aborted = status;
    snprintf(exec->abort_text, sizeof exec->abort_text, "%s", text);
    struct run *run;
    while ((run = TAILQ_FIRST(&exec->starved))) {
        TAILQ_REMOVE(&exec->starved, run, link);
        end_run(exec, run, status, exec->abort_text);
    }
    while ((run = TAILQ_FIRST(&exec->counting))) {
        TAILQ_REMOVE(&exec->counting, run, link);
        finish_run(exec, run, status, exec->abort_text, NULL);
    }
    while ((run = TAILQ_FIRST(&exec->broken))) {
        TAILQ_REMOVE(&exec->broken, run, link);
        end_run(exec, run, status, exec->abort_text);
    }
}
