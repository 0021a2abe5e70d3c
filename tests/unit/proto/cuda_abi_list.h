/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every constant, size and offset of proto/cuda_abi.h, as a table. Compiled twice: against our
 * declarations and against NVIDIA's <cuda.h>.
 */
#ifndef GRADD_CUDA_ABI_LIST_H
#define GRADD_CUDA_ABI_LIST_H

#include <stddef.h>

struct cuda_abi_value {
    const char *name;
    long long value;
};

extern const struct cuda_abi_value cuda_abi_ours[], cuda_abi_theirs[];
extern const size_t cuda_abi_ours_count, cuda_abi_theirs_count;

/* clang-format off */
#define CUDA_ABI_TABLE(name) \
    const struct cuda_abi_value name[] = { \
        {"CUDA_SUCCESS", CUDA_SUCCESS}, \
        {"CUDA_ERROR_INVALID_VALUE", CUDA_ERROR_INVALID_VALUE}, \
        {"CUDA_ERROR_OUT_OF_MEMORY", CUDA_ERROR_OUT_OF_MEMORY}, \
        {"CUDA_ERROR_NOT_INITIALIZED", CUDA_ERROR_NOT_INITIALIZED}, \
        {"CUDA_ERROR_STUB_LIBRARY", CUDA_ERROR_STUB_LIBRARY}, \
        {"CUDA_ERROR_NO_DEVICE", CUDA_ERROR_NO_DEVICE}, \
        {"CUDA_ERROR_INVALID_DEVICE", CUDA_ERROR_INVALID_DEVICE}, \
        {"CUDA_ERROR_INVALID_CONTEXT", CUDA_ERROR_INVALID_CONTEXT}, \
        {"CUDA_ERROR_MAP_FAILED", CUDA_ERROR_MAP_FAILED}, \
        {"CUDA_ERROR_ALREADY_MAPPED", CUDA_ERROR_ALREADY_MAPPED}, \
        {"CUDA_ERROR_NO_BINARY_FOR_GPU", CUDA_ERROR_NO_BINARY_FOR_GPU}, \
        {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", CUDA_ERROR_PEER_ACCESS_UNSUPPORTED}, \
        {"CUDA_ERROR_INVALID_HANDLE", CUDA_ERROR_INVALID_HANDLE}, \
        {"CUDA_ERROR_NOT_FOUND", CUDA_ERROR_NOT_FOUND}, \
        {"CUDA_ERROR_NOT_READY", CUDA_ERROR_NOT_READY}, \
        {"CUDA_ERROR_ILLEGAL_ADDRESS", CUDA_ERROR_ILLEGAL_ADDRESS}, \
        {"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED}, \
        {"CUDA_ERROR_CONTEXT_IS_DESTROYED", CUDA_ERROR_CONTEXT_IS_DESTROYED}, \
        {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED}, \
        {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED}, \
        {"CUDA_ERROR_MISALIGNED_ADDRESS", CUDA_ERROR_MISALIGNED_ADDRESS}, \
        {"CUDA_ERROR_LAUNCH_FAILED", CUDA_ERROR_LAUNCH_FAILED}, \
        {"CUDA_ERROR_NOT_PERMITTED", CUDA_ERROR_NOT_PERMITTED}, \
        {"CUDA_ERROR_NOT_SUPPORTED", CUDA_ERROR_NOT_SUPPORTED}, \
        {"CUDA_ERROR_MPS_CONNECTION_FAILED", CUDA_ERROR_MPS_CONNECTION_FAILED}, \
        {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED}, \
        {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", CUDA_ERROR_STREAM_CAPTURE_IMPLICIT}, \
        {"CU_STREAM_CAPTURE_MODE_GLOBAL", CU_STREAM_CAPTURE_MODE_GLOBAL}, \
        {"CU_STREAM_CAPTURE_MODE_RELAXED", CU_STREAM_CAPTURE_MODE_RELAXED}, \
        {"CU_STREAM_LEGACY", (long long)(size_t)CU_STREAM_LEGACY}, \
        {"CU_STREAM_PER_THREAD", (long long)(size_t)CU_STREAM_PER_THREAD}, \
        {"CU_DEVICE_ATTRIBUTE_MPS_ENABLED", CU_DEVICE_ATTRIBUTE_MPS_ENABLED}, \
        {"sizeof CUresult", sizeof(CUresult)}, \
        {"sizeof CUdevice", sizeof(CUdevice)}, \
        {"sizeof CUdeviceptr", sizeof(CUdeviceptr)}, \
        {"sizeof CUcontext", sizeof(CUcontext)}, \
        {"sizeof CUstream", sizeof(CUstream)}, \
        {"sizeof CUmemGenericAllocationHandle", sizeof(CUmemGenericAllocationHandle)}, \
        {"sizeof CUuuid", sizeof(CUuuid)}, \
        {"sizeof CUipcMemHandle", sizeof(CUipcMemHandle)}, \
        {"sizeof CUipcEventHandle", sizeof(CUipcEventHandle)}, \
        {"sizeof CUmemLocation", sizeof(CUmemLocation)}, \
        {"sizeof CUmemAllocationProp", sizeof(CUmemAllocationProp)}, \
        {"sizeof CUmemAccessDesc", sizeof(CUmemAccessDesc)}, \
        {"CUmemLocation.type", offsetof(CUmemLocation, type)}, \
        {"CUmemLocation.id", offsetof(CUmemLocation, id)}, \
        {"CUmemAllocationProp.type", offsetof(CUmemAllocationProp, type)}, \
        {"CUmemAllocationProp.requestedHandleTypes", offsetof(CUmemAllocationProp, requestedHandleTypes)}, \
        {"CUmemAllocationProp.location", offsetof(CUmemAllocationProp, location)}, \
        {"CUmemAllocationProp.win32HandleMetaData", offsetof(CUmemAllocationProp, win32HandleMetaData)}, \
        {"CUmemAllocationProp.allocFlags", offsetof(CUmemAllocationProp, allocFlags)}, \
        {"CUmemAllocationProp.allocFlags.usage", offsetof(CUmemAllocationProp, allocFlags.usage)}, \
        {"CUmemAccessDesc.location", offsetof(CUmemAccessDesc, location)}, \
        {"CUmemAccessDesc.flags", offsetof(CUmemAccessDesc, flags)}, \
    }; \
    const size_t name##_count = sizeof name / sizeof *name
/* clang-format on */

#endif
