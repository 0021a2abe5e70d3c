/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions: lookup by address, and what the kernel says about their memory.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gradd/gradd.h>

#include "region.h"
#include "run_suite.h"

enum { N_REGIONS = 40, SLOT = 1000, USED = 600 };

START_TEST(any_address_finds_its_region_or_none)
{
    static uint8_t space[1 + N_REGIONS * SLOT];
    uint8_t *memory = space + 1;
    struct region regions[N_REGIONS];
    struct region_table table = {0};
    /* 7 is coprime to 40: every slot once, far from sorted. */
    for (int i = 0; i < N_REGIONS; i++) {
        int slot = i * 7 % N_REGIONS;
        regions[slot] = (struct region){.base = memory + slot * SLOT, .bytes = USED};
        ck_assert_int_eq(region_table_add(&table, &regions[slot]), 0);
    }
    for (int removed = 0; removed < 2; removed++) {
        for (int at = 0; at < N_REGIONS * SLOT; at++) {
            struct region *expected = at % SLOT < USED ? &regions[at / SLOT] : NULL;
            if (removed && at / SLOT % 2)
                expected = NULL;
            ck_assert_ptr_eq(region_table_find(&table, memory + at), expected);
        }
        for (int slot = 1; slot < N_REGIONS && !removed; slot += 2)
            region_table_remove(&table, &regions[slot]);
    }
    ck_assert_ptr_null(region_table_find(&table, space));
    ck_assert_ptr_null(region_table_find(&table, NULL));
    free(table.regions);
}
END_TEST

START_TEST(a_region_is_sealed_zeroed_and_resident)
{
    struct region *region;
    int fd;
    ck_assert_int_eq(region_map(3 * 4096 + 1, &region, &fd), 0);
    ck_assert_uint_eq(region->bytes, 4 * 4096);
    int seals = fcntl(fd, F_GET_SEALS);
    ck_assert_int_eq(seals & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
                     F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    ck_assert_int_lt(ftruncate(fd, 4096), 0);
    ck_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    unsigned char resident[4] = {0};
    ck_assert_int_eq(mincore(region->base, region->bytes, resident), 0);
    for (int i = 0; i < 4; i++)
        ck_assert(resident[i] & 1);
    for (size_t i = 0; i < region->bytes; i++)
        ck_assert_uint_eq(region->base[i], 0);
    close(fd);
    region_unmap(region);
}
END_TEST

START_TEST(memory_beyond_all_bounds_is_refused_in_words)
{
    struct region *region;
    int fd;
    ck_assert_int_eq(region_map(SIZE_MAX, &region, &fd), GRADD_ERR_NO_MEMORY);
    ck_assert_str_ne(gradd_error(), "");
    ck_assert_int_eq(region_map((size_t)1 << 50, &region, &fd), GRADD_ERR_NO_MEMORY);
}
END_TEST

int main(void)
{
    const TTest *tests[] = {any_address_finds_its_region_or_none,
                            a_region_is_sealed_zeroed_and_resident,
                            memory_beyond_all_bounds_is_refused_in_words};
    return run_suite("client/region", tests, sizeof tests / sizeof *tests);
}
