/* SPDX-License-Identifier: Apache-2.0 */
/* The driver itself: loading, cuInit(), the check that begins every call, error texts. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

_Thread_local bool fake_in_stream_thread;
static _Atomic int init_pid;

/*
 * What holds for every call: it is counted, it may be told to fail, it is refused on a stream's
 * own thread (the real driver: in a host function), after fork(), before cuInit(), without a
 * context, after a fault in that context, and when it would spoil a capture.
 */
CUresult fake_enter(enum fake_entry entry, enum fake_need need)
{
    /* Before anything that a thread of the parent may have held locked at the time of fork(). */
    int pid = atomic_load(&init_pid);
    if (pid != 0 && pid != getpid())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult injected = fake_inject(entry, fake_count_call(entry));
    if (injected == CUDA_ERROR_ILLEGAL_ADDRESS || injected == CUDA_ERROR_LAUNCH_FAILED) {
        CUcontext context = fake_context();
        if (context != NULL)
            fake_context_fail_in(context, injected);
    }
    if (injected != CUDA_SUCCESS)
        return injected;
    if (need == NEED_NOTHING)
        return CUDA_SUCCESS;
    if (fake_in_stream_thread)
        return CUDA_ERROR_NOT_PERMITTED;
    if (pid == 0)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (need == NEED_INIT)
        return CUDA_SUCCESS;
    CUcontext context = fake_context();
    if (context == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context->refs == 0)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    CUresult sticky = atomic_load(&context->sticky);
    return sticky != CUDA_SUCCESS ? sticky : fake_capture_check(entry);
}

CUresult cuInit(unsigned flags)
{
    ENTER(cuInit, NEED_NOTHING);
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake_settings.n_devices == 0)
        return CUDA_ERROR_NO_DEVICE;
    pthread_mutex_lock(&fake_lock);
    if (atomic_load(&init_pid) == 0) {
        fake_process_open();
        fake_counts_open();
        fake_inject_open();
        atomic_store(&init_pid, getpid());
    }
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *out)
{
    ENTER(cuDriverGetVersion, NEED_NOTHING);
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *out = fake_settings.version;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult rc;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {208, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for the device"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "memory is already registered"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "memory has not been registered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "MPS client failed to connect"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while a stream is captured"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture failed because of an error"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the stream is not being captured"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "a dependency leaves the captured streams"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "the default stream waits for a captured one"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int find_error(CUresult rc)
{
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].rc == rc)
            return (int)i;
    return -1;
}

CUresult cuGetErrorName(CUresult rc, const char **out)
{
    ENTER(cuGetErrorName, NEED_NOTHING);
    int at = find_error(rc);
    *out = at < 0 ? NULL : errors[at].name;
    return at < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult rc, const char **out)
{
    ENTER(cuGetErrorString, NEED_NOTHING);
    int at = find_error(rc);
    *out = at < 0 ? NULL : errors[at].text;
    return at < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
