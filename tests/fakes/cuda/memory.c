/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a device: cuMemAlloc(), pools, managed memory, and what is asked about pointers. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "block.h"

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    ENTER(cuMemAlloc_v2, NEED_CONTEXT);
    fake_count_sum(SUM_ALLOCATIONS);
    pthread_mutex_lock(&fake_lock);
    CUresult rc = fake_block_alloc(fake_context(), bytes, out);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

void fake_range_destroy(struct range *range)
{
    switch (range->kind) {
    case RANGE_DEVICE:
        fake_block_free(range);
        return;
    case RANGE_IMPORT:
        fake_import_close(range);
        return;
    case RANGE_POOL:
        fake_arena_unmap(range->base, round_up(range->bytes, FAKE_GRANULARITY));
        fake_arena_give(range->base, round_up(range->bytes, FAKE_GRANULARITY));
        break;
    case RANGE_MANAGED:
        munmap((void *)range->base, range->bytes);
        break;
    case RANGE_HOST:
    case RANGE_VMM:
        return;
    }
    fake_range_remove(range);
}

CUresult cuMemFree_v2(CUdeviceptr p)
{
    ENTER(cuMemFree_v2, NEED_CONTEXT);
    if (p == 0)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&fake_lock);
    const struct range *found = fake_range_find(p);
    bool is_right =
        found != NULL && found->base == p &&
        (found->kind == RANGE_DEVICE || found->kind == RANGE_MANAGED || found->kind == RANGE_POOL);
    CUcontext context = is_right ? found->context : NULL;
    pthread_mutex_unlock(&fake_lock);
    if (!is_right)
        return CUDA_ERROR_INVALID_VALUE;
    fake_free_waits(context);
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_find(p);
    if (range != NULL && range->base == p)
        fake_range_destroy(range);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *out_free, size_t *out_total)
{
    ENTER(cuMemGetInfo_v2, NEED_CONTEXT);
    pthread_mutex_lock(&fake_lock);
    *out_total = fake_settings.memory_bytes;
    *out_free = fake_settings.memory_bytes - fake_range_used(fake_context()->device);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    ENTER(cuMemAllocManaged, NEED_CONTEXT);
    fake_count_sum(SUM_ALLOCATIONS);
    if (bytes == 0 || flags != CU_MEM_ATTACH_GLOBAL)
        return CUDA_ERROR_INVALID_VALUE;
    bytes = round_up(bytes, 4096);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&fake_lock);
    fake_range_add((struct range){.base = (uintptr_t)p,
                                  .bytes = bytes,
                                  .kind = RANGE_MANAGED,
                                  .device = fake_context()->device,
                                  .context = fake_context(),
                                  .is_accessible = true});
    pthread_mutex_unlock(&fake_lock);
    *out = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream s)
{
    ENTER(cuMemAllocAsync, NEED_CONTEXT);
    fake_count_sum(SUM_ALLOCATIONS);
    CUstream stream;
    CUresult rc = fake_stream_get(s, &stream);
    if (rc != CUDA_SUCCESS || bytes == 0)
        return rc != CUDA_SUCCESS ? rc : CUDA_ERROR_INVALID_VALUE;
    size_t whole = round_up(bytes, FAKE_GRANULARITY);
    pthread_mutex_lock(&fake_lock);
    uintptr_t base = 0;
    if (whole <= fake_settings.memory_bytes - fake_range_used(fake_context()->device))
        base = fake_arena_take(whole);
    if (base != 0 && fake_arena_map(base, whole, -1, 0))
        fake_range_add((struct range){.base = base,
                                      .bytes = bytes,
                                      .kind = RANGE_POOL,
                                      .device = fake_context()->device,
                                      .context = fake_context(),
                                      .is_accessible = true});
    pthread_mutex_unlock(&fake_lock);
    *out = base;
    return base != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void free_pool_memory(void *data)
{
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_find((uintptr_t)data);
    if (range != NULL && range->kind == RANGE_POOL)
        fake_range_destroy(range);
    pthread_mutex_unlock(&fake_lock);
}

CUresult cuMemFreeAsync(CUdeviceptr p, CUstream s)
{
    ENTER(cuMemFreeAsync, NEED_CONTEXT);
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find(p);
    bool is_right = range != NULL && range->base == p && range->kind == RANGE_POOL;
    pthread_mutex_unlock(&fake_lock);
    return is_right ? fake_stream_push_run(s, free_pool_memory, (void *)(uintptr_t)p)
                    : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *out_base, size_t *out_bytes, CUdeviceptr p)
{
    ENTER(cuMemGetAddressRange_v2, NEED_CONTEXT);
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find(p);
    uintptr_t base = range != NULL ? range->base : 0;
    size_t bytes = range != NULL ? range->bytes : 0;
    if (range != NULL && range->kind == RANGE_IMPORT)
        fake_import_block(range, &base, &bytes);
    if (range != NULL && out_base != NULL)
        *out_base = base;
    if (range != NULL && out_bytes != NULL)
        *out_bytes = bytes;
    pthread_mutex_unlock(&fake_lock);
    return range != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

void fake_context_destroy(CUcontext context)
{
    pthread_mutex_lock(&fake_lock);
    fake_streams_close(context);
    pthread_mutex_unlock(&fake_lock);
    fake_context_drain(context);
    pthread_mutex_lock(&fake_lock);
    struct range *range;
    while ((range = fake_range_of_context(context)) != NULL)
        fake_range_destroy(range);
    pthread_mutex_unlock(&fake_lock);
}
