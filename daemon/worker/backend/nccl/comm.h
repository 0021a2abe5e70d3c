/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A communicator: NCCL's handles for this node's GPUs of one process set, one rank each. Created
 * without blocking and polled, so that what does not come up can be given up.
 *
 * Thread: comm_new() and comm_free() loop, comm_state_name() and comm_is_ending() any, the rest the
 * submitter.
 */
#ifndef GRADD_COMM_H
#define GRADD_COMM_H

#include "worker/backend/nccl/lower.h"
#include "worker/backend/nccl/nccl_table.h"
#include "worker/buffer/cuda_device.h"

enum comm_state {
    COMM_NEW,      /* nothing of NCCL exists; also that of GPUs that need no NCCL */
    COMM_CREATING, /* handles exist, polled until all ranks have come */
    COMM_READY,    /* takes calls */
    COMM_BUSY,     /* a group of calls was issued and is not launched yet: polled */
    COMM_FAILED,   /* an error: only to be aborted */
    COMM_GONE,     /* no handles any more */
};

/* What a communicator is made with; the same on all nodes. */
struct comm_config {
    const char *name; /* for NCCL's own messages */
    uint32_t max_ctas;
    int traffic_class;
    uint64_t timeout_ns; /* to come up, and to launch a group */
};

enum { COMM_REDOPS_MAX = 16 };

struct comm_redop {
    enum gradd_dtype dtype;
    double factor;
    ncclRedOp_t op;
};

struct comm_gpu {
    struct cuda_device *device;
    uint32_t rank; /* in the communicator */
    ncclComm_t handle;
    struct comm_redop redops[COMM_REDOPS_MAX]; /* sums with a factor */
    uint32_t n_redops, next_redop;
};

struct comm {
    const struct nccl_table *nccl; /* NULL: this node has none */
    struct comm_config config;
    struct lower_map map;
    uint32_t *ranks;       /* of the process set; this and the map's arrays in one block */
    struct comm_gpu *gpus; /* this node's: map.n_local */
    bool has_id;
    ncclUniqueId id;
    _Atomic int state;
    _Atomic bool is_ending; /* ncclCommAbort() has been called on every handle */
    uint64_t deadline_ns;   /* while CREATING or BUSY */
    _Atomic uint64_t n_ops;
    struct comm *next; /* the backend's list */
};

/*
 * The communicator of these ranks. device_of_gpu[map's GPU]: NULL on another node. id: of all
 * nodes; NULL: made here, when it is needed. NULL: out of memory.
 */
struct comm *comm_new(const struct nccl_table *nccl, const struct comm_config *config,
                      const uint32_t *ranks, const uint32_t *gpu_of, uint32_t n_ranks,
                      struct cuda_device *const *device_of_gpu, uint32_t n_gpus,
                      const ncclUniqueId *id);
/* Its handles are gone, or it never had any. NULL-safe. */
void comm_free(struct comm *comm);

bool comm_is_of(const struct comm *comm, const uint32_t *ranks, uint32_t n_ranks);
bool comm_has_gpus(const struct comm *comm, const uint32_t *gpu_of);
/* The set's ranks share one GPU. */
bool comm_is_single(const struct comm *comm);
const char *comm_state_name(const struct comm *comm);
/* This node's GPUs from number `first` on, and whose they are: "GPU-... (ranks 0, 2)"; at most n.
 */
void comm_describe_gpus(const struct comm *comm, uint32_t first, uint32_t n, char *text,
                        size_t bytes);

/* NEW: begin. CREATING, BUSY: look again. Returns the state; text[bytes] says why when FAILED. */
enum comm_state comm_advance(struct comm *comm, uint64_t now_ns, char *text, size_t bytes);
/* A group has been issued with this result: READY, BUSY or FAILED follows. */
void comm_issued(struct comm *comm, ncclResult_t rc, uint64_t now_ns, char *text, size_t bytes);
/* While its work runs: false, and text, after an error that NCCL noticed by itself. */
bool comm_check(struct comm *comm, char *text, size_t bytes);
/* The operator for a step: built in, or made and kept. */
ncclResult_t comm_redop(struct comm *comm, struct comm_gpu *gpu, const struct lower_step *step,
                        ncclRedOp_t *out);

/* End whatever runs on it. NCCL waits for the streams: it returns when all that stands before its
 * kernels has happened, or never. */
void comm_abort(struct comm *comm);
/* Any thread. Its kernels end without sending anything: nothing runs, or an abort has begun, if
 * only just now. */
bool comm_is_ending(const struct comm *comm);
/* An orderly end, of which others are told; abandoned after a while. */
void comm_close(struct comm *comm);

#endif
