/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From steps to launches: what the submitter thread keeps of each GPU, and how one chunk of ops is
 * put on the GPUs' streams. In steady state nothing is allocated, created or waited for.
 *
 * Thread: submitter.
 */
#ifndef GRADD_LAUNCH_H
#define GRADD_LAUNCH_H

#include "worker/backend/nccl/comm.h"
#include "worker/backend/nccl/launch_gpu.h"
#include "worker/buffer/queue.h"

/* All GPUs, by cuda_device.index. */
struct launch {
    struct launch_gpu *gpus;
    unsigned n_gpus;
    struct lower_list list;
    struct backend_op **ops; /* of the chunk */
    size_t n_ops, ops_capacity;
    uint64_t scratch_max;                                /* lower_scratch_max() of the ops */
    struct cuda_copy_segment copies[CUDA_COPY_SEGMENTS]; /* to be launched as one */
    size_t n_copies;
};

void launch_init(struct launch *launch);
/* Nothing runs. */
void launch_deinit(struct launch *launch);
/* Nothing runs: give back what was outgrown. */
void launch_trim(struct launch *launch);

/* An event of the device, kept ready; more are made, many at once, only when more is under way than
 * ever before. False: there is none. */
bool launch_take_event(struct launch *launch, struct cuda_device *device, CUevent *out);
void launch_give_event(struct launch *launch, const struct cuda_device *device, CUevent event);

/* Begin a chunk of ops. */
void launch_begin(struct launch *launch);
enum launch_added {
    LAUNCH_ADDED,
    LAUNCH_FULL,    /* added, and the chunk should be launched now */
    LAUNCH_REFUSED, /* not added: the op's status and text say why */
};
/* counters: device address of as many 64-bit words as the op has inputs here, or 0. */
enum launch_added launch_add(struct launch *launch, const struct comm *comm, struct backend_op *op,
                             CUdeviceptr counters);

/* How a chunk went. */
struct launch_result {
    int status;            /* GRADD_OK, or why all ops of the chunk failed */
    bool is_device_broken; /* the context is lost: nothing will run on it again */
    bool has_group;        /* NCCL was called; with this result */
    ncclResult_t nccl;     /* success or in progress */
    char text[400];
};

/* Until NCCL's group: waits for the inputs, sums on each GPU, calls. */
void launch_calls(struct launch *launch, struct comm *comm, struct launch_result *result);
/* Once the group is launched: what comes after, and the marks for the trainers. */
void launch_finish(struct launch *launch, struct comm *comm, struct launch_result *result);

/* Errors after which the context is of no use. */
bool launch_is_fatal(CUresult rc);

#endif
