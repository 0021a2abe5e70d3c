/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPUs that this worker uses: a retained primary context each, made when the first trainer
 * brings memory of that GPU, and one stream on which all ops of the job run, in launch order.
 *
 * GPUs are named by UUID, never by ordinal: CUDA_VISIBLE_DEVICES may differ between processes.
 *
 * Thread: the table and its lookup belong to the loop. Making a context takes a while, so it runs
 * on the chores thread. `stream` and the launch functions belong to the submitter thread
 * (backend/nccl) once the device is ready. Nothing here is called from a thread without saying so.
 */
#ifndef GRADD_CUDA_DEVICE_H
#define GRADD_CUDA_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_table.h"
#include "worker/buffer/chores.h"

enum { CUDA_UUID_BYTES = 16, CUDA_UUID_TEXT_BYTES = 41 };

struct cuda_device_table;

struct cuda_device {
    struct chore chore; /* first: while opening */
    const struct cuda_table *cuda;
    uint8_t uuid[CUDA_UUID_BYTES];
    char uuid_text[CUDA_UUID_TEXT_BYTES]; /* "GPU-..." as nvidia-smi writes it */
    char name[96];
    unsigned index; /* in the table: 0, 1, ... in order of use */
    CUdevice ordinal;
    CUcontext context;
    CUstream stream;        /* non-blocking, for ops */
    CUmodule kernels;       /* of reduce/cuda_kernels.h; NULL: none for this GPU */
    char kernels_text[300]; /* why the driver does not take them; "": it does, or there are none */
    uint64_t context_bytes; /* taken while it was opened; 0: not known */
    bool has_ipc_events, has_flags;
    /* Statistics, on the loop. */
    uint32_t n_imports, n_event_queues, n_flag_queues;
    uint64_t import_bytes;
    _Atomic uint64_t scratch_bytes;
    int status; /* GRADD_OK; GRADD_PENDING while opening; else why not, in text */
    char text[320];
    int open_status; /* the chores thread's, while opening */
    struct cuda_device_table *table;
    struct cuda_device_waiter *waiters;
    struct cuda_device *next;
};

/* cuda is borrowed for good. NULL: out of memory. */
struct cuda_device_table *cuda_device_table_new(const struct cuda_table *cuda,
                                                struct chores *chores);
/* Have this called on the loop after a device was opened; one for the table. */
void cuda_device_table_watch(struct cuda_device_table *table, void (*on_open)(void *data),
                             void *data);
/* No op may be running; every import and queue must be closed. NULL-safe. */
void cuda_device_table_free(struct cuda_device_table *table);

/* "GPU-..." as nvidia-smi writes it; out_text holds CUDA_UUID_TEXT_BYTES. */
void cuda_uuid_format(const uint8_t *uuid, char *out_text);

/* A device that is open, or NULL. */
struct cuda_device *cuda_device_find(struct cuda_device_table *table, const uint8_t *uuid);

typedef void cuda_device_opened_fn(void *data, struct cuda_device *device);
/*
 * Open it, or join those who wait. `opened` is called on the loop, perhaps before this returns;
 * device->status and text tell how it went, device is NULL when there is no memory. data must live
 * until then, or until cuda_device_forget_waiter(). A device that is not GRADD_OK is valid only
 * during the call.
 */
void cuda_device_open(struct cuda_device_table *table, const uint8_t *uuid,
                      cuda_device_opened_fn *opened, void *data);
void cuda_device_forget_waiter(struct cuda_device_table *table, const void *data);

/* The devices in order of use: for statistics and for the backend. */
struct cuda_device *cuda_device_first(struct cuda_device_table *table);

#endif
