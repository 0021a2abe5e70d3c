/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory that the library makes: for gradd_alloc_device(), and to bounce through.
 *
 * Thread: any, under the context's lock.
 */
#ifndef GRADD_CLIENT_CUDA_ALLOCATION_H
#define GRADD_CLIENT_CUDA_ALLOCATION_H

#include "cuda.h"

/* Memory that another process can map, and that stays while it is mapped there, where the driver
 * can make such; else what cuMemAlloc() gives. 0 or a status. */
int cuda_allocation_new(struct cuda *cuda, struct cuda_gpu *gpu, size_t bytes, CUdeviceptr *out);
void cuda_allocation_free(struct cuda *cuda, CUdeviceptr at);
/* Its size, or 0: none begins here. */
uint64_t cuda_allocation_bytes(const struct cuda *cuda, CUdeviceptr at);
/* Free them all; and their records. */
void cuda_allocations_stop(struct cuda *cuda);
void cuda_allocations_free(struct cuda *cuda);

#endif
