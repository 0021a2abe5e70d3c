/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The constants of tests/fakes/cuda/abi.h and the names of the entry points, compared with those of
 * <cuda.h>. Built where a CUDA Toolkit is found; what differs does not compile.
 */
#include <cuda.h>

/* The product's declarations cannot be included beside <cuda.h>; their values are checked in
 * tests/unit/proto. */
#define GRADD_CUDA_ABI_H
#include "cuda/abi.h"

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #theirs)

SAME(FAKE_ERROR_DEVICE_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE);
SAME(FAKE_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE);
SAME(FAKE_ERROR_UNKNOWN, CUDA_ERROR_UNKNOWN);
SAME(FAKE_ERROR_CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
SAME(FAKE_ERROR_CAPTURE_UNMATCHED, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
SAME(FAKE_ERROR_CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
SAME(FAKE_CAPTURE_STATUS_INVALIDATED, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
SAME(FAKE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(FAKE_ATTRIBUTE_WARP_SIZE, CU_DEVICE_ATTRIBUTE_WARP_SIZE);
SAME(FAKE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
SAME(FAKE_ATTRIBUTE_PCI_BUS_ID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
SAME(FAKE_ATTRIBUTE_PCI_DEVICE_ID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
SAME(FAKE_ATTRIBUTE_PCI_DOMAIN_ID, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
SAME(FAKE_ATTRIBUTE_ASYNC_ENGINE_COUNT, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
SAME(FAKE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
     CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
SAME(FAKE_ATTRIBUTE_MANAGED_MEMORY, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
SAME(FAKE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
SAME(FAKE_ATTRIBUTE_CAN_USE_HOST_POINTER,
     CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
SAME(FAKE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES);
SAME(FAKE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
SAME(FAKE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
SAME(FAKE_ATTRIBUTE_STREAM_WAIT_VALUE_NOR, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR);
SAME(FAKE_POINTER_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
SAME(FAKE_POINTER_HOST_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER);
SAME(FAKE_POINTER_SYNC_MEMOPS, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
SAME(FAKE_WAIT_EQ, CU_STREAM_WAIT_VALUE_EQ);
SAME(FAKE_WAIT_AND, CU_STREAM_WAIT_VALUE_AND);
SAME(FAKE_WAIT_NOR, CU_STREAM_WAIT_VALUE_NOR);
SAME(FAKE_WAIT_FLUSH, CU_STREAM_WAIT_VALUE_FLUSH);
SAME(FAKE_EVENT_BLOCKING_SYNC, CU_EVENT_BLOCKING_SYNC);
SAME(0, CU_GET_PROC_ADDRESS_SUCCESS);
SAME(1, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);

/* Every call of <cuda.h> that its macros rename has the suffixed name here. */
#define TEXT(name)  TEXT_(name)
#define TEXT_(name) #name

#include <check.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "proto/run_suite.h"

/* clang-format off */
#define CALLS(X) \
    X(cuGetProcAddress) X(cuDeviceGetUuid) X(cuDeviceTotalMem) X(cuDevicePrimaryCtxRelease) \
    X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuMemAlloc) X(cuMemFree) X(cuMemGetInfo) \
    X(cuMemGetAddressRange) X(cuMemAllocHost) X(cuMemHostRegister) X(cuMemHostGetDevicePointer) \
    X(cuMemcpyDtoD) X(cuMemcpyDtoDAsync) X(cuMemcpyHtoD) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoH) \
    X(cuMemcpyDtoHAsync) X(cuMemsetD8) X(cuMemsetD32) X(cuStreamDestroy) X(cuStreamBeginCapture) \
    X(cuStreamWaitValue32) X(cuStreamWaitValue64) X(cuStreamWriteValue32) X(cuStreamWriteValue64) \
    X(cuEventDestroy) X(cuEventElapsedTime) X(cuIpcOpenMemHandle) \
    X(cuMemcpy) X(cuMemcpyAsync) X(cuMemsetD8Async) X(cuMemsetD32Async) X(cuEventRecord) \
    X(cuEventCreate) X(cuEventQuery) X(cuEventSynchronize) X(cuEventRecordWithFlags) \
    X(cuIpcGetMemHandle) X(cuIpcCloseMemHandle) X(cuIpcGetEventHandle) X(cuIpcOpenEventHandle) \
    X(cuStreamWaitEvent) X(cuStreamQuery) X(cuStreamSynchronize) X(cuStreamCreate) \
    X(cuStreamGetCtx) X(cuStreamIsCapturing) X(cuStreamEndCapture) X(cuLaunchHostFunc) \
    X(cuLaunchKernel) X(cuMemHostUnregister) X(cuMemFreeHost) X(cuMemHostAlloc) \
    X(cuMemRetainAllocationHandle) X(cuMemExportToShareableHandle) X(cuPointerGetAttribute) \
    X(cuMemImportFromShareableHandle) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuMemAllocManaged)
/* clang-format on */

static const char *const names[] = {
#define NAME(call) TEXT(call),
    CALLS(NAME)};

START_TEST(the_library_exports_the_names_that_the_header_maps_calls_to)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    ck_assert_ptr_nonnull(library);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        ck_assert_msg(dlsym(library, names[i]) != NULL, "%s", names[i]);
}
END_TEST

START_TEST(the_default_streams_have_the_headers_handles)
{
    ck_assert_uint_eq(FAKE_STREAM_LEGACY, (uintptr_t)CU_STREAM_LEGACY);
    ck_assert_uint_eq(FAKE_STREAM_PER_THREAD, (uintptr_t)CU_STREAM_PER_THREAD);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        the_library_exports_the_names_that_the_header_maps_calls_to,
        the_default_streams_have_the_headers_handles,
    };
    return run_suite("fake_abi", tests, sizeof tests / sizeof *tests);
}
