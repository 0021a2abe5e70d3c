/* SPDX-License-Identifier: Apache-2.0 */
/* The table by NVIDIA's header. */
#include <cuda.h>

#include "cuda_abi_list.h"

CUDA_ABI_TABLE(cuda_abi_theirs);
