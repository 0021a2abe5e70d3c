/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Legacy IPC of device memory. A handle names one allocation of one process; opening maps its
 * whole block, so what lies beside it in the block is mapped too, but only the allocation is a
 * range here: an access outside of it is an error.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "block.h"

enum { HANDLE_MAGIC = 0x686d6566 };

struct handle {
    uint32_t magic;
    int32_t pid;
    uint64_t number, offset, bytes, id;
};
_Static_assert(sizeof(struct handle) <= sizeof(CUipcMemHandle), "the handle's size is given");

struct import {
    struct import *next;
    struct handle handle;
    struct block_head *head;
    struct range *range;
    uintptr_t base; /* of the block */
    CUcontext context;
    int refs;
};
static struct import *imports; /* under fake_lock */

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr p)
{
    ENTER(cuIpcGetMemHandle, NEED_CONTEXT);
    if (!fake_settings.memory_handles)
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find(p);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    if (range != NULL && range->kind == RANGE_DEVICE) {
        const struct block *block = range->owner;
        struct handle handle = {.magic = HANDLE_MAGIC,
                                .pid = getpid(),
                                .number = block->number,
                                .offset = range->base - block->base,
                                .bytes = range->bytes,
                                .id = range->id};
        memset(out, 0, sizeof *out);
        memcpy(out, &handle, sizeof handle);
        rc = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

static bool handle_is_live(const struct handle *handle, const struct block_head *head)
{
    for (unsigned i = 0; i < BLOCK_ALLOCATIONS; i++)
        if (head->allocations[i].id == handle->id && head->allocations[i].offset == handle->offset)
            return true;
    return false;
}

/* In the place of one who closed the block, or died with it open. */
static void add_importer(struct block_head *head)
{
    for (unsigned i = 0; i < BLOCK_IMPORTERS; i++) {
        int32_t pid = atomic_load(&head->importers[i]);
        if ((pid == 0 || !fake_process_is_alive(pid)) &&
            atomic_compare_exchange_strong(&head->importers[i], &pid, getpid()))
            return;
    }
    fake_die("more than %d imports of one block", BLOCK_IMPORTERS);
}

static void remove_importer(struct block_head *head)
{
    for (unsigned i = 0; i < BLOCK_IMPORTERS; i++) {
        int32_t pid = getpid();
        if (atomic_compare_exchange_strong(&head->importers[i], &pid, 0))
            return;
    }
}

static int visible_ordinal(int physical)
{
    for (int i = 0; i < fake_settings.n_devices; i++)
        if (fake_settings.physical[i] == physical)
            return i;
    return -1;
}

/* Map the file's head: NULL if it is none, or its allocation was freed meanwhile. */
static struct block_head *map_head(int fd, const struct handle *handle)
{
    struct block_head *head = mmap(NULL, BLOCK_HEAD, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (head == MAP_FAILED)
        return NULL;
    if (head->magic == BLOCK_MAGIC && handle_is_live(handle, head))
        return head;
    munmap(head, BLOCK_HEAD);
    return NULL;
}

static CUresult import_new(const struct handle *handle, CUdeviceptr *out)
{
    if (!fake_process_is_alive(handle->pid))
        return CUDA_ERROR_MAP_FAILED;
    int fd = open(fake_path("m%d.%llu", handle->pid, (unsigned long long)handle->number),
                  O_RDWR | O_CLOEXEC);
    struct block_head *head = fd >= 0 ? map_head(fd, handle) : NULL;
    if (head == NULL) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_MAP_FAILED;
    }
    uintptr_t base = fake_arena_take(head->bytes);
    struct import *import = calloc(1, sizeof *import);
    if (base == 0 || import == NULL || !fake_arena_map(base, head->bytes, fd, BLOCK_HEAD))
        fake_die("no addresses for an import");
    close(fd);
    *import = (struct import){.next = imports,
                              .handle = *handle,
                              .head = head,
                              .base = base,
                              .context = fake_context(),
                              .refs = 1};
    import->range = fake_range_add((struct range){.base = base + handle->offset,
                                                  .bytes = handle->bytes,
                                                  .kind = RANGE_IMPORT,
                                                  .device = visible_ordinal(head->physical),
                                                  .context = fake_context(),
                                                  .is_accessible = true,
                                                  .owner = import});
    imports = import;
    add_importer(head);
    *out = import->range->base;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    ENTER(cuIpcOpenMemHandle_v2, NEED_CONTEXT);
    fake_count_sum(SUM_IMPORTS);
    struct handle wanted;
    memcpy(&wanted, &handle, sizeof wanted);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || wanted.magic != HANDLE_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    if (wanted.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&fake_lock);
    struct import *import = imports;
    while (import != NULL && !(memcmp(&import->handle, &wanted, sizeof wanted) == 0 &&
                               import->context == fake_context()))
        import = import->next;
    CUresult rc = CUDA_SUCCESS;
    if (import != NULL) {
        import->refs++;
        *out = import->range->base;
    } else {
        rc = import_new(&wanted, out);
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

void fake_import_block(const struct range *range, uintptr_t *out_base, size_t *out_bytes)
{
    const struct import *import = range->owner;
    *out_base = import->base;
    *out_bytes = import->head->bytes;
}

void fake_import_close(struct range *range)
{
    struct import *import = range->owner, **link = &imports;
    while (*link != import)
        link = &(*link)->next;
    *link = import->next;
    remove_importer(import->head);
    fake_arena_unmap(import->base, import->head->bytes);
    fake_arena_give(import->base, import->head->bytes);
    munmap(import->head, BLOCK_HEAD);
    fake_range_remove(range);
    free(import);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr p)
{
    ENTER(cuIpcCloseMemHandle, NEED_CONTEXT);
    pthread_mutex_lock(&fake_lock);
    struct range *range = fake_range_find(p);
    bool is_import = range != NULL && range->kind == RANGE_IMPORT && range->base == p;
    struct import *import = is_import ? range->owner : NULL;
    bool is_last = is_import && --import->refs == 0;
    CUcontext context = is_import ? import->context : NULL;
    pthread_mutex_unlock(&fake_lock);
    if (!is_import)
        return CUDA_ERROR_INVALID_VALUE;
    fake_free_waits(context);
    pthread_mutex_lock(&fake_lock);
    if (is_last && import->refs == 0)
        fake_import_close(range);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}
