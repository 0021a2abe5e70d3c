/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of the fake driver share: settings, counters, contexts, ranges of memory, streams.
 *
 * Two locks: fake_lock over everything of the process except a stream's queue, which has its own.
 * A stream's lock may be taken under fake_lock, never the other way round.
 */
#ifndef GRADD_FAKE_H
#define GRADD_FAKE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "entries.h"
#include "fake_cuda.h"

enum { FAKE_MAX_DEVICES = 16, FAKE_GRANULARITY = 2 << 20 };

/* What an awaited event of a process that died does. */
enum fake_dead { FAKE_DEAD_HANG, FAKE_DEAD_COMPLETE, FAKE_DEAD_ERROR };

struct fake_settings {
    const char *directory;
    int n_physical, n_devices;
    int physical[FAKE_MAX_DEVICES]; /* of each visible ordinal */
    uint64_t memory_bytes;          /* of each device */
    uint64_t seed;
    unsigned delay_us;
    int compute_mode, ipc_events;
    int version, capability;
    bool suballocate, readable, keep_counts, memory_handles, free_waits;
    enum fake_dead dead;
};
extern struct fake_settings fake_settings;
extern pthread_mutex_t fake_lock;

/* settings.c */
void fake_settings_read(void);
/* Map the file `fail` of the shared directory: errors that may be changed while a process runs. */
void fake_inject_open(void);
/* The error that this call shall fail with, 0: none. May take its time first, or never return. */
CUresult fake_inject(enum fake_entry entry, uint64_t call);
/* Listed in GRADD_FAKE_CUDA_WITHOUT. */
bool fake_is_without(enum fake_entry entry);
const char *fake_entry_name(enum fake_entry entry);
/* The same function, with or without _v2. */
bool fake_same_name(const char *entry, const char *name, size_t bytes);
/* "fake libcuda: ..." to stderr; then abort(). */
_Noreturn void fake_die(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fake_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* counts.c */
enum fake_sum {
    SUM_HOST_SYNCHRONISATIONS,
    SUM_IMPLICIT_SYNCHRONISATIONS,
    SUM_IMPORTS,
    SUM_EVENT_CREATIONS,
    SUM_ALLOCATIONS,
    SUM_FREED_WHILE_IMPORTED,
    N_SUMS
};
void fake_counts_open(void);
uint64_t fake_count_call(enum fake_entry entry);
void fake_count_sum(enum fake_sum sum);

/* process.c: the directory that the fakes of several processes share. */
enum { FAKE_EVENT_RECORDS = 64, FAKE_EVENTS = 4096 };
struct event_slot {
    _Atomic uint32_t ticks; /* futex: one more at every completed record */
    _Atomic uint32_t generation;
    _Atomic uint32_t is_live;
    uint32_t reserved;
    _Atomic uint64_t recorded; /* sequence number of the last record, in all generations */
    _Atomic uint64_t born;     /* `recorded` when this generation began */
    _Atomic uint64_t done[FAKE_EVENT_RECORDS]; /* of record n at n modulo the size */
    _Atomic uint64_t done_ns;
    _Atomic int32_t recorder[FAKE_EVENT_RECORDS]; /* pid */
};
struct process_file {
    uint32_t magic;
    int32_t pid;
    struct event_slot events[FAKE_EVENTS];
};
extern struct process_file *fake_process; /* our own */
void fake_process_open(void);
/* At the end of the process: its files are removed, so that nobody opens them any more. */
void fake_process_close(void);
/* Map another process's file; kept for good. NULL: there is no such process. */
struct process_file *fake_process_of(int pid);
bool fake_process_is_alive(int pid);
/* Path of a file of the shared directory, in a buffer of the calling thread. */
const char *fake_path(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* driver.c */
enum fake_need { NEED_NOTHING, NEED_INIT, NEED_CONTEXT };
CUresult fake_enter(enum fake_entry entry, enum fake_need need);
#define ENTER(name, need)                                                                          \
    do {                                                                                           \
        CUresult entered_ = fake_enter(ENTRY_##name, need);                                        \
        if (entered_ != CUDA_SUCCESS)                                                              \
            return entered_;                                                                       \
    } while (0)

struct CUctx_st {
    int device;       /* ordinal */
    _Atomic int refs; /* changed under fake_lock; 0: not active */
    _Atomic int sticky;
    CUstream default_stream;
};
/* The calling thread's context, NULL: none. */
CUcontext fake_context(void);
void fake_context_fail_in(CUcontext context, CUresult error);
extern _Thread_local bool fake_in_stream_thread;
/* The last reference is gone: its streams end, its memory is freed. */
void fake_context_destroy(CUcontext context);

/* range.c: addresses. */
enum range_kind { RANGE_DEVICE, RANGE_IMPORT, RANGE_VMM, RANGE_POOL, RANGE_MANAGED, RANGE_HOST };
struct range {
    struct range *next;
    uintptr_t base;
    size_t bytes;
    enum range_kind kind;
    int device; /* ordinal; -1: not visible in this process, or of the host */
    uint64_t id;
    CUcontext context;
    bool is_accessible; /* VMM: after cuMemSetAccess() */
    bool is_owned;      /* HOST: by cuMemHostAlloc() */
    void *owner;        /* struct block, struct import, struct physical */
    int refs;           /* IMPORT: times opened */
};
/* All under fake_lock. */
uintptr_t fake_arena_take(size_t bytes); /* multiple of 2 MiB; 0: exhausted */
void fake_arena_give(uintptr_t base, size_t bytes);
bool fake_arena_has(uintptr_t p);
/* Show fd's bytes at the view of `base`, or anonymous memory for -1. */
bool fake_arena_map(uintptr_t base, size_t bytes, int fd, size_t offset);
void fake_arena_unmap(uintptr_t base, size_t bytes);
void *fake_arena_view(uintptr_t base);
struct range *fake_range_add(struct range range); /* takes a new id if range.id is 0 */
void fake_range_remove(struct range *range);
struct range *fake_range_find(uintptr_t p);
/* Any range that the context owns, NULL: none. */
struct range *fake_range_of_context(CUcontext context);
uint64_t fake_range_used(int device); /* bytes */
/* NULL: not mapped, or ordinary memory that the driver does not know. */
void *fake_view_locked(uintptr_t p, size_t bytes);
void fake_poison(void *p, size_t bytes);

/* stream.c */
/* Find the stream behind a handle, default streams included. Not 0: CUresult. */
CUresult fake_stream_get(CUstream handle, CUstream *out);
CUresult fake_stream_push_run(CUstream handle, void (*run)(void *), void *data);
/* Wait until everything pushed so far to the context's streams has run. */
void fake_context_drain(CUcontext context);
/* Giving memory back may wait for the device, as the driver's reference says: this one does, or
 * does not, as the test wants. */
void fake_free_waits(CUcontext context);
/* Under fake_lock. */
void fake_streams_close(CUcontext context);
CUresult fake_stream_drain(CUstream handle);
/* capture.c: may the calling thread make this call while streams are captured? Else those captures
 * are lost. */
CUresult fake_capture_check(enum fake_entry entry);
/* On a stream's thread: its context fails; it has failed, so that no more work is done in it. */
void fake_stream_fault(CUresult error);
bool fake_stream_is_faulted(void);
CUcontext fake_stream_context(void);
CUcontext fake_stream_context_of(CUstream s);

/* A word of shared memory was written; whoever waits for it looks. */
void fake_futex_wake(void *word);
void fake_futex_wait(void *word, uint32_t seen, unsigned timeout_us);

/* kernels.c: what stands for a kernel on the CPU. */
struct fake_launch {
    unsigned grid[3], block[3];
};
struct fake_kernel {
    const char *name;
    size_t parameter_bytes; /* of its one parameter */
    void (*run)(const struct fake_launch *launch, const void *parameter);
};
const struct fake_kernel *fake_kernel_find(const char *name);

#endif
