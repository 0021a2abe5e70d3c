/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams. The default stream of a context (handle NULL or 1) and its blocking streams wait for
 * each other, as the real legacy stream. Handle 2 is a blocking stream of each thread's own.
 *
 * While a stream is captured what is pushed to it is dropped: graphs are not executed here.
 */
#include <signal.h>
#include <stdlib.h>

#include "stream.h"

static CUstream streams; /* under fake_lock */

static CUstream stream_new(CUcontext context, unsigned flags)
{
    static uint64_t number;
    CUstream s = calloc(1, sizeof *s);
    if (s == NULL)
        fake_die("out of memory");
    *s = (struct CUstream_st){.next = streams, .context = context, .flags = flags};
    s->tail = &s->head;
    s->random = (fake_settings.seed + ++number) * 0x9e3779b97f4a7c15ULL | 1;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    int rc = pthread_create(&thread, NULL, fake_stream_thread, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        fake_die("no thread for a stream");
    pthread_detach(thread);
    streams = s;
    return s;
}

/* Kept for the context that the thread used last. */
static CUstream own_stream(CUcontext context)
{
    static _Thread_local CUstream own;
    if (own == NULL || own->context != context || own->is_destroyed)
        own = stream_new(context, CU_STREAM_DEFAULT);
    return own;
}

CUstream fake_stream_first(void)
{
    return streams;
}

static CUresult get_locked(CUstream handle, CUstream *out)
{
    CUcontext context = fake_context();
    if ((uintptr_t)handle == FAKE_STREAM_PER_THREAD) {
        *out = own_stream(context);
        return CUDA_SUCCESS;
    }
    if (handle == NULL || (uintptr_t)handle == FAKE_STREAM_LEGACY) {
        if (context->default_stream == NULL) {
            context->default_stream = stream_new(context, CU_STREAM_DEFAULT);
            context->default_stream->is_default = true;
        }
        *out = context->default_stream;
        return CUDA_SUCCESS;
    }
    CUstream s = streams;
    while (s != NULL && s != handle)
        s = s->next;
    if (s == NULL || s->is_destroyed || s->is_default)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = s;
    return CUDA_SUCCESS;
}

CUcontext fake_stream_context_of(CUstream s)
{
    return s->context;
}

CUresult fake_stream_get(CUstream handle, CUstream *out)
{
    pthread_mutex_lock(&fake_lock);
    CUresult rc = get_locked(handle, out);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

struct other {
    CUstream stream;
    uint64_t item;
};

static void wait_for_other(void *data)
{
    struct other *other = data;
    fake_stream_wait_done(other->stream, other->item);
    free(other);
}

static void append_wait(CUstream s, CUstream stream)
{
    pthread_mutex_lock(&stream->lock);
    uint64_t item = stream->pushed;
    bool is_idle = stream->done == item;
    pthread_mutex_unlock(&stream->lock);
    if (is_idle || (stream->is_default && s->waits_for == item))
        return;
    struct other *other = malloc(sizeof *other);
    if (other == NULL)
        fake_die("out of memory");
    *other = (struct other){stream, item};
    if (stream->is_default)
        s->waits_for = item;
    fake_stream_append(s, wait_for_other, other);
}

/* The order between the default stream and blocking streams. */
static void append_implicit_waits(CUstream s)
{
    if (s->is_default) {
        for (CUstream other = streams; other != NULL; other = other->next)
            if (other->context == s->context && other->flags == CU_STREAM_DEFAULT && other != s)
                append_wait(s, other);
    } else if (s->flags == CU_STREAM_DEFAULT && s->context->default_stream != NULL) {
        append_wait(s, s->context->default_stream);
    }
}

CUresult fake_stream_push_run(CUstream handle, void (*run)(void *), void *data)
{
    pthread_mutex_lock(&fake_lock);
    CUstream s;
    CUresult rc = get_locked(handle, &s);
    if (rc == CUDA_SUCCESS && s->capture == CU_STREAM_CAPTURE_STATUS_NONE) {
        append_implicit_waits(s);
        fake_stream_append(s, run, data);
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

static void drain(CUstream s)
{
    pthread_mutex_lock(&s->lock);
    uint64_t item = s->pushed;
    pthread_mutex_unlock(&s->lock);
    fake_stream_wait_done(s, item);
}

/* Streams are never freed, so the list can be walked while others are added. */
void fake_context_drain(CUcontext context)
{
    pthread_mutex_lock(&fake_lock);
    CUstream s = streams;
    pthread_mutex_unlock(&fake_lock);
    for (; s != NULL; s = s->next)
        if (s->context == context)
            drain(s);
}

void fake_free_waits(CUcontext context)
{
    fake_count_sum(SUM_IMPLICIT_SYNCHRONISATIONS);
    if (fake_settings.free_waits)
        fake_context_drain(context);
}

static void stream_close(CUstream s)
{
    s->is_destroyed = true;
    pthread_mutex_lock(&s->lock);
    s->is_closing = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

void fake_streams_close(CUcontext context)
{
    for (CUstream s = streams; s != NULL; s = s->next)
        if (s->context == context && !s->is_destroyed)
            stream_close(s);
    context->default_stream = NULL;
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    ENTER(cuStreamCreateWithPriority, NEED_CONTEXT);
    if (flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    *out = stream_new(fake_context(), flags);
    pthread_mutex_unlock(&fake_lock);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    ENTER(cuStreamCreate, NEED_CONTEXT);
    return cuStreamCreateWithPriority(out, flags, 0);
}

CUresult cuCtxGetStreamPriorityRange(int *out_least, int *out_greatest)
{
    ENTER(cuCtxGetStreamPriorityRange, NEED_CONTEXT);
    *out_least = 0;
    *out_greatest = -5;
    return CUDA_SUCCESS;
}

/* Returns at once; the thread ends when the queue is empty. */
CUresult cuStreamDestroy_v2(CUstream handle)
{
    ENTER(cuStreamDestroy_v2, NEED_INIT);
    pthread_mutex_lock(&fake_lock);
    CUstream s = streams;
    while (s != NULL && s != handle)
        s = s->next;
    bool is_stream = s != NULL && !s->is_destroyed && !s->is_default;
    if (is_stream)
        stream_close(s);
    pthread_mutex_unlock(&fake_lock);
    return is_stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamQuery(CUstream handle)
{
    ENTER(cuStreamQuery, NEED_CONTEXT);
    CUstream s;
    CUresult rc = fake_stream_get(handle, &s);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (s->capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&s->lock);
    rc = s->done == s->pushed ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

CUresult fake_stream_drain(CUstream handle)
{
    CUstream s;
    CUresult rc = fake_stream_get(handle, &s);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (s->capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    fake_count_sum(SUM_HOST_SYNCHRONISATIONS);
    drain(s);
    return s->context->sticky;
}

CUresult cuStreamSynchronize(CUstream s)
{
    ENTER(cuStreamSynchronize, NEED_CONTEXT);
    return fake_stream_drain(s);
}

CUresult cuCtxSynchronize(void)
{
    ENTER(cuCtxSynchronize, NEED_CONTEXT);
    fake_count_sum(SUM_HOST_SYNCHRONISATIONS);
    fake_context_drain(fake_context());
    return fake_context()->sticky;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *out)
{
    ENTER(cuStreamGetCtx, NEED_INIT);
    if (fake_context() == NULL && (uintptr_t)handle <= FAKE_STREAM_PER_THREAD)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUstream s;
    CUresult rc = fake_stream_get(handle, &s);
    if (rc == CUDA_SUCCESS)
        *out = s->context;
    return rc;
}

FAKE_EXPORT int fake_cuda_stream_push(CUstream stream, void (*run)(void *), void *data)
{
    if (fake_context() == NULL && (uintptr_t)stream <= FAKE_STREAM_PER_THREAD)
        return CUDA_ERROR_INVALID_CONTEXT;
    return fake_stream_push_run(stream, run, data);
}

FAKE_EXPORT int fake_cuda_stream_device(CUstream stream)
{
    CUstream s;
    if (fake_context() == NULL && (uintptr_t)stream <= FAKE_STREAM_PER_THREAD)
        return -1;
    return fake_stream_get(stream, &s) == CUDA_SUCCESS ? s->context->device : -1;
}

FAKE_EXPORT void fake_cuda_context_fail(CUstream stream, int error)
{
    CUstream s;
    if (fake_stream_get(stream, &s) == CUDA_SUCCESS)
        fake_context_fail_in(s->context, error);
}
