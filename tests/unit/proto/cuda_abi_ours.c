/* SPDX-License-Identifier: Apache-2.0 */
/* The table by gradd's own declarations. */
#include "cuda_abi.h"

#include "cuda_abi_list.h"

CUDA_ABI_TABLE(cuda_abi_ours);
