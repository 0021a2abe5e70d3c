/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams that use pages of words: until they have come past what they were given, the pages stay
 * registered. The driver promises neither that undoing a registration waits, nor that it does not;
 * what a stream reads or writes afterwards is a fault of the program's context.
 *
 * Invariant: for each stream that was given a wait or a write, the event of its record was recorded
 * behind the last one. A record whose event has happened may be given to another stream.
 */
#include <stdlib.h>

#include "cuda.h"

struct cuda_use {
    struct cuda_gpu *gpu;
    CUstream stream;
    const void *thread; /* of a per-thread stream; else NULL */
    struct cuda_event *event;
    struct cuda_use *next;
};

static bool is_over(const struct cuda *cuda, const struct cuda_use *use)
{
    return cuda->table->event_query(use->event->event) != CUDA_ERROR_NOT_READY;
}

/* The stream's record, or one of the same GPU that is not needed any more. */
static struct cuda_use *find(struct cuda *cuda, const struct cuda_gpu *gpu, CUstream stream)
{
    const void *thread = cuda_thread_of(stream);
    struct cuda_use *use = cuda->uses;
    while (use && !(use->gpu == gpu && use->stream == stream && use->thread == thread))
        use = use->next;
    if (use)
        return use;
    for (use = cuda->uses; use; use = use->next)
        if (use->gpu == gpu && is_over(cuda, use))
            break;
    if (use) {
        use->stream = stream;
        use->thread = thread;
    }
    return use;
}

static struct cuda_use *add(struct cuda *cuda, struct cuda_gpu *gpu, CUstream stream)
{
    struct cuda_use *use = calloc(1, sizeof *use);
    if (!use || !(use->event = cuda_event_take(cuda, gpu))) {
        free(use);
        return NULL;
    }
    use->gpu = gpu;
    use->stream = stream;
    use->thread = cuda_thread_of(stream);
    use->next = cuda->uses;
    cuda->uses = use;
    return use;
}

void cuda_use_note(struct cuda *cuda, struct cuda_gpu *gpu, CUstream stream)
{
    struct cuda_use *use = find(cuda, gpu, stream);
    if (!use)
        use = add(cuda, gpu, stream);
    if (!use || cuda->table->event_record(use->event->event, stream) != CUDA_SUCCESS)
        cuda->has_unknown_use = true;
}

bool cuda_uses_are_over(const struct cuda *cuda)
{
    bool are_over = !cuda->has_unknown_use;
    for (const struct cuda_use *use = cuda->uses; use && are_over; use = use->next) {
        if (cuda_enter(cuda, use->gpu) < 0)
            continue; /* the context is gone, and its streams with it */
        are_over = is_over(cuda, use);
        cuda_leave(cuda);
    }
    return are_over;
}

void cuda_uses_stop(struct cuda *cuda)
{
    for (struct cuda_use *use = cuda->uses; use; use = use->next)
        cuda_event_put(use->gpu, use->event);
}

void cuda_uses_free(struct cuda *cuda)
{
    while (cuda->uses) {
        struct cuda_use *use = cuda->uses;
        cuda->uses = use->next;
        free(use);
    }
}
