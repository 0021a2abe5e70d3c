/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which GPU each rank of a job has its device memory on, as the coordinator has been told. From it
 * follows the rank of each GPU in a communicator.
 *
 * Pure. Thread: any.
 */
#ifndef GRADD_DEVICE_MAP_H
#define GRADD_DEVICE_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "worker/buffer/cuda_device.h"

struct device_map {
    uint32_t n_ranks;
    struct device_place {
        bool is_known;
        uint32_t node;
        uint8_t uuid[CUDA_UUID_BYTES];
    } * places;     /* by rank */
    uint32_t *keys; /* scratch, as many */
};

/* 0 or -ENOMEM. */
int device_map_init(struct device_map *map, uint32_t n_ranks);
void device_map_deinit(struct device_map *map); /* idempotent */

void device_map_set(struct device_map *map, uint32_t rank, uint32_t node, const uint8_t *uuid);

/* Number the GPUs of these ranks (lower_number_gpus()); returns how many there are. */
uint32_t device_map_number(struct device_map *map, const uint32_t *ranks, uint32_t n,
                           uint32_t *out_gpu_of);

#endif
