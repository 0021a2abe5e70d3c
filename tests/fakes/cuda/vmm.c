/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual memory management: physical memory (a memfd) behind reference-counted handles, addresses
 * reserved apart from it, and mappings of one on the other. Physical memory lives as long as any
 * handle, mapping or exported descriptor, in whatever process.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "block.h"
#include "vmm.h"

struct physical {
    struct block_head *head;
    struct physical *next;
    int fd, refs; /* handles and mappings */
    int device;
};
static struct physical *physicals; /* under fake_lock */

struct reservation {
    struct reservation *next;
    uintptr_t base;
    size_t bytes;
};
static struct reservation *reservations; /* under fake_lock */

static struct physical *physical_get(CUmemGenericAllocationHandle handle)
{
    struct physical *physical = physicals;
    while (physical != NULL && (uintptr_t)physical != handle)
        physical = physical->next;
    return physical;
}

static CUmemGenericAllocationHandle physical_new(struct block_head *head, int fd, int device)
{
    struct physical *physical = malloc(sizeof *physical);
    if (physical == NULL)
        fake_die("out of memory");
    *physical =
        (struct physical){.head = head, .next = physicals, .fd = fd, .refs = 1, .device = device};
    physicals = physical;
    return (uintptr_t)physical;
}

static void physical_unref(struct physical *physical)
{
    if (--physical->refs > 0)
        return;
    struct physical **link = &physicals;
    while (*link != physical)
        link = &(*link)->next;
    *link = physical->next;
    munmap(physical->head, BLOCK_HEAD);
    close(physical->fd);
    free(physical);
}

static bool properties_are_right(const CUmemAllocationProp *properties)
{
    return properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           properties->location.id >= 0 && properties->location.id < fake_settings.n_devices &&
           (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0;
}

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties,
                                       int option)
{
    ENTER(cuMemGetAllocationGranularity, NEED_INIT);
    if (!properties_are_right(properties))
        return CUDA_ERROR_INVALID_VALUE;
    *out = FAKE_GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes,
                     const CUmemAllocationProp *properties, unsigned long long flags)
{
    ENTER(cuMemCreate, NEED_INIT);
    fake_count_sum(SUM_ALLOCATIONS);
    if (!properties_are_right(properties) || bytes == 0 || bytes % FAKE_GRANULARITY != 0 ||
        flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    int device = properties->location.id;
    pthread_mutex_lock(&fake_lock);
    CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;
    struct block_head *head;
    int fd = -1;
    if (bytes <= fake_settings.memory_bytes - fake_range_used(device))
        fd = fake_block_file(memfd_create("fake-cuda", MFD_CLOEXEC), fake_settings.physical[device],
                             bytes, properties->requestedHandleTypes != 0, &head);
    if (fd >= 0) {
        *out = physical_new(head, fd, device);
        rc = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER(cuMemRelease, NEED_INIT);
    pthread_mutex_lock(&fake_lock);
    struct physical *physical = physical_get(handle);
    if (physical != NULL)
        physical_unref(physical);
    pthread_mutex_unlock(&fake_lock);
    return physical != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool fake_physical_is_exportable(const void *owner)
{
    const struct physical *physical = owner;
    return physical->head->is_exportable;
}

bool fake_reservation_find(uintptr_t p, uintptr_t *out_base, size_t *out_bytes)
{
    struct reservation *reservation = reservations;
    while (reservation != NULL &&
           !(p >= reservation->base && p - reservation->base < reservation->bytes))
        reservation = reservation->next;
    if (reservation == NULL)
        return false;
    *out_base = reservation->base;
    *out_bytes = reservation->bytes;
    return true;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr at,
                             unsigned long long flags)
{
    ENTER(cuMemAddressReserve, NEED_INIT);
    if (bytes == 0 || bytes % FAKE_GRANULARITY != 0 || alignment > FAKE_GRANULARITY || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    struct reservation *reservation = malloc(sizeof *reservation);
    uintptr_t base = reservation != NULL ? fake_arena_take(bytes) : 0;
    if (base != 0) {
        *reservation = (struct reservation){reservations, base, bytes};
        reservations = reservation;
        *out = base;
    } else {
        free(reservation);
    }
    pthread_mutex_unlock(&fake_lock);
    return base != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static bool has_mapping(uintptr_t base, size_t bytes)
{
    for (uintptr_t at = base; at < base + bytes; at += FAKE_GRANULARITY)
        if (fake_range_find(at) != NULL)
            return true;
    return false;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes)
{
    ENTER(cuMemAddressFree, NEED_INIT);
    pthread_mutex_lock(&fake_lock);
    struct reservation **link = &reservations;
    while (*link != NULL && !((*link)->base == p && (*link)->bytes == bytes))
        link = &(*link)->next;
    struct reservation *reservation = *link;
    if (reservation != NULL && has_mapping(p, bytes))
        fake_die("addresses are freed while memory is mapped there");
    if (reservation != NULL) {
        *link = reservation->next;
        fake_arena_give(p, bytes);
        free(reservation);
    }
    pthread_mutex_unlock(&fake_lock);
    return reservation != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_reserved(uintptr_t p, size_t bytes)
{
    uintptr_t base;
    size_t reserved;
    return fake_reservation_find(p, &base, &reserved) && bytes <= base + reserved - p;
}

/* The bytes cannot be touched before cuMemSetAccess(). */
CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    ENTER(cuMemMap, NEED_INIT);
    pthread_mutex_lock(&fake_lock);
    struct physical *physical = physical_get(handle);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    if (physical != NULL && flags == 0 && offset == 0 && bytes == physical->head->bytes &&
        p % FAKE_GRANULARITY == 0 && is_reserved(p, bytes) && !has_mapping(p, bytes)) {
        physical->refs++;
        fake_range_add((struct range){.base = p,
                                      .bytes = bytes,
                                      .kind = RANGE_VMM,
                                      .device = physical->device,
                                      .owner = physical});
        rc = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* Whole mappings only, one or several. */
static CUresult for_mappings(uintptr_t p, size_t bytes, void (*act)(struct range *))
{
    for (uintptr_t at = p; at < p + bytes;) {
        const struct range *range = fake_range_find(at);
        if (range == NULL || range->kind != RANGE_VMM || range->base != at ||
            range->bytes > p + bytes - at)
            return CUDA_ERROR_INVALID_VALUE;
        at += range->bytes;
    }
    for (uintptr_t at = p; at < p + bytes;) {
        struct range *range = fake_range_find(at);
        at += range->bytes;
        act(range);
    }
    return CUDA_SUCCESS;
}

static void unmap(struct range *range)
{
    fake_arena_unmap(range->base, range->bytes);
    physical_unref(range->owner);
    fake_range_remove(range);
}

CUresult cuMemUnmap(CUdeviceptr p, size_t bytes)
{
    ENTER(cuMemUnmap, NEED_INIT);
    pthread_mutex_lock(&fake_lock);
    CUresult rc = for_mappings(p, bytes, unmap);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* Of the call of cuMemSetAccess() that is under way; under fake_lock. */
static const CUmemAccessDesc *granted;
static size_t n_granted;

/* Devices beside the memory's own would be peers, which the fake does not have. */
static bool is_for(int device)
{
    for (size_t i = 0; i < n_granted; i++)
        if (granted[i].location.id == device)
            return true;
    return false;
}

static void make_accessible(struct range *range)
{
    if (!is_for(range->device))
        return;
    const struct physical *physical = range->owner;
    if (!fake_arena_map(range->base, range->bytes, physical->fd, BLOCK_HEAD))
        fake_die("cannot map %zu bytes", range->bytes);
    range->is_accessible = true;
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const CUmemAccessDesc *access, size_t n)
{
    ENTER(cuMemSetAccess, NEED_INIT);
    for (size_t i = 0; i < n; i++)
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
            access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || access[i].location.id < 0 ||
            access[i].location.id >= fake_settings.n_devices)
            return CUDA_ERROR_INVALID_VALUE;
    if (n == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    granted = access;
    n_granted = n;
    CUresult rc = for_mappings(p, bytes, make_accessible);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    ENTER(cuMemRetainAllocationHandle, NEED_INIT);
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find((uintptr_t)address);
    bool is_mapped = range != NULL && range->kind == RANGE_VMM;
    if (is_mapped) {
        struct physical *physical = range->owner;
        physical->refs++;
        *out = (uintptr_t)physical;
    }
    pthread_mutex_unlock(&fake_lock);
    return is_mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags)
{
    ENTER(cuMemExportToShareableHandle, NEED_INIT);
    pthread_mutex_lock(&fake_lock);
    const struct physical *physical = physical_get(handle);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    if (physical != NULL && physical->head->is_exportable && flags == 0 &&
        type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        *(int *)out = dup(physical->fd);
        rc = *(int *)out >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* The descriptor stays the caller's. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *os_handle,
                                        int type)
{
    ENTER(cuMemImportFromShareableHandle, NEED_INIT);
    fake_count_sum(SUM_IMPORTS);
    int fd = dup((int)(intptr_t)os_handle);
    struct stat stat;
    struct block_head *head = MAP_FAILED;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && fd >= 0 && fstat(fd, &stat) == 0 &&
        stat.st_size > BLOCK_HEAD)
        head = mmap(NULL, BLOCK_HEAD, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    bool is_ours = head != MAP_FAILED && head->magic == BLOCK_MAGIC && head->is_exportable &&
                   (uint64_t)stat.st_size == BLOCK_HEAD + head->bytes;
    int device = -1;
    for (int i = 0; is_ours && i < fake_settings.n_devices; i++)
        if (fake_settings.physical[i] == head->physical)
            device = i;
    if (!is_ours || device < 0) {
        if (head != MAP_FAILED)
            munmap(head, BLOCK_HEAD);
        if (fd >= 0)
            close(fd);
        return is_ours ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&fake_lock);
    *out = physical_new(head, fd, device);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}
