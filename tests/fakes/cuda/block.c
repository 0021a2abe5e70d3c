/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "block.h"

enum { SMALL = 1 << 20, FILL = 4 << 20 };

static struct block *blocks; /* under fake_lock */

int fake_block_file(int fd, int physical, size_t bytes, bool is_exportable,
                    struct block_head **out_head)
{
    if (fd < 0)
        return -1;
    fchmod(fd, 0666);
    struct block_head *head = MAP_FAILED;
    if (ftruncate(fd, (off_t)(BLOCK_HEAD + bytes)) == 0)
        head = mmap(NULL, BLOCK_HEAD, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (head == MAP_FAILED) {
        close(fd);
        return -1;
    }
    *head = (struct block_head){.magic = BLOCK_MAGIC,
                                .pid = getpid(),
                                .physical = physical,
                                .is_exportable = is_exportable,
                                .bytes = bytes};
    *out_head = head;
    return fd;
}

static struct block *block_new(CUcontext context, size_t bytes)
{
    static uint64_t last_number;
    uint64_t number = ++last_number;
    const char *path = fake_path("m%d.%llu", getpid(), (unsigned long long)number);
    struct block_head *head = NULL;
    uintptr_t base = fake_arena_take(bytes);
    int fd = base == 0
                 ? -1
                 : fake_block_file(open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666),
                                   fake_settings.physical[context->device], bytes, false, &head);
    struct block *block = malloc(sizeof *block);
    if (fd < 0 || block == NULL || !fake_arena_map(base, bytes, fd, BLOCK_HEAD))
        fake_die("cannot make %zu bytes of device memory in %s: %s", bytes, path, strerror(errno));
    close(fd);
    *block = (struct block){.next = blocks,
                            .head = head,
                            .base = base,
                            .number = number,
                            .context = context,
                            .is_shared = bytes == FAKE_GRANULARITY};
    blocks = block;
    return block;
}

static void block_free(struct block *block)
{
    struct block **link = &blocks;
    while (*link != block)
        link = &(*link)->next;
    *link = block->next;
    unlink(fake_path("m%d.%llu", getpid(), (unsigned long long)block->number));
    fake_arena_unmap(block->base, block->head->bytes);
    fake_arena_give(block->base, block->head->bytes);
    munmap(block->head, BLOCK_HEAD);
    free(block);
}

/* The first of n free units of a shared block, -1: there are not so many. */
static int find_units(const struct block *block, unsigned n)
{
    bool taken[BLOCK_ALLOCATIONS] = {false};
    for (unsigned i = 0; i < BLOCK_ALLOCATIONS; i++) {
        uint64_t first = block->head->allocations[i].offset / BLOCK_UNIT;
        uint64_t bytes = block->head->allocations[i].bytes;
        for (uint64_t at = 0; block->head->allocations[i].id != 0 && at * BLOCK_UNIT < bytes; at++)
            taken[first + at] = true;
    }
    unsigned run = 0;
    for (unsigned at = 0; at < BLOCK_ALLOCATIONS; at++) {
        run = taken[at] ? 0 : run + 1;
        if (run == n)
            return (int)(at + 1 - n);
    }
    return -1;
}

static int free_record(const struct block *block)
{
    for (int i = 0; i < BLOCK_ALLOCATIONS; i++)
        if (block->head->allocations[i].id == 0)
            return i;
    return -1;
}

static CUdeviceptr place(struct block *block, size_t offset, size_t bytes)
{
    struct range *range = fake_range_add((struct range){.base = block->base + offset,
                                                        .bytes = bytes,
                                                        .kind = RANGE_DEVICE,
                                                        .device = block->context->device,
                                                        .context = block->context,
                                                        .is_accessible = true,
                                                        .owner = block});
    int record = free_record(block);
    block->head->allocations[record].offset = offset;
    block->head->allocations[record].bytes = bytes;
    block->head->allocations[record].id = range->id;
    fake_poison(fake_arena_view(range->base), bytes < FILL ? bytes : FILL);
    return range->base;
}

CUresult fake_block_alloc(CUcontext context, size_t bytes, CUdeviceptr *out)
{
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    bytes = (bytes + 511) & ~(size_t)511;
    if (bytes > fake_settings.memory_bytes - fake_range_used(context->device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (bytes > SMALL || !fake_settings.suballocate) {
        size_t whole = (bytes + FAKE_GRANULARITY - 1) & ~(size_t)(FAKE_GRANULARITY - 1);
        struct block *block = block_new(context, whole);
        block->is_shared = false;
        *out = place(block, 0, bytes);
        return CUDA_SUCCESS;
    }
    unsigned units = (unsigned)((bytes + BLOCK_UNIT - 1) / BLOCK_UNIT);
    struct block *block = blocks;
    while (block != NULL &&
           !(block->is_shared && block->context == context && find_units(block, units) >= 0))
        block = block->next;
    if (block == NULL)
        block = block_new(context, FAKE_GRANULARITY);
    *out = place(block, (size_t)find_units(block, units) * BLOCK_UNIT, bytes);
    return CUDA_SUCCESS;
}

/* Live processes that have the block open, other than the owner. */
static unsigned importers(const struct block *block)
{
    unsigned n = 0;
    for (unsigned i = 0; i < BLOCK_IMPORTERS; i++) {
        int pid = block->head->importers[i];
        n += pid != 0 && fake_process_is_alive(pid);
    }
    return n;
}

void fake_block_free(struct range *range)
{
    struct block *block = range->owner;
    unsigned used = 0;
    for (unsigned i = 0; i < BLOCK_ALLOCATIONS; i++) {
        if (block->head->allocations[i].id == range->id)
            block->head->allocations[i].id = 0;
        used += block->head->allocations[i].id != 0;
    }
    unsigned n = importers(block);
    if (n > 0) {
        fake_count_sum(SUM_FREED_WHILE_IMPORTED);
        fake_warn("%zu bytes at %#lx are freed while %u other process(es) have them open",
                  range->bytes, (unsigned long)range->base, n);
        fake_poison(fake_arena_view(range->base), range->bytes);
    }
    fake_range_remove(range);
    if (used == 0)
        block_free(block);
}
