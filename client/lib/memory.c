/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the worker knows: registration, and gradd_alloc().
 *
 * Invariant: a region is in the context's table only while the worker has it; it is unmapped here
 * after Unregister was queued, and the worker keeps its own mapping as long as it needs it.
 */
#include <string.h>
#include <unistd.h>

#include "context.h"
#include "cuda.h"

static bool is_answered(const void *arg)
{
    return ((const struct region *)arg)->is_answered;
}

static void forget_unanswered(struct gradd *g, const struct region *region)
{
    struct region **at = &g->unanswered;
    while (*at && *at != region)
        at = &(*at)->next;
    if (*at)
        *at = region->next;
}

int memory_await_answer(struct gradd *g, struct region *region)
{
    region->is_answered = g->failure; /* nobody would answer */
    region->next = g->unanswered;
    g->unanswered = region;
    channel_flush(g);
    channel_wait(g, is_answered, region, WAIT_FOREVER);
    forget_unanswered(g, region);
    if (g->failure)
        return context_check(g);
    if (region->status != GRADD_OK)
        return error_set(region->status, "%s",
                         region->text ? region->text : "the worker refused shared memory");
    return 0;
}

/* Tell the worker, wait for its answer. */
static int register_region(struct gradd *g, struct region *region, int fd)
{
    region->id = ++g->next_region;
    Pb__Register message = PB__REGISTER__INIT;
    message.region = region->id;
    message.bytes = region->bytes;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_REGISTER;
    envelope.register_ = &message;
    int rc = channel_push(g, &envelope, &fd, 1);
    if (rc < 0)
        return error_set(GRADD_ERR_NO_MEMORY, "shared memory of %zu bytes: %s", region->bytes,
                         strerror(-rc));
    return memory_await_answer(g, region);
}

static int new_region(struct gradd *g, size_t bytes, bool is_staging, struct region **out)
{
    struct region *region;
    int fd;
    if (bytes > g->memory_bytes)
        return error_set(GRADD_ERR_NO_MEMORY,
                         "job %s: shared memory of %zu bytes, the job's quota is %llu",
                         g->identity.job, bytes, (unsigned long long)g->memory_bytes);
    pthread_mutex_unlock(&g->lock);
    int rc = region_map(bytes, &region, &fd);
    pthread_mutex_lock(&g->lock);
    if (rc < 0)
        return rc;
    region->is_staging = is_staging;
    rc = context_check(g);
    if (rc == 0 && !g->is_solo)
        rc = register_region(g, region, fd);
    close(fd);
    if (rc == 0 && !is_staging && region_table_add(&g->regions, region) < 0) {
        memory_free_region(g, region);
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    }
    if (rc == 0)
        *out = region;
    else
        region_unmap(region);
    return rc;
}

int memory_new_region(struct gradd *g, size_t bytes, bool is_staging, struct region **out)
{
    int rc = new_region(g, bytes, is_staging, out);
    if (rc != GRADD_ERR_NO_MEMORY || g->failure)
        return rc;
    /* Idle staging buffers are ours to return to the job's quota. */
    uint64_t before = g->stage.bytes;
    stage_trim(g, &g->stage, UINT64_MAX);
    return g->stage.bytes < before ? new_region(g, bytes, is_staging, out) : rc;
}

void memory_unregister(struct gradd *g, const struct region *region)
{
    if (g->is_solo || g->failure)
        return;
    Pb__Unregister message = PB__UNREGISTER__INIT;
    message.region = region->id;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_UNREGISTER;
    envelope.unregister = &message;
    channel_push(g, &envelope, NULL, 0);
    channel_flush(g);
}

void memory_free_region(struct gradd *g, struct region *region)
{
    memory_unregister(g, region);
    region_unmap(region);
}

/* ------------------------------------------------------------------ memory */

void *gradd_alloc(struct gradd *g, size_t bytes)
{
    if (context_enter(g) < 0)
        return NULL;
    struct region *region;
    int rc = context_check(g);
    if (rc == 0)
        rc = memory_new_region(g, bytes, false, &region);
    void *memory = rc == 0 ? region->base : NULL;
    context_leave(g);
    return memory;
}

int gradd_keep(struct gradd *g, void *memory)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    struct region *region = region_table_find(&g->regions, memory);
    if (region && region->base == memory)
        region->is_kept = true;
    else
        rc = error_set(GRADD_ERR_INVALID, "%p was not returned by gradd_alloc() of this context",
                       memory);
    context_leave(g);
    return rc;
}

int gradd_free(struct gradd *g, void *memory)
{
    if (!memory)
        return GRADD_OK;
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    struct region *region = region_table_find(&g->regions, memory);
    if (!region && g->cuda && cuda_free_device(g, memory, &rc)) {
        /* rc is set */
    } else if (!region || region->base != memory) {
        rc = error_set(GRADD_ERR_INVALID, "%p was not returned by gradd_alloc() of this context",
                       memory);
    } else if (region->n_uses > 0) {
        rc = error_set(GRADD_ERR_INVALID, "memory %p is in use by %u op%s in flight: wait first",
                       memory, region->n_uses, region->n_uses == 1 ? "" : "s");
    } else {
        region->is_kept = false;
        region_table_remove(&g->regions, region);
        memory_free_region(g, region);
    }
    context_leave(g);
    return rc;
}
