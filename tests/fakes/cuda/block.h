/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files of device memory in the shared directory, m<pid>.<number>: what cuMemAlloc() hands out and
 * other processes import. Several small allocations share one block of 2 MiB, as with the real
 * driver.
 */
#ifndef GRADD_FAKE_BLOCK_H
#define GRADD_FAKE_BLOCK_H

#include "fake.h"

enum {
    BLOCK_ALLOCATIONS = 32,
    BLOCK_IMPORTERS = 64,
    BLOCK_UNIT = FAKE_GRANULARITY / BLOCK_ALLOCATIONS,
    BLOCK_HEAD = 8192,
    BLOCK_MAGIC = 0x6b6c6266
};

struct block_head { /* the first bytes of the file; the memory begins at BLOCK_HEAD */
    uint32_t magic;
    int32_t pid, physical;
    uint32_t is_exportable; /* of memory made by cuMemCreate() */
    uint64_t bytes;
    struct {
        _Atomic uint64_t offset, bytes, id; /* id 0: unused */
    } allocations[BLOCK_ALLOCATIONS];
    _Atomic int32_t importers[BLOCK_IMPORTERS]; /* pids */
};

struct block { /* of our own */
    struct block *next;
    struct block_head *head;
    uintptr_t base;
    uint64_t number;
    CUcontext context;
    bool is_shared; /* by small allocations */
};

/* All under fake_lock. */
CUresult fake_block_alloc(CUcontext context, size_t bytes, CUdeviceptr *out);
/* Free a RANGE_DEVICE; whoever has it imported reads poison from now on. */
void fake_block_free(struct range *range);
/* Make and map a file with its head. -1: no memory. fd: whose it is then. */
int fake_block_file(int fd, int physical, size_t bytes, bool is_exportable,
                    struct block_head **out_head);
/* Free a range of any kind that its context owns. */
void fake_range_destroy(struct range *range);
void fake_import_close(struct range *range);
/* What a RANGE_IMPORT has mapped: the block that its allocation lies in. */
void fake_import_block(const struct range *range, uintptr_t *out_base, size_t *out_bytes);

#endif
