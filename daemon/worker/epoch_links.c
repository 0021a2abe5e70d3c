/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The links to the job's other nodes: from the mesh, while they come up, to the backend and to the
 * negotiation, which own them from then on.
 */
#include <stdlib.h>
#include <unistd.h>

#include "base/log.h"
#include "worker/backend/net/net.h"
#include "worker/coordinator.h"
#include "worker/epoch_internal.h"
#include "worker/follower.h"
#include "worker/mesh.h"

static void on_net_lost(void *data, uint32_t node, const char *text)
{
    struct epoch *epoch = data;
    if (!epoch->coordinator || !epoch_node_has_left(epoch, node))
        epoch_link_lost(epoch, node, text);
}

static struct link *take_link(struct epoch *epoch, uint32_t node, uint32_t stream)
{
    const struct layout *layout = epoch->layout;
    int fd = mesh_take(epoch->mesh, node, stream);
    if (fd < 0)
        return NULL;
    return layout->encrypt_data ? link_tls_new(fd, layout->secret, node < layout->node_rank)
                                : link_tcp_new(fd);
}

/* The links become the backend's, which owns them even when this fails. */
static bool open_net(struct epoch *epoch)
{
    const struct layout *layout = epoch->layout;
    struct link **links = calloc((size_t)layout->n_nodes * NET_STREAMS_MAX, sizeof(*links));
    if (!links)
        return false;
    for (uint32_t node = 0; node < layout->n_nodes; node++)
        for (uint32_t stream = 0; stream < layout->ring_streams; stream++)
            links[node * NET_STREAMS_MAX + stream] = take_link(epoch, node, stream);
    const struct net_setup setup = {
        .loop = epoch->setup->loop,
        .node_rank = layout->node_rank,
        .n_nodes = layout->n_nodes,
        .ring_streams = layout->ring_streams,
        .links = links,
        .wire = layout->wire,
        .on_lost = on_net_lost,
        .data = epoch,
    };
    const char *text = "";
    epoch->net = net_new(&setup, &text);
    free(links);
    if (!epoch->net)
        log_error("worker", "%s: %s", epoch->label, text);
    return epoch->net;
}

static bool open_negotiation(struct epoch *epoch)
{
    if (epoch->follower)
        return follower_attach(epoch->follower, mesh_take(epoch->mesh, 0, MESH_NEGOTIATION)) == 0;
    for (uint32_t node = 1; node < epoch->layout->n_nodes; node++)
        if (coordinator_attach(epoch->coordinator, node,
                               mesh_take(epoch->mesh, node, MESH_NEGOTIATION)) < 0)
            return false;
    return true;
}

static void on_mesh_up(void *data)
{
    struct epoch *epoch = data;
    if (epoch->failure.status || epoch->is_retired)
        return;
    if (!open_net(epoch) || !open_negotiation(epoch)) {
        epoch_link_lost(epoch, epoch->layout->node_rank, "no memory for the links between nodes");
        return;
    }
    exec_set_backend(epoch->exec, &backend_net, epoch->net, epoch->layout->node_of);
    epoch_start_members(epoch);
    epoch->setup->on_links_up(epoch->setup->data, epoch->number);
}

static void on_mesh_lost(void *data, uint32_t node, const char *text)
{
    epoch_link_lost(data, node, text);
}

static const struct mesh_ops mesh_ops = {.on_up = on_mesh_up, .on_lost = on_mesh_lost};

bool epoch_open_links(struct epoch *epoch)
{
    const struct epoch_setup *setup = epoch->setup;
    epoch->mesh = mesh_new(setup->loop, epoch->layout, setup->peer_dead_ns, &mesh_ops, epoch);
    if (!epoch->mesh)
        return false;
    mesh_start(epoch->mesh);
    return true;
}

void epoch_link_arrived(struct epoch *epoch, uint32_t from_node, uint32_t stream, int take_fd)
{
    if (epoch->mesh && !epoch->net)
        mesh_arrived(epoch->mesh, from_node, stream, take_fd);
    else
        close(take_fd);
}
