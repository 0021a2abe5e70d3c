/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend for jobs on several nodes: local ranks are summed in shared memory, nodes exchange
 * sums over links, results are stored to the local ranks; chunk by chunk, all at the same time.
 *
 * Thread: loop; the work is done on one net thread per epoch, or, when it is small and nothing else
 * is under way, on the loop thread. A peer that closes is noticed when a batch needs it, not
 * before: idle connections are the daemons' business. Batches run strictly in the order given,
 * which is the same on all nodes; each node derives the same schedule from the ops alone, so that
 * what is sent next is always what the other side expects next. A header before each chunk (op,
 * block, step, bytes) proves it: a mismatch fails the batch, it never gives a wrong sum.
 *
 * Results are bit-identical on all nodes, independent of timing and of what is fused.
 */
#ifndef GRADD_NET_H
#define GRADD_NET_H

#include "worker/backend/backend.h"
#include "worker/backend/net/link.h"

enum {
    NET_NODES_MAX = 256,
    NET_STREAMS_MAX = 8,
};

struct net_setup {
    struct loop *loop;
    uint32_t node_rank, n_nodes;
    uint32_t ring_streams; /* 1 to NET_STREAMS_MAX */
    /*
     * links[node * NET_STREAMS_MAX + stream]: stream 0 to every other node; further streams, up to
     * ring_streams, to the two ring neighbours (node_rank ± 1 modulo n_nodes). Others NULL. Taken.
     */
    struct link **links;
    int wire; /* 0, or GRADD_F16 / GRADD_BF16: float32 travels between nodes in that type */
    /* A link has failed or a peer sent what it should not: called once, on the loop. The batches
     * that are not done end with GRADD_ERR_RANK_LOST (their done() is called first or after). */
    void (*on_lost)(void *data, uint32_t node, const char *text);
    void *data;
};

struct net_link_stats {
    uint32_t node;
    unsigned n_streams;
    uint64_t sent_bytes, received_bytes;
    double busy_s; /* time sending, and waiting for the link to take more */
};

/* The links are taken, even on failure (NULL, *out_text says why). */
struct backend *net_new(const struct net_setup *setup, const char **out_text);

/* End whatever runs or waits: each batch's done() is called from the loop with this status. */
void net_abort(struct backend *net, int status, const char *text);

/* Something has been given to run and is not done. */
bool net_is_busy(const struct backend *net);

struct net_stall {
    uint64_t waited_ns;
    uint32_t node;
    bool is_sure;   /* it is that link, or the node; else the node may itself wait for another */
    char text[140]; /* what is waited for: the stream, and how much of its message has come */
};

/*
 * Look whether any byte has moved or any batch has ended since the last look. True: something is
 * under way, and nothing has for waited_ns. The looks are all there is, so that moving data pays
 * nothing for them: the time counts from the look that saw the last change, and is not too long.
 */
bool net_find_stall(struct backend *net, uint64_t now_ns, struct net_stall *out);

/* Wait for that node no longer: as if the link to it had failed with this text. */
void net_give_up(struct backend *net, uint32_t node, const char *text);

/* Figures per peer node; returns how many were written. */
size_t net_stats(const struct backend *net, struct net_link_stats *out, size_t capacity);

/*
 * run() and free(); no new(). Every op kind except the ones without data; parts of remote ranks
 * have no base. All-reduce and broadcast come whole (begin 0, end count).
 */
extern const struct backend_ops backend_net;

#endif
