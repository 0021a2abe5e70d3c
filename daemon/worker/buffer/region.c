/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/buffer/region.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

enum region_state {
    REGION_OPENING, /* the chores thread maps it; not to be used yet */
    REGION_READY,   /* mapped; ops may pin it */
    REGION_CLOSED,  /* out of the table; unmapped when nothing pins it */
};

struct region {
    struct chore chore; /* first: the chore is the region */
    enum region_state state;
    uint32_t id;
    uint32_t n_pins;
    unsigned serial; /* among the job's regions: places the mapping */
    uint64_t bytes;
    uint8_t *base;
    int fd;                     /* while opening */
    int error;                  /* errno of mapping */
    struct region_table *table; /* not once closed */
    struct region_quota *quota;
    struct chores *chores;
    region_opened_fn *opened;
    region_closed_fn *closed; /* NULL: nobody asks */
    void *data;               /* of opened, then of closed */
    bool is_device;
    struct cuda_import_user user; /* device memory */
    UT_hash_handle hh;
    LIST_ENTRY(region) link; /* on table->closing */
};

void region_table_init(struct region_table *table, struct chores *chores,
                       struct region_quota *quota)
{
    *table = (struct region_table){.chores = chores, .quota = quota};
    LIST_INIT(&table->closing);
}

/* ------------------------------------------------------------------ unmapping */

static void run_unmap(struct chore *chore)
{
    struct region *region = (struct region *)chore;
    if (region->base)
        munmap(region->base, region->bytes);
}

static void on_unmapped(struct chore *chore)
{
    struct region *region = (struct region *)chore;
    free(region);
}

/* Device memory is not mapped any more: who wants to free it may do so. */
static void on_import_closed(struct cuda_import_user *user)
{
    struct region *region = (struct region *)((char *)user - offsetof(struct region, user));
    if (region->closed) {
        LIST_REMOVE(region, link);
        region->closed(region->data, region->id);
    }
    free(region);
}

static void unmap_if_unused(struct region *region)
{
    if (region->state != REGION_CLOSED || region->n_pins > 0)
        return;
    if (region->is_device) {
        if (region->user.import)
            cuda_import_release(&region->user);
        else
            on_import_closed(&region->user);
        return;
    }
    /* Given back now: the trainer may ask for as much again before the unmapping is done. */
    region->quota->used_bytes -= region->bytes;
    region->chore = (struct chore){.run = run_unmap, .done = on_unmapped};
    chores_add(region->chores, &region->chore);
}

static void close_region(struct region_table *table, struct region *region,
                         region_closed_fn *closed, void *data)
{
    bool is_mapping = region->state == REGION_OPENING && !region->is_device;
    uint32_t id = region->id;
    HASH_DEL(table->by_id, region);
    region->state = REGION_CLOSED;
    region->table = NULL;
    region->opened = NULL;
    if (region->is_device && closed) {
        region->closed = closed;
        region->data = data;
        LIST_INSERT_HEAD(&table->closing, region, link);
    } else if (!region->is_device) {
        table->bytes -= region->bytes;
    }
    bool is_told_later = region->closed;
    if (!is_mapping) /* else on_mapped() goes on from here */
        unmap_if_unused(region);
    if (closed && !is_told_later)
        closed(data, id);
}

bool region_close(struct region_table *table, uint32_t id, region_closed_fn *closed, void *data)
{
    struct region *region;
    HASH_FIND(hh, table->by_id, &id, sizeof id, region);
    if (region)
        close_region(table, region, closed, data);
    return region;
}

void region_table_deinit(struct region_table *table)
{
    struct region *region, *next;
    while ((region = LIST_FIRST(&table->closing))) {
        LIST_REMOVE(region, link);
        region->closed = NULL;
    }
    HASH_ITER(hh, table->by_id, region, next)
    close_region(table, region, NULL, NULL);
}

/* ------------------------------------------------------------------ opening */

/*
 * Map a region where its address differs from every other region's modulo 256 MiB. AMD's Zen cores
 * predict the cache way from a hash of address bits 12 to 27: ranks whose equal tensors lie at
 * equal distances would evict each other (measured on Zen 4: up to 3.6 times slower at 1 MiB).
 */
static void *map_staggered(int fd, size_t bytes, unsigned serial)
{
    const size_t alignment = (size_t)1 << 28;
    const size_t skew = serial % 1024 * 17 * (size_t)sysconf(_SC_PAGESIZE);
    const size_t room_bytes = bytes + skew + alignment;
    char *room = room_bytes < bytes ? MAP_FAILED
                                    : mmap(NULL, room_bytes, PROT_NONE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *base = room + -(uintptr_t)room % alignment + skew;
    void *mapped = mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED) {
        int error = errno;
        munmap(room, room_bytes);
        errno = error;
        return MAP_FAILED;
    }
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *end = base + (bytes + page - 1) / page * page;
    if (base > room)
        munmap(room, (size_t)(base - room));
    if (end < room + room_bytes)
        munmap(end, (size_t)(room + room_bytes - end));
    return mapped;
}

/* Map and touch every page now, so that no op pays for page faults and a shortage shows here. */
static void run_map(struct chore *chore)
{
    struct region *region = (struct region *)chore;
    void *base = map_staggered(region->fd, region->bytes, region->serial);
    region->error = base == MAP_FAILED ? errno : 0;
    close(region->fd);
    region->fd = -1;
    if (base == MAP_FAILED)
        return;
    region->base = base;
    /* EINVAL: a kernel without it; the pages come at first use. */
    if (madvise(base, region->bytes, MADV_POPULATE_WRITE) < 0 && errno != EINVAL)
        region->error = errno;
}

static void on_mapped(struct chore *chore)
{
    struct region *region = (struct region *)chore;
    if (region->state == REGION_CLOSED) {
        unmap_if_unused(region);
        return;
    }
    region_opened_fn *opened = region->opened;
    void *data = region->data;
    uint32_t id = region->id;
    region->state = REGION_READY;
    if (!region->error) {
        opened(data, id, GRADD_OK, "");
        return;
    }
    char text[200];
    snprintf(text, sizeof text, "region %u: %llu bytes could not be mapped: %s", id,
             (unsigned long long)region->bytes, strerror(region->error));
    opened(data, id, GRADD_ERR_NO_MEMORY, text);
    close_region(region->table, region, NULL, NULL);
}

/* Seals and size, which the kernel then guarantees: without F_SEAL_SHRINK the trainer could
 * truncate the file and kill the worker with SIGBUS. Files without seals are refused by the same
 * test. NULL: fine. */
static const char *check_fd(int fd, uint64_t bytes, char *text, size_t text_bytes)
{
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return "the descriptor is not a memfd";
    if (!(seals & F_SEAL_SHRINK))
        return "the memfd is not sealed against shrinking (F_SEAL_SHRINK)";
    if (fstat(fd, &status) < 0)
        return strerror(errno);
    if (bytes == 0 || (uint64_t)status.st_size < bytes) {
        snprintf(text, text_bytes, "the memfd has %lld bytes, the message says %llu",
                 (long long)status.st_size, (unsigned long long)bytes);
        return text;
    }
    return NULL;
}

void region_open(struct region_table *table, uint32_t id, int take_fd, uint64_t bytes,
                 region_opened_fn *opened, void *data)
{
    char text[240], why[160];
    struct region_quota *quota = table->quota;
    struct region *region;
    int status = GRADD_ERR_INVALID;
    HASH_FIND(hh, table->by_id, &id, sizeof id, region);
    const char *wrong = id == 0  ? "0 is no region id"
                        : region ? "the id is in use"
                                 : check_fd(take_fd, bytes, why, sizeof why);
    if (!wrong && (bytes > quota->limit_bytes || quota->used_bytes > quota->limit_bytes - bytes)) {
        status = GRADD_ERR_NO_MEMORY;
        snprintf(why, sizeof why,
                 "%llu bytes more than the %llu in use would exceed job_memory_bytes (%llu)",
                 (unsigned long long)bytes, (unsigned long long)quota->used_bytes,
                 (unsigned long long)quota->limit_bytes);
        wrong = why;
    }
    region = wrong ? NULL : calloc(1, sizeof *region);
    if (!wrong && !region) {
        status = GRADD_ERR_NO_MEMORY;
        wrong = "the worker has no memory";
    }
    if (wrong) {
        close(take_fd);
        snprintf(text, sizeof text, "region %u: %s", id, wrong);
        opened(data, id, status, text);
        return;
    }
    *region = (struct region){
        .chore = {.run = run_map, .done = on_mapped},
        .id = id,
        .serial = quota->n_opened++,
        .bytes = bytes,
        .fd = take_fd,
        .table = table,
        .quota = quota,
        .chores = table->chores,
        .opened = opened,
        .data = data,
    };
    quota->used_bytes += bytes;
    table->bytes += bytes;
    HASH_ADD(hh, table->by_id, id, sizeof region->id, region);
    chores_add(table->chores, &region->chore);
}

/* ------------------------------------------------------------------ device memory */

static void on_import_opened(struct cuda_import_user *user, int status, const char *why)
{
    struct region *region = (struct region *)((char *)user - offsetof(struct region, user));
    region_opened_fn *opened = region->opened;
    void *data = region->data;
    uint32_t id = region->id;
    if (status == GRADD_OK) {
        region->base = (uint8_t *)(uintptr_t)cuda_import_base(user);
        region->state = REGION_READY;
        opened(data, id, GRADD_OK, "");
        return;
    }
    char text[400];
    snprintf(text, sizeof text, "region %u: device memory can not be mapped: %s", id, why);
    close_region(region->table, region, NULL, NULL);
    opened(data, id, status, text);
}

void region_open_device(struct region_table *table, uint32_t id, uint64_t bytes,
                        const struct region_device *device, region_opened_fn *opened, void *data)
{
    char text[240];
    struct region *region;
    int status = GRADD_ERR_INVALID;
    HASH_FIND(hh, table->by_id, &id, sizeof id, region);
    const char *wrong = id == 0      ? "0 is no region id"
                        : region     ? "the id is in use"
                        : bytes == 0 ? "it has no bytes"
                                     : NULL;
    if (!wrong && !table->imports) {
        status = GRADD_ERR_UNSUPPORTED;
        wrong = "this job's workers take no device memory";
    }
    region = wrong ? NULL : calloc(1, sizeof *region);
    if (!wrong && !region) {
        status = GRADD_ERR_NO_MEMORY;
        wrong = "the worker has no memory";
    }
    if (wrong) {
        snprintf(text, sizeof text, "region %u: %s", id, wrong);
        opened(data, id, status, text);
        return;
    }
    *region = (struct region){
        .id = id,
        .bytes = bytes,
        .fd = -1,
        .table = table,
        .quota = table->quota,
        .chores = table->chores,
        .opened = opened,
        .data = data,
        .is_device = true,
        .user = {.bytes = bytes, .opened = on_import_opened, .closed = on_import_closed},
    };
    HASH_ADD(hh, table->by_id, id, sizeof region->id, region);
    if (device->handle)
        cuda_import_handle(table->imports, &region->user, device->uuid, device->handle);
    else
        cuda_import_chunks(table->imports, &region->user, device->uuid, device->n_chunks);
}

void region_add_chunks(struct region_table *table, uint32_t id, int *fds, const uint64_t *bytes,
                       unsigned n)
{
    struct region *region;
    HASH_FIND(hh, table->by_id, &id, sizeof id, region);
    if (region && region->user.import) {
        cuda_import_add_chunks(&region->user, fds, bytes, n);
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        close(fds[i]);
        fds[i] = -1;
    }
}

/* ------------------------------------------------------------------ use */

uint8_t *region_pin(struct region_table *table, uint32_t id, uint64_t offset, uint64_t bytes,
                    struct region **out_region, const char **out_text)
{
    struct region *region;
    uint64_t end;
    HASH_FIND(hh, table->by_id, &id, sizeof id, region);
    if (!region || region->state != REGION_READY || region->error) {
        *out_text = "names a region that is not registered";
        return NULL;
    }
    if (__builtin_add_overflow(offset, bytes, &end) || end > region->bytes) {
        *out_text = "reaches beyond the end of its region";
        return NULL;
    }
    region->n_pins++;
    *out_region = region;
    return region->base + offset;
}

void region_unpin(struct region *region)
{
    if (!region)
        return;
    region->n_pins--;
    unmap_if_unused(region);
}

struct cuda_device *region_device(const struct region *region)
{
    return region->is_device ? cuda_import_device(&region->user) : NULL;
}
