/* SPDX-License-Identifier: Apache-2.0 */
/* Where ranks are: the order of nodes, local ranks, and what of another node's message is believed.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "control/layout.h"
#include "run_suite.h"

/* Links are only compared. */
static struct peer_link *const node_b = (struct peer_link *)1;
static struct peer_link *const node_c = (struct peer_link *)2;

enum { N = 6 };
static struct member members[N];
static struct member *slots[N];
static struct roster gathering;

static void gather(struct peer_link *const origins[N], uint32_t local_size)
{
    for (uint32_t rank = 0; rank < N; rank++) {
        members[rank] = (struct member){.rank = rank,
                                        .size = N,
                                        .local_rank = 7 + rank,
                                        .local_size = local_size,
                                        .pid = (pid_t)(100 + rank),
                                        .origin = origins[rank]};
        slots[rank] = &members[rank];
    }
    gathering = (struct roster){.size = N, .n = N, .of_rank = slots};
}

static struct layout *make(uint32_t local_size)
{
    struct peer_link *const origins[N] = {[1] = node_c, [2] = node_b, [4] = node_c};
    gather(origins, local_size);
    struct layout *layout = layout_new(&gathering);
    ck_assert_ptr_nonnull(layout);
    layout->epoch = 9;
    layout->ring_streams = 2;
    layout->wire = 6;
    layout->device_path = true;
    layout->encrypts_data = true;
    for (uint32_t i = 0; i < layout->n_nodes; i++) {
        snprintf(layout->nodes[i].name, sizeof layout->nodes[i].name, "n%u", i);
        snprintf(layout->nodes[i].address, sizeof layout->nodes[i].address, "10.0.0.%u", i);
        layout->nodes[i].port = (uint16_t)(7000 + i);
    }
    memset(layout->secret, 5, sizeof layout->secret);
    memset(layout->link_id, 6, sizeof layout->link_id);
    return layout;
}

START_TEST(nodes_stand_in_the_order_of_their_lowest_rank)
{
    struct layout *layout = make(8);
    ck_assert_uint_eq(layout->n_nodes, 3);
    ck_assert_ptr_null(layout->nodes[0].link);
    ck_assert_ptr_eq(layout->nodes[1].link, node_c);
    ck_assert_ptr_eq(layout->nodes[2].link, node_b);
    static const uint32_t nodes[N] = {0, 1, 2, 0, 1, 0};
    for (uint32_t rank = 0; rank < N; rank++) {
        ck_assert_uint_eq(layout->ranks[rank].node, nodes[rank]);
        ck_assert_int_eq(layout->ranks[rank].pid, 100 + (int)rank);
    }
    ck_assert_uint_eq(layout->nodes[0].n_ranks, 3);
    ck_assert_uint_eq(layout->nodes[1].n_ranks, 2);
    ck_assert_uint_eq(layout->nodes[2].n_ranks, 1);
    layout_free(layout);
}
END_TEST

START_TEST(local_ranks_are_the_launchers_or_counted_on_each_node)
{
    struct layout *layout = make(8);
    for (uint32_t rank = 0; rank < N; rank++)
        ck_assert_uint_eq(layout->ranks[rank].local_rank, 7 + rank);
    layout_free(layout);
    layout = make(0);
    static const uint32_t counted[N] = {0, 0, 0, 1, 1, 2};
    for (uint32_t rank = 0; rank < N; rank++)
        ck_assert_uint_eq(layout->ranks[rank].local_rank, counted[rank]);
    layout_free(layout);
}
END_TEST

START_TEST(a_layout_travels_whole)
{
    struct layout *layout = make(0), *back;
    const char *error;
    Pb__Layout *packed = layout_pack(layout, 2);
    ck_assert_ptr_nonnull(packed);
    uint8_t bytes[2048];
    ck_assert_uint_le(pb__layout__get_packed_size(packed), sizeof bytes);
    size_t n = pb__layout__pack(packed, bytes);
    layout_packed_free(packed);
    Pb__Layout *received = pb__layout__unpack(NULL, n, bytes);
    ck_assert_ptr_nonnull(received);
    ck_assert_msg(layout_unpack(received, &back, &error) == 0, "%s", error);
    pb__layout__free_unpacked(received, NULL);
    ck_assert_uint_eq(back->node_rank, 2);
    ck_assert_uint_eq(back->epoch, 9);
    ck_assert_uint_eq(back->size, N);
    ck_assert_uint_eq(back->n_nodes, 3);
    ck_assert_uint_eq(back->ring_streams, 2);
    ck_assert(back->device_path);
    ck_assert_uint_eq(back->wire, 6);
    ck_assert(back->encrypts_data);
    ck_assert_mem_eq(back->secret, layout->secret, sizeof back->secret);
    ck_assert_mem_eq(back->link_id, layout->link_id, sizeof back->link_id);
    ck_assert_mem_eq(back->ranks, layout->ranks, N * sizeof *back->ranks);
    for (uint32_t i = 0; i < 3; i++) {
        ck_assert_str_eq(back->nodes[i].name, layout->nodes[i].name);
        ck_assert_str_eq(back->nodes[i].address, layout->nodes[i].address);
        ck_assert_uint_eq(back->nodes[i].port, layout->nodes[i].port);
        ck_assert_uint_eq(back->nodes[i].n_ranks, layout->nodes[i].n_ranks);
        ck_assert_ptr_null(back->nodes[i].link);
    }
    layout_free(layout);
    layout_free(back);
}
END_TEST

/* ------------------------------------------------------------------ what is not believed */

static void spoil_epoch(Pb__Layout *p)
{
    p->epoch = 0;
}
static void spoil_last_epoch(Pb__Layout *p)
{
    p->epoch = UINT64_MAX;
}
static void spoil_size(Pb__Layout *p)
{
    p->size = 5;
}
static void spoil_size_1(Pb__Layout *p)
{
    p->size = 1, p->n_ranks = 1;
}
static void spoil_nodes(Pb__Layout *p)
{
    p->n_nodes = 1;
}
static void spoil_node_rank(Pb__Layout *p)
{
    p->node_rank = 3;
}
static void spoil_own_rank(Pb__Layout *p)
{
    p->node_rank = 0;
}
static void spoil_link_id(Pb__Layout *p)
{
    p->link_id.len = 15;
}
static void spoil_secret(Pb__Layout *p)
{
    p->secret.len = 0;
}
static void spoil_streams(Pb__Layout *p)
{
    p->ring_streams = 17;
}
static void spoil_no_streams(Pb__Layout *p)
{
    p->ring_streams = 0;
}
static void spoil_port(Pb__Layout *p)
{
    p->nodes[1]->port = 65536;
}
static void spoil_place(Pb__Layout *p)
{
    p->ranks[3]->node = 3;
}
static void spoil_first(Pb__Layout *p)
{
    p->ranks[0]->node = 1;
}
static void spoil_empty(Pb__Layout *p)
{
    p->ranks[2]->node = 0;
}
static void spoil_name(Pb__Layout *p)
{
    static char name[300];
    memset(name, 'n', sizeof name - 1);
    p->nodes[2]->name = name;
}
static void spoil_address(Pb__Layout *p)
{
    p->nodes[2]->address = p->nodes[0]->name;
}

START_TEST(a_layout_that_contradicts_itself_is_refused)
{
    static void (*const spoilers[])(Pb__Layout *) = {
        spoil_epoch,  spoil_last_epoch, spoil_size,       spoil_size_1,
        spoil_nodes,  spoil_node_rank,  spoil_own_rank,   spoil_link_id,
        spoil_secret, spoil_streams,    spoil_no_streams, spoil_port,
        spoil_place,  spoil_first,      spoil_empty,      spoil_name,
    };
    for (size_t i = 0; i < sizeof spoilers / sizeof *spoilers; i++) {
        struct layout *layout = make(0), *back = NULL;
        const char *error = NULL;
        Pb__Layout *packed = layout_pack(layout, 1);
        spoilers[i](packed);
        ck_assert_msg(layout_unpack(packed, &back, &error) == -EPROTO, "spoiler %zu", i);
        ck_assert_ptr_nonnull(error);
        ck_assert_ptr_null(back);
        layout_packed_free(packed);
        layout_free(layout);
    }
}
END_TEST

START_TEST(an_address_of_any_length_is_measured)
{
    struct layout *layout = make(0), *back;
    const char *error;
    Pb__Layout *packed = layout_pack(layout, 1);
    memset(layout->nodes[0].name, 'x', LAYOUT_ADDRESS_MAX + 1);
    layout->nodes[0].name[LAYOUT_ADDRESS_MAX + 1] = '\0';
    spoil_address(packed);
    ck_assert_int_eq(layout_unpack(packed, &back, &error), -EPROTO);
    layout_packed_free(packed);
    layout_free(layout);
}
END_TEST

START_TEST(nobody_elsewhere_is_told_a_loopback_address)
{
    const struct {
        const char *dialled, *second, *expected;
    } cases[] = {
        {"10.0.0.1", "127.0.0.1", "10.0.0.1"}, {"10.0.0.1", "::1", "10.0.0.1"},
        {"10.0.0.1", "10.0.0.2", "10.0.0.2"},  {"127.0.0.1", "127.0.0.1", "127.0.0.1"},
        {"127.0.0.2", "10.0.0.2", "10.0.0.2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct layout *layout = make(0);
        strcpy(layout->nodes[0].address, "127.0.0.1");
        strcpy(layout->nodes[1].address, cases[i].second);
        strcpy(layout->nodes[2].address, "10.0.0.3");
        layout_place_coordinator(layout, cases[i].dialled);
        ck_assert_str_eq(layout->nodes[0].address, cases[i].dialled);
        ck_assert_str_eq(layout->nodes[1].address, cases[i].expected);
        ck_assert_str_eq(layout->nodes[2].address, "10.0.0.3");
        layout_free(layout);
    }
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        nodes_stand_in_the_order_of_their_lowest_rank,
        local_ranks_are_the_launchers_or_counted_on_each_node,
        a_layout_travels_whole,
        a_layout_that_contradicts_itself_is_refused,
        an_address_of_any_length_is_measured,
        nobody_elsewhere_is_told_a_loopback_address,
    };
    return run_suite("layout", tests, sizeof tests / sizeof *tests);
}
