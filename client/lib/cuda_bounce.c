/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory of the library's own making: bounce buffers, and gradd_alloc_device().
 *
 * Invariant: memory is unmapped here after the worker was told; the worker's own mapping holds what
 * it still needs.
 */
#include <stdlib.h>

#include "cuda.h"
#include "cuda_allocation.h"

/* ------------------------------------------------------------------ bounce buffers */

static int describe_bounce(struct gradd *g, struct cuda_gpu *gpu, CUdeviceptr at,
                           struct cuda_region *r, bool *out_is_ipc)
{
    struct cuda_memory memory;
    int rc = cuda_enter(g->cuda, gpu);
    if (rc < 0)
        return rc;
    rc = cuda_memory_chunk(g->cuda->table, (void *)(uintptr_t)at, &memory) &&
                 !cuda_why_unshared(&memory)
             ? cuda_find_chunks(g->cuda, &memory, at, memory.bytes, r)
             : 1;
    cuda_leave(g->cuda);
    if (rc == 0)
        *out_is_ipc = memory.is_ipc;
    return rc == 1 ? error_set(GRADD_ERR_UNSUPPORTED,
                               "GPU %d has no memory that two processes can share", gpu->ordinal)
                   : rc;
}

static int new_bounce(struct gradd *g, struct cuda_gpu *gpu, size_t bytes, struct region **out)
{
    CUdeviceptr at;
    bool is_ipc = false;
    int rc = cuda_allocation_new(g->cuda, gpu, bytes, &at);
    if (rc < 0)
        return rc;
    struct cuda_region *r = calloc(1, sizeof *r);
    rc = r ? 0 : error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    if (r) {
        r->gpu = gpu;
        rc = describe_bounce(g, gpu, at, r, &is_ipc);
    }
    if (rc == 0)
        rc = cuda_region_tell(g, r, is_ipc);
    if (rc < 0) {
        if (r)
            cuda_region_free(r);
        cuda_allocation_free(g->cuda, at);
        return rc;
    }
    r->region.is_staging = true;
    *out = &r->region;
    return 0;
}

int cuda_bounce_new(struct gradd *g, struct stage_pool *pool, size_t bytes, struct region **out)
{
    int rc = new_bounce(g, pool->owner, bytes, out);
    if (rc != GRADD_ERR_NO_MEMORY || pool->bytes == pool->lent_bytes)
        return rc;
    stage_trim(g, pool, UINT64_MAX); /* idle buffers may be what is in the way */
    return new_bounce(g, pool->owner, bytes, out);
}

void cuda_bounce_free(struct gradd *g, struct stage_pool *pool, struct region *region)
{
    struct cuda_region *r = (struct cuda_region *)region;
    memory_unregister(g, region);
    cuda_allocation_free(g->cuda, (uintptr_t)region->base);
    cuda_region_free(r);
}

/* ------------------------------------------------------------------ gradd_alloc_device() */

void *gradd_alloc_device(struct gradd *g, int device, size_t bytes)
{
    if (context_enter(g) < 0)
        return NULL;
    const struct cuda_table *table = cuda_driver();
    struct cuda *cuda;
    struct cuda_gpu *gpu;
    CUdeviceptr at = 0;
    int rc = context_check(g);
    if (rc == 0 && !table)
        rc = error_set(GRADD_ERR_UNAVAILABLE, "this process has not loaded the CUDA driver");
    if (rc == 0)
        rc = cuda_get(g, table, &cuda);
    if (rc == 0)
        rc = cuda_gpu_get(cuda, device, NULL, NULL, &gpu);
    if (rc == 0)
        rc = cuda_allocation_new(cuda, gpu, bytes, &at);
    if (rc == 0 && g->has_device_path) {
        cuda_register(g, (void *)(uintptr_t)at, bytes ? bytes : 1);
        rc = context_check(g);
        if (rc < 0)
            cuda_allocation_free(cuda, at);
    }
    context_leave(g);
    return rc == 0 ? (void *)(uintptr_t)at : NULL;
}

bool cuda_free_device(struct gradd *g, void *memory, int *out_rc)
{
    CUdeviceptr at = (uintptr_t)memory;
    uint64_t bytes = cuda_allocation_bytes(g->cuda, at);
    if (!bytes)
        return false;
    struct cuda_region *r = cuda_region_around(g->cuda, at, bytes);
    if (r && r->region.n_uses > 0) {
        *out_rc =
            error_set(GRADD_ERR_INVALID, "memory %p is in use by %u op%s in flight: wait first",
                      memory, r->region.n_uses, r->region.n_uses == 1 ? "" : "s");
        return true;
    }
    for (; r; r = cuda_region_around(g->cuda, at, bytes))
        cuda_region_forget(g, r);
    cuda_allocation_free(g->cuda, at);
    *out_rc = GRADD_OK;
    return true;
}

/* ------------------------------------------------------------------ the end */

void cuda_regions_stop(struct gradd *g)
{
    struct cuda *cuda = g->cuda;
    for (struct cuda_gpu *gpu = cuda->gpus; gpu; gpu = gpu->next) {
        struct stage_pool *pool = &gpu->bounce;
        while (pool->n_regions > 0)
            cuda_bounce_free(g, pool, pool->regions[--pool->n_regions]);
    }
    cuda_allocations_stop(cuda);
}
