/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory operations on streams: a stream writes a word, or waits until a word has a value, and host
 * functions. A word may be written by anyone, the CPU included, so a waiting stream looks again
 * after a millisecond at the latest; a write by a stream wakes it at once.
 */
#include <errno.h>
#include <linux/futex.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

void fake_futex_wake(void *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void fake_futex_wait(void *word, uint32_t seen, unsigned timeout_us)
{
    struct timespec timeout = {timeout_us / 1000000, (long)(timeout_us % 1000000) * 1000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

struct value_op {
    CUdeviceptr p;
    void *word; /* where the CPU finds it */
    uint64_t value;
    unsigned flags, bytes;
};

static uint64_t load(const struct value_op *op)
{
    return op->bytes == 8 ? atomic_load((_Atomic uint64_t *)op->word)
                          : atomic_load((_Atomic uint32_t *)op->word);
}

static bool is_met(const struct value_op *op, uint64_t word)
{
    switch (op->flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
        return op->bytes == 8 ? (int64_t)(word - op->value) >= 0
                              : (int32_t)((uint32_t)word - (uint32_t)op->value) >= 0;
    case FAKE_WAIT_EQ:
        return word == op->value;
    case FAKE_WAIT_AND:
        return (word & op->value) != 0;
    default:
        return op->bytes == 8 ? ~(word | op->value) != 0
                              : (uint32_t) ~((uint32_t)word | (uint32_t)op->value) != 0;
    }
}

/* Under fake_lock, so that the word stays there for the moment. False: it is gone, a fault. */
static bool is_there(const struct value_op *op)
{
    if (fake_range_find(op->p) != NULL && fake_view_locked(op->p, op->bytes) == op->word)
        return true;
    fake_warn("a stream uses the word at %#llx, which is not registered any more", op->p);
    fake_stream_fault(CUDA_ERROR_ILLEGAL_ADDRESS);
    return false;
}

static void wait_value(void *data)
{
    struct value_op *op = data;
    unsigned pause_us = 20;
    while (!fake_stream_is_faulted()) {
        pthread_mutex_lock(&fake_lock);
        bool goes_on = is_there(op);
        uint64_t word = goes_on ? load(op) : 0;
        pthread_mutex_unlock(&fake_lock);
        if (!goes_on || is_met(op, word))
            break;
        fake_futex_wait(op->word, (uint32_t)word, pause_us);
        pause_us = pause_us < 1000 ? pause_us * 2 : 1000;
    }
    free(op);
}

static void write_value(void *data)
{
    struct value_op *op = data;
    pthread_mutex_lock(&fake_lock);
    if (!fake_stream_is_faulted() && is_there(op)) {
        if (op->bytes == 8)
            atomic_store((_Atomic uint64_t *)op->word, op->value);
        else
            atomic_store((_Atomic uint32_t *)op->word, (uint32_t)op->value);
        fake_futex_wake(op->word);
    }
    pthread_mutex_unlock(&fake_lock);
    free(op);
}

/* The word must be memory of a device, or of the host and registered; not managed. */
static CUresult push(CUstream s, void (*run)(void *), CUdeviceptr p, uint64_t value, unsigned flags,
                     unsigned bytes)
{
    pthread_mutex_lock(&fake_lock);
    const struct range *range = fake_range_find(p);
    void *word = range != NULL && range->kind != RANGE_MANAGED ? fake_view_locked(p, bytes) : NULL;
    pthread_mutex_unlock(&fake_lock);
    if (word == NULL || p % bytes != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct value_op *op = malloc(sizeof *op);
    if (op == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *op = (struct value_op){p, word, value, flags, bytes};
    CUresult rc = fake_stream_push_run(s, run, op);
    if (rc != CUDA_SUCCESS)
        free(op);
    return rc;
}

/* Flushing is not supported, as attribute 98 says. */
static bool wait_flags_are_right(unsigned flags)
{
    return flags <= FAKE_WAIT_NOR;
}

CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr p, uint32_t value, unsigned flags)
{
    ENTER(cuStreamWaitValue32_v2, NEED_CONTEXT);
    return wait_flags_are_right(flags) ? push(s, wait_value, p, value, flags, 4)
                                       : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuStreamWaitValue64_v2(CUstream s, CUdeviceptr p, uint64_t value, unsigned flags)
{
    ENTER(cuStreamWaitValue64_v2, NEED_CONTEXT);
    return wait_flags_are_right(flags) ? push(s, wait_value, p, value, flags, 8)
                                       : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, uint32_t value, unsigned flags)
{
    ENTER(cuStreamWriteValue32_v2, NEED_CONTEXT);
    return push(s, write_value, p, value, flags, 4);
}

CUresult cuStreamWriteValue64_v2(CUstream s, CUdeviceptr p, uint64_t value, unsigned flags)
{
    ENTER(cuStreamWriteValue64_v2, NEED_CONTEXT);
    return push(s, write_value, p, value, flags, 8);
}

struct host_call {
    void (*run)(void *);
    void *data;
};

static void call_host(void *data)
{
    struct host_call *call = data;
    if (!fake_stream_is_faulted())
        call->run(call->data);
    free(call);
}

CUresult cuLaunchHostFunc(CUstream s, void (*run)(void *), void *data)
{
    ENTER(cuLaunchHostFunc, NEED_CONTEXT);
    struct host_call *call = malloc(sizeof *call);
    if (call == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *call = (struct host_call){run, data};
    CUresult rc = fake_stream_push_run(s, call_host, call);
    if (rc != CUDA_SUCCESS)
        free(call);
    return rc;
}
