/* SPDX-License-Identifier: Apache-2.0 */
/* Where the ranks of an epoch are, copied from the daemon's message. Pure. Thread: loop. */
#ifndef GRADD_LAYOUT_H
#define GRADD_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "wire.h"

struct layout_node {
    char name[64];
    char address[64]; /* numeric */
    uint16_t port;
};

struct layout {
    uint64_t epoch;
    uint32_t node_rank, n_nodes, size;
    struct layout_node *nodes;
    uint32_t *node_of;    /* [size]: by rank */
    uint32_t *local_rank; /* [size] */
    int *pids;            /* [size] */
    uint8_t link_id[16], secret[32];
    uint32_t ring_streams;
    bool encrypt_data;
    bool device_path; /* every node takes device memory */
    int wire;         /* a gradd_dtype, or 0: float32 travels as it is */
};

/* NULL: the message makes no sense, or no memory. */
struct layout *layout_new(const Pb__Layout *message);
/* All of it zero but for these. NULL: no memory. */
struct layout *layout_alloc(uint64_t epoch, uint32_t n_nodes, uint32_t size);
void layout_free(struct layout *layout); /* NULL-safe */

#endif
