/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every entry point of the fake driver: one table for the prototypes, the counters, the injection
 * of errors and the look-up by cuGetProcAddress(). Names are those that <cuda.h> 13.0 maps its
 * calls to.
 */
#ifndef GRADD_FAKE_ENTRIES_H
#define GRADD_FAKE_ENTRIES_H

#include "abi.h"

/* clang-format off */
#define FAKE_ENTRIES(X) \
    X(cuInit, (unsigned flags)) \
    X(cuDriverGetVersion, (int *out)) \
    X(cuGetErrorName, (CUresult rc, const char **out)) \
    X(cuGetErrorString, (CUresult rc, const char **out)) \
    X(cuGetProcAddress_v2, (const char *symbol, void **out, int version, uint64_t flags, int *out_status)) \
    X(cuDeviceGetCount, (int *out)) \
    X(cuDeviceGet, (CUdevice *out, int ordinal)) \
    X(cuDeviceGetUuid_v2, (CUuuid *out, CUdevice device)) \
    X(cuDeviceGetName, (char *out, int bytes, CUdevice device)) \
    X(cuDeviceGetAttribute, (int *out, int attribute, CUdevice device)) \
    X(cuDeviceGetPCIBusId, (char *out, int bytes, CUdevice device)) \
    X(cuDeviceTotalMem_v2, (size_t *out, CUdevice device)) \
    X(cuDeviceCanAccessPeer, (int *out, CUdevice device, CUdevice peer)) \
    X(cuDevicePrimaryCtxRetain, (CUcontext *out, CUdevice device)) \
    X(cuDevicePrimaryCtxRelease_v2, (CUdevice device)) \
    X(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active)) \
    X(cuCtxGetCurrent, (CUcontext *out)) \
    X(cuCtxSetCurrent, (CUcontext context)) \
    X(cuCtxPushCurrent_v2, (CUcontext context)) \
    X(cuCtxPopCurrent_v2, (CUcontext *out)) \
    X(cuCtxGetDevice, (CUdevice *out)) \
    X(cuCtxSynchronize, (void)) \
    X(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags)) \
    X(cuMemAlloc_v2, (CUdeviceptr *out, size_t bytes)) \
    X(cuMemFree_v2, (CUdeviceptr p)) \
    X(cuMemGetInfo_v2, (size_t *out_free, size_t *out_total)) \
    X(cuMemGetAddressRange_v2, (CUdeviceptr *out_base, size_t *out_bytes, CUdeviceptr p)) \
    X(cuPointerGetAttribute, (void *out, int attribute, CUdeviceptr p)) \
    X(cuPointerGetAttributes, (unsigned n, const int *attributes, void **out, CUdeviceptr p)) \
    X(cuMemAllocManaged, (CUdeviceptr *out, size_t bytes, unsigned flags)) \
    X(cuMemAllocAsync, (CUdeviceptr *out, size_t bytes, CUstream s)) \
    X(cuMemFreeAsync, (CUdeviceptr p, CUstream s)) \
    X(cuMemHostAlloc, (void **out, size_t bytes, unsigned flags)) \
    X(cuMemAllocHost_v2, (void **out, size_t bytes)) \
    X(cuMemFreeHost, (void *p)) \
    X(cuMemHostRegister_v2, (void *p, size_t bytes, unsigned flags)) \
    X(cuMemHostUnregister, (void *p)) \
    X(cuMemHostGetDevicePointer_v2, (CUdeviceptr *out, void *p, unsigned flags)) \
    X(cuMemCreate, (CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)) \
    X(cuMemRelease, (CUmemGenericAllocationHandle handle)) \
    X(cuMemAddressReserve, (CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long flags)) \
    X(cuMemAddressFree, (CUdeviceptr p, size_t bytes)) \
    X(cuMemMap, (CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)) \
    X(cuMemUnmap, (CUdeviceptr p, size_t bytes)) \
    X(cuMemSetAccess, (CUdeviceptr p, size_t bytes, const CUmemAccessDesc *access, size_t n)) \
    X(cuMemGetAllocationGranularity, (size_t *out, const CUmemAllocationProp *properties, int option)) \
    X(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *out, void *address)) \
    X(cuMemExportToShareableHandle, (void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)) \
    X(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *out, void *os_handle, int type)) \
    X(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes)) \
    X(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s)) \
    X(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes)) \
    X(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s)) \
    X(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes)) \
    X(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream s)) \
    X(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes)) \
    X(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream s)) \
    X(cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t n)) \
    X(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t n, CUstream s)) \
    X(cuMemsetD32_v2, (CUdeviceptr to, unsigned value, size_t n)) \
    X(cuMemsetD32Async, (CUdeviceptr to, unsigned value, size_t n, CUstream s)) \
    X(cuStreamCreate, (CUstream *out, unsigned flags)) \
    X(cuStreamCreateWithPriority, (CUstream *out, unsigned flags, int priority)) \
    X(cuCtxGetStreamPriorityRange, (int *out_least, int *out_greatest)) \
    X(cuStreamDestroy_v2, (CUstream s)) \
    X(cuStreamQuery, (CUstream s)) \
    X(cuStreamSynchronize, (CUstream s)) \
    X(cuStreamWaitEvent, (CUstream s, CUevent e, unsigned flags)) \
    X(cuStreamGetCtx, (CUstream s, CUcontext *out)) \
    X(cuStreamIsCapturing, (CUstream s, int *out_status)) \
    X(cuStreamBeginCapture_v2, (CUstream s, int mode)) \
    X(cuStreamEndCapture, (CUstream s, CUgraph *out)) \
    X(cuThreadExchangeStreamCaptureMode, (int *mode)) \
    X(cuGraphDestroy, (CUgraph graph)) \
    X(cuStreamWaitValue32_v2, (CUstream s, CUdeviceptr p, uint32_t value, unsigned flags)) \
    X(cuStreamWaitValue64_v2, (CUstream s, CUdeviceptr p, uint64_t value, unsigned flags)) \
    X(cuStreamWriteValue32_v2, (CUstream s, CUdeviceptr p, uint32_t value, unsigned flags)) \
    X(cuStreamWriteValue64_v2, (CUstream s, CUdeviceptr p, uint64_t value, unsigned flags)) \
    X(cuLaunchHostFunc, (CUstream s, void (*run)(void *), void *data)) \
    X(cuEventCreate, (CUevent *out, unsigned flags)) \
    X(cuEventDestroy_v2, (CUevent e)) \
    X(cuEventRecord, (CUevent e, CUstream s)) \
    X(cuEventRecordWithFlags, (CUevent e, CUstream s, unsigned flags)) \
    X(cuEventQuery, (CUevent e)) \
    X(cuEventSynchronize, (CUevent e)) \
    X(cuEventElapsedTime_v2, (float *out_ms, CUevent from, CUevent to)) \
    X(cuIpcGetMemHandle, (CUipcMemHandle *out, CUdeviceptr p)) \
    X(cuIpcOpenMemHandle_v2, (CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)) \
    X(cuIpcCloseMemHandle, (CUdeviceptr p)) \
    X(cuIpcGetEventHandle, (CUipcEventHandle *out, CUevent e)) \
    X(cuIpcOpenEventHandle, (CUevent *out, CUipcEventHandle handle)) \
    X(cuModuleLoadData, (CUmodule *out, const void *image)) \
    X(cuModuleUnload, (CUmodule module)) \
    X(cuModuleGetFunction, (CUfunction *out, CUmodule module, const char *name)) \
    X(cuLibraryLoadData, (CUlibrary *out, const void *image, int *options, void **values, unsigned n, int *library_options, void **library_values, unsigned n_library)) \
    X(cuLibraryUnload, (CUlibrary library)) \
    X(cuLibraryGetKernel, (CUkernel *out, CUlibrary library, const char *name)) \
    X(cuKernelGetFunction, (CUfunction *out, CUkernel kernel)) \
    X(cuLaunchKernel, (CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream s, void **parameters, void **extra))
/* clang-format on */

enum fake_entry {
#define FAKE_ENTRY_ID(name, parameters) ENTRY_##name,
    FAKE_ENTRIES(FAKE_ENTRY_ID)
#undef FAKE_ENTRY_ID
        N_ENTRIES
};

#define FAKE_EXPORT                            __attribute__((visibility("default")))
#define FAKE_ENTRY_PROTOTYPE(name, parameters) FAKE_EXPORT CUresult name parameters;
FAKE_ENTRIES(FAKE_ENTRY_PROTOTYPE)
#undef FAKE_ENTRY_PROTOTYPE

#endif
