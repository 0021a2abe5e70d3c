/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NCCL behind one table of functions, opened at run time: nothing of gradd is linked with it.
 *
 * Thread: nccl_table_open() any. The functions belong to the submitter thread: NCCL forbids issuing
 * from several threads on one device.
 */
#ifndef GRADD_NCCL_TABLE_H
#define GRADD_NCCL_TABLE_H

#include <stdbool.h>

#include "worker/backend/nccl/nccl_abi.h"

/* X(field, symbol, result, parameters): what NCCL 2.18 has. */
#define NCCL_TABLE_REQUIRED(X)                                                                     \
    X(get_version, "ncclGetVersion", ncclResult_t, (int *out))                                     \
    X(get_unique_id, "ncclGetUniqueId", ncclResult_t, (ncclUniqueId * out))                        \
    X(comm_init, "ncclCommInitRankConfig", ncclResult_t,                                           \
      (ncclComm_t * out, int n_ranks, ncclUniqueId id, int rank, ncclConfig_t *config))            \
    X(comm_finalize, "ncclCommFinalize", ncclResult_t, (ncclComm_t comm))                          \
    X(comm_destroy, "ncclCommDestroy", ncclResult_t, (ncclComm_t comm))                            \
    X(comm_abort, "ncclCommAbort", ncclResult_t, (ncclComm_t comm))                                \
    X(comm_async_error, "ncclCommGetAsyncError", ncclResult_t,                                     \
      (ncclComm_t comm, ncclResult_t * out))                                                       \
    X(error_string, "ncclGetErrorString", const char *, (ncclResult_t rc))                         \
    X(last_error, "ncclGetLastError", const char *, (ncclComm_t comm))                             \
    X(group_start, "ncclGroupStart", ncclResult_t, (void))                                         \
    X(group_end, "ncclGroupEnd", ncclResult_t, (void))                                             \
    X(all_reduce, "ncclAllReduce", ncclResult_t,                                                   \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,               \
       ncclComm_t comm, CUstream stream))                                                          \
    X(reduce, "ncclReduce", ncclResult_t,                                                          \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,     \
       ncclComm_t comm, CUstream stream))                                                          \
    X(broadcast, "ncclBroadcast", ncclResult_t,                                                    \
      (const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,    \
       CUstream stream))                                                                           \
    X(all_gather, "ncclAllGather", ncclResult_t,                                                   \
      (const void *in, void *out, size_t in_count, ncclDataType_t type, ncclComm_t comm,           \
       CUstream stream))                                                                           \
    X(reduce_scatter, "ncclReduceScatter", ncclResult_t,                                           \
      (const void *in, void *out, size_t out_count, ncclDataType_t type, ncclRedOp_t op,           \
       ncclComm_t comm, CUstream stream))                                                          \
    X(send, "ncclSend", ncclResult_t,                                                              \
      (const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,               \
       CUstream stream))                                                                           \
    X(recv, "ncclRecv", ncclResult_t,                                                              \
      (void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream))  \
    X(premul_sum, "ncclRedOpCreatePreMulSum", ncclResult_t,                                        \
      (ncclRedOp_t * out, void *scalar, ncclDataType_t type, int residence, ncclComm_t comm))      \
    X(redop_destroy, "ncclRedOpDestroy", ncclResult_t, (ncclRedOp_t op, ncclComm_t comm))

/* What came later; NULL where the library lacks it. */
#define NCCL_TABLE_OPTIONAL(X)                                                                     \
    X(comm_revoke, "ncclCommRevoke", ncclResult_t, (ncclComm_t comm, int flags))                   \
    X(comm_shrink, "ncclCommShrink", ncclResult_t,                                                 \
      (ncclComm_t comm, int *excluded, int n_excluded, ncclComm_t *out, ncclConfig_t *config,      \
       int flags))                                                                                 \
    X(window_register, "ncclCommWindowRegister", ncclResult_t,                                     \
      (ncclComm_t comm, void *p, size_t bytes, ncclWindow_t *out, int flags))                      \
    X(all_to_all, "ncclAlltoAll", ncclResult_t,                                                    \
      (const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,              \
       CUstream stream))

struct nccl_table {
#define NCCL_TABLE_FIELD(field, symbol, result, parameters) result(*field) parameters;
    NCCL_TABLE_REQUIRED(NCCL_TABLE_FIELD)
    NCCL_TABLE_OPTIONAL(NCCL_TABLE_FIELD)
#undef NCCL_TABLE_FIELD
    int version; /* 10000 * major + 100 * minor + patch */
};

/* The process's table; opened once, never closed. NULL: *out_text (static storage, may be NULL)
 * says why not: no library, too old, or without a function that it should have. */
const struct nccl_table *nccl_table_open(const char **out_text);

/* For people: "2.28.9". */
void nccl_table_describe_version(const struct nccl_table *nccl, char *text, size_t bytes);

/* What the library lacks, and what is done instead, for people; "" when it has everything. */
void nccl_table_describe_missing(const struct nccl_table *nccl, char *text, size_t bytes);

/* "unhandled cuda error (1): ...", with the text of NCCL's last error; in a buffer of the calling
 * thread. */
const char *nccl_table_error(const struct nccl_table *nccl, ncclResult_t rc);

#endif
