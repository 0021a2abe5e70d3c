/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of NCCL's binary interface that gradd uses, declared here so that every build has it,
 * with or without NCCL's header. Names, values and layouts are those of the NCCL 2.28 API reference
 * (docs.nvidia.com/deeplearning/nccl); NCCL keeps them stable and only appends to ncclConfig_t.
 * tests/unit/worker/nccl/test_nccl_abi compares them with <nccl.h> where one is installed. Never
 * include both in one file.
 */
#ifndef GRADD_NCCL_ABI_H
#define GRADD_NCCL_ABI_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;

enum { NCCL_UNIQUE_ID_BYTES = 128 };

typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;

/* The built-in operators and the element types have the numbers of gradd/types.h; what
 * ncclRedOpCreatePreMulSum() makes is larger. */
typedef int ncclRedOp_t;
typedef int ncclDataType_t;

enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5,
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt64 = 4,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclScalarHostImmediate = 1,
    NCCL_CONFIG_UNDEF_INT = INT_MIN,
};

/*
 * As of 2.28. `size` tells a library how much of it there is: an older one reads the fields that it
 * knows and ignores the rest, a newer one takes its defaults for what is missing.
 */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare;       /* 2.18 */
    int trafficClass;     /* 2.26 */
    const char *commName; /* 2.27, as the next three */
    int collnetEnable, CTAPolicy, shrinkShare;
    int nvlsCTAs; /* 2.28, as the next two */
    int nChannelsPerNetPeer, nvlinkCentricSched;
} ncclConfig_t;

enum {
    NCCL_ABI_CONFIG_VERSION = 22800,
    NCCL_ABI_VERSION_MIN = 21800, /* ncclConfig_t with splitShare, ncclCommSplit */
};
#define NCCL_ABI_CONFIG_MAGIC 0xcafebeefu

/* NCCL_CONFIG_INITIALIZER */
static inline ncclConfig_t nccl_abi_config(void)
{
    return (ncclConfig_t){
        .size = sizeof(ncclConfig_t),
        .magic = NCCL_ABI_CONFIG_MAGIC,
        .version = NCCL_ABI_CONFIG_VERSION,
        .blocking = NCCL_CONFIG_UNDEF_INT,
        .cgaClusterSize = NCCL_CONFIG_UNDEF_INT,
        .minCTAs = NCCL_CONFIG_UNDEF_INT,
        .maxCTAs = NCCL_CONFIG_UNDEF_INT,
        .splitShare = NCCL_CONFIG_UNDEF_INT,
        .trafficClass = NCCL_CONFIG_UNDEF_INT,
        .collnetEnable = NCCL_CONFIG_UNDEF_INT,
        .CTAPolicy = NCCL_CONFIG_UNDEF_INT,
        .shrinkShare = NCCL_CONFIG_UNDEF_INT,
        .nvlsCTAs = NCCL_CONFIG_UNDEF_INT,
        .nChannelsPerNetPeer = NCCL_CONFIG_UNDEF_INT,
        .nvlinkCentricSched = NCCL_CONFIG_UNDEF_INT,
    };
}

#endif
