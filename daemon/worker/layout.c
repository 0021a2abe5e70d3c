/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradd/types.h>

#include "worker/backend/net/net.h"

static bool is_sane(const Pb__Layout *m)
{
    bool is_wire = m->wire == 0 || m->wire == GRADD_F16 || m->wire == GRADD_BF16;
    if (m->size == 0 || m->n_ranks != m->size || m->n_nodes < 2 || m->n_nodes > NET_NODES_MAX ||
        m->node_rank >= m->n_nodes || m->link_id.len != 16 || m->secret.len != 32 ||
        m->ring_streams < 1 || m->ring_streams > NET_STREAMS_MAX || !is_wire)
        return false;
    for (size_t i = 0; i < m->n_ranks; i++)
        if (m->ranks[i]->node >= m->n_nodes)
            return false;
    return m->ranks[0]->node == 0;
}

struct layout *layout_alloc(uint64_t epoch, uint32_t n_nodes, uint32_t size)
{
    struct layout *layout = calloc(1, sizeof *layout);
    if (!layout)
        return NULL;
    layout->epoch = epoch;
    layout->n_nodes = n_nodes;
    layout->size = size;
    layout->nodes = calloc(n_nodes, sizeof *layout->nodes);
    layout->node_of = calloc(size, sizeof *layout->node_of);
    layout->local_rank = calloc(size, sizeof *layout->local_rank);
    layout->pids = calloc(size, sizeof *layout->pids);
    if (!layout->nodes || !layout->node_of || !layout->local_rank || !layout->pids) {
        layout_free(layout);
        return NULL;
    }
    return layout;
}

struct layout *layout_new(const Pb__Layout *m)
{
    struct layout *layout =
        is_sane(m) ? layout_alloc(m->epoch, (uint32_t)m->n_nodes, m->size) : NULL;
    if (!layout)
        return NULL;
    layout->node_rank = m->node_rank;
    layout->ring_streams = m->ring_streams;
    layout->encrypt_data = m->encrypt_data;
    layout->device_path = m->device_path;
    layout->wire = (int)m->wire;
    memcpy(layout->link_id, m->link_id.data, sizeof layout->link_id);
    memcpy(layout->secret, m->secret.data, sizeof layout->secret);
    for (size_t i = 0; i < m->n_nodes; i++) {
        struct layout_node *node = &layout->nodes[i];
        snprintf(node->name, sizeof node->name, "%s", m->nodes[i]->name);
        snprintf(node->address, sizeof node->address, "%s", m->nodes[i]->address);
        node->port = (uint16_t)m->nodes[i]->port;
    }
    for (size_t i = 0; i < m->n_ranks; i++) {
        layout->node_of[i] = m->ranks[i]->node;
        layout->local_rank[i] = m->ranks[i]->local_rank;
        layout->pids[i] = m->ranks[i]->pid;
    }
    return layout;
}

void layout_free(struct layout *layout)
{
    if (!layout)
        return;
    free(layout->nodes);
    free(layout->node_of);
    free(layout->local_rank);
    free(layout->pids);
    explicit_bzero(layout->secret, sizeof layout->secret);
    free(layout);
}
