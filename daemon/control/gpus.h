/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this node can do for device memory: asked once, of `gradd-worker --gpus`, so that the daemon
 * itself never loads a GPU library. Workers are configured when the answer is there, or has taken
 * too long.
 *
 * Thread: loop.
 */
#ifndef GRADD_CONTROL_GPUS_H
#define GRADD_CONTROL_GPUS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/loop.h"

enum { GPUS_MAX = 64 };

struct gpu {
    char uuid[48], compute[16], mode[16], name[96];
    uint64_t memory_bytes;
    bool has_mps;
};

struct gpus {
    bool is_done;
    bool device_path;                          /* workers may take device memory */
    char text[400];                            /* why not */
    char driver[240], nccl[400], kernels[128]; /* versions, or "- WHY NOT" */
    struct gpu gpus[GPUS_MAX];
    unsigned n_gpus;
    struct loop *loop;
    pid_t pid; /* of the probe; 0: none to be reaped */
    int fd;
    struct watch *output_watch, *limit;
    char output[16384];
    size_t used;
    void (*on_done)(void *owner);
    void *owner;
};

/* Ask. on_done() follows from the loop, or has been called already. */
void gpus_start(struct gpus *gpus, struct loop *loop, const char *worker_program,
                void (*on_done)(void *owner), void *owner);
/* There is no need to ask, and this is why. */
void gpus_skip(struct gpus *gpus, const char *why);
/* Called on SIGCHLD. */
void gpus_reap(struct gpus *gpus);
void gpus_stop(struct gpus *gpus);

/* What the probe has printed, and what follows from it. False: it is not whole. */
bool gpus_parse(struct gpus *gpus, char *output);

#endif
