/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connections of an epoch on several nodes: this worker connects to the nodes after it, the
 * daemon hands over what the nodes before it have opened. Each proves the epoch's secret.
 *
 * Thread: loop. Between two nodes there is data stream 0; between neighbours of the ring, as many
 * as ring_streams; between the coordinator and each other node, one for negotiation. The lower node
 * rank connects. A peer that does not know the epoch yet closes: it is tried again until the
 * deadline.
 */
#ifndef GRADD_MESH_H
#define GRADD_MESH_H

#include "base/loop.h"
#include "worker/layout.h"

struct mesh;

enum {
    MESH_NEGOTIATION = 0xffff, /* its stream number */
};

struct mesh_ops {
    /* Everything is connected. The fds are the caller's: take them with mesh_take(). */
    void (*on_up)(void *data);
    /* A connection could not be made; called once. */
    void (*on_lost)(void *data, uint32_t node, const char *text);
};

/*
 * layout is borrowed for the mesh's life. dead_ns: a connection that is not made within that time,
 * or on which the other side's kernel then says nothing for so long, is lost. NULL: out of memory.
 */
struct mesh *mesh_new(struct loop *loop, const struct layout *layout, uint64_t dead_ns,
                      const struct mesh_ops *ops, void *data);
void mesh_free(struct mesh *mesh); /* closes what was not taken; NULL-safe */
void mesh_start(struct mesh *mesh);

/* A proved connection from another node. take_fd is owned. */
void mesh_arrived(struct mesh *mesh, uint32_t from_node, uint32_t stream, int take_fd);

/* The connected socket, or -1 where there is none; the caller owns it. */
int mesh_take(struct mesh *mesh, uint32_t node, uint32_t stream);

#endif
