/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the trainer and the worker share: a sealed memfd, mapped by both.
 *
 * Thread: any; the table and the regions in it belong to the context's lock.
 */
#ifndef GRADD_CLIENT_REGION_H
#define GRADD_CLIENT_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct region {
    uint32_t id;
    uint8_t *base;
    size_t bytes;        /* what the owner asked for, rounded up to pages */
    unsigned n_uses;     /* ops in flight that name it */
    bool is_staging;     /* the library's own: not found by pointer */
    bool is_kept;        /* gradd_keep(): the mapping outlives the context */
    bool is_answered;    /* the worker has replied to Register */
    int status;          /* its answer */
    char *text;          /* the sentence of a refusal; owned */
    struct region *next; /* while unanswered: the next such region */
};

/* Regions of gradd_alloc(), sorted by address; no two overlap. */
struct region_table {
    struct region **regions;
    size_t n, capacity;
};

/* The region that contains the address, or NULL. */
struct region *region_table_find(const struct region_table *table, const void *address);
/* 0 or -ENOMEM. */
int region_table_add(struct region_table *table, struct region *region);
void region_table_remove(struct region_table *table, const struct region *region);

/*
 * Create, seal, map and populate. Slow (it touches every page): call it without a lock.
 * *out_fd is the caller's to close. 0, or a gradd_status with gradd_error() set.
 */
int region_map(size_t bytes, struct region **out, int *out_fd);
/* Unmap (unless it is kept) and free. NULL is allowed. */
void region_unmap(struct region *region);

#endif
