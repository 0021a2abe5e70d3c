/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocations that the worker knows: registered once, found again by address and buffer id.
 *
 * Invariant: a registration is used only when every allocation below the tensor has the buffer id
 * that it had when it was registered: an address that was freed and given out again misses. What
 * has missed is unregistered by a message that nobody waits for, once no op uses it.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"
#include "cuda_allocation.h"

enum { CHUNKS_MAX = 1 << 16 };

static bool covers(const struct cuda_region *r, CUdeviceptr at, uint64_t bytes)
{
    CUdeviceptr base = (uintptr_t)r->region.base;
    return at >= base && at - base <= r->region.bytes && bytes <= r->region.bytes - (at - base);
}

static bool overlaps(const struct cuda_region *r, CUdeviceptr at, uint64_t bytes)
{
    CUdeviceptr base = (uintptr_t)r->region.base;
    return at < base + r->region.bytes && base < at + bytes;
}

/* ------------------------------------------------------------------ the list */

static void unlink_region(struct cuda *cuda, struct cuda_region *r)
{
    struct cuda_region **at = &cuda->regions;
    while (*at && *at != r)
        at = &(*at)->next;
    if (!*at)
        return;
    *at = r->next;
    cuda->n_regions--;
}

static void link_region(struct cuda *cuda, struct cuda_region *r)
{
    r->next = cuda->regions;
    cuda->regions = r;
    cuda->n_regions++;
}

static void free_record(struct cuda_region *r)
{
    free(r->chunk_ids);
    free(r->region.text);
    free(r);
}

static bool is_idle(const struct cuda_region *r)
{
    return r->region.n_uses == 0 && r->n_pins == 0 && !r->is_pending;
}

static void drop(struct gradd *g, struct cuda_region *r)
{
    unlink_region(g->cuda, r);
    if (r->region.status == GRADD_OK)
        memory_unregister(g, &r->region);
    free_record(r);
}

/* Let go of what is stale, and of what was used longest ago when there are too many. */
static void sweep(struct gradd *g)
{
    struct cuda *cuda = g->cuda;
    struct cuda_region *next, *oldest = NULL;
    for (struct cuda_region *r = cuda->regions; r; r = next) {
        next = r->next;
        if (!is_idle(r))
            continue;
        if (r->is_stale)
            drop(g, r);
        else
            oldest = r;
    }
    if (cuda->n_regions >= CUDA_REGIONS_MAX && oldest)
        drop(g, oldest);
}

/* ------------------------------------------------------------------ finding */

/* Have the chunks from `at` on the ids that they had? */
static bool has_same_chunks(const struct cuda *cuda, const struct cuda_region *r, CUdeviceptr at,
                            uint64_t bytes)
{
    CUdeviceptr chunk = (uintptr_t)r->region.base;
    for (unsigned i = 0; i < r->n_chunks && chunk < at + bytes; i++) {
        CUdeviceptr end = chunk + r->chunk_bytes[i];
        struct cuda_memory memory;
        if (end > at && (!cuda_memory_chunk(cuda->table, (void *)(uintptr_t)chunk, &memory) ||
                         memory.id != r->chunk_ids[i] || memory.base != chunk))
            return false;
        chunk = end;
    }
    return true;
}

static bool is_current(const struct cuda *cuda, const struct cuda_region *r,
                       const struct cuda_memory *memory, CUdeviceptr at, uint64_t bytes)
{
    if (r->n_chunks > 1)
        return has_same_chunks(cuda, r, at, bytes);
    return r->chunk_ids[0] == memory->id && (uintptr_t)r->region.base == memory->base &&
           r->chunk_bytes[0] == memory->bytes;
}

/* The registration that holds the tensor; others of this address that are no longer true become
 * stale. */
static struct cuda_region *find(struct cuda *cuda, const struct cuda_memory *memory, CUdeviceptr at,
                                uint64_t bytes)
{
    for (struct cuda_region *r = cuda->regions; r; r = r->next) {
        if (r->is_stale || !overlaps(r, at, bytes ? bytes : 1))
            continue;
        if (!is_current(cuda, r, memory, at, bytes))
            r->is_stale = true;
        else if (covers(r, at, bytes))
            return r;
    }
    return NULL;
}

/* ------------------------------------------------------------------ describing */

/* NULL: it can be shared. */
static const char *why_unshared(const struct cuda_memory *memory)
{
    if (memory->is_managed)
        return "managed memory can not be shared between processes";
    if (!memory->is_ipc && !memory->is_posix)
        return "its allocator gives out nothing to share it by (a cudaMallocAsync() pool, or "
               "cuMemCreate() without POSIX descriptors)";
    return NULL;
}

static int add_chunk(struct cuda_region *r, const struct cuda_memory *chunk)
{
    unsigned n = r->n_chunks;
    if ((n & (n - 1)) == 0) { /* room for the next power of two */
        size_t capacity = n ? 2 * (size_t)n : 1;
        uint64_t *both = realloc(r->chunk_ids, 2 * capacity * sizeof *both);
        if (!both)
            return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
        if (n)
            memmove(both + capacity, both + n, n * sizeof *both);
        r->chunk_ids = both;
        r->chunk_bytes = both + capacity;
    }
    r->chunk_ids[n] = chunk->id;
    r->chunk_bytes[n] = chunk->bytes;
    r->n_chunks = n + 1;
    r->region.bytes += chunk->bytes;
    return 0;
}

/* The chunks that the tensor lies in. 0; 1: one of them can not be shared; or a status. */
static int find_chunks(const struct cuda *cuda, const struct cuda_memory *first, CUdeviceptr at,
                       uint64_t bytes, struct cuda_region *r)
{
    r->region.base = (uint8_t *)(uintptr_t)first->base;
    struct cuda_memory chunk = *first;
    for (;;) {
        int rc = add_chunk(r, &chunk);
        CUdeviceptr end = chunk.base + chunk.bytes;
        if (rc < 0 || end >= at + bytes)
            return rc;
        if (first->is_ipc || r->n_chunks == CHUNKS_MAX ||
            !cuda_memory_chunk(cuda->table, (void *)(uintptr_t)end, &chunk) || chunk.base != end ||
            !chunk.is_posix)
            return 1;
    }
}

/* ------------------------------------------------------------------ telling the worker */

static int push(struct gradd *g, Pb__Envelope__BodyCase body_case, void *body, const int *fds,
                unsigned n_fds)
{
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.register_ = body; /* a member of a union of pointers */
    int rc = channel_push(g, &envelope, fds, n_fds);
    return rc < 0 ? error_set(GRADD_ERR_NO_MEMORY, "out of memory or descriptors for sharing %s",
                              "device memory")
                  : 0;
}

static int push_register(struct gradd *g, const struct cuda_region *r, Pb__RegionKind kind,
                         CUipcMemHandle *handle)
{
    Pb__Register message = PB__REGISTER__INIT;
    message.region = r->region.id;
    message.bytes = r->region.bytes;
    message.kind = kind;
    message.device = (ProtobufCBinaryData){CUDA_UUID_BYTES, r->gpu->uuid};
    if (handle)
        message.handle =
            (ProtobufCBinaryData){sizeof handle->reserved, (uint8_t *)handle->reserved};
    else
        message.chunks = r->n_chunks;
    return push(g, PB__ENVELOPE__BODY_REGISTER, &message, NULL, 0);
}

static int export_chunk(const struct cuda *cuda, CUdeviceptr at, int *out_fd)
{
    const struct cuda_table *table = cuda->table;
    CUmemGenericAllocationHandle handle;
    CUresult rc = table->vmm_retain(&handle, (void *)(uintptr_t)at);
    if (rc != CUDA_SUCCESS)
        return cuda_failure(cuda, rc, "the memory's handle");
    rc = table->vmm_export(out_fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    table->vmm_release(handle);
    return rc == CUDA_SUCCESS ? 0 : cuda_failure(cuda, rc, "exporting memory");
}

/* Export a few chunks, push them. */
static int push_chunks(struct gradd *g, const struct cuda_region *r, unsigned first, unsigned n,
                       CUdeviceptr *at)
{
    int fds[WIRE_FDS_MAX], rc = 0;
    unsigned n_fds = 0;
    while (n_fds < n && (rc = export_chunk(g->cuda, *at, &fds[n_fds])) == 0)
        *at += r->chunk_bytes[first + n_fds++];
    Pb__RegisterChunks message = PB__REGISTER_CHUNKS__INIT;
    message.region = r->region.id;
    message.bytes = r->chunk_bytes + first;
    message.n_bytes = n;
    if (rc == 0)
        rc = push(g, PB__ENVELOPE__BODY_REGISTER_CHUNKS, &message, fds, n_fds);
    while (n_fds > 0)
        close(fds[--n_fds]);
    channel_flush(g);
    return rc;
}

static int tell_worker(struct gradd *g, struct cuda_region *r, bool is_ipc)
{
    struct cuda *cuda = g->cuda;
    CUdeviceptr at = (uintptr_t)r->region.base;
    r->region.id = ++g->next_region;
    if (is_ipc) {
        CUipcMemHandle handle;
        CUresult result = cuda->table->ipc_get_mem(&handle, at);
        if (result != CUDA_SUCCESS)
            return cuda_failure(cuda, result, "the memory's IPC handle");
        return push_register(g, r, PB__REGION_KIND__CUDA_IPC, &handle);
    }
    int rc = push_register(g, r, PB__REGION_KIND__CUDA_VMM, NULL);
    for (unsigned i = 0; i < r->n_chunks && rc == 0; i += WIRE_FDS_MAX) {
        unsigned n = r->n_chunks - i < WIRE_FDS_MAX ? r->n_chunks - i : WIRE_FDS_MAX;
        rc = push_chunks(g, r, i, n, &at);
    }
    if (rc < 0)
        memory_unregister(g, &r->region);
    return rc;
}

/* The record is complete; the worker's answer is waited for. 0 or a status. */
static int register_with_worker(struct gradd *g, struct cuda_region *r, bool is_ipc)
{
    int rc = cuda_enter(g->cuda, r->gpu);
    if (rc < 0)
        return rc;
    rc = tell_worker(g, r, is_ipc);
    cuda_leave(g->cuda);
    return rc < 0 ? rc : memory_await_answer(g, &r->region);
}

/* ------------------------------------------------------------------ getting one */

static bool is_answered(const void *arg)
{
    return !((const struct cuda_region *)arg)->is_pending;
}

static int make(struct gradd *g, struct cuda_gpu *gpu, const struct cuda_memory *memory,
                CUdeviceptr at, uint64_t bytes, struct cuda_region **out)
{
    sweep(g);
    struct cuda_region *r = calloc(1, sizeof *r);
    if (!r)
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    r->gpu = gpu;
    int rc = find_chunks(g->cuda, memory, at, bytes, r);
    if (rc != 0) {
        free_record(r);
        return rc;
    }
    r->is_pending = true;
    link_region(g->cuda, r);
    rc = register_with_worker(g, r, memory->is_ipc);
    r->is_pending = false;
    g->has_ended = true; /* another thread may have waited for the same answer */
    channel_notify(g);
    if (rc < 0) { /* kept, so that it is not asked about again by every op */
        r->region.status = rc;
        if (!r->region.text)
            r->region.text = strdup(gradd_error());
    }
    *out = r;
    return 0;
}

/* With the bounds that can be shared; the GPU is current while the chunks are looked at. */
static int find_or_make(struct gradd *g, struct cuda_gpu *gpu, const void *address, uint64_t bytes,
                        struct cuda_region **out)
{
    CUdeviceptr at = (uintptr_t)address;
    struct cuda_memory memory;
    struct cuda_region *r = NULL;
    int rc = cuda_enter(g->cuda, gpu);
    if (rc < 0)
        return rc;
    if (!cuda_memory_chunk(g->cuda->table, address, &memory))
        rc = error_set(GRADD_ERR_INVALID, "the bounds of the memory at %p are not known", address);
    while (rc == 0 && (r = find(g->cuda, &memory, at, bytes)) && r->is_pending) {
        r->n_pins++;
        channel_wait(g, is_answered, r, WAIT_FOREVER);
        r->n_pins--;
    }
    if (rc == 0 && !r)
        rc = make(g, gpu, &memory, at, bytes, &r);
    cuda_leave(g->cuda);
    if (rc == 0)
        *out = r;
    return rc;
}

int cuda_region_get(struct gradd *g, struct cuda_gpu *gpu, const struct cuda_memory *memory,
                    const void *address, uint64_t bytes, struct cuda_region **out,
                    const char **out_text)
{
    struct cuda_region *r = NULL;
    if ((*out_text = why_unshared(memory)))
        return 1;
    int rc = find_or_make(g, gpu, address, bytes, &r);
    if (rc == 0)
        rc = context_check(g);
    if (rc < 0)
        return rc;
    if (rc == 1) {
        *out_text = "it lies in several allocations, of which one can not be shared";
        return 1;
    }
    if (r->region.status != GRADD_OK) {
        *out_text = r->region.text ? r->region.text : "the worker refused it";
        return 1;
    }
    if (g->cuda->regions != r) {
        unlink_region(g->cuda, r);
        link_region(g->cuda, r);
    }
    *out = r;
    return 0;
}

/* ------------------------------------------------------------------ bounce buffers */

static int describe_bounce(struct gradd *g, struct cuda_gpu *gpu, CUdeviceptr at,
                           struct cuda_region *r, bool *out_is_ipc)
{
    struct cuda_memory memory;
    int rc = cuda_enter(g->cuda, gpu);
    if (rc < 0)
        return rc;
    rc = cuda_memory_chunk(g->cuda->table, (void *)(uintptr_t)at, &memory) && !why_unshared(&memory)
             ? find_chunks(g->cuda, &memory, at, memory.bytes, r)
             : 1;
    cuda_leave(g->cuda);
    if (rc == 0)
        *out_is_ipc = memory.is_ipc;
    return rc == 1 ? error_set(GRADD_ERR_UNSUPPORTED,
                               "GPU %d has no memory that two processes can share", gpu->ordinal)
                   : rc;
}

int cuda_bounce_new(struct gradd *g, struct stage_pool *pool, size_t bytes, struct region **out)
{
    struct cuda_gpu *gpu = pool->owner;
    CUdeviceptr at;
    bool is_ipc = false;
    int rc = cuda_allocation_new(g->cuda, gpu, bytes, &at);
    if (rc < 0)
        return rc;
    struct cuda_region *r = calloc(1, sizeof *r);
    rc = r ? 0 : error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    if (r) {
        r->gpu = gpu;
        rc = describe_bounce(g, gpu, at, r, &is_ipc);
    }
    if (rc == 0)
        rc = register_with_worker(g, r, is_ipc);
    if (rc < 0) {
        if (r)
            free_record(r);
        cuda_allocation_free(g->cuda, at);
        return rc;
    }
    r->region.is_staging = true;
    *out = &r->region;
    return 0;
}

void cuda_bounce_free(struct gradd *g, struct stage_pool *pool, struct region *region)
{
    struct cuda_region *r = (struct cuda_region *)region;
    memory_unregister(g, region);
    cuda_allocation_free(g->cuda, (uintptr_t)region->base);
    free_record(r);
}

/* ------------------------------------------------------------------ the public calls */

static bool is_unused(const void *arg)
{
    const struct cuda_region *r = arg;
    return r->region.n_uses == 0 && r->n_pins == 1 && !r->is_pending;
}

/* Wait until no op uses it and the worker has closed it. */
static void forget(struct gradd *g, struct cuda_region *r)
{
    r->is_stale = r->is_leaving = true; /* no new op takes it */
    r->n_pins++;
    channel_wait(g, is_unused, r, WAIT_FOREVER);
    unlink_region(g->cuda, r);
    if (r->region.status == GRADD_OK && !g->failure) {
        memory_unregister(g, &r->region);
        memory_await_answer(g, &r->region);
    }
    free_record(r);
}

/* The registration around the address, whose memory may be gone. */
static struct cuda_region *find_any(const struct cuda *cuda, CUdeviceptr at, uint64_t bytes)
{
    struct cuda_region *r = cuda->regions;
    while (r && (r->is_leaving || !overlaps(r, at, bytes)))
        r = r->next;
    return r;
}

static int register_locked(struct gradd *g, const void *memory, size_t bytes)
{
    const struct cuda_table *table = cuda_driver();
    struct cuda_memory found;
    struct cuda *cuda;
    struct cuda_gpu *gpu;
    struct cuda_region *region;
    const char *text;
    if (!table || !cuda_memory_find(table, memory, &found))
        return error_set(GRADD_ERR_INVALID, "%p is no device memory of this process", memory);
    if (!g->has_device_path)
        return error_set(GRADD_ERR_INVALID, "memory %p can not be shared: %s", memory,
                         g->device_text);
    int rc = cuda_get(g, table, &cuda);
    if (rc == 0)
        rc = cuda_gpu_get(cuda, found.ordinal, found.context, NULL, &gpu);
    if (rc == 0)
        rc = cuda_region_get(g, gpu, &found, memory, bytes, &region, &text);
    return rc == 1 ? error_set(GRADD_ERR_INVALID, "memory %p can not be shared: %s", memory, text)
                   : rc;
}

int gradd_register(struct gradd *g, const void *memory, size_t bytes)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    rc = context_check(g);
    if (rc == 0)
        rc = register_locked(g, memory, bytes);
    context_leave(g);
    return rc;
}

int gradd_forget(struct gradd *g, const void *memory)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    struct cuda_region *r;
    while (g->cuda && (r = find_any(g->cuda, (uintptr_t)memory, 1)))
        forget(g, r);
    rc = context_check(g);
    context_leave(g);
    return rc;
}

void *gradd_alloc_device(struct gradd *g, int device, size_t bytes)
{
    if (context_enter(g) < 0)
        return NULL;
    const struct cuda_table *table = cuda_driver();
    struct cuda *cuda;
    struct cuda_gpu *gpu;
    CUdeviceptr at = 0;
    int rc = context_check(g);
    if (rc == 0 && !table)
        rc = error_set(GRADD_ERR_UNAVAILABLE, "this process has not loaded the CUDA driver");
    if (rc == 0)
        rc = cuda_get(g, table, &cuda);
    if (rc == 0)
        rc = cuda_gpu_get(cuda, device, NULL, NULL, &gpu);
    if (rc == 0)
        rc = cuda_allocation_new(cuda, gpu, bytes, &at);
    if (rc == 0 && g->has_device_path) {
        register_locked(g, (void *)(uintptr_t)at, bytes ? bytes : 1);
        rc = context_check(g);
        if (rc < 0)
            cuda_allocation_free(cuda, at);
    }
    context_leave(g);
    return rc == 0 ? (void *)(uintptr_t)at : NULL;
}

bool cuda_free_device(struct gradd *g, void *memory, int *out_rc)
{
    CUdeviceptr at = (uintptr_t)memory;
    uint64_t bytes = cuda_allocation_bytes(g->cuda, at);
    if (!bytes)
        return false;
    struct cuda_region *r = find_any(g->cuda, at, bytes);
    if (r && r->region.n_uses > 0) {
        *out_rc =
            error_set(GRADD_ERR_INVALID, "memory %p is in use by %u ops in flight: wait for them",
                      memory, r->region.n_uses);
        return true;
    }
    for (; r; r = find_any(g->cuda, at, bytes))
        forget(g, r);
    cuda_allocation_free(g->cuda, at);
    *out_rc = GRADD_OK;
    return true;
}

/* ------------------------------------------------------------------ the end */

void cuda_regions_stop(struct gradd *g)
{
    struct cuda *cuda = g->cuda;
    for (struct cuda_gpu *gpu = cuda->gpus; gpu; gpu = gpu->next) {
        struct stage_pool *pool = &gpu->bounce;
        while (pool->n_regions > 0)
            cuda_bounce_free(g, pool, pool->regions[--pool->n_regions]);
    }
    cuda_allocations_stop(cuda);
}

void cuda_regions_free(struct cuda *cuda)
{
    while (cuda->regions) {
        struct cuda_region *r = cuda->regions;
        cuda->regions = r->next;
        free_record(r);
    }
    for (struct cuda_gpu *gpu = cuda->gpus; gpu; gpu = gpu->next) {
        struct stage_pool *pool = &gpu->bounce;
        while (pool->n_regions > 0)
            free_record((struct cuda_region *)pool->regions[--pool->n_regions]);
        stage_pool_deinit(pool);
    }
    cuda_allocations_free(cuda);
}
