/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory that the device may use: registered by its owner, or allocated by the driver. */
#include <sys/mman.h>

#include "fake.h"

enum { REGISTER_FLAGS = 0xf };

static bool overlaps(uintptr_t p, size_t bytes)
{
    for (uintptr_t at = p; at < p + bytes; at += 4096)
        if (fake_range_find(at) != NULL)
            return true;
    return fake_range_find(p + bytes - 1) != NULL;
}

static CUresult add(void *p, size_t bytes, bool is_owned)
{
    pthread_mutex_lock(&fake_lock);
    CUresult rc = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!overlaps((uintptr_t)p, bytes)) {
        fake_range_add((struct range){.base = (uintptr_t)p,
                                      .bytes = bytes,
                                      .kind = RANGE_HOST,
                                      .device = fake_context()->device,
                                      .context = fake_context(),
                                      .is_accessible = true,
                                      .is_owned = is_owned});
        rc = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* Forget the range that begins at p. 0: no such. */
static size_t take_away(void *p, bool is_owned)
{
    fake_free_waits(fake_context());
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_find((uintptr_t)p);
    size_t bytes = 0;
    if (range != NULL && range->base == (uintptr_t)p && range->kind == RANGE_HOST &&
        range->is_owned == is_owned) {
        bytes = range->bytes;
        fake_range_remove(range);
    }
    pthread_mutex_unlock(&fake_lock);
    return bytes;
}

CUresult cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags)
{
    ENTER(cuMemHostRegister_v2, NEED_CONTEXT);
    if (p == NULL || bytes == 0 || flags > REGISTER_FLAGS || fake_arena_has((uintptr_t)p))
        return CUDA_ERROR_INVALID_VALUE;
    return add(p, bytes, false);
}

CUresult cuMemHostUnregister(void *p)
{
    ENTER(cuMemHostUnregister, NEED_CONTEXT);
    return take_away(p, false) > 0 ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *p, unsigned flags)
{
    ENTER(cuMemHostGetDevicePointer_v2, NEED_CONTEXT);
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find((uintptr_t)p);
    bool is_host = range != NULL && range->kind == RANGE_HOST;
    pthread_mutex_unlock(&fake_lock);
    if (!is_host || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

static CUresult host_alloc(void **out, size_t bytes)
{
    fake_count_sum(SUM_ALLOCATIONS);
    bytes = (bytes + 4095) & ~(size_t)4095;
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = p;
    return add(p, bytes, true);
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    ENTER(cuMemHostAlloc, NEED_CONTEXT);
    return host_alloc(out, bytes);
}

CUresult cuMemAllocHost_v2(void **out, size_t bytes)
{
    ENTER(cuMemAllocHost_v2, NEED_CONTEXT);
    return host_alloc(out, bytes);
}

CUresult cuMemFreeHost(void *p)
{
    ENTER(cuMemFreeHost, NEED_CONTEXT);
    size_t bytes = take_away(p, true);
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    munmap(p, bytes);
    return CUDA_SUCCESS;
}
