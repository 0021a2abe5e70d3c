/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocating device memory that the worker can map.
 *
 * Invariant: an allocation's physical memory has no handle here beside its mapping, so that the
 * mapping's end frees it, unless another process has mapped it too.
 */
#include "cuda_allocation.h"

#include <stdlib.h>

struct cuda_allocation {
    struct cuda_gpu *gpu;
    CUdeviceptr at;
    size_t bytes;
    bool is_mapped; /* VMM; else cuMemAlloc() */
    struct cuda_allocation *next;
};

static CUresult map(const struct cuda_table *table, struct cuda_allocation *allocation,
                    CUmemGenericAllocationHandle handle)
{
    const CUmemAccessDesc access = {
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, allocation->gpu->ordinal},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    size_t bytes = allocation->bytes;
    CUresult rc = table->vmm_reserve(&allocation->at, bytes, 0, 0, 0);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = table->vmm_map(allocation->at, bytes, 0, handle, 0);
    if (rc == CUDA_SUCCESS) {
        rc = table->vmm_access(allocation->at, bytes, &access, 1);
        if (rc == CUDA_SUCCESS)
            return rc;
        table->vmm_unmap(allocation->at, bytes);
    }
    table->vmm_address_free(allocation->at, bytes);
    return rc;
}

static CUresult make_mapped(const struct cuda_table *table, struct cuda_allocation *allocation)
{
    const CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, allocation->gpu->ordinal},
    };
    size_t unit = 0;
    CUresult rc = table->vmm_granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (rc != CUDA_SUCCESS || unit == 0)
        return rc ? rc : CUDA_ERROR_NOT_SUPPORTED;
    allocation->bytes = (allocation->bytes + unit - 1) / unit * unit;
    CUmemGenericAllocationHandle handle;
    rc = table->vmm_create(&handle, allocation->bytes, &properties, 0);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = map(table, allocation, handle);
    table->vmm_release(handle);
    return rc;
}

int cuda_allocation_new(struct cuda *cuda, struct cuda_gpu *gpu, size_t bytes, CUdeviceptr *out)
{
    struct cuda_allocation *allocation = calloc(1, sizeof *allocation);
    if (!allocation || bytes > PTRDIFF_MAX / 2) {
        free(allocation);
        return error_set(GRADD_ERR_NO_MEMORY, "device memory of %zu bytes: out of memory", bytes);
    }
    *allocation = (struct cuda_allocation){
        .gpu = gpu, .bytes = bytes ? bytes : 1, .is_mapped = gpu->has_posix};
    int rc = cuda_enter(cuda, gpu);
    if (rc == 0) {
        CUresult result = gpu->has_posix
                              ? make_mapped(cuda->table, allocation)
                              : cuda->table->mem_alloc(&allocation->at, allocation->bytes);
        cuda_leave(cuda);
        if (result != CUDA_SUCCESS)
            rc = error_set(GRADD_ERR_NO_MEMORY, "device memory of %zu bytes on GPU %d: %s", bytes,
                           gpu->ordinal, cuda_table_error(cuda->table, result));
    }
    if (rc < 0) {
        free(allocation);
        return rc;
    }
    allocation->next = cuda->allocations;
    cuda->allocations = allocation;
    *out = allocation->at;
    return 0;
}

static void free_memory(struct cuda *cuda, const struct cuda_allocation *allocation)
{
    if (cuda_enter(cuda, allocation->gpu) < 0)
        return; /* the context is gone, and its memory with it */
    if (allocation->is_mapped) {
        cuda->table->vmm_unmap(allocation->at, allocation->bytes);
        cuda->table->vmm_address_free(allocation->at, allocation->bytes);
    } else {
        cuda->table->mem_free(allocation->at);
    }
    cuda_leave(cuda);
}

static struct cuda_allocation **find(struct cuda *cuda, CUdeviceptr at)
{
    struct cuda_allocation **place = &cuda->allocations;
    while (*place && (*place)->at != at)
        place = &(*place)->next;
    return place;
}

void cuda_allocation_free(struct cuda *cuda, CUdeviceptr at)
{
    struct cuda_allocation **place = find(cuda, at), *allocation = *place;
    if (!allocation)
        return;
    *place = allocation->next;
    free_memory(cuda, allocation);
    free(allocation);
}

uint64_t cuda_allocation_bytes(const struct cuda *cuda, CUdeviceptr at)
{
    const struct cuda_allocation *allocation = *find((struct cuda *)(uintptr_t)cuda, at);
    return allocation ? allocation->bytes : 0;
}

void cuda_allocations_stop(struct cuda *cuda)
{
    while (cuda->allocations)
        cuda_allocation_free(cuda, cuda->allocations->at);
}

void cuda_allocations_free(struct cuda *cuda)
{
    while (cuda->allocations) {
        struct cuda_allocation *allocation = cuda->allocations;
        cuda->allocations = allocation->next;
        free(allocation);
    }
}
