/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake NCCL: libnccl.so.2 for tests. Ranks meet in a file named after the unique id, exchange
 * tensors through it in pieces, and reduce on the CPU in the order of the ranks, when the stream
 * (of the fake CUDA driver) comes to the operation.
 *
 * Whoever breaks a rule that the real library only documents ends here: the process aborts with a
 * sentence that begins with "fake libnccl:". What the real library answers with an error is
 * answered with that error.
 *
 * One lock, fake_lock, over everything of the process; between processes only atomics, and a futex
 * word that counts changes.
 */
#ifndef GRADD_FAKE_NCCL_H
#define GRADD_FAKE_NCCL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/worker/backend/nccl/nccl_abi.h"

#define FAKE_EXPORT __attribute__((visibility("default")))

extern pthread_mutex_t fake_lock;

/* ---- settings.c ---- */

struct fake_settings {
    char directory[200];
    int version;
    unsigned init_ms;     /* how long making a communicator takes */
    unsigned launch_ms;   /* how long a launch in progress takes */
    unsigned in_progress; /* every n-th launch of a communicator is in progress; 0: the first */
    uint64_t hang_at;     /* operation that ends only by an abort; 0: none */
    uint64_t async_at;    /* operation at which an asynchronous error comes up; 0: none */
    ncclResult_t async_result; /* which */
    bool init_hangs, abort_hangs;
    char host[64]; /* ranks with the same are on one machine */
};
const struct fake_settings *fake_settings(void);
/* What the call shall return instead of doing anything; ncclSuccess: nothing. May take its time. */
ncclResult_t fake_inject(const char *function);
_Noreturn void fake_die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Sets ncclGetLastError()'s text and returns rc. */
ncclResult_t fake_error(ncclResult_t rc, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* One line in the file GRADD_FAKE_NCCL_LOG, if that is set. */
void fake_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fake_sleep_ms(unsigned ms);

/* ---- driver.c: what is needed of the fake driver, looked up when it is first needed ---- */

struct fake_driver {
    CUresult (*ctx_device)(CUdevice *out);
    int (*stream_push)(CUstream stream, void (*run)(void *), void *data);
    int (*stream_device)(CUstream stream);
    int (*pointer_device)(const void *pointer);
    void *(*view)(const void *pointer, size_t bytes);
    int (*physical_device)(int ordinal);
    void (*context_fail)(CUstream stream, int error);
};
const struct fake_driver *fake_driver(void);

/* ---- shared.c: the memory that the ranks of a communicator share ---- */

enum {
    FAKE_RANKS = 32,
    FAKE_DEVICES = 64,
    FAKE_SLOT_BYTES = 256 << 10, /* of a rank, for collectives */
    FAKE_MAIL_BYTES = 32 << 10,  /* from one rank to another */
    FAKE_HISTORY = 1024,         /* operations whose signature is known */
};

enum fake_kind {
    KIND_ALL_REDUCE,
    KIND_REDUCE,
    KIND_BROADCAST,
    KIND_ALL_GATHER,
    KIND_REDUCE_SCATTER,
    KIND_ALL_TO_ALL,
    KIND_P2P, /* sends and receives of a group */
};

/* What must be the same on every rank. */
struct fake_signature {
    int kind, type, op, root;
    uint64_t count;
};

enum rank_state { RANK_ABSENT, RANK_CLAIMED, RANK_HERE, RANK_FINALIZED, RANK_GONE };

struct shared_rank {
    _Atomic uint32_t state; /* enum rank_state */
    _Atomic uint32_t has_come;
    int32_t pid, physical;
    char host[64];
    _Atomic uint64_t steps; /* barriers entered */
    struct {
        _Atomic uint64_t number; /* of the operation, from 1; 0 while it is written */
        struct fake_signature signature;
    } history[FAKE_HISTORY];
};

struct mailbox {
    _Atomic uint32_t is_full;
    uint32_t bytes;
    uint64_t total; /* of the whole message */
};

struct shared {
    _Atomic uint32_t ticks; /* futex */
    _Atomic uint32_t n_ranks;
    struct shared_rank ranks[FAKE_RANKS];
    struct mailbox mail[FAKE_RANKS][FAKE_RANKS]; /* [from][to] */
};

/* NULL: the file cannot be made. */
struct shared *fake_shared_open(const ncclUniqueId *id);
/* Once all ranks have it open. */
void fake_shared_unlink(const ncclUniqueId *id);
uint8_t *fake_shared_slot(struct shared *shared, int rank);
uint8_t *fake_shared_mail(struct shared *shared, int from, int to);
void fake_shared_changed(struct shared *shared);
/* Until something may have changed since `ticks` was read; a few milliseconds at most. */
void fake_shared_wait(struct shared *shared, uint32_t ticks);

/* ---- comm.c ---- */

enum comm_state {
    COMM_STARTING,  /* non-blocking: ncclInProgress until all ranks have come */
    COMM_READY,     /* operations may be issued */
    COMM_LAUNCHING, /* non-blocking: ncclInProgress until the operations are on their streams */
    COMM_FINALIZING,
    COMM_FINALIZED,
    COMM_REVOKED, /* operations were stopped; only to be destroyed */
    COMM_DEAD,    /* destroyed or aborted; the memory stays, so that use is found */
};

enum { FAKE_OPS = 64 };

struct ncclComm {
    uint64_t magic;
    struct ncclComm *next; /* of the process; under fake_lock */
    unsigned number;       /* in this process */
    ncclUniqueId id;
    int rank, n_ranks, device, physical;
    bool is_blocking;
    struct shared *_Atomic shared; /* NULL until the file is open */
    enum comm_state state;         /* under fake_lock */
    ncclResult_t error;            /* under fake_lock; ncclSuccess: none */
    bool is_error_seen;            /* the caller has been told */
    const char *ended_by;          /* COMM_DEAD: the function */
    _Atomic bool is_stopped;       /* operations end without a result */
    uint64_t n_issued;             /* collectives, for signatures; under fake_lock */
    uint64_t n_launched;           /* operations of any kind; under fake_lock */
    _Atomic uint64_t n_done;       /* operations, in the order of launch */
    _Atomic bool is_running;       /* an operation is being executed */
    uint64_t n_groups;             /* launches so far */
    pthread_t issuer;              /* of the last launch outside a group */
    bool has_issuer;
    bool has_thread; /* `thread` is to be joined */
    pthread_t thread;
    struct {
        bool is_used;
        int type;
        double factor;
        const void *device_factor; /* read when the operation runs; NULL: factor */
    } ops[FAKE_OPS];
};

enum { FAKE_MAGIC = 0x4c434346 };

/* Dies unless comm is a communicator that may be used now, for `function`. Called under fake_lock.
 */
ncclResult_t fake_comm_check(ncclComm_t comm, const char *function);
void fake_comm_set_error(ncclComm_t comm, ncclResult_t rc, const char *text);
/* The caller is being told: from now on it may only be aborted. */
void fake_comm_fail_seen(ncclComm_t comm, ncclResult_t rc);
/* All communicators of the process, dead ones too; under fake_lock. */
ncclComm_t fake_comm_next(ncclComm_t comm); /* NULL: the first */
/* -1: NULL. Dies for what is no living communicator. */
int fake_comm_physical(ncclComm_t comm, const char *function);
/* Starts to make it; non-blocking ones go on by themselves. */
ncclResult_t fake_comm_start(ncclComm_t comm);
ncclResult_t fake_comm_join(ncclComm_t comm);

/* ---- guard.c: one thread at a time on a device ---- */

/* Dies when another thread is inside for this physical device. */
void fake_guard_enter(int physical, const char *function);
void fake_guard_leave(int physical);

/* ---- group.c ---- */

struct fake_op {
    struct fake_op *next;
    ncclComm_t comm;
    CUstream stream;
    enum fake_kind kind;
    const void *in;
    void *out;
    uint64_t count; /* elements, as the call has it */
    int type, op, root;
    double factor; /* of a sum that is multiplied before */
    const void *device_factor;
    uint64_t number;         /* of the collective, from 1: its signature's */
    uint64_t order;          /* among the communicator's operations, from 1 */
    struct fake_part *parts; /* KIND_P2P */
};

struct fake_part {
    struct fake_part *next;
    bool is_send;
    int peer;
    uint8_t *memory; /* device pointer */
    uint64_t bytes, done;
};

/* Launches it, or keeps it until the end of the group. op is taken. */
ncclResult_t fake_group_add(struct fake_op *op, const char *function);
ncclResult_t fake_group_add_comm(ncclComm_t comm);
bool fake_group_is_open(void);
/* A call failed: so does the group. */
void fake_group_fail(ncclResult_t rc);

/* ---- exec.c ---- */

size_t fake_type_bytes(int type); /* 0: unknown */
double fake_scalar(int type, const void *p);
/* What is pushed to a stream; frees the op. */
void fake_exec(void *op);
/* Dies when another rank issued something else as this operation. */
void fake_signature_publish(const struct fake_op *op);
void fake_signature_compare(const struct fake_op *op);

/* ---- p2p.c ---- */

/* Until all parts are done, or the communicator is stopped. */
void fake_exec_parts(struct fake_op *op);
/* False: the operation shall end without a result. Waits a little; sees peers that are gone. */
bool fake_exec_wait(struct fake_op *op, uint32_t ticks);

#endif
