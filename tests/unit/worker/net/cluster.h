/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Several nodes in one process: each has a loop and a net backend, all are connected by socket
 * pairs. Ops are described once for all ranks and compared with a plain reference afterwards.
 */
#ifndef TEST_CLUSTER_H
#define TEST_CLUSTER_H

#include "worker/backend/net/net.h"

enum { CLUSTER_NODES_MAX = 8, CLUSTER_RANKS_MAX = 32 };

enum cluster_links { CLUSTER_SOCKETS, CLUSTER_TCP, CLUSTER_TLS };

struct run;

struct cluster_node {
    struct loop *loop;
    struct backend *net;
    struct run *runs;
    unsigned n_waiting; /* batches */
    unsigned n_failed;
    int status; /* of the last batch that failed */
    unsigned n_lost;
    uint32_t lost_node;
    char text[300];
    int peer_fds[CLUSTER_NODES_MAX]; /* the test's own ends, where a node is played by the test */
};

struct cluster {
    uint32_t n_nodes, n_ranks;
    uint32_t node_of[CLUSTER_RANKS_MAX]; /* by rank */
    int wire;
    struct cluster_node nodes[CLUSTER_NODES_MAX];
};

/* ranks_of: ranks of each node. n_played: nodes at the end that the test itself plays. */
void cluster_start(struct cluster *cluster, uint32_t n_nodes, const uint32_t *ranks_of,
                   uint32_t n_streams, int wire, enum cluster_links links, uint32_t n_played);
void cluster_stop(struct cluster *cluster);

/* One collective among `ranks`, with memory of its own. */
struct collective {
    enum gradd_kind kind;
    enum gradd_dtype dtype;
    enum gradd_redop redop;
    double prescale, postscale;
    uint32_t n_ranks;
    uint32_t ranks[CLUSTER_RANKS_MAX];
    bool is_joined[CLUSTER_RANKS_MAX]; /* out of data */
    bool in_place, checks_finite;
    uint32_t root;
    uint64_t count[CLUSTER_RANKS_MAX];                     /* of each rank's input */
    uint64_t counts[CLUSTER_RANKS_MAX][CLUSTER_RANKS_MAX]; /* all-to-all; [0]: reduce-scatter */
    unsigned shift; /* bytes by which buffers are off their alignment */

    uint8_t *in[CLUSTER_RANKS_MAX], *out[CLUSTER_RANKS_MAX]; /* as the backend sees them */
    void *memory[2 * CLUSTER_RANKS_MAX];
    double *values[CLUSTER_RANKS_MAX]; /* inputs, for the reference */
    uint64_t out_count[CLUSTER_RANKS_MAX];
    /* As each node sees it. */
    struct backend_op ops[CLUSTER_NODES_MAX];
    struct backend_part parts[CLUSTER_NODES_MAX][CLUSTER_RANKS_MAX];
    _Atomic uint64_t nonfinite[CLUSTER_NODES_MAX][CLUSTER_RANKS_MAX];
};

/* After the description is filled in: inputs of small whole numbers, so that sums are exact. */
void collective_prepare(struct collective *c, const struct cluster *cluster, unsigned seed);
void collective_free(struct collective *c);

/* What rank `index` should have at element i. */
double collective_expected(const struct collective *c, uint32_t index, uint64_t i);
double collective_result(const struct collective *c, uint32_t index, uint64_t i);

/* Every output is right to within `tolerance` (relative), and outputs that should be the same are
 * the same bits; nothing outside of them is touched. */
void collective_check(const struct collective *c, double tolerance);

/* Give the batch to all nodes that have ranks in it; to all real nodes when for_all. */
void cluster_run(struct cluster *cluster, struct collective *const *batch, size_t n);
/* Until no real node waits for a batch. */
void cluster_wait(struct cluster *cluster);

#endif
