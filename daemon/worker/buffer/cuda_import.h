/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory of trainers, mapped into the worker's context: whole allocations of cuMemAlloc() by
 * their IPC handle, or physical chunks of cuMemCreate() by descriptors, one after another.
 *
 * An allocation is opened once per worker and device, whoever names its handle how often: whether
 * the driver takes a second opening is not to be relied on. So users share an import.
 *
 * Thread: loop; what the driver may take long for runs on the chores thread: opening, mapping, and
 * closing, which waits for the device. Life of a user: opening → in use → released → closed.
 */
#ifndef GRADD_CUDA_IMPORT_H
#define GRADD_CUDA_IMPORT_H

#include <sys/queue.h>

#include "worker/buffer/cuda_device.h"

enum {
    CUDA_HANDLE_BYTES = 64,
    CUDA_CHUNKS_MAX = 65536, /* of one region: 128 GiB in chunks of 2 MiB */
    CUDA_CHUNKS_AT_ONCE = 4, /* descriptors of one message */
};

struct cuda_import;

/* What all regions of a worker share. */
struct cuda_import_table {
    struct chores *chores;
    struct cuda_device_table *devices;
    struct cuda_import *by_handle;
};

/* Embedded in who needs the memory. Zeroed is one that has none. */
struct cuda_import_user {
    struct cuda_import *import; /* NULL: none, or refused */
    uint64_t bytes;             /* that this user may touch */
    /* Called once, perhaps before the function that opens returns. status: a gradd_status; when it
     * is not GRADD_OK the user has no import any more. */
    void (*opened)(struct cuda_import_user *user, int status, const char *text);
    /* After cuda_import_release(), perhaps before it returns: nothing of it is mapped any more,
     * unless somebody else uses the same allocation. The user may be freed. */
    void (*closed)(struct cuda_import_user *user);
    LIST_ENTRY(cuda_import_user) link;
};

/* The allocation of that handle, of which user->bytes are claimed. */
void cuda_import_handle(struct cuda_import_table *table, struct cuda_import_user *user,
                        const uint8_t *uuid, const uint8_t *handle);
/* Room for user->bytes in n_chunks chunks, which follow. */
void cuda_import_chunks(struct cuda_import_table *table, struct cuda_import_user *user,
                        const uint8_t *uuid, uint32_t n_chunks);
/* The next chunks, at most CUDA_CHUNKS_AT_ONCE; the descriptors are taken (set to -1). */
void cuda_import_add_chunks(struct cuda_import_user *user, int *fds, const uint64_t *bytes,
                            unsigned n);
/* Done with it, opened or not; no op may use it any more. `opened` is not called any more. */
void cuda_import_release(struct cuda_import_user *user);

/* Once opened. */
CUdeviceptr cuda_import_base(const struct cuda_import_user *user);
struct cuda_device *cuda_import_device(const struct cuda_import_user *user);

#endif
