/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups, and how operations come to their streams: at once, or, for a non-blocking communicator,
 * sometimes a little later, from a thread of the library. Work that the caller pushes to the stream
 * in the meantime comes before them, as with the real one: who does not poll gets wrong results.
 */
#include <signal.h>
#include <stdlib.h>

#include "fake.h"

static _Thread_local struct {
    unsigned depth;
    struct fake_op *ops, **tail;
    ncclComm_t comms[FAKE_RANKS];
    unsigned n_comms;
    unsigned held[FAKE_DEVICES]; /* guards, by physical device */
    ncclResult_t error;          /* of the first call that failed */
} group;

/* From its first operation on, the group is inside NCCL for the device. */
static void hold(int physical, const char *function)
{
    fake_guard_enter(physical, function);
    group.held[physical]++;
}

static void release_all(void)
{
    for (int i = 0; i < FAKE_DEVICES; i++)
        for (; group.held[i] > 0; group.held[i]--)
            fake_guard_leave(i);
}

bool fake_group_is_open(void)
{
    return group.depth > 0;
}

ncclResult_t fake_group_add_comm(ncclComm_t comm)
{
    if (group.ops)
        fake_die("ncclCommInitRankConfig in a group that has collectives");
    if (group.n_comms == FAKE_RANKS)
        fake_die("more than %d communicators in a group", FAKE_RANKS);
    hold(comm->physical, "ncclCommInitRankConfig");
    group.comms[group.n_comms++] = comm;
    return ncclSuccess;
}

static void push(struct fake_op *ops)
{
    for (struct fake_op *op = ops, *next; op; op = next) {
        CUstream stream = op->stream;
        int rc;

        next = op->next;
        rc = fake_driver()->stream_push(stream, fake_exec, op);
        if (rc != CUDA_SUCCESS) {
            fake_comm_set_error(op->comm, ncclUnhandledCudaError, "the stream takes no work");
            atomic_store(&op->comm->n_done, op->order);
        }
    }
}

/* In the order of the calls, so on every rank. */
static void number(struct fake_op *ops)
{
    for (struct fake_op *op = ops; op; op = op->next) {
        pthread_mutex_lock(&fake_lock);
        if (op->kind != KIND_P2P)
            op->number = ++op->comm->n_issued;
        op->order = ++op->comm->n_launched;
        pthread_mutex_unlock(&fake_lock);
        if (op->kind != KIND_P2P) {
            fake_signature_publish(op);
            fake_signature_compare(op);
        }
    }
}

/* True: the launch is in progress for a while. */
static bool count_launch(struct fake_op *ops)
{
    const unsigned every = fake_settings()->in_progress;
    bool is_in_progress = false;

    pthread_mutex_lock(&fake_lock);
    for (struct fake_op *op = ops; op; op = op->next) {
        bool is_first = true; /* of its communicator in this launch */

        for (struct fake_op *before = ops; before != op; before = before->next)
            is_first &= before->comm != op->comm;
        if (!is_first)
            continue;
        op->comm->n_groups++;
        is_in_progress |=
            !op->comm->is_blocking &&
            (op->comm->n_groups == 1 || (every > 0 && op->comm->n_groups % every == 0));
    }
    for (struct fake_op *op = ops; op && is_in_progress; op = op->next)
        op->comm->state = COMM_LAUNCHING;
    pthread_mutex_unlock(&fake_lock);
    return is_in_progress;
}

static void *launch_thread(void *data)
{
    struct fake_op *ops = data;
    ncclComm_t comms[FAKE_RANKS];
    unsigned n = 0;

    fake_sleep_ms(fake_settings()->launch_ms);
    for (struct fake_op *op = ops; op && n < FAKE_RANKS; op = op->next)
        if (n == 0 || comms[n - 1] != op->comm)
            comms[n++] = op->comm;
    push(ops);
    pthread_mutex_lock(&fake_lock);
    for (unsigned i = 0; i < n; i++)
        if (comms[i]->state == COMM_LAUNCHING)
            comms[i]->state = COMM_READY;
    pthread_mutex_unlock(&fake_lock);
    return NULL;
}

static ncclResult_t launch(struct fake_op *ops)
{
    sigset_t all, before;
    pthread_t thread;

    number(ops);
    if (!count_launch(ops)) {
        push(ops);
        return ncclSuccess;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, launch_thread, ops) != 0)
        fake_die("no thread for a launch");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_detach(thread);
    return ncclInProgress;
}

/* Sends and receives of one communicator are one operation. */
static bool merge(struct fake_op *op)
{
    for (struct fake_op *other = group.ops; other && op->kind == KIND_P2P; other = other->next) {
        struct fake_part **tail = &other->parts;

        if (other->kind != KIND_P2P || other->comm != op->comm)
            continue;
        if (other->stream != op->stream)
            fake_die("sends and receives of a group on two streams");
        while (*tail)
            tail = &(*tail)->next;
        *tail = op->parts;
        free(op);
        return true;
    }
    return false;
}

ncclResult_t fake_group_add(struct fake_op *op, const char *function)
{
    if (group.depth == 0)
        return launch(op);
    if (group.n_comms > 0)
        fake_die("%s in a group that makes communicators", function);
    hold(op->comm->physical, function);
    if (merge(op))
        return ncclSuccess;
    if (group.ops == NULL)
        group.tail = &group.ops;
    *group.tail = op;
    group.tail = &op->next;
    return ncclSuccess;
}

void fake_group_fail(ncclResult_t rc)
{
    if (group.depth > 0 && group.error == ncclSuccess)
        group.error = rc;
}

/* Communicators of a group: all start, then blocking ones are waited for. */
static ncclResult_t make_all(void)
{
    ncclResult_t rc = ncclSuccess;

    for (unsigned i = 0; i < group.n_comms; i++)
        fake_comm_start(group.comms[i]);
    for (unsigned i = 0; i < group.n_comms; i++) {
        const ncclResult_t one =
            group.comms[i]->is_blocking ? fake_comm_join(group.comms[i]) : ncclInProgress;

        if (rc == ncclSuccess || rc == ncclInProgress)
            rc = one;
    }
    group.n_comms = 0;
    return rc;
}

static void drop(struct fake_op *ops)
{
    for (struct fake_op *op = ops, *next; op; op = next) {
        next = op->next;
        for (struct fake_part *part = op->parts, *after; part; part = after) {
            after = part->next;
            free(part);
        }
        free(op);
    }
}

static ncclResult_t end(struct fake_op *ops, ncclResult_t error)
{
    if (error != ncclSuccess) {
        /* Anything but an invalid argument is fatal for the communicators of the group. */
        for (struct fake_op *op = ops; op && error != ncclInvalidArgument; op = op->next)
            fake_comm_fail_seen(op->comm, error);
        drop(ops);
        return error;
    }
    if (group.n_comms > 0)
        return make_all();
    return ops ? launch(ops) : ncclSuccess;
}

FAKE_EXPORT ncclResult_t ncclGroupStart(void);
FAKE_EXPORT ncclResult_t ncclGroupEnd(void);

ncclResult_t ncclGroupStart(void)
{
    const ncclResult_t rc = fake_inject("ncclGroupStart");

    if (rc == ncclSuccess)
        group.depth++;
    return rc;
}

ncclResult_t ncclGroupEnd(void)
{
    struct fake_op *ops;
    ncclResult_t rc = ncclSuccess, error;

    if (group.depth == 0)
        fake_die("ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0)
        return ncclSuccess;
    rc = fake_inject("ncclGroupEnd");
    error = group.error != ncclSuccess ? group.error : rc;
    ops = group.ops;
    group.ops = NULL;
    group.error = ncclSuccess;
    rc = end(ops, error);
    release_all();
    return rc;
}
