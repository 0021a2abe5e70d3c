/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Communicators: making, ending, stopping them, and the rules on when they may be used.
 *
 * None is ever freed, so that one that was destroyed is recognised when it is used.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

static ncclComm_t comms; /* under fake_lock */

static ncclComm_t find(ncclComm_t comm, const char *function)
{
    ncclComm_t at = comms;

    while (at && at != comm)
        at = at->next;
    if (!at || at->magic != FAKE_MAGIC)
        fake_die("%s: this pointer is no communicator", function);
    if (at->state == COMM_DEAD)
        fake_die("%s: the communicator was ended by %s", function, at->ended_by);
    return at;
}

static void check_error(ncclComm_t comm, const char *function)
{
    if (comm->error != ncclSuccess && comm->is_error_seen)
        fake_die("%s: the communicator has failed with %d, which the caller knows: it may only "
                 "be aborted",
                 function, comm->error);
}

ncclResult_t fake_comm_check(ncclComm_t comm, const char *function)
{
    if (comm == NULL)
        return fake_error(ncclInvalidArgument, "%s: comm is NULL", function);
    find(comm, function);
    check_error(comm, function);
    if (comm->error != ncclSuccess) {
        comm->is_error_seen = true;
        return comm->error;
    }
    switch (comm->state) {
    case COMM_STARTING:
    case COMM_LAUNCHING:
    case COMM_FINALIZING:
        fake_die("%s: the non-blocking communicator is in progress (%s): "
                 "ncclCommGetAsyncError() until ncclSuccess first",
                 function,
                 comm->state == COMM_STARTING    ? "being made"
                 : comm->state == COMM_LAUNCHING ? "launching"
                                                 : "being finalized");
    case COMM_FINALIZED:
        fake_die("%s: the communicator is finalized", function);
    case COMM_REVOKED:
        fake_die("%s: the communicator is revoked", function);
    case COMM_READY:
    case COMM_DEAD:
        break;
    }
    return ncclSuccess;
}

void fake_comm_set_error(ncclComm_t comm, ncclResult_t rc, const char *text)
{
    pthread_mutex_lock(&fake_lock);
    if (comm->error == ncclSuccess && comm->state != COMM_DEAD) {
        comm->error = rc;
        fake_error(rc, "rank %d: %s", comm->rank, text);
    }
    pthread_mutex_unlock(&fake_lock);
}

void fake_comm_fail_seen(ncclComm_t comm, ncclResult_t rc)
{
    pthread_mutex_lock(&fake_lock);
    if (comm->error == ncclSuccess)
        comm->error = rc;
    comm->is_error_seen = true;
    pthread_mutex_unlock(&fake_lock);
}

ncclComm_t fake_comm_next(ncclComm_t comm)
{
    return comm ? comm->next : comms;
}

int fake_comm_physical(ncclComm_t comm, const char *function)
{
    if (comm == NULL)
        return -1;
    pthread_mutex_lock(&fake_lock);
    find(comm, function);
    pthread_mutex_unlock(&fake_lock);
    return comm->physical;
}

/* ---- Making ---- */

static void claim(ncclComm_t comm)
{
    struct shared_rank *self = &comm->shared->ranks[comm->rank];
    uint32_t n = 0, absent = RANK_ABSENT;

    if (!atomic_compare_exchange_strong(&comm->shared->n_ranks, &n, (uint32_t)comm->n_ranks) &&
        n != (uint32_t)comm->n_ranks)
        fake_die("rank %d wants a communicator of %d ranks, another rank one of %u", comm->rank,
                 comm->n_ranks, n);
    if (comm->is_stopped)
        return; /* aborted before it came so far */
    if (!atomic_compare_exchange_strong(&self->state, &absent, RANK_CLAIMED) && !comm->is_stopped)
        fake_die("rank %d of one unique id came twice", comm->rank);
    self->pid = getpid();
    self->physical = comm->physical;
    memcpy(self->host, fake_settings()->host, sizeof(self->host));
    atomic_store(&self->state, RANK_HERE);
    atomic_store(&self->has_come, 1);
    fake_shared_changed(comm->shared);
}

static bool is_elsewhere(ncclComm_t comm, int rank)
{
    return strcmp(comm->shared->ranks[rank].host, fake_settings()->host) != 0;
}

/* Until all have come, though some may have gone again; false: stopped. */
static bool wait_for_all(ncclComm_t comm)
{
    for (int i = 0; i < comm->n_ranks && !comm->is_stopped;) {
        const uint32_t ticks = atomic_load(&comm->shared->ticks);

        if (atomic_load(&comm->shared->ranks[i].has_come))
            i++;
        else
            fake_shared_wait(comm->shared, ticks);
    }
    return !comm->is_stopped;
}

static ncclResult_t check_duplicates(ncclComm_t comm)
{
    ncclResult_t rc = ncclSuccess;

    for (int i = 0; i < comm->n_ranks; i++)
        for (int j = i + 1; j < comm->n_ranks; j++) {
            const struct shared_rank *a = &comm->shared->ranks[i], *b = &comm->shared->ranks[j];

            if (a->physical != b->physical || strcmp(a->host, b->host) != 0)
                continue;
            if (i == comm->rank || j == comm->rank)
                return fake_error(ncclInvalidUsage,
                                  "Duplicate GPU detected : rank %d and rank %d both on CUDA "
                                  "device %d",
                                  comm->rank, i == comm->rank ? j : i, a->physical);
            rc = ncclRemoteError;
        }
    return rc;
}

static ncclResult_t meet(ncclComm_t comm)
{
    struct shared *shared = fake_shared_open(&comm->id);

    if (shared == NULL)
        return ncclSystemError;
    comm->shared = shared;
    claim(comm);
    while (fake_settings()->init_hangs && !comm->is_stopped)
        fake_sleep_ms(2);
    if (!wait_for_all(comm))
        return ncclInternalError;
    if (comm->rank == 0)
        fake_shared_unlink(&comm->id);
    return check_duplicates(comm);
}

static void make(ncclComm_t comm)
{
    ncclResult_t rc;

    fake_sleep_ms(fake_settings()->init_ms);
    rc = meet(comm);
    if (rc != ncclSuccess && comm->shared) {
        atomic_store(&comm->shared->ranks[comm->rank].state, RANK_GONE);
        fake_shared_changed(comm->shared);
    }
    pthread_mutex_lock(&fake_lock);
    if (comm->state == COMM_STARTING) {
        if (rc == ncclSuccess)
            comm->state = COMM_READY;
        else
            comm->error = rc;
    }
    pthread_mutex_unlock(&fake_lock);
    fake_log("made %u rank %d of %d: %d", comm->number, comm->rank, comm->n_ranks, rc);
}

static void *make_thread(void *data)
{
    make(data);
    return NULL;
}

static void start_thread(ncclComm_t comm, void *(*run)(void *))
{
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&comm->thread, NULL, run, comm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        fake_die("no thread for a communicator");
    comm->has_thread = true;
}

static void join_thread(ncclComm_t comm)
{
    if (comm->has_thread)
        pthread_join(comm->thread, NULL);
    comm->has_thread = false;
}

ncclResult_t fake_comm_start(ncclComm_t comm)
{
    start_thread(comm, make_thread);
    return ncclInProgress;
}

ncclResult_t fake_comm_join(ncclComm_t comm)
{
    join_thread(comm);
    comm->is_error_seen = true;
    return comm->error;
}

static ncclResult_t check_config(const ncclConfig_t *config)
{
    if (config->magic != NCCL_ABI_CONFIG_MAGIC || config->size < offsetof(ncclConfig_t, splitShare))
        return fake_error(ncclInvalidArgument,
                          "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 && config->blocking != 1)
        return fake_error(ncclInvalidArgument, "Invalid config blocking attribute value %d",
                          config->blocking);
    if (config->maxCTAs != NCCL_CONFIG_UNDEF_INT &&
        (config->maxCTAs < 1 ||
         (config->minCTAs != NCCL_CONFIG_UNDEF_INT && config->minCTAs > config->maxCTAs)))
        return fake_error(ncclInvalidArgument, "Invalid config min/max channels attribute value");
    return ncclSuccess;
}

static bool has_traffic_class(const ncclConfig_t *config)
{
    return config->size >= offsetof(ncclConfig_t, trafficClass) + sizeof(int);
}

static ncclComm_t comm_new(int n_ranks, const ncclUniqueId *id, int rank,
                           const ncclConfig_t *config)
{
    static unsigned n;
    ncclComm_t comm = calloc(1, sizeof(*comm));
    CUdevice device = 0;

    if (comm == NULL)
        fake_die("out of memory");
    if (fake_driver()->ctx_device(&device) != CUDA_SUCCESS)
        fake_die("ncclCommInitRankConfig: the calling thread has no current context");
    *comm = (struct ncclComm){
        .magic = FAKE_MAGIC,
        .id = *id,
        .rank = rank,
        .n_ranks = n_ranks,
        .device = device,
        .physical = fake_driver()->physical_device(device),
        .is_blocking = config == NULL || config->blocking != 0,
    };
    pthread_mutex_lock(&fake_lock);
    comm->number = n++;
    comm->next = comms;
    comms = comm;
    pthread_mutex_unlock(&fake_lock);
    fake_log("init %u rank %d of %d device %d blocking %d maxCTAs %d trafficClass %d name %s",
             comm->number, rank, n_ranks, comm->physical, comm->is_blocking,
             config ? config->maxCTAs : NCCL_CONFIG_UNDEF_INT,
             config && has_traffic_class(config) ? config->trafficClass : NCCL_CONFIG_UNDEF_INT,
             config && config->size == sizeof(*config) && config->commName ? config->commName
                                                                           : "-");
    return comm;
}

FAKE_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int n_ranks, ncclUniqueId id,
                                                int rank, ncclConfig_t *config);
FAKE_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *out, int n_ranks, ncclUniqueId id, int rank);

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int n_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    ncclResult_t rc = fake_inject("ncclCommInitRankConfig");
    ncclComm_t comm;

    if (rc != ncclSuccess)
        return rc;
    if (out == NULL || n_ranks < 1 || rank < 0 || rank >= n_ranks)
        return fake_error(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, n_ranks);
    if (n_ranks > FAKE_RANKS)
        fake_die("%d ranks, the fake has room for %d", n_ranks, FAKE_RANKS);
    if (config)
        rc = check_config(config);
    if (rc != ncclSuccess)
        return rc;
    comm = comm_new(n_ranks, &id, rank, config);
    *out = comm;
    if (fake_group_is_open())
        return fake_group_add_comm(comm);
    fake_guard_enter(comm->physical, "ncclCommInitRankConfig");
    rc = fake_comm_start(comm);
    if (comm->is_blocking)
        rc = fake_comm_join(comm);
    fake_guard_leave(comm->physical);
    return rc;
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int n_ranks, ncclUniqueId id, int rank)
{
    return ncclCommInitRankConfig(out, n_ranks, id, rank, NULL);
}

/* ---- State ---- */

FAKE_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out);
FAKE_EXPORT ncclResult_t ncclCommCount(ncclComm_t comm, int *out);
FAKE_EXPORT ncclResult_t ncclCommUserRank(ncclComm_t comm, int *out);
FAKE_EXPORT ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *out);

/* From any thread, at any time of its life. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    const ncclResult_t rc = fake_inject("ncclCommGetAsyncError");

    if (rc != ncclSuccess)
        return rc;
    if (comm == NULL)
        return fake_error(ncclInvalidArgument, "ncclCommGetAsyncError: comm is NULL");
    pthread_mutex_lock(&fake_lock);
    find(comm, "ncclCommGetAsyncError");
    if (comm->error != ncclSuccess) {
        comm->is_error_seen = true;
        *out = comm->error;
    } else {
        *out = comm->state == COMM_STARTING || comm->state == COMM_LAUNCHING ||
                       comm->state == COMM_FINALIZING
                   ? ncclInProgress
                   : ncclSuccess;
    }
    pthread_mutex_unlock(&fake_lock);
    return ncclSuccess;
}

static ncclResult_t get(ncclComm_t comm, const char *function, const int *field, int *out)
{
    ncclResult_t rc;

    pthread_mutex_lock(&fake_lock);
    rc = fake_comm_check(comm, function);
    if (rc == ncclSuccess)
        *out = *field;
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *out)
{
    return get(comm, "ncclCommCount", &comm->n_ranks, out);
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *out)
{
    return get(comm, "ncclCommUserRank", &comm->rank, out);
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *out)
{
    return get(comm, "ncclCommCuDevice", &comm->device, out);
}

/* ---- Ending ---- */

static void leave(ncclComm_t comm, enum rank_state state)
{
    if (comm->shared == NULL)
        return;
    atomic_store(&comm->shared->ranks[comm->rank].state, state);
    fake_shared_changed(comm->shared);
}

/* The kernel that runs sees that it shall end; those that wait on their streams do so later. */
static void stop(ncclComm_t comm)
{
    comm->is_stopped = true;
    if (comm->shared)
        fake_shared_changed(comm->shared);
    while (comm->is_running)
        fake_sleep_ms(1);
}

static void set_dead(ncclComm_t comm, const char *function)
{
    pthread_mutex_lock(&fake_lock);
    comm->state = COMM_DEAD;
    comm->ended_by = function;
    pthread_mutex_unlock(&fake_lock);
    fake_log("%s %u rank %d of %d", function, comm->number, comm->rank, comm->n_ranks);
}

/* Its own operations have run, and the ranks of this machine are ending as well. */
static void finalize(ncclComm_t comm)
{
    for (bool is_over = false; !is_over && !comm->is_stopped;) {
        const uint32_t ticks = atomic_load(&comm->shared->ticks);

        is_over = atomic_load(&comm->n_done) == comm->n_launched;
        if (is_over && atomic_load(&comm->shared->ranks[comm->rank].state) < RANK_FINALIZED)
            leave(comm, RANK_FINALIZED);
        for (int i = 0; i < comm->n_ranks; i++)
            if (!is_elsewhere(comm, i))
                is_over &= atomic_load(&comm->shared->ranks[i].state) >= RANK_FINALIZED;
        if (!is_over)
            fake_shared_wait(comm->shared, ticks);
    }
    pthread_mutex_lock(&fake_lock);
    if (comm->state == COMM_FINALIZING)
        comm->state = COMM_FINALIZED;
    pthread_mutex_unlock(&fake_lock);
}

static void *finalize_thread(void *comm)
{
    finalize(comm);
    return NULL;
}

FAKE_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm);
FAKE_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm);
FAKE_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm);

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    ncclResult_t rc = fake_inject("ncclCommFinalize");

    if (rc != ncclSuccess)
        return rc;
    pthread_mutex_lock(&fake_lock);
    rc = fake_comm_check(comm, "ncclCommFinalize");
    if (rc == ncclSuccess)
        comm->state = COMM_FINALIZING;
    pthread_mutex_unlock(&fake_lock);
    if (rc != ncclSuccess)
        return rc;
    fake_guard_enter(comm->physical, "ncclCommFinalize");
    join_thread(comm);
    if (comm->is_blocking)
        finalize(comm);
    else
        start_thread(comm, finalize_thread);
    fake_guard_leave(comm->physical);
    return comm->is_blocking ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    ncclResult_t rc = fake_inject("ncclCommDestroy");
    bool is_stopped;

    if (rc != ncclSuccess || comm == NULL)
        return rc;
    pthread_mutex_lock(&fake_lock);
    find(comm, "ncclCommDestroy");
    is_stopped = comm->state == COMM_FINALIZED || comm->state == COMM_REVOKED;
    if (is_stopped)
        check_error(comm, "ncclCommDestroy");
    else
        rc = fake_comm_check(comm, "ncclCommDestroy");
    if (rc == ncclSuccess && !is_stopped)
        comm->state = COMM_FINALIZING;
    pthread_mutex_unlock(&fake_lock);
    if (rc != ncclSuccess)
        return rc;
    fake_guard_enter(comm->physical, "ncclCommDestroy");
    join_thread(comm);
    if (!is_stopped)
        finalize(comm);
    set_dead(comm, "ncclCommDestroy");
    leave(comm, RANK_FINALIZED); /* in good order: no error for ranks elsewhere */
    fake_guard_leave(comm->physical);
    return ncclSuccess;
}

static bool is_same_communicator(ncclComm_t a, ncclComm_t b)
{
    return memcmp(&a->id, &b->id, sizeof(a->id)) == 0;
}

/* The last abort of a communicator in a process waits, for a stream of its own that follows every
 * launch: kernels end at once, but only when the caller's streams have come to them. */
static void await_launched(ncclComm_t ended)
{
    bool is_last = true;

    pthread_mutex_lock(&fake_lock);
    for (ncclComm_t comm = comms; comm; comm = comm->next)
        is_last &= !is_same_communicator(comm, ended) || comm->state == COMM_DEAD;
    pthread_mutex_unlock(&fake_lock);
    for (ncclComm_t comm = fake_comm_next(NULL); comm && is_last; comm = fake_comm_next(comm))
        while (is_same_communicator(comm, ended) && atomic_load(&comm->n_done) < comm->n_launched)
            fake_sleep_ms(1);
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    const ncclResult_t rc = fake_inject("ncclCommAbort");

    if (rc != ncclSuccess || comm == NULL)
        return rc;
    pthread_mutex_lock(&fake_lock);
    find(comm, "ncclCommAbort");
    pthread_mutex_unlock(&fake_lock);
    fake_guard_enter(comm->physical, "ncclCommAbort");
    while (fake_settings()->abort_hangs)
        pause();
    set_dead(comm, "ncclCommAbort");
    stop(comm);
    await_launched(comm);
    leave(comm, RANK_GONE);
    join_thread(comm);
    fake_guard_leave(comm->physical);
    return ncclSuccess;
}

/* ---- What came later ---- */

#ifdef FAKE_HAS_OPTIONAL
FAKE_EXPORT ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
FAKE_EXPORT ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int n_excluded,
                                        ncclComm_t *out, ncclConfig_t *config, int flags);
FAKE_EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *p, size_t bytes,
                                                ncclWindow_t *out, int flags);

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags)
{
    const ncclResult_t rc = fake_inject("ncclCommRevoke");

    if (rc != ncclSuccess)
        return rc;
    if (comm == NULL || flags != 0)
        return fake_error(ncclInvalidArgument, "ncclCommRevoke: comm %p flags %d", (void *)comm,
                          flags);
    pthread_mutex_lock(&fake_lock);
    find(comm, "ncclCommRevoke");
    if (comm->state != COMM_READY)
        fake_die("ncclCommRevoke: the communicator is not ready");
    comm->state = COMM_REVOKED;
    comm->error = ncclSuccess; /* it may be destroyed, as if nothing had happened */
    pthread_mutex_unlock(&fake_lock);
    fake_guard_enter(comm->physical, "ncclCommRevoke");
    stop(comm);
    fake_guard_leave(comm->physical);
    return ncclSuccess;
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int n_excluded, ncclComm_t *out,
                            ncclConfig_t *config, int flags)
{
    return fake_error(ncclInvalidUsage, "ncclCommShrink: the fake has only its name");
}

/* Registering is allowed to have no effect. */
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *p, size_t bytes, ncclWindow_t *out,
                                    int flags)
{
    ncclResult_t rc;

    pthread_mutex_lock(&fake_lock);
    rc = fake_comm_check(comm, "ncclCommWindowRegister");
    pthread_mutex_unlock(&fake_lock);
    if (rc == ncclSuccess)
        *out = NULL;
    return rc;
}
#endif
