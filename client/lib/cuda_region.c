/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocations that the worker knows: registered once, found again by address and buffer id.
 *
 * Invariant: a registration is used only when every allocation below the tensor has the buffer id
 * that it had when it was registered: an address that was freed and given out again misses. What
 * has missed is unregistered by a message that nobody waits for, once no op uses it.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "cuda_allocation.h"

static bool covers(const struct cuda_region *r, CUdeviceptr at, uint64_t bytes)
{
    CUdeviceptr base = (uintptr_t)r->region.base;
    return at >= base && at - base <= r->region.bytes && bytes <= r->region.bytes - (at - base);
}

static bool overlaps(const struct cuda_region *r, CUdeviceptr at, uint64_t bytes)
{
    CUdeviceptr base = (uintptr_t)r->region.base;
    return at < base + r->region.bytes && base < at + bytes;
}

/* ------------------------------------------------------------------ the list */

static void unlink_region(struct cuda *cuda, struct cuda_region *r)
{
    struct cuda_region **at = &cuda->regions;
    while (*at && *at != r)
        at = &(*at)->next;
    if (!*at)
        return;
    *at = r->next;
    cuda->n_regions--;
}

static void link_region(struct cuda *cuda, struct cuda_region *r)
{
    r->next = cuda->regions;
    cuda->regions = r;
    cuda->n_regions++;
}

void cuda_region_free(struct cuda_region *r)
{
    free(r->chunk_ids);
    free(r->region.text);
    free(r);
}

static bool is_idle(const struct cuda_region *r)
{
    return r->region.n_uses == 0 && r->n_pins == 0 && !r->is_pending;
}

static void drop(struct gradd *g, struct cuda_region *r)
{
    unlink_region(g->cuda, r);
    if (r->region.status == GRADD_OK)
        memory_unregister(g, &r->region);
    cuda_region_free(r);
}

/* Let go of what is stale, and of what was used longest ago when there are too many. */
static void sweep(struct gradd *g)
{
    struct cuda *cuda = g->cuda;
    struct cuda_region *next, *oldest = NULL;
    for (struct cuda_region *r = cuda->regions; r; r = next) {
        next = r->next;
        if (!is_idle(r))
            continue;
        if (r->is_stale)
            drop(g, r);
        else
            oldest = r;
    }
    if (cuda->n_regions >= CUDA_REGIONS_MAX && oldest)
        drop(g, oldest);
}

/* ------------------------------------------------------------------ finding */

/* Have the chunks from `at` on the ids that they had? */
static bool has_same_chunks(const struct cuda *cuda, const struct cuda_region *r, CUdeviceptr at,
                            uint64_t bytes)
{
    CUdeviceptr chunk = (uintptr_t)r->region.base;
    for (unsigned i = 0; i < r->n_chunks && chunk < at + bytes; i++) {
        CUdeviceptr end = chunk + r->chunk_bytes[i];
        struct cuda_memory memory;
        if (end > at && (!cuda_memory_chunk(cuda->table, (void *)(uintptr_t)chunk, &memory) ||
                         memory.id != r->chunk_ids[i] || memory.base != chunk))
            return false;
        chunk = end;
    }
    return true;
}

static bool is_current(const struct cuda *cuda, const struct cuda_region *r,
                       const struct cuda_memory *memory, CUdeviceptr at, uint64_t bytes)
{
    if (r->n_chunks > 1)
        return has_same_chunks(cuda, r, at, bytes);
    return r->chunk_ids[0] == memory->id && (uintptr_t)r->region.base == memory->base &&
           r->chunk_bytes[0] == memory->bytes;
}

/* The registration that holds the tensor; others of this address that are no longer true become
 * stale. */
static struct cuda_region *find(struct cuda *cuda, const struct cuda_memory *memory, CUdeviceptr at,
                                uint64_t bytes)
{
    for (struct cuda_region *r = cuda->regions; r; r = r->next) {
        if (r->is_stale || !overlaps(r, at, bytes ? bytes : 1))
            continue;
        if (!is_current(cuda, r, memory, at, bytes))
            r->is_stale = true;
        else if (covers(r, at, bytes))
            return r;
    }
    return NULL;
}

/* ------------------------------------------------------------------ getting one */

static bool is_answered(const void *arg)
{
    return !((const struct cuda_region *)arg)->is_pending;
}

static int make(struct gradd *g, struct cuda_gpu *gpu, const struct cuda_memory *memory,
                CUdeviceptr at, uint64_t bytes, struct cuda_region **out)
{
    sweep(g);
    struct cuda_region *r = calloc(1, sizeof *r);
    if (!r)
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    r->gpu = gpu;
    int rc = cuda_find_chunks(g->cuda, memory, at, bytes, r);
    if (rc != 0) {
        cuda_region_free(r);
        return rc;
    }
    r->is_pending = true;
    link_region(g->cuda, r);
    rc = cuda_region_tell(g, r, memory->is_ipc);
    r->is_pending = false;
    g->has_ended = true; /* another thread may have waited for the same answer */
    channel_notify(g);
    if (rc < 0) { /* kept, so that it is not asked about again by every op */
        r->region.status = rc;
        if (!r->region.text)
            r->region.text = strdup(gradd_error());
    }
    *out = r;
    return 0;
}

/* With the bounds that can be shared; the GPU is current while the chunks are looked at. */
static int find_or_make(struct gradd *g, struct cuda_gpu *gpu, const void *address, uint64_t bytes,
                        struct cuda_region **out)
{
    CUdeviceptr at = (uintptr_t)address;
    struct cuda_memory memory;
    struct cuda_region *r = NULL;
    int rc = cuda_enter(g->cuda, gpu);
    if (rc < 0)
        return rc;
    if (!cuda_memory_chunk(g->cuda->table, address, &memory))
        rc = error_set(GRADD_ERR_INVALID, "the bounds of the memory at %p are not known", address);
    while (rc == 0 && (r = find(g->cuda, &memory, at, bytes)) && r->is_pending) {
        r->n_pins++;
        channel_wait(g, is_answered, r, WAIT_FOREVER);
        r->n_pins--;
    }
    if (rc == 0 && !r)
        rc = make(g, gpu, &memory, at, bytes, &r);
    cuda_leave(g->cuda);
    if (rc == 0)
        *out = r;
    return rc;
}

int cuda_region_get(struct gradd *g, struct cuda_gpu *gpu, const struct cuda_memory *memory,
                    const void *address, uint64_t bytes, struct cuda_region **out,
                    const char **out_text)
{
    struct cuda_region *r = NULL;
    if ((*out_text = cuda_why_unshared(memory)))
        return 1;
    int rc = find_or_make(g, gpu, address, bytes, &r);
    if (rc == 0)
        rc = context_check(g);
    if (rc < 0)
        return rc;
    if (rc > 0) {
        *out_text = "it lies in several allocations, of which one can not be shared";
        return 1;
    }
    if (r->region.status != GRADD_OK) {
        *out_text = r->region.text ? r->region.text : "the worker refused it";
        return 1;
    }
    if (g->cuda->regions != r) {
        unlink_region(g->cuda, r);
        link_region(g->cuda, r);
    }
    *out = r;
    return 0;
}

/* ------------------------------------------------------------------ the public calls */

static bool is_unused(const void *arg)
{
    const struct cuda_region *r = arg;
    return r->region.n_uses == 0 && r->n_pins == 1 && !r->is_pending;
}

/* Wait until no op uses it and the worker has closed it. */
void cuda_region_forget(struct gradd *g, struct cuda_region *r)
{
    r->is_stale = r->is_leaving = true; /* no new op takes it */
    r->n_pins++;
    channel_wait(g, is_unused, r, WAIT_FOREVER);
    unlink_region(g->cuda, r);
    if (r->region.status == GRADD_OK && !g->failure) {
        memory_unregister(g, &r->region);
        memory_await_answer(g, &r->region);
    }
    cuda_region_free(r);
}

/* The registration around the address, whose memory may be gone. */
struct cuda_region *cuda_region_around(const struct cuda *cuda, CUdeviceptr at, uint64_t bytes)
{
    struct cuda_region *r = cuda->regions;
    while (r && (r->is_leaving || !overlaps(r, at, bytes)))
        r = r->next;
    return r;
}

int cuda_register(struct gradd *g, const void *memory, size_t bytes)
{
    const struct cuda_table *table = cuda_driver();
    struct cuda_memory found;
    struct cuda *cuda;
    struct cuda_gpu *gpu;
    struct cuda_region *region;
    const char *text = NULL;
    if (!table || !cuda_memory_find(table, memory, &found))
        return error_set(GRADD_ERR_INVALID, "%p is no device memory of this process", memory);
    if (!g->has_device_path)
        return error_set(GRADD_ERR_INVALID, "memory %p can not be shared: %s", memory,
                         g->device_text);
    int rc = cuda_get(g, table, &cuda);
    if (rc == 0)
        rc = cuda_gpu_get(cuda, found.ordinal, found.context, NULL, &gpu);
    if (rc == 0)
        rc = cuda_region_get(g, gpu, &found, memory, bytes, &region, &text);
    return rc == 1 ? error_set(GRADD_ERR_INVALID, "memory %p can not be shared: %s", memory, text)
                   : rc;
}

int gradd_register(struct gradd *g, const void *memory, size_t bytes)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    rc = context_check(g);
    if (rc == 0)
        rc = cuda_register(g, memory, bytes);
    context_leave(g);
    return rc;
}

int gradd_forget(struct gradd *g, const void *memory)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    struct cuda_region *r;
    while (g->cuda && (r = cuda_region_around(g->cuda, (uintptr_t)memory, 1)))
        cuda_region_forget(g, r);
    rc = context_check(g);
    context_leave(g);
    return rc;
}

/* ------------------------------------------------------------------ the end */

void cuda_regions_free(struct cuda *cuda)
{
    while (cuda->regions) {
        struct cuda_region *r = cuda->regions;
        cuda->regions = r->next;
        cuda_region_free(r);
    }
    for (struct cuda_gpu *gpu = cuda->gpus; gpu; gpu = gpu->next) {
        struct stage_pool *pool = &gpu->bounce;
        while (pool->n_regions > 0)
            cuda_region_free((struct cuda_region *)pool->regions[--pool->n_regions]);
        stage_pool_deinit(pool);
    }
    cuda_allocations_free(cuda);
}
