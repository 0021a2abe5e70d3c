/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Addresses of device memory. Two arenas of equal size are reserved: device pointers point into
 * the first, which the CPU can never touch; the bytes are mapped at the same offset of the second,
 * the view. GRADD_FAKE_CUDA_READABLE=1 makes them one.
 *
 * Ranges say what is behind an address; they do not overlap.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake.h"

enum { UNITS = 32 << 10 };
#define ARENA_BYTES ((size_t)UNITS * FAKE_GRANULARITY)

static uintptr_t pointers, views; /* 0: not reserved yet */
static bool is_taken[UNITS];
static struct range *ranges;

static uintptr_t reserve(void)
{
    size_t bytes = ARENA_BYTES + FAKE_GRANULARITY;
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        fake_die("cannot reserve %zu bytes of addresses", bytes);
    return ((uintptr_t)p + FAKE_GRANULARITY - 1) & ~(uintptr_t)(FAKE_GRANULARITY - 1);
}

static bool run_is_free(size_t at, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (is_taken[at + i])
            return false;
    return true;
}

uintptr_t fake_arena_take(size_t bytes)
{
    if (pointers == 0) {
        pointers = reserve();
        views = fake_settings.readable ? pointers : reserve();
    }
    size_t n = bytes / FAKE_GRANULARITY;
    for (size_t at = 0; n > 0 && n <= UNITS && at <= UNITS - n; at++)
        if (run_is_free(at, n)) {
            memset(is_taken + at, 1, n);
            return pointers + at * FAKE_GRANULARITY;
        }
    return 0;
}

void fake_arena_give(uintptr_t base, size_t bytes)
{
    memset(is_taken + (base - pointers) / FAKE_GRANULARITY, 0, bytes / FAKE_GRANULARITY);
}

bool fake_arena_has(uintptr_t p)
{
    return pointers != 0 && p >= pointers && p < pointers + ARENA_BYTES;
}

void *fake_arena_view(uintptr_t base)
{
    return (void *)(base - pointers + views);
}

bool fake_arena_map(uintptr_t base, size_t bytes, int fd, size_t offset)
{
    int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    /* cppcheck-suppress leakReturnValNotUsed; it is where it was asked for */
    return mmap(fake_arena_view(base), bytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)offset) !=
           MAP_FAILED;
}

void fake_arena_unmap(uintptr_t base, size_t bytes)
{
    int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    /* cppcheck-suppress leakReturnValNotUsed; as above */
    if (mmap(fake_arena_view(base), bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
        fake_die("cannot unmap %zu bytes of device memory", bytes);
}

struct range *fake_range_add(struct range range)
{
    static uint64_t last_id;
    struct range *added = malloc(sizeof *added);
    if (added == NULL)
        fake_die("out of memory");
    *added = range;
    if (added->id == 0)
        added->id = ++last_id;
    added->next = ranges;
    ranges = added;
    return added;
}

void fake_range_remove(struct range *range)
{
    struct range **link = &ranges;
    while (*link != range)
        link = &(*link)->next;
    *link = range->next;
    free(range);
}

struct range *fake_range_find(uintptr_t p)
{
    struct range *range = ranges;
    while (range != NULL && !(p >= range->base && p - range->base < range->bytes))
        range = range->next;
    return range;
}

struct range *fake_range_of_context(CUcontext context)
{
    struct range *range = ranges;
    while (range != NULL && !(range->context == context && range->kind != RANGE_HOST))
        range = range->next;
    return range;
}

uint64_t fake_range_used(int device)
{
    uint64_t bytes = 0;
    for (struct range *range = ranges; range != NULL; range = range->next)
        if (range->device == device && range->kind != RANGE_IMPORT && range->kind != RANGE_HOST)
            bytes += range->bytes;
    return bytes;
}

void *fake_view_locked(uintptr_t p, size_t bytes)
{
    if (!fake_arena_has(p)) {
        const struct range *range = fake_range_find(p);
        bool is_whole = range != NULL && bytes <= range->base + range->bytes - p;
        return is_whole ? (void *)p : NULL;
    }
    uintptr_t end = p + bytes;
    for (uintptr_t at = p; at < end || at == p;) {
        const struct range *range = fake_range_find(at);
        if (range == NULL || !range->is_accessible)
            return NULL;
        at = range->base + range->bytes;
    }
    return fake_arena_view(p);
}

void fake_poison(void *p, size_t bytes)
{
    /* A NaN in every floating type: what reads it is noticed. */
    static const unsigned char pattern[4] = {0xff, 0xff, 0xde, 0xff};
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)p)[i] = pattern[i % sizeof pattern];
}

FAKE_EXPORT void *fake_cuda_view(const void *device_pointer, size_t bytes)
{
    pthread_mutex_lock(&fake_lock);
    void *view = fake_view_locked((uintptr_t)device_pointer, bytes);
    pthread_mutex_unlock(&fake_lock);
    return view;
}

FAKE_EXPORT int fake_cuda_pointer_device(const void *device_pointer)
{
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find((uintptr_t)device_pointer);
    int device = range != NULL && range->kind != RANGE_HOST ? range->device : -1;
    pthread_mutex_unlock(&fake_lock);
    return device;
}
