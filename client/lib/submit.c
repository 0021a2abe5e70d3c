/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Submission: from `struct gradd_op` to messages for the worker.
 *
 * Invariant: a submission is known to the worker as a whole or not at all. Until everything that
 * can fail has been done, nothing is sent; undoing gives back what was taken. With registered
 * memory and a recycled record, nothing is allocated on this way.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "cuda.h"

enum {
    FRAME_TARGET_BYTES = 256 << 10, /* longer batches are sent as several frames */
    BUFFERS_AN_OP = 3,              /* in, out, signal */
    SUBMIT_BYTES = 128,             /* of a Submit on the wire, without names and counts */
};

/* Arrays for one call, kept by the context between calls. */
struct submit_scratch {
    size_t capacity, even_capacity;
    size_t even_stride; /* counts per op in `even` */
    struct gradd_op *requests;
    struct op_shape *shapes;
    struct op **ops;
    Pb__Submit *submits;
    Pb__Buffer *buffers; /* three per op */
    Pb__Submit **pointers;
    uint64_t *even;
};

void submit_scratch_free(struct submit_scratch *scratch)
{
    if (!scratch)
        return;
    free(scratch->requests);
    free(scratch->shapes);
    free(scratch->ops);
    free(scratch->submits);
    free(scratch->buffers);
    free(scratch->pointers);
    free(scratch->even);
    free(scratch);
}

static bool resize(void *array, size_t n, size_t element_bytes)
{
    void **place = array, *grown = reallocarray(*place, n, element_bytes);
    if (grown)
        *place = grown;
    return grown != NULL;
}

/* Room for n ops. */
static bool scratch_reserve(struct submit_scratch *s, size_t n)
{
    if (n <= s->capacity)
        return true;
    if (!resize(&s->requests, n, sizeof *s->requests) ||
        !resize(&s->shapes, n, sizeof *s->shapes) || !resize(&s->ops, n, sizeof(void *)) ||
        !resize(&s->submits, n, sizeof *s->submits) ||
        !resize(&s->buffers, n, BUFFERS_AN_OP * sizeof *s->buffers) ||
        !resize(&s->pointers, n, sizeof(void *)))
        return false;
    s->capacity = n;
    return true;
}

/* Room for one count per op and rank, where some op leaves its counts to the library. */
static bool scratch_reserve_even(struct submit_scratch *s, size_t n, size_t n_ranks)
{
    bool is_needed = false;
    for (size_t i = 0; i < n; i++)
        is_needed |= !s->requests[i].counts && (s->requests[i].kind == GRADD_REDUCE_SCATTER ||
                                                s->requests[i].kind == GRADD_ALLTOALL);
    s->even_stride = is_needed ? n_ranks : 0;
    size_t n_even = n * s->even_stride;
    if (n_even <= s->even_capacity)
        return true;
    if (!resize(&s->even, n_even, sizeof *s->even))
        return false;
    s->even_capacity = n_even;
    return true;
}

/* Take the scratch out of the context: another thread that gets the lock meanwhile makes its own.
 */
static struct submit_scratch *scratch_take(struct gradd *g, size_t n)
{
    struct submit_scratch *s = g->scratch ? g->scratch : calloc(1, sizeof *s);
    g->scratch = NULL;
    if (s && scratch_reserve(s, n))
        return s;
    submit_scratch_free(s);
    return NULL;
}

static void scratch_put(struct gradd *g, struct submit_scratch *scratch)
{
    if (g->scratch)
        submit_scratch_free(scratch);
    else
        g->scratch = scratch;
}

/* ------------------------------------------------------------------ preparing */

/* Where is the memory: in a region, or does it need a stage? */
static int resolve(struct gradd *g, const char *name, const void *memory, uint64_t bytes,
                   struct lane *lane)
{
    if (bytes == 0)
        return 0;
    struct region *region = region_table_find(&g->regions, memory);
    if (!region) {
        lane->user = (uint8_t *)(uintptr_t)memory;
        return 0;
    }
    uint64_t offset = (uint64_t)((const uint8_t *)memory - region->base);
    if (bytes > region->bytes - offset)
        return error_set(GRADD_ERR_INVALID,
                         "\"%s\": %llu bytes at %p reach %llu bytes beyond their gradd_alloc()",
                         name, (unsigned long long)bytes, memory,
                         (unsigned long long)(bytes - (region->bytes - offset)));
    lane->region = region;
    lane->offset = offset;
    return 0;
}

static int place_buffers(struct gradd *g, const struct gradd_op *request, struct op *op)
{
    int rc = resolve(g, request->name, request->in, op->in_bytes, &op->in);
    if (rc == 0)
        rc = resolve(g, request->name, request->out, op->out_bytes, &op->out);
    if (rc < 0)
        return rc;
    /* In place, these kinds would overwrite what other ranks have still to read. */
    if (!op->is_flowing && op->out_bytes && request->in == request->out)
        op->out = (struct lane){.user = request->out};
    return 0;
}

/* The root of a broadcast has one buffer on the wire, which is read; a second one is filled here.
 */
static void skip_output_of_root(const struct gradd *g, const struct gradd_op *request,
                                struct op *op)
{
    if (request->kind != GRADD_BROADCAST || request->root != g->identity.rank)
        return;
    if (op->out_bytes && request->out != request->in)
        memcpy(request->out, request->in, op->out_bytes);
    op->out = (struct lane){0};
}

/* An enum cuda_place, or a status. Programs without CUDA come back at once. */
static int prepare_device(struct gradd *g, const struct gradd_op *request,
                          const struct op_shape *shape, struct op *op)
{
    const struct cuda_table *cuda = op->in_bytes || op->out_bytes ? cuda_driver() : NULL;
    return cuda ? cuda_op_prepare(g, cuda, request, shape, op) : CUDA_HOST;
}

static int prepare(struct gradd *g, const struct gradd_op *request, const struct op_shape *shape,
                   struct op *op, enum stage_window window)
{
    op->kind = (uint8_t)request->kind;
    op->element_bytes = (uint8_t)(gradd_dtype_size(request->dtype) ?: 1);
    op->is_flowing = request->kind == GRADD_ALLREDUCE || request->kind == GRADD_BROADCAST;
    op->count = request->kind <= GRADD_ALLTOALL ? request->count : 0;
    op->in_bytes = shape->in_bytes;
    op->out_bytes = shape->out_bytes;
    op->flow.total = op->flow.fed = op->count * op->element_bytes;
    if (request->kind == GRADD_SET_ADD) {
        op->set = (struct process_set){.size = (uint32_t)shape->n_counts, .index = -1};
        for (size_t i = 0; i < shape->n_counts; i++)
            if (shape->counts[i] == (uint64_t)g->identity.rank)
                op->set.index = (int32_t)i;
    }
    if (request->kind == GRADD_SET_REMOVE)
        op->set.id = (uint32_t)request->root;
    int rc = prepare_device(g, request, shape, op);
    if (rc != CUDA_HOST)
        return rc < 0 ? rc : 0;
    if (g->is_solo)
        return 0;
    rc = place_buffers(g, request, op);
    if (rc < 0)
        return rc;
    skip_output_of_root(g, request, op);
    op_hold_regions(op);
    if (!op->in.user && !op->out.user)
        return 0;
    op->flow.fed = 0;
    return stage_prepare(g, op, window);
}

/* Give back what prepare() took. */
static void undo(struct gradd *g, struct op **ops, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct op *op = ops[i];
        op_drop_regions(op);
        stage_release(g, op);
        if (op->cuda)
            cuda_op_release(g, op);
        op_free(&g->ops, op);
    }
}

static int prepare_all(struct gradd *g, struct submit_scratch *s, size_t n,
                       enum stage_window window)
{
    int rc = 0;
    size_t n_made = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        uint64_t *even = s->even ? s->even + i * s->even_stride : NULL;
        rc = validate_op(g, &s->requests[i], even, &s->shapes[i]);
        if (rc < 0)
            break;
        struct op *op = op_new(&g->ops);
        if (!op) {
            rc = error_set(GRADD_ERR_NO_MEMORY, "out of memory for another op in flight");
            break;
        }
        s->ops[n_made++] = op;
        rc = prepare(g, &s->requests[i], &s->shapes[i], op, window);
    }
    if (rc == 0 && g->cuda)
        rc = cuda_ops_join(g, s->ops, n);
    /* Preparing may have let go of the lock. */
    if (rc == 0)
        rc = context_check(g);
    if (rc == 0 && n > g->max_in_flight - (g->ops.n_running < g->max_in_flight ? g->ops.n_running
                                                                               : g->max_in_flight))
        rc = error_set(GRADD_ERR_NO_MEMORY,
                       "job %s, rank %d: %u ops in flight and %zu more, the job allows %u: wait "
                       "for some first",
                       g->identity.job, g->identity.rank, g->ops.n_running, n, g->max_in_flight);
    if (rc == 0 && s->ops[0]->cuda && !g->is_solo)
        rc = cuda_ops_issue(g, s->ops, n);
    if (rc < 0)
        undo(g, s->ops, n_made);
    return rc;
}

/* ------------------------------------------------------------------ sending */

static Pb__Buffer *describe_lane(const struct lane *lane, Pb__Buffer *out)
{
    if (!lane->region)
        return NULL;
    pb__buffer__init(out);
    out->region = lane->region->id;
    out->offset = lane->offset;
    out->ring_bytes = lane->ring_bytes;
    return out;
}

enum { DIMS_MAX = 32 }; /* a tensor with more dimensions is compared by its count alone */

static void describe(const struct gradd_op *request, const struct op_shape *shape,
                     const struct op *op, const char *group, Pb__Buffer *buffers, Pb__Submit *out)
{
    pb__submit__init(out);
    out->id = (uint64_t)op->id;
    out->name = (char *)(uintptr_t)request->name;
    out->kind = (uint32_t)request->kind;
    out->dtype = (uint32_t)request->dtype;
    out->redop = (uint32_t)request->redop;
    out->count = op->count;
    out->in = describe_lane(&op->in, &buffers[0]);
    out->out = describe_lane(&op->out, &buffers[1]);
    out->out_capacity = request->out_capacity;
    out->counts = (uint64_t *)(uintptr_t)shape->counts;
    out->n_counts = shape->n_counts;
    out->root = request->root;
    out->prescale = shape->prescale;
    out->postscale = shape->postscale;
    out->set = request->set;
    if (group) {
        out->group = (char *)(uintptr_t)group;
        out->group_size = op->lead->n_ops;
    }
    out->check_finite = request->check_finite != 0;
    if (request->n_dims <= DIMS_MAX) {
        out->dims = (uint64_t *)(uintptr_t)request->dims;
        out->n_dims = request->dims ? request->n_dims : 0;
    }
    out->ready = op->is_flowing && !op->cuda ? op->flow.fed / op->element_bytes : op->count;
    if (op->cuda)
        cuda_op_describe(op, &buffers[2], out);
}

/* The group's name is the same on all ranks, in whatever order they list its ops. */
static const char *name_group(const struct submit_scratch *s, size_t n)
{
    const char *least = s->requests[0].name;
    for (size_t i = 1; i < n; i++)
        if (strcmp(s->requests[i].name, least) < 0)
            least = s->requests[i].name;
    return n > 1 ? least : NULL;
}

/* To the worker; or, with frames, there, to be sent later. */
static void push_batch(struct gradd *g, Pb__Submit **submits, size_t n, struct wire_out *frames)
{
    Pb__SubmitBatch batch = PB__SUBMIT_BATCH__INIT;
    batch.epoch = g->epoch;
    batch.submits = submits;
    batch.n_submits = n;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_SUBMIT_BATCH;
    envelope.submit_batch = &batch;
    int rc =
        frames ? wire_out_push(frames, &envelope, NULL, 0) : channel_push(g, &envelope, NULL, 0);
    if (rc < 0)
        context_fail(g, GRADD_ERR_NO_MEMORY, "job %s: a submission could not be sent: %s",
                     g->identity.job, strerror(-rc));
}

static void push_all(struct gradd *g, struct submit_scratch *s, size_t n, struct wire_out *frames)
{
    const char *group = name_group(s, n);
    size_t first = 0, bytes = 0;
    for (size_t i = 0; i < n; i++) {
        size_t more = SUBMIT_BYTES + strlen(s->requests[i].name) + (group ? strlen(group) : 0) +
                      10 * s->shapes[i].n_counts;
        if (i > first && bytes + more > FRAME_TARGET_BYTES) {
            push_batch(g, s->pointers + first, i - first, frames);
            first = i;
            bytes = 0;
        }
        bytes += more;
        s->pointers[i] = &s->submits[i];
        describe(&s->requests[i], &s->shapes[i], s->ops[i], group, s->buffers + BUFFERS_AN_OP * i,
                 &s->submits[i]);
    }
    push_batch(g, s->pointers + first, n - first, frames);
}

static void send_all(struct gradd *g, struct submit_scratch *s, size_t n)
{
    push_all(g, s, n, NULL);
    channel_flush(g);
}

/* Have the submission sent by its stream, behind the copies. */
static void send_staged(struct gradd *g, struct submit_scratch *s, size_t n)
{
    struct cuda_launch *launch = cuda_launch_new(g);
    if (!launch) {
        context_fail(g, GRADD_ERR_NO_MEMORY, "job %s: out of memory", g->identity.job);
        return;
    }
    push_all(g, s, n, cuda_launch_frames(launch));
    cuda_ops_launch(g, s->ops, n, launch);
}

/* From here on the ops have ids and will end exactly once. */
static struct op *start_all(struct gradd *g, struct submit_scratch *s, size_t n)
{
    struct op *lead = s->ops[0];
    lead->n_ops = lead->n_running = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        s->ops[i]->lead = lead;
        s->ops[i]->next = i + 1 < n ? s->ops[i + 1] : NULL;
        op_start(&g->ops, s->ops[i]);
        if (s->ops[i]->is_flowing && (s->ops[i]->in.user || s->ops[i]->out.user))
            stage_fill_chunk(s->ops[i]);
    }
    return lead;
}

static void run_solo(struct gradd *g, struct submit_scratch *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const char *text = NULL;
        int status = solo_run(g, s->ops[i], &s->requests[i], &s->shapes[i], &text);
        context_end_op(g, s->ops[i], status, text);
    }
    channel_notify(g);
}

static gradd_handle submit_locked(struct gradd *g, struct submit_scratch *s, size_t n,
                                  enum stage_window window)
{
    int rc = prepare_all(g, s, n, window);
    if (rc < 0)
        return rc;
    gradd_handle handle = start_all(g, s, n)->id;
    if (g->is_solo) {
        run_solo(g, s, n);
        return handle;
    }
    if (cuda_op_is_staged(s->ops[0]))
        send_staged(g, s, n);
    else
        send_all(g, s, n);
    for (size_t i = 0; i < n; i++)
        if (s->ops[i]->is_flowing && (s->ops[i]->in.user || s->ops[i]->out.user))
            channel_feed(g, s->ops[i]);
    if (g->has_ended)
        channel_notify(g);
    return handle;
}

/* What the first version of the struct had. */
#define FIRST_OP_BYTES offsetof(struct gradd_op, check_finite)

/* Copy the requests, of whatever version of the struct the caller was compiled with. */
static int copy_requests(const struct gradd_op *ops, size_t n, struct gradd_op *out)
{
    const uint8_t *at = (const uint8_t *)ops;
    for (size_t i = 0; i < n; i++) {
        out[i] = (struct gradd_op){0};
        int rc = validate_struct(&out[i], sizeof *out, at, FIRST_OP_BYTES, "struct gradd_op");
        if (rc < 0)
            return rc;
        at += ops->struct_size;
    }
    return 0;
}

gradd_handle submit_ops(struct gradd *g, const struct gradd_op *ops, size_t n,
                        enum stage_window window)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    gradd_handle handle = context_check(g);
    if (handle == 0 && (!ops || n == 0 || n > (size_t)1 << OP_SLOT_BITS))
        handle = error_set(GRADD_ERR_INVALID, "a submission of %zu ops", ops ? n : 0);
    struct submit_scratch *scratch = NULL;
    if (handle == 0 && !(scratch = scratch_take(g, n)))
        handle = error_set(GRADD_ERR_NO_MEMORY, "out of memory for a submission of %zu ops", n);
    if (handle == 0)
        handle = copy_requests(ops, n, scratch->requests);
    if (handle == 0 && !scratch_reserve_even(scratch, n, (size_t)g->identity.size))
        handle = error_set(GRADD_ERR_NO_MEMORY, "out of memory for the counts of %zu ops", n);
    if (handle == 0)
        handle = submit_locked(g, scratch, n, window);
    if (scratch)
        scratch_put(g, scratch);
    context_leave(g);
    return handle;
}

gradd_handle gradd_submit(struct gradd *g, const struct gradd_op *ops, size_t n)
{
    return submit_ops(g, ops, n, STAGE_ASYNC);
}
