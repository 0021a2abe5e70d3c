/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices and their primary contexts. A context exists from the first retain to the last release;
 * the exclusive compute mode is a lock on a file of the shared directory.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

enum { STACK = 32 };

static struct CUctx_st contexts[FAKE_MAX_DEVICES]; /* by ordinal */
static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

static bool is_device(CUdevice device)
{
    return device >= 0 && device < fake_settings.n_devices;
}

FAKE_EXPORT int fake_cuda_physical_device(int ordinal)
{
    return is_device(ordinal) ? fake_settings.physical[ordinal] : -1;
}

CUcontext fake_context(void)
{
    return depth > 0 ? stack[depth - 1] : NULL;
}

void fake_context_fail_in(CUcontext context, CUresult error)
{
    int none = 0;
    atomic_compare_exchange_strong(&context->sticky, &none, error);
}

CUresult cuDeviceGetCount(int *out)
{
    ENTER(cuDeviceGetCount, NEED_INIT);
    *out = fake_settings.n_devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    ENTER(cuDeviceGet, NEED_INIT);
    if (!is_device(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device)
{
    ENTER(cuDeviceGetUuid_v2, NEED_INIT);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    static const uint8_t bytes[16] = {0xfa, 0x4e, 0xfa, 0x4e, 0, 0, 0x40, 0, 0x80};
    memcpy(out->bytes, bytes, sizeof bytes);
    out->bytes[15] = (uint8_t)fake_settings.physical[device];
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *out, int bytes, CUdevice device)
{
    ENTER(cuDeviceGetName, NEED_INIT);
    if (!is_device(device) || bytes <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(out, (size_t)bytes, "Fake GPU %d", fake_settings.physical[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *out, int bytes, CUdevice device)
{
    ENTER(cuDeviceGetPCIBusId, NEED_INIT);
    if (!is_device(device) || bytes < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(out, (size_t)bytes, "0000:%02X:00.0",
             0xf0u + (unsigned)fake_settings.physical[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice device)
{
    ENTER(cuDeviceTotalMem_v2, NEED_INIT);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = fake_settings.memory_bytes;
    return CUDA_SUCCESS;
}

static bool has_entry(enum fake_entry entry)
{
    return !fake_is_without(entry);
}

static int attribute_value(int attribute, CUdevice device)
{
    switch (attribute) {
    case FAKE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return 1024;
    case FAKE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 4;
    case FAKE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return 2048;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        return fake_settings.compute_mode;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return fake_settings.capability / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return fake_settings.capability % 10;
    case FAKE_ATTRIBUTE_PCI_BUS_ID:
        return 0xf0 + fake_settings.physical[device];
    case FAKE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return 3;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        return has_entry(ENTRY_cuMemCreate);
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        return has_entry(ENTRY_cuMemExportToShareableHandle);
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
        return has_entry(ENTRY_cuStreamWaitValue64_v2);
    case FAKE_ATTRIBUTE_STREAM_WAIT_VALUE_NOR:
        return has_entry(ENTRY_cuStreamWaitValue32_v2);
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
        return fake_settings.ipc_events;
    case FAKE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        return has_entry(ENTRY_cuMemAllocAsync);
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case FAKE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case FAKE_ATTRIBUTE_MANAGED_MEMORY:
    case FAKE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case FAKE_ATTRIBUTE_CAN_USE_HOST_POINTER:
    case FAKE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        return 1;
    default:
        return 0;
    }
}

CUresult cuDeviceGetAttribute(int *out, int attribute, CUdevice device)
{
    ENTER(cuDeviceGetAttribute, NEED_INIT);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (attribute <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    *out = attribute_value(attribute, device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *out, CUdevice device, CUdevice peer)
{
    ENTER(cuDeviceCanAccessPeer, NEED_INIT);
    if (!is_device(device) || !is_device(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = device != peer;
    return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    ENTER(cuCtxEnablePeerAccess, NEED_CONTEXT);
    static _Thread_local uint32_t enabled[FAKE_MAX_DEVICES]; /* bits, by own device */
    if (peer == NULL || peer == fake_context() || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    uint32_t *bits = &enabled[fake_context()->device], bit = 1u << peer->device;
    if (*bits & bit)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    *bits |= bit;
    return CUDA_SUCCESS;
}

/* The lock of exclusive mode is this process's until it ends. */
static bool take_exclusive(int physical)
{
    static int held[FAKE_MAX_DEVICES];
    if (held[physical] > 0)
        return true;
    int fd = open(fake_path("exclusive%d", physical), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fd >= 0 && fcntl(fd, F_SETLK, &lock) == 0) {
        held[physical] = fd;
        return true;
    }
    if (fd >= 0)
        close(fd);
    return false;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRetain, NEED_INIT);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (fake_settings.compute_mode == CU_COMPUTEMODE_PROHIBITED)
        return FAKE_ERROR_DEVICE_UNAVAILABLE;
    pthread_mutex_lock(&fake_lock);
    CUresult rc = CUDA_SUCCESS;
    CUcontext context = &contexts[device];
    if (fake_settings.compute_mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS &&
        !take_exclusive(fake_settings.physical[device]))
        rc = FAKE_ERROR_DEVICE_UNAVAILABLE;
    else if (context->refs++ == 0)
        context->device = device;
    if (rc == CUDA_SUCCESS)
        *out = context;
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRelease_v2, NEED_INIT);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&fake_lock);
    CUcontext context = &contexts[device];
    CUresult rc = context->refs > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    bool is_last = rc == CUDA_SUCCESS && --context->refs == 0;
    pthread_mutex_unlock(&fake_lock);
    if (is_last) {
        fake_context_destroy(context);
        atomic_store(&context->sticky, 0);
    }
    return rc;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER(cuDevicePrimaryCtxGetState, NEED_INIT);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&fake_lock);
    *flags = 0;
    *active = contexts[device].refs > 0;
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

static bool is_context(CUcontext context)
{
    bool found = false;
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < fake_settings.n_devices && !found; i++)
        found = context == &contexts[i] && context->refs > 0;
    pthread_mutex_unlock(&fake_lock);
    return found;
}

CUresult cuCtxGetCurrent(CUcontext *out)
{
    ENTER(cuCtxGetCurrent, NEED_INIT);
    *out = fake_context();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(cuCtxSetCurrent, NEED_INIT);
    if (context == NULL) {
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    if (!is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    depth += depth == 0;
    stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER(cuCtxPushCurrent_v2, NEED_INIT);
    if (!is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == STACK)
        fake_die("contexts are pushed and never popped");
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    ENTER(cuCtxPopCurrent_v2, NEED_INIT);
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (out != NULL)
        *out = stack[depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *out)
{
    ENTER(cuCtxGetDevice, NEED_INIT);
    if (fake_context() == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = fake_context()->device;
    return CUDA_SUCCESS;
}
