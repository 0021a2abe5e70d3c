/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/launch_gpu.h"

#include <stdatomic.h>
#include <stdlib.h>

enum {
    SCRATCH_STEP = 2 * 1024 * 1024,
    EVENTS_STEP = 32,
};

void launch_gpu_init(struct launch_gpu *gpu, struct cuda_device *device)
{
    gpu->device = device;
    device->cuda->ctx_set(device->context);
    if (device->kernels)
        cuda_kernels_load(&gpu->kernels, device->cuda, device->kernels, device->ordinal);
}

void launch_gpu_trim(struct launch_gpu *gpu)
{
    if (gpu->n_outgrown > 0)
        gpu->device->cuda->ctx_set(gpu->device->context);
    for (size_t i = 0; i < gpu->n_outgrown; i++)
        gpu->device->cuda->mem_free(gpu->outgrown[i]);
    gpu->n_outgrown = 0;
}

void launch_gpu_deinit(struct launch_gpu *gpu)
{
    free(gpu->outgrown);
    if (!gpu->device)
        return;
    gpu->device->cuda->ctx_set(gpu->device->context);
    for (size_t event = 0; event < gpu->n_events; event++)
        gpu->device->cuda->event_destroy(gpu->events[event]);
    free(gpu->events);
    if (gpu->scratch)
        gpu->device->cuda->mem_free(gpu->scratch);
    atomic_store(&gpu->device->scratch_bytes, 0);
}

CUresult launch_gpu_grow_scratch(struct launch_gpu *gpu, uint64_t bytes)
{
    const struct cuda_table *cuda = gpu->device->cuda;
    CUdeviceptr grown = 0;
    CUdeviceptr *outgrown = realloc(gpu->outgrown, (gpu->n_outgrown + 1) * sizeof *gpu->outgrown);
    if (!outgrown)
        return CUDA_ERROR_OUT_OF_MEMORY;
    gpu->outgrown = outgrown;
    bytes = (bytes + SCRATCH_STEP - 1) / SCRATCH_STEP * SCRATCH_STEP;
    CUresult rc = cuda->mem_alloc(&grown, bytes);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (gpu->scratch)
        gpu->outgrown[gpu->n_outgrown++] = gpu->scratch;
    gpu->scratch = grown;
    gpu->scratch_bytes = bytes;
    atomic_store(&gpu->device->scratch_bytes, bytes);
    return CUDA_SUCCESS;
}

static bool make_events(struct launch_gpu *gpu)
{
    const size_t n = gpu->n_events_made + EVENTS_STEP;
    CUevent *events = realloc(gpu->events, n * sizeof(*events));
    if (!events)
        return false;
    gpu->events = events;
    gpu->device->cuda->ctx_set(gpu->device->context);
    for (size_t i = 0; i < EVENTS_STEP; i++) {
        if (gpu->device->cuda->event_create(&events[gpu->n_events], CU_EVENT_DISABLE_TIMING) !=
            CUDA_SUCCESS)
            break;
        gpu->n_events++;
        gpu->n_events_made++;
    }
    return gpu->n_events > 0;
}

bool launch_gpu_take_event(struct launch_gpu *gpu, CUevent *out)
{
    if (gpu->n_events == 0 && !make_events(gpu))
        return false;
    *out = gpu->events[--gpu->n_events];
    return true;
}

void launch_gpu_give_event(struct launch_gpu *gpu, CUevent event)
{
    gpu->events[gpu->n_events++] = event;
}
