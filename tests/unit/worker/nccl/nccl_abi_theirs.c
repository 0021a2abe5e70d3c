/* SPDX-License-Identifier: Apache-2.0 */
/* The table by NVIDIA's header. */
#include <nccl.h>

#include <string.h>

#include "nccl_abi_list.h"

NCCL_ABI_TABLE(nccl_abi_theirs);

size_t nccl_abi_their_config(void *out, size_t bytes)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.version = 0;
    memcpy(out, &config, sizeof config < bytes ? sizeof config : bytes);
    return sizeof config;
}
