/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A region: memory that a trainer shares, mapped here too: a sealed memfd, or device memory (see
 * cuda_import.h). Ops name a place in it by (id, offset, bytes); every use is checked against its
 * size.
 *
 * The quota counts memfds. Device memory is the trainer's own, on a GPU that has no more; mapping
 * it here costs nothing.
 *
 * Thread: loop; mapping work on the chores thread. Life: opening → ready → (closed and unpinned) →
 * unmapped. A pin keeps the mapping for an op that reads or writes it, whatever the trainer does.
 */
#ifndef GRADD_REGION_H
#define GRADD_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <gradd/types.h>
#include <uthash.h>

#include "worker/buffer/chores.h"
#include "worker/buffer/cuda_import.h"

struct region;

/* Bytes in all regions of a job against its limit. Outlives every region. */
struct region_quota {
    uint64_t used_bytes, limit_bytes;
    unsigned n_opened; /* regions so far */
};

struct region_table {
    struct chores *chores;
    struct region_quota *quota;
    struct cuda_import_table *imports; /* NULL: this worker takes no device memory */
    struct region *by_id;
    LIST_HEAD(, region) closing; /* device memory that is not unmapped yet, and who asked knows */
    uint64_t bytes;              /* of the open memfds */
};

/* A gradd_status and a sentence; called on the loop once the region is ready or refused. */
typedef void region_opened_fn(void *data, uint32_t id, int status, const char *text);
typedef void region_closed_fn(void *data, uint32_t id);

void region_table_init(struct region_table *table, struct chores *chores,
                       struct region_quota *quota);
/* Close every region; pinned ones are unmapped when their last pin goes. */
void region_table_deinit(struct region_table *table);

/*
 * Open a region. take_fd is owned from here on. Refusals known at once (id taken, quota, seals,
 * size) are reported before the call returns; data must live until `opened` was called or
 * region_table_deinit() was.
 */
void region_open(struct region_table *table, uint32_t id, int take_fd, uint64_t bytes,
                 region_opened_fn *opened, void *data);

/* What a message says about device memory. */
struct region_device {
    const uint8_t *uuid;   /* of the GPU, CUDA_UUID_BYTES */
    const uint8_t *handle; /* CUDA_HANDLE_BYTES: an allocation of cuMemAlloc(); NULL: chunks */
    uint32_t n_chunks;     /* of cuMemCreate(), given to region_add_chunks() */
};
/* The same for device memory; `opened` once all chunks are mapped. */
void region_open_device(struct region_table *table, uint32_t id, uint64_t bytes,
                        const struct region_device *device, region_opened_fn *opened, void *data);
/* The next chunks, at most CUDA_CHUNKS_AT_ONCE, of a region that is being opened. The descriptors
 * are taken (set to -1); with no such region they are just closed. */
void region_add_chunks(struct region_table *table, uint32_t id, int *fds, const uint64_t *bytes,
                       unsigned n);

/*
 * False: no such region. `closed` (may be NULL): called on the loop, perhaps before this returns,
 * unless the table goes before. A memfd: at once. Device memory: when no op uses it any more and
 * it is unmapped, so that the trainer may free it.
 */
bool region_close(struct region_table *table, uint32_t id, region_closed_fn *closed, void *data);

/*
 * Pin a ready region and give the address of [offset, offset + bytes), for the device only if
 * region_device() says so. NULL: *out_text says why not. Unpin with region_unpin().
 */
uint8_t *region_pin(struct region_table *table, uint32_t id, uint64_t offset, uint64_t bytes,
                    struct region **out_region, const char **out_text);
void region_unpin(struct region *region); /* NULL-safe */
/* The device whose memory it is; NULL: host memory. */
struct cuda_device *region_device(const struct region *region);

#endif
