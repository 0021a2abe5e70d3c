/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPUs that a context uses, their events, and the end of all that the driver knows of it.
 *
 * Invariant: a GPU is in the list only when the program has a context on it; what is pushed as the
 * current context is popped in the same function.
 */
#include "cuda.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static const uint64_t streams_grace_ns = 10000000000u; /* for host functions at the end */

int cuda_get(struct gradd *g, const struct cuda_table *table, struct cuda **out)
{
    if (!g->cuda) {
        struct cuda *cuda = calloc(1, sizeof *cuda);
        if (!cuda)
            return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
        cuda->table = table;
        cuda->pinned.new_region = cuda_pinned_new;
        cuda->pinned.free_region = cuda_pinned_free;
        cuda->pinned.owner = cuda;
        cuda->pinned.limit = g->memory_bytes / (2 * (uint64_t)(g->identity.local_size ?: 1));
        g->cuda = cuda;
    }
    *out = g->cuda;
    return 0;
}

int cuda_failure(const struct cuda *cuda, CUresult rc, const char *what)
{
    return error_set(rc == CUDA_ERROR_OUT_OF_MEMORY ? GRADD_ERR_NO_MEMORY : GRADD_ERR_INTERNAL,
                     "%s: %s", what, cuda_table_error(cuda->table, rc));
}

/* The thread's, within cuda_enter(). While a stream is captured the driver answers some calls, such
 * as asking an event, by giving the capture up, unless the thread says that it knows what it does.
 */
static _Thread_local struct {
    unsigned depth;
    int outer_mode;
} capture;

int cuda_enter(const struct cuda *cuda, const struct cuda_gpu *gpu)
{
    CUresult rc = cuda->table->ctx_push(gpu->context);
    if (rc != CUDA_SUCCESS)
        return cuda_failure(cuda, rc, "the GPU's context");
    if (capture.depth++ == 0) {
        capture.outer_mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        cuda->table->capture_mode(&capture.outer_mode);
    }
    return 0;
}

void cuda_leave(const struct cuda *cuda)
{
    CUcontext ignored;
    if (--capture.depth == 0)
        cuda->table->capture_mode(&capture.outer_mode);
    cuda->table->ctx_pop(&ignored);
}

const void *cuda_thread_of(CUstream stream)
{
    static _Thread_local char self;
    return cuda_is_per_thread(stream) ? &self : NULL;
}

/* ------------------------------------------------------------------ GPUs */

/* The program's context on this GPU; none is made. */
static int find_context(const struct cuda_table *table, int ordinal, CUcontext of_memory,
                        CUstream stream, struct cuda_gpu *gpu)
{
    if (of_memory) {
        gpu->context = of_memory;
        return 0;
    }
    if ((uintptr_t)stream > CU_STREAM_PER_THREAD &&
        table->stream_ctx(stream, &gpu->context) == CUDA_SUCCESS)
        return 0;
    CUdevice current;
    if (table->ctx_device(&current) == CUDA_SUCCESS && current == gpu->ordinal &&
        table->ctx_current(&gpu->context) == CUDA_SUCCESS)
        return 0;
    unsigned flags;
    int is_active = 0;
    if (table->primary_state(gpu->ordinal, &flags, &is_active) == CUDA_SUCCESS && is_active &&
        table->primary_retain(&gpu->context, gpu->ordinal) == CUDA_SUCCESS) {
        gpu->is_retained = true;
        return 0;
    }
    return error_set(GRADD_ERR_INVALID,
                     "GPU %d: this process has no CUDA context there: make one first", ordinal);
}

static bool has_attribute(const struct cuda_table *table, int attribute, CUdevice device)
{
    int value = 0;
    return table->device_attribute(&value, attribute, device) == CUDA_SUCCESS && value;
}

static struct cuda_gpu *new_gpu(struct cuda *cuda, int ordinal)
{
    const struct cuda_table *table = cuda->table;
    struct cuda_gpu *gpu = calloc(1, sizeof *gpu);
    CUdevice device;
    CUuuid uuid;
    CUresult rc = gpu ? table->device_get(&device, ordinal) : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS)
        rc = table->device_uuid(&uuid, device);
    if (rc != CUDA_SUCCESS) {
        free(gpu);
        cuda_failure(cuda, rc, "the GPU's UUID");
        return NULL;
    }
    gpu->ordinal = ordinal;
    memcpy(gpu->uuid, uuid.bytes, sizeof gpu->uuid);
    gpu->has_events = has_attribute(table, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, device);
    gpu->has_flags =
        table->has_flags &&
        has_attribute(table, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device);
    gpu->has_posix =
        table->has_vmm &&
        has_attribute(table, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) &&
        has_attribute(table, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                      device);
    gpu->bounce.new_region = cuda_bounce_new;
    gpu->bounce.free_region = cuda_bounce_free;
    gpu->bounce.owner = gpu;
    gpu->bounce.limit = UINT64_MAX;
    return gpu;
}

int cuda_gpu_get(struct cuda *cuda, int ordinal, CUcontext context, void *stream,
                 struct cuda_gpu **out)
{
    for (struct cuda_gpu *gpu = cuda->gpus; gpu; gpu = gpu->next) {
        if (gpu->ordinal == ordinal) {
            *out = gpu;
            return 0;
        }
    }
    struct cuda_gpu *gpu = new_gpu(cuda, ordinal);
    if (!gpu)
        return GRADD_ERR_INTERNAL;
    int rc = find_context(cuda->table, ordinal, context, stream, gpu);
    if (rc < 0) {
        free(gpu);
        return rc;
    }
    gpu->next = cuda->gpus;
    cuda->gpus = gpu;
    *out = gpu;
    return 0;
}

/* ------------------------------------------------------------------ events */

struct cuda_event *cuda_event_take(struct cuda *cuda, struct cuda_gpu *gpu)
{
    struct cuda_event *event = gpu->idle_events;
    if (event) {
        gpu->idle_events = event->next;
        return event;
    }
    event = calloc(1, sizeof *event);
    CUresult rc = event ? cuda->table->event_create(&event->event, CU_EVENT_DISABLE_TIMING)
                        : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS)
        return event;
    free(event);
    cuda_failure(cuda, rc, "an event");
    return NULL;
}

void cuda_event_put(struct cuda_gpu *gpu, struct cuda_event *event)
{
    if (!event)
        return;
    event->next = gpu->idle_events;
    gpu->idle_events = event;
}

void cuda_events_reserve(struct cuda *cuda, struct cuda_gpu *gpu, unsigned n)
{
    if (n == 0)
        return;
    struct cuda_event *event = cuda_event_take(cuda, gpu);
    cuda_events_reserve(cuda, gpu, n - 1);
    cuda_event_put(gpu, event);
}

/* ------------------------------------------------------------------ the end */

void cuda_failed(struct gradd *g)
{
    for (unsigned i = 0; i < g->cuda->n_queues; i++)
        g->cuda->queues[i]->is_answered = true;
    cuda_poison(g->cuda);
}

/* The worker closes its end of the socket when it has left the trainer's events alone. */
static bool worker_is_gone(const void *arg)
{
    const struct gradd *g = arg;
    return g->is_solo || g->worker.is_over;
}

/* Read to the end of the worker's stream: nothing that it says matters any more. */
static void await_worker(struct gradd *g, uint64_t deadline)
{
    while (!worker_is_gone(g) && context_now_ns() < deadline) {
        if (wire_in_read(&g->worker.in, g->worker.fd) < 0 || g->worker.in.is_eof) {
            g->worker.is_over = true;
            return;
        }
        struct wire_frame frame;
        bool has_frames = false;
        int next;
        while ((next = wire_in_next(&g->worker.in, &frame)) == 1) {
            wire_frame_close_fds(&frame);
            has_frames = true;
        }
        if (next < 0)
            return;
        if (!has_frames)
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

/* What uses the library's memory must have ended before it is unmapped. */
static bool await_streams(struct gradd *g, uint64_t deadline)
{
    struct cuda *cuda = g->cuda;
    for (;;) {
        cuda_ops_collect(g);
        if (atomic_load(&cuda->n_launches) == 0 && !cuda->draining && cuda_uses_are_over(cuda))
            return true;
        if (context_now_ns() >= deadline)
            return false;
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

static void free_events(struct cuda_gpu *gpu)
{
    while (gpu->idle_events) {
        struct cuda_event *event = gpu->idle_events;
        gpu->idle_events = event->next;
        free(event);
    }
}

static void stop_gpu(struct cuda *cuda, struct cuda_gpu *gpu)
{
    if (cuda_enter(cuda, gpu) == 0) {
        for (struct cuda_event *event = gpu->idle_events; event; event = event->next)
            cuda->table->event_destroy(event->event);
        cuda_leave(cuda);
    }
    if (gpu->is_retained)
        cuda->table->primary_release(gpu->ordinal);
}

bool cuda_stop(struct gradd *g)
{
    struct cuda *cuda = g->cuda;
    pthread_mutex_lock(&g->lock);
    const uint64_t deadline = context_now_ns() + streams_grace_ns;
    await_worker(g, deadline);
    cuda_poison(cuda); /* streams that wait go on, to the copies below */
    struct op *op;
    for (uint32_t slot = 0; (op = op_at(&g->ops, slot)); slot++)
        if (op->state != OP_FREE && op->cuda)
            cuda_op_release(g, op);
    bool is_quiet = await_streams(g, deadline);
    cuda_watch_stop(cuda);
    if (is_quiet) {
        cuda_queues_stop(cuda);
        cuda_pinned_stop(cuda);
        cuda_pages_stop(cuda);
        cuda_uses_stop(cuda);
        cuda_regions_stop(g);
        for (struct cuda_gpu *gpu = cuda->gpus; gpu; gpu = gpu->next)
            stop_gpu(cuda, gpu);
    }
    pthread_mutex_unlock(&g->lock);
    return is_quiet;
}

void cuda_free(struct cuda *cuda)
{
    if (!cuda)
        return;
    cuda_watch_free(cuda);
    cuda_launches_free(cuda);
    cuda_ops_free(cuda);
    cuda_regions_free(cuda);
    cuda_words_free(cuda);
    cuda_uses_free(cuda);
    for (unsigned i = 0; i < cuda->n_queues; i++)
        free(cuda->queues[i]);
    stage_pool_deinit(&cuda->pinned);
    cuda_pages_free(cuda);
    while (cuda->gpus) {
        struct cuda_gpu *gpu = cuda->gpus;
        cuda->gpus = gpu->next;
        free_events(gpu);
        free(gpu);
    }
    free(cuda);
}
