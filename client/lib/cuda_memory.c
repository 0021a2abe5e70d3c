/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the driver says about an address: one call, whatever the memory.
 */
#include "cuda.h"

bool cuda_memory_find(const struct cuda_table *cuda, const void *address, struct cuda_memory *out)
{
    static const int attributes[] = {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,          CU_POINTER_ATTRIBUTE_CONTEXT,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,       CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CU_POINTER_ATTRIBUTE_RANGE_SIZE,           CU_POINTER_ATTRIBUTE_BUFFER_ID,
        CU_POINTER_ATTRIBUTE_IS_MANAGED,           CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
    };
    unsigned type = 0;
    int ordinal = 0, is_managed = 0, is_ipc = 0;
    CUcontext context = NULL;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    unsigned long long id = 0, handle_types = 0;
    void *values[] = {&type, &context,    &ordinal, &base,        &bytes,
                      &id,   &is_managed, &is_ipc,  &handle_types};
    CUresult rc = cuda->pointer_attributes(sizeof attributes / sizeof *attributes, attributes,
                                           values, (CUdeviceptr)(uintptr_t)address);
    if (rc != CUDA_SUCCESS || (type != CU_MEMORYTYPE_DEVICE && !is_managed))
        return false;
    *out = (struct cuda_memory){
        .ordinal = ordinal,
        .context = context,
        .base = base,
        .bytes = bytes,
        .id = id,
        .is_managed = is_managed,
        .is_ipc = is_ipc && !is_managed,
        .is_posix = !is_managed && handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    };
    return true;
}

bool cuda_memory_chunk(const struct cuda_table *cuda, const void *address, struct cuda_memory *out)
{
    if (!cuda_memory_find(cuda, address, out))
        return false;
    /* Of VMM memory the attributes tell the reserved range, not what is mapped here. */
    return out->is_ipc || cuda->mem_range(&out->base, &out->bytes,
                                          (CUdeviceptr)(uintptr_t)address) == CUDA_SUCCESS;
}
