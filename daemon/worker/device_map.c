/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/device_map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "worker/backend/nccl/lower.h"

int device_map_init(struct device_map *map, uint32_t n_ranks)
{
    map->n_ranks = n_ranks;
    map->places = calloc(n_ranks, sizeof *map->places);
    map->keys = calloc(n_ranks, sizeof *map->keys);
    if (map->places && map->keys)
        return 0;
    device_map_deinit(map);
    return -ENOMEM;
}

void device_map_deinit(struct device_map *map)
{
    free(map->places);
    free(map->keys);
    *map = (struct device_map){0};
}

void device_map_set(struct device_map *map, uint32_t rank, uint32_t node, const uint8_t *uuid)
{
    struct device_place *place = &map->places[rank];
    place->is_known = true;
    place->node = node;
    memcpy(place->uuid, uuid, sizeof place->uuid);
}

/* The first rank on the same GPU of the same node stands for the GPU. */
static uint32_t key_of(const struct device_map *map, uint32_t rank)
{
    const struct device_place *place = &map->places[rank];
    for (uint32_t i = 0; place->is_known && i < map->n_ranks; i++) {
        const struct device_place *other = &map->places[i];
        if (other->is_known && other->node == place->node &&
            memcmp(other->uuid, place->uuid, sizeof place->uuid) == 0)
            return i;
    }
    return LOWER_NO_GPU;
}

uint32_t device_map_number(struct device_map *map, const uint32_t *ranks, uint32_t n,
                           uint32_t *out_gpu_of)
{
    for (uint32_t i = 0; i < n; i++)
        map->keys[i] = key_of(map, ranks[i]);
    return lower_number_gpus(map->keys, n, out_gpu_of);
}
