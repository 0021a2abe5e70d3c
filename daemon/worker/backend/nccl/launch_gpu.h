/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the submitter thread keeps of a GPU: its kernels, scratch memory and spare events. They only
 * grow, so that in steady state nothing is made.
 *
 * Thread: submitter.
 */
#ifndef GRADD_LAUNCH_GPU_H
#define GRADD_LAUNCH_GPU_H

#include "cuda_kernels.h"
#include "worker/buffer/cuda_device.h"

struct launch_gpu {
    struct cuda_device *device; /* NULL: not used yet */
    struct cuda_kernels kernels;
    CUdeviceptr scratch;
    uint64_t scratch_bytes;
    CUdeviceptr *outgrown; /* scratch of before, which something may still use */
    size_t n_outgrown;
    CUevent *events; /* spare ones */
    size_t n_events, n_events_made;
};

/* The device's context is current from here on. */
void launch_gpu_init(struct launch_gpu *gpu, struct cuda_device *device);
/* Nothing runs. */
void launch_gpu_deinit(struct launch_gpu *gpu);
/* Nothing runs: give back what was outgrown. */
void launch_gpu_trim(struct launch_gpu *gpu);

/* So much scratch memory, in place of what there is. The device's context is current. */
CUresult launch_gpu_grow_scratch(struct launch_gpu *gpu, uint64_t bytes);

/* An event; more are made, many at once, when there is none. False: none can be made. */
bool launch_gpu_take_event(struct launch_gpu *gpu, CUevent *out);
void launch_gpu_give_event(struct launch_gpu *gpu, CUevent event);

#endif
