/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A region: memory that a trainer shares as a sealed memfd, mapped here too. Ops name a place in
 * it by (id, offset, bytes); every use is checked against its size.
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

struct region;

/* Bytes in all regions of a job against its limit. Outlives every region. */
struct region_quota {
    uint64_t used_bytes, limit_bytes;
    unsigned n_opened; /* regions so far */
};

struct region_table {
    struct chores *chores;
    struct region_quota *quota;
    struct region *by_id;
    uint64_t bytes; /* of the open regions */
};

/* A gradd_status and a sentence; called on the loop once the region is ready or refused. */
typedef void region_opened_fn(void *data, uint32_t id, int status, const char *text);

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

/* False: no such region. */
bool region_close(struct region_table *table, uint32_t id);

/*
 * Pin a ready region and give the address of [offset, offset + bytes). NULL: *out_text says why
 * not. Unpin with region_unpin().
 */
uint8_t *region_pin(struct region_table *table, uint32_t id, uint64_t offset, uint64_t bytes,
                    struct region **out_region, const char **out_text);
void region_unpin(struct region *region); /* NULL-safe */

#endif
