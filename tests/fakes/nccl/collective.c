/* SPDX-License-Identifier: Apache-2.0 */
/* The calls that issue operations: their checks, in the order in which the real one makes them. */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

size_t fake_type_bytes(int type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclFloat64:
        return 8;
    }
    return 0;
}

/* ---- Operators that multiply first ---- */

/* Handles of one communicator mean nothing to another. */
static int handle_of(const struct ncclComm *comm, int index)
{
    return ncclNumOps + 1 + (int)(comm->number + 1) * FAKE_OPS + index;
}

static int index_of(const struct ncclComm *comm, int op, const char *function)
{
    const int index = op - handle_of(comm, 0);

    if (index < 0 || index >= FAKE_OPS)
        fake_die("%s: operator %d is not of this communicator", function, op);
    if (!comm->ops[index].is_used)
        fake_die("%s: operator %d has been destroyed", function, op);
    return index;
}

FAKE_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *out, void *scalar,
                                                  ncclDataType_t type, int residence,
                                                  ncclComm_t comm);
FAKE_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *out, void *scalar, ncclDataType_t type,
                                      int residence, ncclComm_t comm)
{
    ncclResult_t rc = fake_inject("ncclRedOpCreatePreMulSum");
    int index = 0;

    if (rc != ncclSuccess)
        return rc;
    if (fake_type_bytes(type) == 0 || (residence != 0 && residence != ncclScalarHostImmediate))
        return fake_error(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: type %d residence %d",
                          type, residence);
    pthread_mutex_lock(&fake_lock);
    rc = fake_comm_check(comm, "ncclRedOpCreatePreMulSum");
    while (rc == ncclSuccess && index < FAKE_OPS && comm->ops[index].is_used)
        index++;
    if (rc == ncclSuccess && index == FAKE_OPS)
        fake_die("more than %d operators of a communicator: they are to be destroyed", FAKE_OPS);
    if (rc == ncclSuccess) {
        comm->ops[index].is_used = true;
        comm->ops[index].type = type;
        comm->ops[index].device_factor = residence == ncclScalarHostImmediate ? NULL : scalar;
        if (residence == ncclScalarHostImmediate)
            comm->ops[index].factor = fake_scalar(type, scalar);
        *out = handle_of(comm, index);
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
    ncclResult_t rc = fake_inject("ncclRedOpDestroy");

    if (rc != ncclSuccess)
        return rc;
    if (op < ncclNumOps)
        return fake_error(ncclInvalidArgument, "ncclRedOpDestroy: %d is built in", op);
    pthread_mutex_lock(&fake_lock);
    rc = fake_comm_check(comm, "ncclRedOpDestroy");
    if (rc == ncclSuccess)
        comm->ops[index_of(comm, op, "ncclRedOpDestroy")].is_used = false;
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* ---- Checks ---- */

/* Ranks of one process, issued by one thread without a group: the first would wait for the second,
 * which is never issued if the launch blocks. */
static void check_grouped(ncclComm_t comm, const char *function)
{
    if (fake_group_is_open())
        return;
    for (ncclComm_t other = fake_comm_next(NULL); other; other = fake_comm_next(other))
        if (other != comm && other->state != COMM_DEAD && other->has_issuer &&
            pthread_equal(other->issuer, pthread_self()) &&
            memcmp(&other->id, &comm->id, sizeof(comm->id)) == 0)
            fake_die("%s: one thread issues for several ranks of a communicator outside a group",
                     function);
    comm->issuer = pthread_self();
    comm->has_issuer = true;
}

static void check_memory(const struct fake_op *op, const void *p, const char *function)
{
    if (p && op->count > 0 && fake_driver()->pointer_device(p) != op->comm->device)
        fake_die("%s: %p is not memory of the communicator's device %d", function, p,
                 op->comm->device);
}

static ncclResult_t check_arguments(struct fake_op *op, const char *function)
{
    ncclComm_t comm = op->comm;

    if (fake_type_bytes(op->type) == 0)
        return fake_error(ncclInvalidArgument, "%s : invalid type %d", function, op->type);
    if (op->root < 0 || op->root >= comm->n_ranks)
        return fake_error(ncclInvalidArgument,
                          "%s : invalid root %d (root should be in the 0..%d "
                          "range)",
                          function, op->root, comm->n_ranks);
    if (op->op < 0 || op->op == ncclNumOps)
        return fake_error(ncclInvalidArgument, "%s : invalid reduction operation %d", function,
                          op->op);
    if (op->op > ncclNumOps) {
        const int index = index_of(comm, op->op, function);

        if (comm->ops[index].type != op->type)
            return fake_error(ncclInvalidArgument,
                              "%s : the operator is of another type than the tensor", function);
        op->factor = comm->ops[index].factor;
        op->device_factor = comm->ops[index].device_factor;
        op->op = ncclNumOps; /* the same for all ranks: a sum with a factor of its own */
    }
    return ncclSuccess;
}

static ncclResult_t check(struct fake_op *op, const char *function)
{
    ncclResult_t rc;

    pthread_mutex_lock(&fake_lock);
    rc = fake_comm_check(op->comm, function);
    if (rc == ncclSuccess)
        rc = check_arguments(op, function);
    if (rc == ncclSuccess)
        check_grouped(op->comm, function);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

static ncclResult_t issue(struct fake_op wanted, const char *function)
{
    struct fake_op *op;
    ncclResult_t rc = fake_inject(function);

    if (rc != ncclSuccess && rc != ncclInvalidArgument && wanted.comm)
        fake_comm_fail_seen(wanted.comm, rc);
    if (rc == ncclSuccess)
        rc = check(&wanted, function);
    if (rc != ncclSuccess) {
        fake_group_fail(rc);
        free(wanted.parts);
        return rc;
    }
    if (fake_driver()->stream_device(wanted.stream) != wanted.comm->device)
        fake_die("%s: the stream is not of the communicator's device %d", function,
                 wanted.comm->device);
    if (wanted.kind != KIND_BROADCAST || wanted.comm->rank == wanted.root)
        check_memory(&wanted, wanted.in, function);
    if (wanted.kind != KIND_REDUCE || wanted.comm->rank == wanted.root)
        check_memory(&wanted, wanted.out, function);
    op = malloc(sizeof(*op));
    if (op == NULL)
        fake_die("out of memory");
    *op = wanted;
    return fake_group_add(op, function);
}

/* The guard is for the physical device, so the communicator must be one. */
static ncclResult_t issue_guarded(struct fake_op wanted, const char *function)
{
    const int physical = fake_comm_physical(wanted.comm, function);
    ncclResult_t rc;

    if (physical >= 0)
        fake_guard_enter(physical, function);
    rc = issue(wanted, function);
    if (physical >= 0)
        fake_guard_leave(physical);
    return rc;
}

/* ---- The calls ---- */

FAKE_EXPORT ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                                       ncclRedOp_t op, ncclComm_t comm, CUstream stream);
FAKE_EXPORT ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                                    ncclRedOp_t op, int root, ncclComm_t comm, CUstream stream);
FAKE_EXPORT ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type,
                                       int root, ncclComm_t comm, CUstream stream);
FAKE_EXPORT ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type,
                                       ncclComm_t comm, CUstream stream);
FAKE_EXPORT ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count,
                                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                           CUstream stream);
FAKE_EXPORT ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t comm, CUstream stream);
FAKE_EXPORT ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t comm, CUstream stream);

#define OP(kind_, in_, out_, op_, root_)                                                           \
    (struct fake_op)                                                                               \
    {                                                                                              \
        .comm = comm, .stream = stream, .kind = (kind_), .in = (in_), .out = (out_),               \
        .count = count, .type = type, .op = (op_), .root = (root_), .factor = 1,                   \
    }

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, CUstream stream)
{
    return issue_guarded(OP(KIND_ALL_REDUCE, in, out, op, 0), "ncclAllReduce");
}

ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, CUstream stream)
{
    return issue_guarded(OP(KIND_REDUCE, in, out, op, root), "ncclReduce");
}

ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, CUstream stream)
{
    return issue_guarded(OP(KIND_BROADCAST, in, out, ncclSum, root), "ncclBroadcast");
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, CUstream stream)
{
    return issue_guarded(OP(KIND_ALL_GATHER, in, out, ncclSum, 0), "ncclAllGather");
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, CUstream stream)
{
    return issue_guarded(OP(KIND_REDUCE_SCATTER, in, out, op, 0), "ncclReduceScatter");
}

static struct fake_part *part_new(bool is_send, int peer, const void *memory, uint64_t bytes)
{
    struct fake_part *part = malloc(sizeof(*part));

    if (part == NULL)
        fake_die("out of memory");
    *part = (struct fake_part){
        .is_send = is_send, .peer = peer, .memory = (uint8_t *)(uintptr_t)memory, .bytes = bytes};
    return part;
}

ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      CUstream stream)
{
    struct fake_op op = OP(KIND_P2P, in, NULL, ncclSum, peer);

    op.parts = part_new(true, peer, in, count * fake_type_bytes(type));
    return issue_guarded(op, "ncclSend");
}

ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      CUstream stream)
{
    struct fake_op op = OP(KIND_P2P, NULL, out, ncclSum, peer);

    op.parts = part_new(false, peer, out, count * fake_type_bytes(type));
    return issue_guarded(op, "ncclRecv");
}

#ifdef FAKE_HAS_OPTIONAL
FAKE_EXPORT ncclResult_t ncclAlltoAll(const void *in, void *out, size_t count, ncclDataType_t type,
                                      ncclComm_t comm, CUstream stream);

ncclResult_t ncclAlltoAll(const void *in, void *out, size_t count, ncclDataType_t type,
                          ncclComm_t comm, CUstream stream)
{
    if (in == out && count > 0)
        fake_die("ncclAlltoAll in place");
    return issue_guarded(OP(KIND_ALL_TO_ALL, in, out, ncclSum, 0), "ncclAlltoAll");
}
#endif
