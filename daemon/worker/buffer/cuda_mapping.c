/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/buffer/cuda_mapping.h"

#include <stdarg.h>
#include <stdio.h>

#include <gradd/types.h>

__attribute__((format(printf, 3, 4))) static void fail(struct cuda_mapping_result *out, int status,
                                                       const char *format, ...)
{
    va_list args;
    out->status = status;
    va_start(args, format);
    vsnprintf(out->text, sizeof out->text, format, args);
    va_end(args);
}

static void fail_call(struct cuda_mapping_result *out, const struct cuda_mapping *m,
                      const char *what, CUresult rc)
{
    fail(out, rc == CUDA_ERROR_OUT_OF_MEMORY ? GRADD_ERR_NO_MEMORY : GRADD_ERR_INVALID, "%s: %s",
         what, cuda_table_error(m->cuda, rc));
}

static void unmap(struct cuda_mapping *m)
{
    if (m->is_legacy) {
        if (m->is_open)
            m->cuda->ipc_close_mem(m->base);
    } else if (m->base) {
        if (m->mapped_bytes > 0)
            m->cuda->vmm_unmap(m->base, m->mapped_bytes);
        m->cuda->vmm_address_free(m->base, m->bytes);
    }
    m->is_open = false;
    m->base = 0;
    m->mapped_bytes = 0;
}

static void open_legacy(struct cuda_mapping *m, struct cuda_mapping_result *out)
{
    CUdeviceptr base = 0;
    size_t bytes = 0;
    CUresult rc = m->cuda->ipc_open_mem(&m->base, m->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (rc != CUDA_SUCCESS) {
        m->base = 0;
        fail_call(out, m, "its IPC handle can not be opened", rc);
        return;
    }
    m->is_open = true;
    rc = m->cuda->mem_range(&base, &bytes, m->base);
    if (rc != CUDA_SUCCESS) {
        fail_call(out, m, "the size of the allocation is not known", rc);
        unmap(m);
        return;
    }
    /* What is mapped may begin before: small allocations lie together in one block. */
    m->bytes = base + bytes - m->base;
    out->is_complete = true;
}

static void reserve(struct cuda_mapping *m, struct cuda_mapping_result *out)
{
    size_t total = 0;
    if (!m->cuda->has_vmm) {
        fail(out, GRADD_ERR_UNSUPPORTED, "the driver can not import memory of cuMemCreate()");
        return;
    }
    CUresult rc = m->cuda->device_total_bytes(&total, m->ordinal);
    if (rc == CUDA_SUCCESS && m->bytes > total) {
        fail(out, GRADD_ERR_INVALID, "%llu bytes are more than the GPU has (%llu)",
             (unsigned long long)m->bytes, (unsigned long long)total);
        return;
    }
    rc = m->cuda->vmm_reserve(&m->base, m->bytes, 0, 0, 0);
    if (rc != CUDA_SUCCESS) {
        m->base = 0;
        fail_call(out, m, "no addresses can be reserved", rc);
    }
}

void cuda_mapping_open(struct cuda_mapping *m, struct cuda_mapping_result *out)
{
    CUcontext ignored;
    CUresult rc = m->cuda->ctx_push(m->context);
    if (rc != CUDA_SUCCESS) {
        fail_call(out, m, "the worker's context is not usable", rc);
    } else {
        if (m->is_legacy)
            open_legacy(m, out);
        else
            reserve(m, out);
        m->cuda->ctx_pop(&ignored);
    }
    m->is_broken = out->status != GRADD_OK;
}

/* Import one chunk and map it behind the others; the mapping alone keeps the memory. */
static void map_chunk(struct cuda_mapping *m, int fd, uint64_t bytes,
                      struct cuda_mapping_result *out)
{
    CUmemGenericAllocationHandle handle;
    if (m->n_mapped == m->n_chunks || bytes == 0 || bytes > m->bytes - m->mapped_bytes) {
        fail(out, GRADD_ERR_INVALID,
             "its chunks are more than the %u, or larger than the %llu bytes together, that were "
             "announced",
             m->n_chunks, (unsigned long long)m->bytes);
        return;
    }
    CUresult rc = m->cuda->vmm_import(&handle, (void *)(uintptr_t)fd,
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (rc != CUDA_SUCCESS) {
        fail_call(out, m, "a chunk's descriptor can not be imported", rc);
        return;
    }
    rc = m->cuda->vmm_map(m->base + m->mapped_bytes, bytes, 0, handle, 0);
    m->cuda->vmm_release(handle);
    if (rc != CUDA_SUCCESS) {
        fail_call(out, m, "a chunk can not be mapped", rc);
        return;
    }
    m->mapped_bytes += bytes;
    m->n_mapped++;
}

static void allow_access(struct cuda_mapping *m, struct cuda_mapping_result *out)
{
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = m->ordinal},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    if (m->mapped_bytes != m->bytes) {
        fail(out, GRADD_ERR_INVALID, "its %u chunks have %llu bytes, not the %llu announced",
             m->n_chunks, (unsigned long long)m->mapped_bytes, (unsigned long long)m->bytes);
        return;
    }
    CUresult rc = m->cuda->vmm_access(m->base, m->bytes, &access, 1);
    if (rc != CUDA_SUCCESS) {
        fail_call(out, m, "the GPU can not access a chunk", rc);
        return;
    }
    m->is_open = true;
    out->is_complete = true;
}

void cuda_mapping_add(struct cuda_mapping *m, const int *fds, const uint64_t *bytes, unsigned n,
                      struct cuda_mapping_result *out)
{
    CUcontext ignored;
    CUresult rc = CUDA_SUCCESS;
    /* Chunks beyond the last one change nothing: ops may use the memory already. */
    const bool is_wanted = !m->is_broken && !m->is_open;
    if (is_wanted && (rc = m->cuda->ctx_push(m->context)) != CUDA_SUCCESS) {
        fail_call(out, m, "the worker's context is not usable", rc);
        m->is_broken = true;
    } else if (is_wanted) {
        for (unsigned i = 0; i < n && out->status == GRADD_OK; i++)
            map_chunk(m, fds[i], bytes[i], out);
        if (out->status == GRADD_OK && m->n_mapped == m->n_chunks)
            allow_access(m, out);
        if (out->status != GRADD_OK)
            unmap(m);
        m->is_broken = out->status != GRADD_OK;
        m->cuda->ctx_pop(&ignored);
    }
}

void cuda_mapping_close(struct cuda_mapping *m)
{
    CUcontext ignored;
    if (m->cuda->ctx_push(m->context) != CUDA_SUCCESS)
        return; /* the context is gone, and the mapping with it */
    unmap(m);
    m->cuda->ctx_pop(&ignored);
}
