/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Capturing a stream: only its state. What is pushed meanwhile is dropped and the graph is empty;
 * what a captured stream may not do fails as with the real driver.
 */
#include <stdlib.h>

#include "stream.h"

struct CUgraph_st {
    int unused;
};

static _Thread_local int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static _Atomic int n_captures;

/* Calls that may wait for a device, or for what a capture will never do. */
static bool is_unsafe(enum fake_entry entry)
{
    switch (entry) {
    case ENTRY_cuMemAlloc_v2:
    case ENTRY_cuMemFree_v2:
    case ENTRY_cuMemAllocManaged:
    case ENTRY_cuMemHostAlloc:
    case ENTRY_cuMemAllocHost_v2:
    case ENTRY_cuMemFreeHost:
    case ENTRY_cuMemHostRegister_v2:
    case ENTRY_cuMemHostUnregister:
    case ENTRY_cuIpcOpenMemHandle_v2:
    case ENTRY_cuIpcCloseMemHandle:
    case ENTRY_cuEventQuery:
    case ENTRY_cuEventSynchronize:
    case ENTRY_cuStreamQuery:
    case ENTRY_cuStreamSynchronize:
    case ENTRY_cuCtxSynchronize:
        return true;
    default:
        return false;
    }
}

static bool is_spoilt(CUstream s)
{
    if (s->capture != CU_STREAM_CAPTURE_STATUS_ACTIVE ||
        s->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    return pthread_equal(s->capture_thread, pthread_self()) ||
           (s->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
            thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult fake_capture_check(enum fake_entry entry)
{
    CUresult rc = CUDA_SUCCESS;
    if (atomic_load(&n_captures) == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED ||
        !is_unsafe(entry))
        return rc;
    pthread_mutex_lock(&fake_lock);
    for (CUstream s = fake_stream_first(); s != NULL; s = s->next) {
        if (!is_spoilt(s))
            continue;
        s->capture = FAKE_CAPTURE_STATUS_INVALIDATED;
        rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER(cuThreadExchangeStreamCaptureMode, NEED_INIT);
    if (mode == NULL || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL ||
        *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* The default stream cannot be asked while a stream that it waits for is captured. */
static bool waits_for_capture(CUstream s)
{
    bool found = false;
    pthread_mutex_lock(&fake_lock);
    for (CUstream other = fake_stream_first(); other != NULL && s->is_default; other = other->next)
        found |= other->context == s->context && other->flags == CU_STREAM_DEFAULT &&
                 other->capture != CU_STREAM_CAPTURE_STATUS_NONE;
    pthread_mutex_unlock(&fake_lock);
    return found;
}

CUresult cuStreamIsCapturing(CUstream handle, int *out_status)
{
    ENTER(cuStreamIsCapturing, NEED_CONTEXT);
    CUstream s;
    CUresult rc = fake_stream_get(handle, &s);
    if (rc == CUDA_SUCCESS && waits_for_capture(s))
        rc = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (rc == CUDA_SUCCESS)
        *out_status = s->capture;
    return rc;
}

CUresult cuStreamBeginCapture_v2(CUstream handle, int mode)
{
    ENTER(cuStreamBeginCapture_v2, NEED_CONTEXT);
    CUstream s;
    CUresult rc = fake_stream_get(handle, &s);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (s->is_default || s->capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&fake_lock);
    s->capture_mode = mode;
    s->capture_thread = pthread_self();
    s->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    pthread_mutex_unlock(&fake_lock);
    atomic_fetch_add(&n_captures, 1);
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *out)
{
    ENTER(cuStreamEndCapture, NEED_CONTEXT);
    CUstream s;
    CUresult rc = fake_stream_get(handle, &s);
    if (rc != CUDA_SUCCESS)
        return rc;
    int status = s->capture;
    s->capture = CU_STREAM_CAPTURE_STATUS_NONE;
    *out = NULL;
    if (status == CU_STREAM_CAPTURE_STATUS_NONE)
        return FAKE_ERROR_CAPTURE_UNMATCHED;
    atomic_fetch_sub(&n_captures, 1);
    if (status == FAKE_CAPTURE_STATUS_INVALIDATED)
        return FAKE_ERROR_CAPTURE_INVALIDATED;
    *out = calloc(1, sizeof **out);
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphDestroy(CUgraph graph)
{
    ENTER(cuGraphDestroy, NEED_INIT);
    free(graph);
    return CUDA_SUCCESS;
}
