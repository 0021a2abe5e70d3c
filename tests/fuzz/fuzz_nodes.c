/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The workers of a job's nodes, who negotiate what runs, when the others lie: the coordinator's
 * (bit 0 of the input's first byte clear) with two other nodes, or a follower's with its
 * coordinator. Trainers of this node submit whatever the input says. A double stands in for the
 * backend between nodes: it ends each batch at once, well or (bit 1) as if a link had broken.
 *
 * A record's `who`: bits 0-1: 0 and 1 that trainer, 2 and 3 that other node's worker; bit 2: raw
 * bytes instead of a frame; bit 3: the other side closes; bit 4: let the loop turn first.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "records.h"
#include "wire.h"
#include "worker/coordinator.h"
#include "worker/epoch.h"
#include "worker/follower.h"
#include "worker/mesh.h"
#include "worker/stats.h"

enum { NODES = 3, RANKS = 4, TRAINERS = 2, REGION_BYTES = 64 * 1024, TURNS = 4, ENDS = 4 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint32_t node_of_ranks[2][RANKS] = {{0, 0, 1, 2}, {0, 1, 1, 2}};

struct scene {
    struct loop *loop;
    struct chores *chores;
    struct region_quota quota;
    struct epoch_setup setup;
    struct epoch *epoch;
    int ends[ENDS]; /* the fuzzer's: trainers, then workers; -1: none */
};

/* ------------------------------------------------------------------ doubles */

static bool breaks_links;
static volatile uint8_t touched;

static void run_batch(struct backend *backend, struct backend_batch *batch)
{
    (void)backend;
    for (size_t i = 0; i < batch->n_ops; i++) {
        struct backend_op *op = batch->ops[i];
        /* As the real one: every input that is here is looked at. */
        for (uint32_t part = 0; part < op->n_ranks; part++)
            if (op->parts[part].in.base && op->parts[part].count)
                touched = op->parts[part].in.base[0];
        op->status = breaks_links ? GRADD_ERR_RANK_LOST : GRADD_OK;
        op->text = breaks_links ? "the link broke" : "";
    }
    batch->done(batch->data, batch);
}

static const struct backend_ops backend_double = {.name = "double", .run = run_batch};

static void on_links_up(void *data, uint64_t epoch)
{
    (void)data, (void)epoch;
}

static void on_link_lost(void *data, uint64_t epoch, uint32_t node, const char *text)
{
    (void)data, (void)epoch, (void)text;
    if (node >= NODES)
        abort();
}

static void on_member_gone(void *data, uint64_t epoch, const struct member *member, int status,
                           const char *text)
{
    (void)data, (void)epoch, (void)member, (void)status, (void)text;
}

static void on_stall(void *data, uint64_t epoch, uint32_t n_stalled, const char *text)
{
    (void)data, (void)epoch, (void)n_stalled, (void)text;
}

static void on_over(void *data)
{
    (void)data;
}

static void on_stats(void *data, Pb__StatsReply *reply)
{
    (void)data;
    if (reply->stats->n_ranks > RANKS)
        abort();
}

static void on_round(void *data, uint64_t seq)
{
    struct scene *scene = data;
    stats_reply(scene->epoch, &scene->quota, seq, on_stats, NULL);
}

/* ------------------------------------------------------------------ the scene */

static void turn(struct scene *scene)
{
    for (int i = 0; i < TURNS; i++)
        loop_step(scene->loop, false);
    for (int i = 0; i < ENDS; i++)
        if (scene->ends[i] >= 0)
            drain_socket(scene->ends[i]);
}

/* The other end stays the fuzzer's. */
static int open_end(struct scene *scene, int i)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
        abort();
    scene->ends[i] = ends[1];
    return ends[0];
}

static struct layout *make_layout(uint32_t node_rank)
{
    struct layout *layout = layout_alloc(1, NODES, RANKS);
    if (!layout)
        abort();
    layout->node_rank = node_rank;
    layout->ring_streams = 1;
    memcpy(layout->node_of, node_of_ranks[node_rank], sizeof node_of_ranks[node_rank]);
    for (uint32_t i = 0; i < NODES; i++)
        layout->nodes[i] = (struct layout_node){.name = "n", .address = "127.0.0.1", .port = 1};
    return layout;
}

static void add_trainer(struct scene *scene, int i, uint32_t rank)
{
    const struct epoch_member who = {.rank = rank, .local_rank = (uint32_t)i, .source = "fuzz"};
    if (epoch_add_member(scene->epoch, &who, open_end(scene, i)) < 0)
        abort();
    member_start(&scene->epoch->members[scene->epoch->n_members - 1]);
    int memory = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0 || ftruncate(memory, REGION_BYTES) < 0 ||
        fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
        abort();
    Pb__Register request = PB__REGISTER__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    struct wire_out out;
    request.region = 1;
    request.bytes = REGION_BYTES;
    envelope.body_case = PB__ENVELOPE__BODY_REGISTER;
    envelope.register_ = &request;
    wire_out_init(&out, WIRE_FRAME_MAX);
    if (wire_out_push(&out, &envelope, &memory, 1) < 0 || wire_out_flush(&out, scene->ends[i]) < 0)
        abort();
    wire_out_deinit(&out);
    close(memory);
}

/* The region is opened by another thread. */
static void await_region(struct scene *scene, int i)
{
    uint8_t reply[256];
    while (recv(scene->ends[i], reply, sizeof reply, MSG_DONTWAIT) <= 0)
        loop_step(scene->loop, true);
}

static void open_scene(struct scene *scene, uint32_t node_rank)
{
    *scene = (struct scene){.loop = loop_new(), .ends = {-1, -1, -1, -1}};
    scene->chores = scene->loop ? chores_new(scene->loop) : NULL;
    if (!scene->chores)
        abort();
    scene->quota.limit_bytes = 4 * REGION_BYTES;
    scene->setup = (struct epoch_setup){
        .loop = scene->loop,
        .chores = scene->chores,
        .quota = &scene->quota,
        .job = "fuzz",
        .node = "n",
        .max_in_flight = 16,
        .stall_warn_ns = 1000000,
        .op_timeout_ns = 5000000,
        .peer_dead_ns = UINT64_C(1000000000),
        .fusion_bytes = 4096,
        .on_links_up = on_links_up,
        .on_link_lost = on_link_lost,
        .on_member_gone = on_member_gone,
        .on_stall = on_stall,
        .on_over = on_over,
    };
    const uint32_t *node_of = node_of_ranks[node_rank];
    scene->epoch = epoch_new(&scene->setup, 1, RANKS, TRAINERS, make_layout(node_rank));
    if (!scene->epoch)
        abort();
    mesh_free(scene->epoch->mesh); /* its connections are made here */
    scene->epoch->mesh = NULL;
    for (uint32_t rank = 0, i = 0; rank < RANKS; rank++)
        if (node_of[rank] == node_rank)
            add_trainer(scene, (int)i++, rank);
    for (uint32_t node = 1; node_rank == 0 && node < NODES; node++)
        if (coordinator_attach(scene->epoch->coordinator, node,
                               open_end(scene, TRAINERS + (int)node - 1)) < 0)
            abort();
    if (node_rank > 0 && follower_attach(scene->epoch->follower, open_end(scene, TRAINERS)) < 0)
        abort();
    exec_set_backend(scene->epoch->exec, &backend_double, (struct backend *)&breaks_links,
                     scene->epoch->layout->node_of);
    for (int i = 0; i < TRAINERS; i++)
        await_region(scene, i);
    turn(scene);
}

static void perform(struct scene *scene, const struct record *record)
{
    int *end = &scene->ends[record->who & 3];
    if (record->who & 16)
        turn(scene);
    if (*end < 0)
        return;
    if (record->who & 4)
        (void)send(*end, record->bytes, record->n, MSG_DONTWAIT | MSG_NOSIGNAL);
    else
        send_frame(*end, record->bytes, record->n);
    if (record->who & 8) {
        close(*end);
        *end = -1;
    }
}

static void close_scene(struct scene *scene)
{
    struct epoch *epoch = scene->epoch;
    turn(scene);
    if (epoch->coordinator)
        coordinator_ask_stats(epoch->coordinator, 1, on_round, scene);
    stats_reply(epoch, &scene->quota, 2, on_stats, NULL);
    turn(scene);
    epoch_retire(epoch);
    turn(scene);
    if (!epoch_is_idle(epoch))
        abort();
    epoch_free(epoch);
    chores_free(scene->chores); /* closes what is still open */
    loop_free(scene->loop);
    if (scene->quota.used_bytes != 0)
        abort();
    for (int i = 0; i < ENDS; i++)
        if (scene->ends[i] >= 0)
            close(scene->ends[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct scene scene;
    struct record record;
    if (size == 0)
        return 0;
    breaks_links = data[0] & 2;
    open_scene(&scene, data[0] & 1);
    data++;
    size--;
    while (record_next(&data, &size, &record))
        perform(&scene, &record);
    close_scene(&scene);
    return 0;
}
