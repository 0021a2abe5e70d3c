/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events. A slot counts the records that were made and keeps, for the last few, which are done; a
 * wait is for the record that was the last when the wait was called. Slots of interprocess events
 * lie in the process's shared file, others on the heap.
 *
 * Invariant: `recorded` never goes back, not even when a slot is used for another event, so a wait
 * that was pushed before the event was destroyed ends rightly.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stream.h"

enum { EVENT_MAGIC = 0x746e6576, FLAGS = 7 };

struct CUevent_st {
    struct CUevent_st *next;
    CUcontext context;
    unsigned flags;
    struct event_slot *slot;
    int owner; /* pid */
    uint32_t index, generation;
};
static CUevent events;    /* under fake_lock */
static CUevent destroyed; /* kept, so that their handles are never those of others */

struct handle {
    uint32_t magic;
    int32_t pid;
    uint32_t index, generation;
};

static CUresult event_get(CUevent handle, CUevent *out)
{
    pthread_mutex_lock(&fake_lock);
    CUevent e = events;
    while (e != NULL && e != handle)
        e = e->next;
    pthread_mutex_unlock(&fake_lock);
    if (e == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (e->owner != getpid() &&
        (atomic_load(&e->slot->generation) != e->generation || atomic_load(&e->slot->is_live) == 0))
        fake_die("an event of process %d is used after that process has destroyed it", e->owner);
    *out = e;
    return CUDA_SUCCESS;
}

static CUevent event_new(struct event_slot *slot, unsigned flags, int owner, uint32_t index)
{
    CUevent e = malloc(sizeof *e);
    if (e == NULL)
        fake_die("out of memory");
    *e = (struct CUevent_st){.next = events,
                             .context = fake_context(),
                             .flags = flags,
                             .slot = slot,
                             .owner = owner,
                             .index = index,
                             .generation = atomic_load(&slot->generation)};
    events = e;
    return e;
}

/* A slot of the shared file, -1: all are taken. */
static int take_slot(void)
{
    for (int i = 0; i < FAKE_EVENTS; i++)
        if (atomic_load(&fake_process->events[i].is_live) == 0)
            return i;
    return -1;
}

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    ENTER(cuEventCreate, NEED_CONTEXT);
    fake_count_sum(SUM_EVENT_CREATIONS);
    bool is_shared = (flags & CU_EVENT_INTERPROCESS) != 0;
    if (flags > FLAGS || (is_shared && (flags & CU_EVENT_DISABLE_TIMING) == 0))
        return CUDA_ERROR_INVALID_VALUE;
    if (is_shared && !fake_settings.ipc_events)
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&fake_lock);
    int index = is_shared ? take_slot() : 0;
    struct event_slot *slot = NULL;
    if (index >= 0)
        slot = is_shared ? &fake_process->events[index] : calloc(1, sizeof *slot);
    if (slot != NULL) {
        atomic_fetch_add(&slot->generation, 1);
        atomic_store(&slot->born, atomic_load(&slot->recorded));
        atomic_store(&slot->is_live, 1);
        *out = event_new(slot, flags, getpid(), (uint32_t)index);
    }
    pthread_mutex_unlock(&fake_lock);
    return slot != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Heap slots are not freed: items of streams may still name them. */
CUresult cuEventDestroy_v2(CUevent handle)
{
    ENTER(cuEventDestroy_v2, NEED_INIT);
    pthread_mutex_lock(&fake_lock);
    CUevent *link = &events;
    while (*link != NULL && *link != handle)
        link = &(*link)->next;
    CUevent e = *link;
    if (e != NULL) {
        *link = e->next;
        if (e->owner == getpid())
            atomic_store(&e->slot->is_live, 0);
        e->next = destroyed;
        destroyed = e;
    }
    pthread_mutex_unlock(&fake_lock);
    return e != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

struct record {
    struct event_slot *slot;
    uint64_t number;
};

static struct record *record_of(struct event_slot *slot, uint64_t number)
{
    struct record *record = malloc(sizeof *record);
    if (record == NULL)
        fake_die("out of memory");
    *record = (struct record){slot, number};
    return record;
}

static bool is_done(const struct event_slot *slot, uint64_t number)
{
    return number == 0 || atomic_load(&slot->done[number % FAKE_EVENT_RECORDS]) >= number;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Records on several streams may be done in any order. */
static void mark_done(_Atomic uint64_t *done, uint64_t number)
{
    uint64_t before = atomic_load(done);
    while (before < number && !atomic_compare_exchange_weak(done, &before, number))
        ;
}

static void complete(void *data)
{
    struct record *record = data;
    struct event_slot *slot = record->slot;
    /* Like the work before it, a record behind a fault is never reached. */
    if (!fake_stream_is_faulted() || fake_settings.dead == FAKE_DEAD_COMPLETE) {
        atomic_store(&slot->done_ns, now_ns());
        mark_done(&slot->done[record->number % FAKE_EVENT_RECORDS], record->number);
        atomic_fetch_add(&slot->ticks, 1);
        fake_futex_wake(&slot->ticks);
    }
    free(record);
}

static CUresult record_event(CUevent handle, CUstream stream)
{
    CUevent e;
    CUstream s;
    CUresult rc = event_get(handle, &e);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = fake_stream_get(stream, &s);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (s->context != e->context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (s->capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_SUCCESS;
    uint64_t number = atomic_load(&e->slot->recorded) + 1;
    atomic_store(&e->slot->recorder[number % FAKE_EVENT_RECORDS], getpid());
    atomic_store(&e->slot->recorded, number);
    return fake_stream_push_run(stream, complete, record_of(e->slot, number));
}

CUresult cuEventRecord(CUevent e, CUstream s)
{
    ENTER(cuEventRecord, NEED_CONTEXT);
    return record_event(e, s);
}

CUresult cuEventRecordWithFlags(CUevent e, CUstream s, unsigned flags)
{
    ENTER(cuEventRecordWithFlags, NEED_CONTEXT);
    return flags == 0 ? record_event(e, s) : CUDA_ERROR_INVALID_VALUE;
}

/* The last record, 0: never recorded. */
static uint64_t last_record(const struct event_slot *slot)
{
    uint64_t number = atomic_load(&slot->recorded);
    return number == atomic_load(&slot->born) ? 0 : number;
}

/*
 * Until the record is done, or the waiting context has a fault; returns that, or what the death of
 * the recorder is to mean.
 */
static CUresult await(struct event_slot *slot, uint64_t number, CUcontext context)
{
    for (;;) {
        uint32_t seen = atomic_load(&slot->ticks);
        if (is_done(slot, number))
            return CUDA_SUCCESS;
        if (atomic_load(&context->sticky) != 0)
            return atomic_load(&context->sticky);
        fake_futex_wait(&slot->ticks, seen, 20000);
        int recorder = atomic_load(&slot->recorder[number % FAKE_EVENT_RECORDS]);
        if (fake_settings.dead == FAKE_DEAD_HANG || fake_process_is_alive(recorder) ||
            is_done(slot, number))
            continue;
        return fake_settings.dead == FAKE_DEAD_ERROR ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
    }
}

static void wait_record(void *data)
{
    struct record *record = data;
    CUresult rc = await(record->slot, record->number, fake_stream_context());
    if (rc != CUDA_SUCCESS)
        fake_stream_fault(rc);
    free(record);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned flags)
{
    ENTER(cuStreamWaitEvent, NEED_CONTEXT);
    CUevent e;
    CUstream s;
    CUresult rc = event_get(handle, &e);
    if (rc == CUDA_SUCCESS)
        rc = fake_stream_get(stream, &s);
    if (rc != CUDA_SUCCESS || flags != 0)
        return rc != CUDA_SUCCESS ? rc : CUDA_ERROR_INVALID_VALUE;
    uint64_t number = last_record(e->slot);
    if (s->capture != CU_STREAM_CAPTURE_STATUS_NONE) {
        if (number == 0)
            return CUDA_SUCCESS;
        s->capture = FAKE_CAPTURE_STATUS_INVALIDATED;
        return FAKE_ERROR_CAPTURE_ISOLATION;
    }
    if (is_done(e->slot, number))
        return CUDA_SUCCESS;
    return fake_stream_push_run(stream, wait_record, record_of(e->slot, number));
}

CUresult cuEventQuery(CUevent handle)
{
    ENTER(cuEventQuery, NEED_CONTEXT);
    CUevent e;
    CUresult rc = event_get(handle, &e);
    if (rc != CUDA_SUCCESS)
        return rc;
    return is_done(e->slot, last_record(e->slot)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle)
{
    ENTER(cuEventSynchronize, NEED_CONTEXT);
    CUevent e;
    CUresult rc = event_get(handle, &e);
    if (rc != CUDA_SUCCESS)
        return rc;
    fake_count_sum(SUM_HOST_SYNCHRONISATIONS);
    return await(e->slot, last_record(e->slot), fake_context());
}

CUresult cuEventElapsedTime_v2(float *out_ms, CUevent from, CUevent to)
{
    ENTER(cuEventElapsedTime_v2, NEED_CONTEXT);
    CUevent a, b;
    if (event_get(from, &a) != CUDA_SUCCESS || event_get(to, &b) != CUDA_SUCCESS ||
        ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING) != 0 || last_record(a->slot) == 0 ||
        last_record(b->slot) == 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!is_done(a->slot, last_record(a->slot)) || !is_done(b->slot, last_record(b->slot)))
        return CUDA_ERROR_NOT_READY;
    *out_ms = (float)((double)(int64_t)(b->slot->done_ns - a->slot->done_ns) / 1e6);
    return CUDA_SUCCESS;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent handle)
{
    ENTER(cuIpcGetEventHandle, NEED_CONTEXT);
    CUevent e;
    CUresult rc = event_get(handle, &e);
    if (rc != CUDA_SUCCESS)
        return rc;
    if ((e->flags & CU_EVENT_INTERPROCESS) == 0 || e->owner != getpid())
        return CUDA_ERROR_INVALID_HANDLE;
    struct handle shared = {EVENT_MAGIC, getpid(), e->index, e->generation};
    memset(out, 0, sizeof *out);
    memcpy(out, &shared, sizeof shared);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle)
{
    ENTER(cuIpcOpenEventHandle, NEED_CONTEXT);
    fake_count_sum(SUM_EVENT_CREATIONS);
    struct handle shared;
    memcpy(&shared, &handle, sizeof shared);
    if (shared.magic != EVENT_MAGIC || shared.index >= FAKE_EVENTS)
        return CUDA_ERROR_INVALID_VALUE;
    if (shared.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&fake_lock);
    struct process_file *file = fake_process_of(shared.pid);
    struct event_slot *slot = file != NULL ? &file->events[shared.index] : NULL;
    bool is_live = slot != NULL && atomic_load(&slot->is_live) != 0 &&
                   atomic_load(&slot->generation) == shared.generation;
    if (is_live)
        *out = event_new(slot, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, shared.pid,
                         shared.index);
    pthread_mutex_unlock(&fake_lock);
    return is_live ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}
