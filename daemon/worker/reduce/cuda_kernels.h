/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device's side of reduce.h: kernels that read N inputs once and write M outputs once, pack and
 * unpack small tensors, and count what is not finite.
 *
 * The results are those of reduce.h, bit for bit (NaN for NaN): the order of the inputs, float32
 * for half types, the factors and the rounding are the same.
 *
 * The kernels are compiled by nvcc into an image within the worker (sm_80, sm_90, sm_100, sm_120,
 * and PTX for what is newer), loaded by the driver. Without nvcc at build time there is none:
 * `gradctl status` says so, and ops that need one fail with a sentence. A file named by
 * GRADD_CUDA_KERNELS in the worker's environment takes the image's place.
 *
 * Thread: cuda_kernels_image(), _sources() any; the others the thread that launches on the device,
 * with its context current. Launches are asynchronous, in the order of the stream.
 */
#ifndef GRADD_CUDA_KERNELS_H
#define GRADD_CUDA_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <gradd/types.h>

#include "cuda_params.h"
#include "cuda_table.h"

enum { CUDA_KERNELS_DTYPES = 10, CUDA_KERNELS_OPS = 4 };

/* What cuModuleLoadData() takes, or NULL: no image, out_text (may be NULL) says why. Read once per
 * process, valid for good. */
const void *cuda_kernels_image(size_t *out_bytes, const char **out_text);

/* For people: "sm_80, sm_90, sm_100, sm_120, PTX", the file's name, or "none (built without nvcc)".
 */
const char *cuda_kernels_describe(void);

/* The functions of a loaded module, and what launches need to know of its device. */
struct cuda_kernels {
    const struct cuda_table *cuda;                            /* NULL: not loaded */
    CUfunction reduce[CUDA_KERNELS_DTYPES][CUDA_KERNELS_OPS]; /* [gradd_dtype][gradd_redop] */
    CUfunction nonfinite[CUDA_KERNELS_DTYPES];                /* [gradd_dtype]; NULL: integers */
    CUfunction copy;
    unsigned n_multiprocessors;
};

/* Look up all functions of the module. On failure *kernels stays as it was. */
CUresult cuda_kernels_load(struct cuda_kernels *kernels, const struct cuda_table *cuda,
                           CUmodule module, CUdevice device);

/*
 * Reduce n elements: r->in and r->out are device addresses. CUDA_ERROR_INVALID_VALUE: a type or
 * operator that has no kernel, or more than CUDA_REDUCE_MAX inputs or outputs.
 */
struct reduction;
CUresult cuda_kernels_reduce(const struct cuda_kernels *kernels, CUstream stream,
                             const struct reduction *r, size_t n);

/* Copy n_segments pieces that do not overlap: pack, unpack, or one source to many. */
CUresult cuda_kernels_copy(const struct cuda_kernels *kernels, CUstream stream,
                           const struct cuda_copy_segment *segments, size_t n_segments);

/* Add to the uint64_t at `count` (device address) how many of n elements are NaN or infinite; adds
 * nothing for integers. */
CUresult cuda_kernels_count_nonfinite(const struct cuda_kernels *kernels, CUstream stream,
                                      enum gradd_dtype dtype, CUdeviceptr in, size_t n,
                                      CUdeviceptr count);

/* Blocks of CUDA_KERNELS_THREADS threads for so many bytes per input: enough to fill the device,
 * no more than it holds at once. */
unsigned cuda_kernels_blocks(unsigned n_multiprocessors, size_t bytes);

#endif
