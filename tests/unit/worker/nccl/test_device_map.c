/* SPDX-License-Identifier: Apache-2.0 */
/* Which rank of a communicator each GPU is, as the coordinator numbers them. */
#include "run_suite.h"
#include "worker/backend/nccl/lower.h"
#include "worker/device_map.h"

static const uint8_t gpu_a[CUDA_UUID_BYTES] = {0xa}, gpu_b[CUDA_UUID_BYTES] = {0xb};

START_TEST(gpus_are_numbered_by_their_first_rank)
{
    struct device_map map;
    uint32_t gpu_of[4];
    ck_assert_int_eq(device_map_init(&map, 4), 0);
    device_map_set(&map, 0, 0, gpu_b);
    device_map_set(&map, 1, 0, gpu_a);
    device_map_set(&map, 2, 1, gpu_a); /* another node's: another GPU, whatever its name */
    device_map_set(&map, 3, 0, gpu_b);
    ck_assert_uint_eq(device_map_number(&map, (const uint32_t[]){0, 1, 2, 3}, 4, gpu_of), 3);
    ck_assert_mem_eq(gpu_of, ((const uint32_t[]){0, 1, 2, 0}), sizeof gpu_of);
    device_map_deinit(&map);
    device_map_deinit(&map);
}
END_TEST

START_TEST(a_set_counts_its_own_ranks_only)
{
    struct device_map map;
    uint32_t gpu_of[2];
    ck_assert_int_eq(device_map_init(&map, 4), 0);
    device_map_set(&map, 0, 0, gpu_b);
    device_map_set(&map, 1, 0, gpu_a);
    device_map_set(&map, 3, 0, gpu_a);
    ck_assert_uint_eq(device_map_number(&map, (const uint32_t[]){1, 3}, 2, gpu_of), 1);
    ck_assert_mem_eq(gpu_of, ((const uint32_t[]){0, 0}), sizeof gpu_of);
    /* Rank 2 has brought no device memory yet. */
    ck_assert_uint_eq(device_map_number(&map, (const uint32_t[]){2, 3}, 2, gpu_of), 1);
    ck_assert_mem_eq(gpu_of, ((const uint32_t[]){LOWER_NO_GPU, 0}), sizeof gpu_of);
    device_map_deinit(&map);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {gpus_are_numbered_by_their_first_rank,
                                  a_set_counts_its_own_ranks_only};
    return run_suite("device_map", tests, sizeof tests / sizeof *tests);
}
