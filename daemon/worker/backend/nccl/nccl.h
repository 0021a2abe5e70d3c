/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend for device memory: sums on the GPU what its ranks bring, NCCL between GPUs, copies
 * back. One per epoch; the thread that launches is the worker's (submitter.h).
 *
 * Thread: loop. On one node the communicators follow from where the ranks' memory is. On several,
 * the coordinator numbers the GPUs and tells all nodes (nccl_comm_begin()) before the first batch
 * that needs the communicator, so that all have the same.
 */
#ifndef GRADD_NCCL_H
#define GRADD_NCCL_H

#include "worker/backend/backend.h"
#include "worker/backend/nccl/comm.h"
#include "worker/backend/nccl/submitter.h"

struct nccl_setup {
    struct loop *loop;
    struct submitter *submitter;
    const char *job; /* borrowed */
    uint32_t n_ranks;
    uint32_t max_ctas; /* 0: NCCL's choice */
    int traffic_class; /* -1: NCCL's choice */
    uint64_t op_timeout_ns;
    uint64_t create_timeout_ns;
    uint64_t abort_timeout_ns; /* for what was launched to end after nccl_abort(); 0: 10 s */
    bool is_alone;             /* all ranks are on this node: communicators follow from the ops */
    /* The epoch is over; called once. broken: a GPU's context is lost, and this process with it. */
    void (*on_failed)(void *data, int status, const char *text, bool broken);
    void (*on_drained)(void *data); /* after nccl_abort(): nccl_is_draining() no longer holds */
    void *data;
};

/* NULL: out of memory. */
struct backend *nccl_new(const struct nccl_setup *setup);

/* Where a rank of this node has its memory; once per rank. */
void nccl_set_device(struct backend *backend, uint32_t rank, struct cuda_device *device);

/*
 * Several nodes: a communicator of these ranks, whose GPUs have these numbers (LOWER_NO_GPU: none
 * yet). It takes the place of an earlier one of the same ranks. False: it makes no sense, or no
 * memory.
 */
bool nccl_comm_begin(struct backend *backend, const uint32_t *ranks, const uint32_t *gpu_of,
                     uint32_t n_ranks, uint32_t n_gpus, const uint8_t *unique_id, size_t id_bytes);
/* The newest communicator of these ranks has these GPUs. */
bool nccl_has_comm(const struct backend *backend, const uint32_t *ranks, const uint32_t *gpu_of,
                   uint32_t n_ranks);
/* A new unique id of NCCL_UNIQUE_ID_BYTES; false: *out_text says why not. */
bool nccl_unique_id(uint8_t *out_id, const char **out_text);

/* The epoch has failed: what is not launched ends with this, communicators are aborted. When that
 * does not come to an end, the process does. */
void nccl_abort(struct backend *backend, int status, const char *text);
/* It has been aborted, and something of it is still on the GPUs. */
bool nccl_is_draining(const struct backend *backend);

/* For statistics: the communicators, newest first. */
const struct comm *nccl_comms(const struct backend *backend);

/*
 * run() and free(); no new(). free(): nothing is under way; the memory goes when the submitter has
 * ended the communicators.
 */
extern const struct backend_ops backend_nccl;

#endif
