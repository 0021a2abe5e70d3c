/* SPDX-License-Identifier: Apache-2.0 */
/* cuPointerGetAttribute(): what is behind an address. */
#include "fake.h"
#include "vmm.h"

static bool is_exportable(const struct range *range)
{
    return range->kind == RANGE_VMM && fake_physical_is_exportable(range->owner);
}

/* Of mapped physical memory: the whole reservation, unlike cuMemGetAddressRange(). */
static struct range mappable(const struct range *range)
{
    struct range whole = *range;
    if (range->kind == RANGE_VMM)
        fake_reservation_find(range->base, &whole.base, &whole.bytes);
    return whole;
}

static unsigned memory_type(const struct range *range)
{
    return range->kind == RANGE_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

/* range: NULL for memory that the driver does not know. */
static CUresult get(void *out, int attribute, const struct range *range, CUdeviceptr p)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)out = range != NULL && range->kind != RANGE_VMM ? range->context : NULL;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = range != NULL ? memory_type(range) : 0;
        break;
    case FAKE_POINTER_DEVICE_POINTER:
        *(CUdeviceptr *)out = range != NULL ? p : 0;
        break;
    case FAKE_POINTER_HOST_POINTER:
        *(void **)out = range != NULL && (range->kind == RANGE_HOST || range->kind == RANGE_MANAGED)
                            ? (void *)(uintptr_t)p
                            : NULL;
        break;
    case FAKE_POINTER_SYNC_MEMOPS:
        *(int *)out = 0;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(uint64_t *)out = range != NULL ? range->id : 0;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(int *)out = range != NULL && range->kind == RANGE_MANAGED;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)out = range != NULL ? range->device : -2;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)out = range != NULL && range->kind == RANGE_DEVICE && fake_settings.memory_handles;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)out = range != NULL ? mappable(range).base : 0;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)out = range != NULL ? mappable(range).bytes : 0;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(int *)out = range != NULL;
        break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(uint64_t *)out = range != NULL && is_exportable(range)
                               ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                               : CU_MEM_HANDLE_TYPE_NONE;
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(void **)out = range != NULL && range->kind == RANGE_POOL ? (void *)range->context : NULL;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr p)
{
    ENTER(cuPointerGetAttribute, NEED_CONTEXT);
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find(p);
    CUresult rc = range == NULL ? CUDA_ERROR_INVALID_VALUE : get(out, attribute, range, p);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* Unlike the single call, this one succeeds for any pointer, with values that say "unknown". */
CUresult cuPointerGetAttributes(unsigned n, const int *attributes, void **out, CUdeviceptr p)
{
    ENTER(cuPointerGetAttributes, NEED_CONTEXT);
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find(p);
    CUresult rc = CUDA_SUCCESS;
    for (unsigned i = 0; i < n && rc == CUDA_SUCCESS; i++)
        rc = get(out[i], attributes[i], range, p);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}
