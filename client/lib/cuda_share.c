/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Telling the worker of an allocation: what it consists of, and by what the worker can map it.
 *
 * Invariant: every descriptor that is exported here is closed here; the worker has its own.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

enum { CHUNKS_MAX = 1 << 16 };

/* ------------------------------------------------------------------ describing */

/* NULL: it can be shared. */
const char *cuda_why_unshared(const struct cuda_memory *memory)
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
int cuda_find_chunks(const struct cuda *cuda, const struct cuda_memory *first, CUdeviceptr at,
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
        /* NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): cuda_failure() is never 0 */
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
int cuda_region_tell(struct gradd *g, struct cuda_region *r, bool is_ipc)
{
    int rc = cuda_enter(g->cuda, r->gpu);
    if (rc < 0)
        return rc;
    rc = tell_worker(g, r, is_ipc);
    cuda_leave(g->cuda);
    return rc < 0 ? rc : memory_await_answer(g, &r->region);
}
