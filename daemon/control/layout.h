/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the ranks of an epoch on several nodes are: computed once, by the coordinator, and the same
 * everywhere. The one place that translates Pb__Layout.
 *
 * Pure. Thread: loop.
 *
 * Invariant: a layout has 2 nodes or more, each with a rank; rank 0 is on node 0; nodes are in the
 * order of their lowest ranks; ranks of a node have different local ranks where their launcher told
 * them apart.
 */
#ifndef GRADD_CONTROL_LAYOUT_H
#define GRADD_CONTROL_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/link_proof.h"
#include "control/membership.h"
#include "wire.h"

enum {
    LAYOUT_NAME_MAX = 255,
    LAYOUT_ADDRESS_MAX = 63,
    LAYOUT_STREAMS_MAX = 16,
};

struct layout_node {
    char name[LAYOUT_NAME_MAX + 1];
    char address[LAYOUT_ADDRESS_MAX + 1]; /* numeric */
    uint16_t port;
    uint32_t n_ranks;
    struct peer_link *link; /* to its daemon, where this node knows one; NULL: here, or gone */
};

struct layout_rank {
    uint32_t node, local_rank;
    pid_t pid;
};

struct layout {
    uint64_t epoch;
    uint32_t size, n_nodes;
    uint32_t node_rank; /* of this node */
    struct layout_node *nodes;
    struct layout_rank *ranks;
    uint8_t link_id[LINK_ID_BYTES];
    uint8_t secret[LINK_SECRET_BYTES];
    uint32_t ring_streams;
    bool encrypts_data;
    bool device_path; /* every node takes device memory */
    uint32_t wire;    /* enum gradd_dtype of float32 tensors between nodes; 0: as they are */
};

/*
 * The nodes and ranks of a whole gathering, whose rank 0 is on this node. Names and addresses of
 * nodes, numbers and secrets are the caller's to fill. NULL: out of memory.
 */
struct layout *layout_new(const struct roster *gathering);
/* NULL-safe. Wipes the secret. */
void layout_free(struct layout *layout);

/* The local rank of each that knows none: its place among the ranks of its node. */
void layout_number_locally(struct layout *layout, const bool *is_known);

/* A layout that came from a coordinator. 0, -EPROTO with *out_error (a static phrase), -ENOMEM. */
int layout_unpack(const Pb__Layout *packed, struct layout **out_layout, const char **out_error);

/*
 * The receiver of a layout reaches the coordinator at this address. Nodes that the coordinator
 * knows by a loopback address are on its machine: for whoever is not, they are at the same address
 * as it.
 */
void layout_place_coordinator(struct layout *layout, const char *address);

/* As a message; its parts belong to the storage that layout_packed_free() frees. NULL: no memory.
 */
Pb__Layout *layout_pack(struct layout *layout, uint32_t node_rank);
void layout_packed_free(Pb__Layout *packed);

#endif
