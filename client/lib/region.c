/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions: shared memory with every page in place before the first op, found again by address.
 *
 * Invariant: a region's memfd is sealed at its size, and its pages are allocated when it is made,
 * so that neither side meets SIGBUS or a page fault that must find memory later.
 */
#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <gradd/gradd.h>

#include "error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* Index of the first region that begins above the address. */
static size_t upper_bound(const struct region_table *table, const void *address)
{
    size_t low = 0, high = table->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uintptr_t)table->regions[middle]->base <= (uintptr_t)address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct region *region_table_find(const struct region_table *table, const void *address)
{
    size_t after = upper_bound(table, address);
    if (after == 0)
        return NULL;
    struct region *region = table->regions[after - 1];
    return (uintptr_t)address - (uintptr_t)region->base < region->bytes ? region : NULL;
}

int region_table_add(struct region_table *table, struct region *region)
{
    if (table->n == table->capacity) {
        size_t capacity = table->capacity ? table->capacity * 2 : 16;
        struct region **regions = realloc(table->regions, capacity * sizeof *regions);
        if (!regions)
            return -ENOMEM;
        table->regions = regions;
        table->capacity = capacity;
    }
    size_t at = upper_bound(table, region->base);
    memmove(&table->regions[at + 1], &table->regions[at], (table->n - at) * sizeof *table->regions);
    table->regions[at] = region;
    table->n++;
    return 0;
}

void region_table_remove(struct region_table *table, const struct region *region)
{
    size_t after = upper_bound(table, region->base);
    if (after == 0 || table->regions[after - 1] != region)
        return;
    memmove(&table->regions[after - 1], &table->regions[after],
            (table->n - after) * sizeof *table->regions);
    table->n--;
}

static int fail(const char *what, size_t bytes)
{
    int code = errno;
    return error_set(GRADD_ERR_NO_MEMORY, "shared memory of %zu bytes: %s: %s", bytes, what,
                     strerror(code));
}

/* A memfd whose pages exist and whose size is final. A descriptor, or a status. */
static int make_memfd(size_t bytes)
{
    int fd = memfd_create("gradd", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return fail("memfd_create", bytes);
    int rc = ftruncate(fd, (off_t)bytes) < 0 ? fail("ftruncate", bytes) : 0;
    while (rc == 0 && fallocate(fd, 0, 0, (off_t)bytes) < 0)
        if (errno != EINTR)
            rc = fail("fallocate", bytes);
    if (rc == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        rc = fail("sealing", bytes);
    if (rc == 0)
        return fd;
    close(fd);
    return rc;
}

/* Map every page now: a fault costs far more than its share of this. */
static void populate(uint8_t *base, size_t bytes, size_t page)
{
    if (madvise(base, bytes, MADV_POPULATE_WRITE) == 0)
        return;
    for (size_t at = 0; at < bytes; at += page)
        ((volatile uint8_t *)base)[at] = 0;
}

/* fallocate() would try, and take every page of the machine before it fails. */
static size_t all_memory(void)
{
    struct sysinfo info;
    return sysinfo(&info) == 0 ? (info.totalram + info.totalswap) * info.mem_unit : SIZE_MAX;
}

int region_map(size_t bytes, struct region **out, int *out_fd)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes > PTRDIFF_MAX - page)
        return error_set(GRADD_ERR_NO_MEMORY, "shared memory of %zu bytes: beyond all memory",
                         bytes);
    bytes = (bytes ? bytes + page - 1 : page) & ~(page - 1);
    if (bytes > all_memory())
        return error_set(GRADD_ERR_NO_MEMORY, "shared memory of %zu bytes: this node has %zu",
                         bytes, all_memory());
    struct region *region = calloc(1, sizeof *region);
    if (!region)
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    int fd = make_memfd(bytes);
    if (fd < 0) {
        free(region);
        return fd;
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        int rc = fail("mmap", bytes);
        close(fd);
        free(region);
        return rc;
    }
    populate(base, bytes, page);
    region->base = base;
    region->bytes = bytes;
    *out = region;
    *out_fd = fd;
    return 0;
}

void region_unmap(struct region *region)
{
    if (!region)
        return;
    if (!region->is_kept)
        munmap(region->base, region->bytes);
    free(region->text);
    free(region);
}
