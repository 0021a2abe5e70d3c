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

CUresult cuStreamIsCapturing(CUstream handle, int *out_status)
{
    ENTER(cuStreamIsCapturing, NEED_CONTEXT);
    CUstream s;
    CUresult rc = fake_stream_get(handle, &s);
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
    s->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
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
