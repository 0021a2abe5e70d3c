/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the driver says about an address: one call, whatever the memory. A thread without a current
 * context borrows one that the program has made; none is made here.
 */
#include "cuda.h"

static CUresult ask(const struct cuda_table *cuda, unsigned n, const int *attributes, void **values,
                    CUdeviceptr at)
{
    int n_devices = 0, is_active;
    unsigned flags;
    CUdevice device;
    CUcontext context;
    CUresult rc = cuda->pointer_attributes(n, attributes, values, at);
    if (rc != CUDA_ERROR_INVALID_CONTEXT || cuda->device_count(&n_devices) != CUDA_SUCCESS)
        return rc;
    for (int i = 0; i < n_devices; i++) {
        if (cuda->device_get(&device, i) != CUDA_SUCCESS ||
            cuda->primary_state(device, &flags, &is_active) != CUDA_SUCCESS || !is_active ||
            cuda->primary_retain(&context, device) != CUDA_SUCCESS)
            continue;
        if (cuda->ctx_push(context) == CUDA_SUCCESS) {
            rc = cuda->pointer_attributes(n, attributes, values, at);
            cuda->ctx_pop(&context);
        }
        cuda->primary_release(device);
        if (rc != CUDA_ERROR_INVALID_CONTEXT)
            break;
    }
    return rc;
}

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
    CUresult rc = ask(cuda, sizeof attributes / sizeof *attributes, attributes, values,
                      (CUdeviceptr)(uintptr_t)address);
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
