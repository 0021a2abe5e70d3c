/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of another process in a GPU's context: one allocation by its IPC handle, or a range of
 * addresses into which physical chunks are mapped one behind the other.
 *
 * Thread: chores, where the driver may take its time; one call at a time. The loop fills in what is
 * asked for before the first call, and reads base and bytes once a call's result has come to it.
 * Invariant: a mapping whose opening or adding has failed takes no more; closing it is due all the
 * same.
 */
#ifndef GRADD_CUDA_MAPPING_H
#define GRADD_CUDA_MAPPING_H

#include <stdbool.h>
#include <stdint.h>

#include "worker/buffer/cuda_device.h"

struct cuda_mapping {
    bool is_legacy; /* by an IPC handle */
    const struct cuda_table *cuda;
    CUcontext context;
    CUdevice ordinal;
    CUipcMemHandle handle; /* legacy */
    CUdeviceptr base;
    uint64_t bytes;        /* legacy: as the driver knows it; else of all chunks together */
    uint64_t mapped_bytes; /* chunks so far */
    uint32_t n_chunks, n_mapped;
    bool is_open, is_broken;
};

/* Of one call; zeroed before it. */
struct cuda_mapping_result {
    bool is_complete; /* all is mapped and may be used */
    int status;       /* a gradd_status; what is wrong is in text */
    char text[240];
};

/* Legacy: complete afterwards. Else addresses for m->bytes are reserved. */
void cuda_mapping_open(struct cuda_mapping *m, struct cuda_mapping_result *out);

/* The next chunks; complete with the last one. The descriptors stay the caller's. What comes behind
 * the last chunk, or after a failure, changes nothing. */
void cuda_mapping_add(struct cuda_mapping *m, const int *fds, const uint64_t *bytes, unsigned n,
                      struct cuda_mapping_result *out);

/* Opened or not. May wait for what the device does with the memory. */
void cuda_mapping_close(struct cuda_mapping *m);

#endif
