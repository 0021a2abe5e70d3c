/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every constant, size and offset of nccl_abi.h, as a table. Compiled twice: against our
 * declarations and against NVIDIA's <nccl.h>.
 */
#ifndef GRADD_NCCL_ABI_LIST_H
#define GRADD_NCCL_ABI_LIST_H

#include <stddef.h>

struct nccl_abi_value {
    const char *name;
    long long value;
};

extern const struct nccl_abi_value nccl_abi_ours[], nccl_abi_theirs[];
extern const size_t nccl_abi_ours_count, nccl_abi_theirs_count;

/* What a configuration is initialised with; returns its size. */
size_t nccl_abi_our_config(void *out, size_t bytes);
size_t nccl_abi_their_config(void *out, size_t bytes);

/* clang-format off */
#define NCCL_ABI_VALUE(name) {#name, (long long)(name)}
#define NCCL_ABI_FIELD(field) {"ncclConfig_t." #field, offsetof(ncclConfig_t, field)}
#define NCCL_ABI_TABLE(name) \
    const struct nccl_abi_value name[] = { \
        NCCL_ABI_VALUE(NCCL_UNIQUE_ID_BYTES), \
        NCCL_ABI_VALUE(NCCL_CONFIG_UNDEF_INT), \
        NCCL_ABI_VALUE(ncclSuccess), \
        NCCL_ABI_VALUE(ncclUnhandledCudaError), \
        NCCL_ABI_VALUE(ncclSystemError), \
        NCCL_ABI_VALUE(ncclInternalError), \
        NCCL_ABI_VALUE(ncclInvalidArgument), \
        NCCL_ABI_VALUE(ncclInvalidUsage), \
        NCCL_ABI_VALUE(ncclRemoteError), \
        NCCL_ABI_VALUE(ncclInProgress), \
        NCCL_ABI_VALUE(ncclSum), \
        NCCL_ABI_VALUE(ncclProd), \
        NCCL_ABI_VALUE(ncclMax), \
        NCCL_ABI_VALUE(ncclMin), \
        NCCL_ABI_VALUE(ncclAvg), \
        NCCL_ABI_VALUE(ncclNumOps), \
        NCCL_ABI_VALUE(ncclInt8), \
        NCCL_ABI_VALUE(ncclUint8), \
        NCCL_ABI_VALUE(ncclInt32), \
        NCCL_ABI_VALUE(ncclInt64), \
        NCCL_ABI_VALUE(ncclFloat16), \
        NCCL_ABI_VALUE(ncclFloat32), \
        NCCL_ABI_VALUE(ncclFloat64), \
        NCCL_ABI_VALUE(ncclBfloat16), \
        NCCL_ABI_VALUE(ncclScalarHostImmediate), \
        NCCL_ABI_VALUE(sizeof(ncclUniqueId)), \
        NCCL_ABI_VALUE(sizeof(ncclRedOp_t)), \
        NCCL_ABI_VALUE(sizeof(ncclDataType_t)), \
        NCCL_ABI_VALUE(sizeof(ncclResult_t)), \
        NCCL_ABI_VALUE(sizeof(ncclConfig_t)), \
        NCCL_ABI_FIELD(size), \
        NCCL_ABI_FIELD(magic), \
        NCCL_ABI_FIELD(version), \
        NCCL_ABI_FIELD(blocking), \
        NCCL_ABI_FIELD(cgaClusterSize), \
        NCCL_ABI_FIELD(minCTAs), \
        NCCL_ABI_FIELD(maxCTAs), \
        NCCL_ABI_FIELD(netName), \
        NCCL_ABI_FIELD(splitShare), \
        NCCL_ABI_FIELD(trafficClass), \
        NCCL_ABI_FIELD(commName), \
        NCCL_ABI_FIELD(collnetEnable), \
        NCCL_ABI_FIELD(CTAPolicy), \
        NCCL_ABI_FIELD(shrinkShare), \
        NCCL_ABI_FIELD(nvlsCTAs), \
        NCCL_ABI_FIELD(nChannelsPerNetPeer), \
        NCCL_ABI_FIELD(nvlinkCentricSched), \
    }; \
    const size_t name##_count = sizeof name / sizeof *name
/* clang-format on */

#endif
