/* SPDX-License-Identifier: Apache-2.0 */
#include "control/layout.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control/resolve.h"
#include "gradd/types.h"

/* ------------------------------------------------------------------ life */

static struct layout *allocate(uint32_t size, uint32_t n_nodes)
{
    struct layout *layout = calloc(1, sizeof *layout);
    if (!layout)
        return NULL;
    layout->size = size;
    layout->nodes = calloc(n_nodes, sizeof *layout->nodes);
    layout->ranks = calloc(size, sizeof *layout->ranks);
    if (layout->nodes && layout->ranks)
        return layout;
    layout_free(layout);
    return NULL;
}

void layout_free(struct layout *layout)
{
    if (!layout)
        return;
    free(layout->nodes);
    free(layout->ranks);
    explicit_bzero(layout, sizeof *layout);
    free(layout);
}

/* ------------------------------------------------------------------ computing */

/* Index of the node that this link leads to; a new one for the first rank of a node. */
static uint32_t find_node(struct layout *layout, struct peer_link *link)
{
    uint32_t i = 0;
    while (i < layout->n_nodes && layout->nodes[i].link != link)
        i++;
    if (i == layout->n_nodes)
        layout->nodes[layout->n_nodes++].link = link;
    return i;
}

struct layout *layout_new(const struct roster *gathering)
{
    struct layout *layout = allocate(gathering->size, gathering->size);
    bool *is_known = calloc(gathering->size, sizeof *is_known);
    if (!layout || !is_known) {
        layout_free(layout);
        free(is_known);
        return NULL;
    }
    for (uint32_t rank = 0; rank < gathering->size; rank++) {
        const struct member *member = gathering->of_rank[rank];
        uint32_t node = find_node(layout, member->origin);
        layout->nodes[node].n_ranks++;
        layout->ranks[rank] = (struct layout_rank){
            .node = node, .local_rank = member->local_rank, .pid = member->pid};
        is_known[rank] = member->local_size > 0;
    }
    layout_number_locally(layout, is_known);
    free(is_known);
    return layout;
}

void layout_number_locally(struct layout *layout, const bool *is_known)
{
    for (uint32_t rank = 0; rank < layout->size; rank++) {
        if (is_known[rank])
            continue;
        uint32_t place = 0;
        for (uint32_t before = 0; before < rank; before++)
            place += layout->ranks[before].node == layout->ranks[rank].node;
        layout->ranks[rank].local_rank = place;
    }
}

/* ------------------------------------------------------------------ from a message */

static const char *find_fault(const Pb__Layout *packed)
{
    if (packed->epoch == 0 || packed->epoch > MEMBERSHIP_EPOCH_MAX || packed->size < 2 ||
        packed->size > MEMBERSHIP_SIZE_MAX)
        return "an epoch or a size out of range";
    if (packed->n_ranks != packed->size)
        return "as many ranks as it says";
    if (packed->n_nodes < 2 || packed->n_nodes > packed->size)
        return "a number of nodes out of range";
    if (packed->node_rank == 0 || packed->node_rank >= packed->n_nodes)
        return "a node rank out of range";
    if (packed->link_id.len != LINK_ID_BYTES || packed->secret.len != LINK_SECRET_BYTES)
        return "a link id or secret of another length";
    if (packed->ring_streams < 1 || packed->ring_streams > LAYOUT_STREAMS_MAX)
        return "a number of streams out of range";
    for (size_t i = 0; i < packed->n_nodes; i++)
        if (strlen(packed->nodes[i]->name) > LAYOUT_NAME_MAX ||
            strlen(packed->nodes[i]->address) > LAYOUT_ADDRESS_MAX ||
            packed->nodes[i]->port > UINT16_MAX)
            return "a node with a name or an address too long";
    for (size_t rank = 0; rank < packed->n_ranks; rank++)
        if (packed->ranks[rank]->node >= packed->n_nodes)
            return "a rank on a node that there is not";
    return packed->ranks[0]->node == 0 ? NULL : "rank 0 on another node than the first";
}

int layout_unpack(const Pb__Layout *packed, struct layout **out_layout, const char **out_error)
{
    *out_error = find_fault(packed);
    if (*out_error)
        return -EPROTO;
    struct layout *layout = allocate(packed->size, (uint32_t)packed->n_nodes);
    if (!layout)
        return -ENOMEM;
    layout->epoch = packed->epoch;
    layout->n_nodes = (uint32_t)packed->n_nodes;
    layout->node_rank = packed->node_rank;
    layout->ring_streams = packed->ring_streams;
    layout->encrypts_data = packed->encrypt_data;
    layout->wire = packed->wire;
    layout->device_path = packed->device_path;
    memcpy(layout->link_id, packed->link_id.data, LINK_ID_BYTES);
    memcpy(layout->secret, packed->secret.data, LINK_SECRET_BYTES);
    for (uint32_t i = 0; i < layout->n_nodes; i++) {
        struct layout_node *node = &layout->nodes[i];
        snprintf(node->name, sizeof node->name, "%s", packed->nodes[i]->name);
        snprintf(node->address, sizeof node->address, "%s", packed->nodes[i]->address);
        node->port = (uint16_t)packed->nodes[i]->port;
    }
    for (uint32_t rank = 0; rank < layout->size; rank++) {
        const Pb__LayoutRank *from = packed->ranks[rank];
        layout->ranks[rank] = (struct layout_rank){from->node, from->local_rank, from->pid};
        layout->nodes[from->node].n_ranks++;
    }
    for (uint32_t i = 0; i < layout->n_nodes; i++) {
        if (layout->nodes[i].n_ranks == 0) {
            layout_free(layout);
            *out_error = "a node without ranks";
            return -EPROTO;
        }
    }
    *out_layout = layout;
    return 0;
}

static bool is_loopback(const char *address)
{
    struct peer_address numeric;
    return resolve_number(address, 1, &numeric) && resolve_is_loopback(&numeric);
}

void layout_place_coordinator(struct layout *layout, const char *address)
{
    bool is_here = is_loopback(address);
    for (uint32_t i = 0; i < layout->n_nodes; i++)
        if (i == 0 || (!is_here && is_loopback(layout->nodes[i].address)))
            snprintf(layout->nodes[i].address, sizeof layout->nodes[i].address, "%s", address);
}

/* ------------------------------------------------------------------ to a message */

/* The message and all of its parts, in one block each. */
struct packed_layout {
    Pb__Layout layout; /* first: its address is the whole's */
    Pb__LayoutNode *nodes, **node_pointers;
    Pb__LayoutRank *ranks, **rank_pointers;
};

void layout_packed_free(Pb__Layout *packed)
{
    struct packed_layout *whole = (struct packed_layout *)packed;
    if (!whole)
        return;
    free(whole->nodes);
    free(whole->node_pointers);
    free(whole->ranks);
    free(whole->rank_pointers);
    free(whole);
}

static void pack_parts(struct layout *layout, struct packed_layout *whole)
{
    for (uint32_t i = 0; i < layout->n_nodes; i++) {
        Pb__LayoutNode *node = whole->node_pointers[i] = &whole->nodes[i];
        pb__layout_node__init(node);
        node->name = layout->nodes[i].name;
        node->address = layout->nodes[i].address;
        node->port = layout->nodes[i].port;
    }
    for (uint32_t rank = 0; rank < layout->size; rank++) {
        Pb__LayoutRank *to = whole->rank_pointers[rank] = &whole->ranks[rank];
        pb__layout_rank__init(to);
        to->node = layout->ranks[rank].node;
        to->local_rank = layout->ranks[rank].local_rank;
        to->pid = (int32_t)layout->ranks[rank].pid;
    }
}

Pb__Layout *layout_pack(struct layout *layout, uint32_t node_rank)
{
    struct packed_layout *whole = calloc(1, sizeof *whole);
    if (!whole)
        return NULL;
    Pb__Layout *packed = &whole->layout;
    pb__layout__init(packed);
    whole->nodes = calloc(layout->n_nodes, sizeof *whole->nodes);
    whole->node_pointers = calloc(layout->n_nodes, sizeof *whole->node_pointers);
    whole->ranks = calloc(layout->size, sizeof *whole->ranks);
    whole->rank_pointers = calloc(layout->size, sizeof *whole->rank_pointers);
    if (!whole->nodes || !whole->node_pointers || !whole->ranks || !whole->rank_pointers) {
        layout_packed_free(packed);
        return NULL;
    }
    pack_parts(layout, whole);
    packed->epoch = layout->epoch;
    packed->size = layout->size;
    packed->n_nodes = layout->n_nodes;
    packed->nodes = whole->node_pointers;
    packed->n_ranks = layout->size;
    packed->ranks = whole->rank_pointers;
    packed->link_id = (ProtobufCBinaryData){LINK_ID_BYTES, layout->link_id};
    packed->secret = (ProtobufCBinaryData){LINK_SECRET_BYTES, layout->secret};
    packed->node_rank = node_rank;
    packed->ring_streams = layout->ring_streams;
    packed->encrypt_data = layout->encrypts_data;
    packed->wire = layout->wire;
    packed->device_path = layout->device_path;
    return packed;
}
