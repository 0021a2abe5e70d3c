/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies and fills. As with the real driver a copy from pageable host memory takes the bytes before
 * the call returns, and a copy to it returns when it is done: that is a host synchronisation, and
 * counted as one.
 */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct copy {
    CUdeviceptr to, from;
    const void *source; /* staged bytes; NULL: at `from` */
    size_t bytes;
    unsigned value, unit; /* of a fill: unit != 0 */
    unsigned char staged[];
};

/* Kind of the memory: RANGE_* or PAGEABLE. */
enum { PAGEABLE = -1 };

static int kind_of(uintptr_t p)
{
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find(p);
    int kind = range != NULL ? (int)range->kind : PAGEABLE;
    pthread_mutex_unlock(&fake_lock);
    return kind;
}

/* Copies may touch memory of the host that the driver does not know. */
static void *view_of(CUdeviceptr p, size_t bytes)
{
    if (kind_of(p) == PAGEABLE && !fake_arena_has(p))
        return (void *)(uintptr_t)p;
    return fake_cuda_view((void *)(uintptr_t)p, bytes);
}

static void move(const struct copy *copy)
{
    void *to = view_of(copy->to, copy->bytes);
    const void *from = copy->source != NULL ? copy->source : view_of(copy->from, copy->bytes);
    if (to == NULL || (from == NULL && copy->unit == 0)) {
        fake_warn("memory was unmapped before a copy of %zu bytes had run", copy->bytes);
        fake_stream_fault(CUDA_ERROR_ILLEGAL_ADDRESS);
    } else if (copy->unit == 0) {
        memmove(to, from, copy->bytes);
    } else if (copy->unit == 1) {
        memset(to, (int)copy->value, copy->bytes);
    } else {
        for (size_t i = 0; i < copy->bytes / 4; i++)
            ((unsigned *)to)[i] = copy->value;
    }
}

static void run(void *data)
{
    if (!fake_stream_is_faulted())
        move(data);
    free(data);
}

static CUresult push(CUdeviceptr to, CUdeviceptr from, size_t bytes, bool is_staged, CUstream s)
{
    const void *from_view = view_of(from, bytes);
    if (view_of(to, bytes) == NULL || from_view == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct copy *copy = malloc(sizeof *copy + (is_staged ? bytes : 0));
    if (copy == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = (struct copy){.to = to, .from = from, .bytes = bytes};
    if (is_staged) {
        memcpy(copy->staged, from_view, bytes);
        copy->source = copy->staged;
    }
    CUresult rc = fake_stream_push_run(s, run, copy);
    if (rc != CUDA_SUCCESS)
        free(copy);
    return rc;
}

static CUresult copy_async(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s)
{
    if (bytes == 0)
        return CUDA_SUCCESS;
    bool is_staged = kind_of(from) == PAGEABLE && !fake_arena_has(from);
    CUresult rc = push(to, from, bytes, is_staged, s);
    bool waits = kind_of(to) == PAGEABLE;
    return rc == CUDA_SUCCESS && waits ? fake_stream_drain(s) : rc;
}

static CUresult copy_now(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    if (bytes == 0)
        return CUDA_SUCCESS;
    CUresult rc = push(to, from, bytes, false, NULL);
    return rc == CUDA_SUCCESS ? fake_stream_drain(NULL) : rc;
}

/* A copy by direction: the device's side must be device memory. */
static bool is_device(CUdeviceptr p)
{
    int kind = kind_of(p);
    return kind != PAGEABLE;
}

static CUdeviceptr host(const void *p)
{
    return (CUdeviceptr)(uintptr_t)p;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    ENTER(cuMemcpy, NEED_CONTEXT);
    return copy_now(to, from, bytes);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s)
{
    ENTER(cuMemcpyAsync, NEED_CONTEXT);
    return copy_async(to, from, bytes, s);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    ENTER(cuMemcpyDtoD_v2, NEED_CONTEXT);
    if (!is_device(to) || !is_device(from))
        return CUDA_ERROR_INVALID_VALUE;
    return push(to, from, bytes, false, NULL);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s)
{
    ENTER(cuMemcpyDtoDAsync_v2, NEED_CONTEXT);
    if (!is_device(to) || !is_device(from))
        return CUDA_ERROR_INVALID_VALUE;
    return copy_async(to, from, bytes, s);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    ENTER(cuMemcpyHtoD_v2, NEED_CONTEXT);
    return is_device(to) ? copy_now(to, host(from), bytes) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream s)
{
    ENTER(cuMemcpyHtoDAsync_v2, NEED_CONTEXT);
    return is_device(to) ? copy_async(to, host(from), bytes, s) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    ENTER(cuMemcpyDtoH_v2, NEED_CONTEXT);
    return is_device(from) ? copy_now(host(to), from, bytes) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream s)
{
    ENTER(cuMemcpyDtoHAsync_v2, NEED_CONTEXT);
    return is_device(from) ? copy_async(host(to), from, bytes, s) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult fill(CUdeviceptr to, unsigned value, unsigned unit, size_t n, CUstream s)
{
    if (n == 0)
        return CUDA_SUCCESS;
    if (!is_device(to) || view_of(to, n * unit) == NULL || to % unit != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct copy *copy = malloc(sizeof *copy);
    if (copy == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = (struct copy){.to = to, .bytes = n * unit, .value = value, .unit = unit};
    CUresult rc = fake_stream_push_run(s, run, copy);
    if (rc != CUDA_SUCCESS)
        free(copy);
    return rc;
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t n)
{
    ENTER(cuMemsetD8_v2, NEED_CONTEXT);
    return fill(to, value, 1, n, NULL);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream s)
{
    ENTER(cuMemsetD8Async, NEED_CONTEXT);
    return fill(to, value, 1, n, s);
}

CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t n)
{
    ENTER(cuMemsetD32_v2, NEED_CONTEXT);
    return fill(to, value, 4, n, NULL);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, CUstream s)
{
    ENTER(cuMemsetD32Async, NEED_CONTEXT);
    return fill(to, value, 4, n, s);
}
