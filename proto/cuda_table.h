/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver behind one table of functions, opened at run time. Library and worker use it
 * alike; nothing of gradd is linked with CUDA. Only the driver API: no libcudart.
 *
 * Thread: the table is constant once opened; each function has the driver's own rules.
 */
#ifndef GRADD_CUDA_TABLE_H
#define GRADD_CUDA_TABLE_H

#include <stdbool.h>

#include "cuda_abi.h"

/* X(field, symbol, result, parameters): a function that every supported driver has. */
#define CUDA_TABLE_REQUIRED(X)                                                                     \
    X(init, "cuInit", (unsigned flags))                                                            \
    X(driver_version, "cuDriverGetVersion", (int *out))                                            \
    X(error_name, "cuGetErrorName", (CUresult rc, const char **out))                               \
    X(error_string, "cuGetErrorString", (CUresult rc, const char **out))                           \
    X(device_count, "cuDeviceGetCount", (int *out))                                                \
    X(device_get, "cuDeviceGet", (CUdevice * out, int ordinal))                                    \
    X(device_uuid, "cuDeviceGetUuid_v2", (CUuuid * out, CUdevice device))                          \
    X(device_name, "cuDeviceGetName", (char *out, int bytes, CUdevice device))                     \
    X(device_attribute, "cuDeviceGetAttribute", (int *out, int attribute, CUdevice device))        \
    X(device_total_bytes, "cuDeviceTotalMem_v2", (size_t * out, CUdevice device))                  \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (CUcontext * out, CUdevice device))              \
    X(primary_release, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                          \
    X(primary_state, "cuDevicePrimaryCtxGetState",                                                 \
      (CUdevice device, unsigned *flags, int *active))                                             \
    X(ctx_current, "cuCtxGetCurrent", (CUcontext * out))                                           \
    X(ctx_set, "cuCtxSetCurrent", (CUcontext context))                                             \
    X(ctx_push, "cuCtxPushCurrent_v2", (CUcontext context))                                        \
    X(ctx_pop, "cuCtxPopCurrent_v2", (CUcontext * out))                                            \
    X(ctx_device, "cuCtxGetDevice", (CUdevice * out))                                              \
    X(ctx_synchronize, "cuCtxSynchronize", (void))                                                 \
    X(mem_alloc, "cuMemAlloc_v2", (CUdeviceptr * out, size_t bytes))                               \
    X(mem_free, "cuMemFree_v2", (CUdeviceptr p))                                                   \
    X(mem_info, "cuMemGetInfo_v2", (size_t * out_free, size_t * out_total))                        \
    X(mem_range, "cuMemGetAddressRange_v2", (CUdeviceptr * base, size_t * bytes, CUdeviceptr p))   \
    X(pointer_attribute, "cuPointerGetAttribute", (void *out, int attribute, CUdeviceptr p))       \
    X(pointer_attributes, "cuPointerGetAttributes",                                                \
      (unsigned n, const int *attributes, void **out, CUdeviceptr p))                              \
    X(host_register, "cuMemHostRegister_v2", (void *p, size_t bytes, unsigned flags))              \
    X(host_unregister, "cuMemHostUnregister", (void *p))                                           \
    X(host_device_pointer, "cuMemHostGetDevicePointer_v2",                                         \
      (CUdeviceptr * out, void *p, unsigned flags))                                                \
    X(copy_async, "cuMemcpyAsync", (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s))   \
    X(set8_async, "cuMemsetD8Async", (CUdeviceptr to, unsigned char value, size_t n, CUstream s))  \
    X(stream_create, "cuStreamCreateWithPriority", (CUstream * out, unsigned flags, int priority)) \
    X(stream_destroy, "cuStreamDestroy_v2", (CUstream s))                                          \
    X(stream_query, "cuStreamQuery", (CUstream s))                                                 \
    X(stream_synchronize, "cuStreamSynchronize", (CUstream s))                                     \
    X(stream_wait_event, "cuStreamWaitEvent", (CUstream s, CUevent e, unsigned flags))             \
    X(stream_capturing, "cuStreamIsCapturing", (CUstream s, int *out_status))                      \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                              \
    X(stream_ctx, "cuStreamGetCtx", (CUstream s, CUcontext * out))                                 \
    X(launch_host, "cuLaunchHostFunc", (CUstream s, void (*run)(void *), void *data))              \
    X(event_create, "cuEventCreate", (CUevent * out, unsigned flags))                              \
    X(event_destroy, "cuEventDestroy_v2", (CUevent e))                                             \
    X(event_record, "cuEventRecord", (CUevent e, CUstream s))                                      \
    X(event_query, "cuEventQuery", (CUevent e))                                                    \
    X(ipc_get_mem, "cuIpcGetMemHandle", (CUipcMemHandle * out, CUdeviceptr p))                     \
    X(ipc_open_mem, "cuIpcOpenMemHandle_v2",                                                       \
      (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags))                                  \
    X(ipc_close_mem, "cuIpcCloseMemHandle", (CUdeviceptr p))                                       \
    X(ipc_get_event, "cuIpcGetEventHandle", (CUipcEventHandle * out, CUevent e))                   \
    X(ipc_open_event, "cuIpcOpenEventHandle", (CUevent * out, CUipcEventHandle handle))            \
    X(module_load, "cuModuleLoadData", (CUmodule * out, const void *image))                        \
    X(module_unload, "cuModuleUnload", (CUmodule module))                                          \
    X(module_function, "cuModuleGetFunction",                                                      \
      (CUfunction * out, CUmodule module, const char *name))                                       \
    X(launch_kernel, "cuLaunchKernel",                                                             \
      (CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,          \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream s, void **parameters,   \
       void **extra))

/* Groups of functions that a driver may lack; each group is there as a whole or not at all. */
#define CUDA_TABLE_VMM(X)                                                                          \
    X(vmm_granularity, "cuMemGetAllocationGranularity",                                            \
      (size_t * out, const CUmemAllocationProp *properties, int option))                           \
    X(vmm_create, "cuMemCreate",                                                                   \
      (CUmemGenericAllocationHandle * out, size_t bytes, const CUmemAllocationProp *properties,    \
       unsigned long long flags))                                                                  \
    X(vmm_release, "cuMemRelease", (CUmemGenericAllocationHandle handle))                          \
    X(vmm_reserve, "cuMemAddressReserve",                                                          \
      (CUdeviceptr * out, size_t bytes, size_t alignment, CUdeviceptr at,                          \
       unsigned long long flags))                                                                  \
    X(vmm_address_free, "cuMemAddressFree", (CUdeviceptr p, size_t bytes))                         \
    X(vmm_map, "cuMemMap",                                                                         \
      (CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,            \
       unsigned long long flags))                                                                  \
    X(vmm_unmap, "cuMemUnmap", (CUdeviceptr p, size_t bytes))                                      \
    X(vmm_access, "cuMemSetAccess",                                                                \
      (CUdeviceptr p, size_t bytes, const CUmemAccessDesc *access, size_t n))                      \
    X(vmm_retain, "cuMemRetainAllocationHandle",                                                   \
      (CUmemGenericAllocationHandle * out, void *address))                                         \
    X(vmm_export, "cuMemExportToShareableHandle",                                                  \
      (void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))        \
    X(vmm_import, "cuMemImportFromShareableHandle",                                                \
      (CUmemGenericAllocationHandle * out, void *os_handle, int type))

#define CUDA_TABLE_FLAGS(X)                                                                        \
    X(stream_wait_value, "cuStreamWaitValue64_v2",                                                 \
      (CUstream s, CUdeviceptr p, uint64_t value, unsigned flags))                                 \
    X(stream_write_value, "cuStreamWriteValue64_v2",                                               \
      (CUstream s, CUdeviceptr p, uint64_t value, unsigned flags))

struct cuda_table {
#define CUDA_TABLE_FIELD(field, symbol, parameters) CUresult(*field) parameters;
    CUDA_TABLE_REQUIRED(CUDA_TABLE_FIELD)
    CUDA_TABLE_VMM(CUDA_TABLE_FIELD)
    CUDA_TABLE_FLAGS(CUDA_TABLE_FIELD)
#undef CUDA_TABLE_FIELD
    bool has_vmm, has_flags;
    int version; /* of the driver: 1000 * major + 10 * minor */
};

enum cuda_open_how {
    CUDA_OPEN_LOAD,      /* load the driver */
    CUDA_OPEN_IF_LOADED, /* only when this process has loaded it already */
};

/*
 * The process's table; opened once, never closed. NULL: *out_text says why not (static storage):
 * no driver, one that lacks a required function, or, for CUDA_OPEN_LOAD, one that will not
 * initialise. CUDA_OPEN_IF_LOADED never calls cuInit() and may be asked again later.
 */
const struct cuda_table *cuda_table_open(enum cuda_open_how how, const char **out_text);

/* "CUDA_ERROR_OUT_OF_MEMORY: out of memory", in a buffer of the calling thread. */
const char *cuda_table_error(const struct cuda_table *cuda, CUresult rc);

#endif
