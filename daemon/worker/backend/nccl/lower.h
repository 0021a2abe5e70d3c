/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An op on device memory becomes steps for each GPU of this node, in three phases: before NCCL
 * (kernels that sum the inputs of ranks that share a GPU), NCCL's calls, and after (factors, copies
 * to the other ranks of the GPU). The steps of one phase of many ops may run as one, so that small
 * tensors share one NCCL group.
 *
 * Which NCCL calls are made, in which order and with which sizes, follows from the op and the map
 * alone, so that all nodes agree without asking. A process set whose ranks share one GPU needs no
 * NCCL.
 *
 * Pure. Thread: any.
 */
#ifndef GRADD_LOWER_H
#define GRADD_LOWER_H

#include "worker/backend/backend.h"

enum {
    LOWER_GPUS_MAX = 64,       /* of one process set on one node */
    LOWER_NO_GPU = 0x7fffffff, /* in lower_map */
    LOWER_SCRATCH_ALIGN = 256,
};

/* Where the ranks of a process set are. GPUs are numbered over all nodes, in order of their first
 * rank: that is their rank in the communicator. */
struct lower_map {
    uint32_t n_ranks, n_gpus;
    const uint32_t *gpu_of;   /* [n_ranks]; LOWER_NO_GPU: has brought no device memory yet */
    const uint32_t *local_of; /* [n_gpus]: index among this node's; LOWER_NO_GPU: on another node */
    uint32_t n_local;
};

enum lower_phase { LOWER_BEFORE, LOWER_CALLS, LOWER_AFTER, LOWER_PHASES };

enum lower_kind {
    LOWER_REDUCE, /* kernel: n_in inputs into n_out outputs (struct reduction) */
    LOWER_COPY,   /* from, to, bytes */
    LOWER_ZERO,   /* to, bytes */
    LOWER_COUNT,  /* kernel: not finite elements of `from`; peer: index of the input in the op */
    LOWER_ALL_REDUCE,
    LOWER_BROADCAST, /* peer: root */
    LOWER_ALL_GATHER,
    LOWER_REDUCE_SCATTER,
    LOWER_REDUCE_TO, /* peer: root; `to` only there */
    LOWER_SEND,
    LOWER_RECV,
};

/* How NCCL combines; the operators of gradd/types.h, and the sum of inputs times `factor`. */
enum { LOWER_PREMUL_SUM = 1000 };

struct lower_step {
    enum lower_kind kind;
    uint32_t gpu; /* index among this node's */
    const struct backend_op *op;
    uint32_t peer;     /* in the communicator */
    uint64_t from, to; /* device address, or lower_scratch() */
    uint64_t count;    /* elements; bytes for copies and zeros */
    enum gradd_dtype dtype;
    int redop;                  /* gradd_redop, or LOWER_PREMUL_SUM */
    double factor;              /* of LOWER_PREMUL_SUM */
    double prescale, postscale; /* of LOWER_REDUCE, as the next four */
    uint32_t n_in, n_out, n_zero, divisor;
    size_t first_address; /* into the list's addresses: inputs, then outputs */
};

struct lower_steps {
    struct lower_step *steps;
    size_t n, capacity;
};

struct lower_list {
    struct lower_steps phases[LOWER_PHASES];
    uint64_t *addresses;
    size_t n_addresses, address_capacity;
    uint64_t scratch_bytes[LOWER_GPUS_MAX]; /* by GPU of this node */
};

/* An address in the GPU's scratch memory, until that is placed. Device addresses have 57 bits. */
static inline uint64_t lower_scratch(uint64_t offset)
{
    return offset | (uint64_t)1 << 63;
}

static inline uint64_t lower_address(uint64_t address, uint64_t scratch)
{
    return address >> 63 ? scratch + (address & ~((uint64_t)1 << 63)) : address;
}

void lower_list_init(struct lower_list *list);
void lower_list_deinit(struct lower_list *list);
/* Forget the steps, keep the memory. */
void lower_list_clear(struct lower_list *list);

/* Append an op's steps. 0 or -ENOMEM (the list is then to be cleared). */
int lower_op(struct lower_list *list, const struct backend_op *op, const struct lower_map *map);

/* The most scratch memory that the op needs on any GPU of any node; the same on all of them. What
 * is launched as one NCCL group must be cut by such figures alone: NCCL sorts the calls of a group.
 */
uint64_t lower_scratch_max(const struct backend_op *op, const struct lower_map *map);

/* The map of ranks whose GPUs have these keys (any numbers; LOWER_NO_GPU: none). Fills
 * gpu_of[n_ranks] and returns the number of GPUs. */
uint32_t lower_number_gpus(const uint32_t *keys, uint32_t n_ranks, uint32_t *gpu_of);

#endif
