/* SPDX-License-Identifier: Apache-2.0 */
/* The table by gradd's own declarations. */
#include "worker/backend/nccl/nccl_abi.h"

#include <string.h>

#include "nccl_abi_list.h"

NCCL_ABI_TABLE(nccl_abi_ours);

size_t nccl_abi_our_config(void *out, size_t bytes)
{
    ncclConfig_t config = nccl_abi_config();
    config.version = 0; /* 2.28.0 here, the header's own there */
    memcpy(out, &config, sizeof config < bytes ? sizeof config : bytes);
    return sizeof config;
}
