/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/stats.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/stats_fit.h"
#include "worker/backend/nccl/nccl.h"
#include "worker/backend/net/net.h"
#include "worker/coordinator.h"

enum {
    STALLS_MAX = 64, /* reported at once; more are counted by StallNotice */
    COMMS_MAX = 64,
};

static const char *state_name(enum member_state state)
{
    switch (state) {
    case MEMBER_ACTIVE:
        return "active";
    case MEMBER_LEFT:
        return "left";
    case MEMBER_ENDED:
    case MEMBER_LOST:
        return "lost";
    }
    return "unknown";
}

static void fill_rank(const struct epoch *epoch, const struct member *member,
                      Pb__RankStats *message)
{
    *message = (Pb__RankStats)PB__RANK_STATS__INIT;
    message->rank = member->rank;
    message->local_rank = member->local_rank;
    message->pid = member->pid;
    message->uid = member->uid;
    message->node =
        epoch->layout ? epoch->layout->nodes[member->node].name : (char *)epoch->setup->node;
    message->source = (char *)member->source;
    message->ops_done = member->stats.ops_done;
    message->ops_failed = member->stats.ops_failed;
    message->bytes = member->stats.bytes;
    message->in_flight = member->stats.in_flight;
    message->last_tensor = (char *)member->stats.last_tensor;
    message->late_mean_us = member->stats.late_mean_us;
    message->late_max_us = member->stats.late_max_us;
    message->memory_bytes = member->regions.bytes;
    message->state = (char *)state_name(member->state);
}

struct stall_list {
    Pb__Stall messages[STALLS_MAX];
    size_t n;
};

static uint32_t *copy_ranks(const uint32_t *ranks, uint32_t n)
{
    uint32_t *copy = n ? malloc(n * sizeof *copy) : NULL;
    if (copy)
        memcpy(copy, ranks, n * sizeof *copy);
    return copy;
}

static void add_stall(void *data, const struct plan_stall *stall)
{
    struct stall_list *list = data;
    if (list->n == STALLS_MAX)
        return;
    Pb__Stall *message = &list->messages[list->n];
    *message = (Pb__Stall)PB__STALL__INIT;
    message->name = (char *)stall->name;
    message->kind = stall->kind;
    message->waited_ms = stall->waited_ns / 1000000u;
    message->missing = copy_ranks(stall->missing, stall->n_missing);
    message->n_missing = message->missing ? stall->n_missing : 0;
    message->present = copy_ranks(stall->present, stall->n_present);
    message->n_present = message->present ? stall->n_present : 0;
    list->n++;
}

struct link_list {
    struct net_link_stats stats[NET_NODES_MAX];
    Pb__LinkStats messages[NET_NODES_MAX];
    size_t n;
};

/* This node's links; NULL when it has none. */
static struct link_list *list_links(const struct epoch *epoch)
{
    struct link_list *list = epoch->net ? calloc(1, sizeof *list) : NULL;
    if (!list)
        return NULL;
    list->n = net_stats(epoch->net, list->stats, NET_NODES_MAX);
    for (size_t i = 0; i < list->n; i++) {
        const struct net_link_stats *from = &list->stats[i];
        Pb__LinkStats *message = &list->messages[i];
        *message = (Pb__LinkStats)PB__LINK_STATS__INIT;
        message->from_node = epoch->layout->node_rank;
        message->to_node = from->node;
        message->streams = from->n_streams;
        message->sent_bytes = from->sent_bytes;
        message->received_bytes = from->received_bytes;
        message->busy_s = from->busy_s;
        message->send_rate = from->busy_s > 0 ? (double)from->sent_bytes / from->busy_s : 0;
    }
    return list;
}

/* ------------------------------------------------------------------ GPUs */

size_t stats_gpus(struct cuda_device_table *devices, const char *node, Pb__GpuStats *messages,
                  size_t max)
{
    size_t n = 0;
    for (struct cuda_device *d = devices ? cuda_device_first(devices) : NULL; d && n < max;
         d = d->next) {
        if (d->status != GRADD_OK)
            continue;
        Pb__GpuStats *message = &messages[n++];
        *message = (Pb__GpuStats)PB__GPU_STATS__INIT;
        message->node = (char *)node;
        message->uuid = d->uuid_text;
        message->name = d->name;
        message->context_bytes = d->context_bytes;
        message->scratch_bytes = atomic_load_explicit(&d->scratch_bytes, memory_order_relaxed);
        message->imports = d->n_imports;
        message->import_bytes = d->import_bytes;
        message->event_queues = d->n_event_queues;
        message->flag_queues = d->n_flag_queues;
    }
    return n;
}

/* What this node knows of GPUs and communicators. */
struct gpu_list {
    Pb__GpuStats gpus[STATS_GPUS_MAX];
    Pb__CommStats comms[COMMS_MAX];
    size_t n_gpus, n_comms;
};

/* NULL: the epoch takes no device memory. */
static struct gpu_list *list_gpus(const struct epoch *epoch)
{
    struct gpu_list *list = epoch->device ? calloc(1, sizeof *list) : NULL;
    if (!list)
        return NULL;
    const struct epoch_setup *setup = epoch->setup;
    list->n_gpus = stats_gpus(setup->devices, setup->node, list->gpus, STATS_GPUS_MAX);
    for (const struct comm *comm = nccl_comms(epoch->device); comm && list->n_comms < COMMS_MAX;
         comm = comm->next) {
        Pb__CommStats *message = &list->comms[list->n_comms++];
        *message = (Pb__CommStats)PB__COMM_STATS__INIT;
        message->ranks = comm->ranks;
        message->n_ranks = comm->map.n_ranks;
        message->size = comm->map.n_gpus;
        message->state = (char *)comm_state_name(comm);
        message->ops = atomic_load_explicit(&comm->n_ops, memory_order_relaxed);
    }
    return list;
}

/* ------------------------------------------------------------------ the whole picture */

/* What the reply points to, besides what the other nodes have said. */
struct picture {
    Pb__JobStats stats;
    Pb__RankStats *ranks;
    Pb__RankStats **rank_pointers;
    struct stall_list *stalls;
    Pb__Stall **stall_pointers;
    struct link_list *links; /* NULL: this node has none */
    Pb__LinkStats **link_pointers;
    struct gpu_list *gpus; /* NULL: this node has none */
    Pb__GpuStats **gpu_pointers;
    Pb__CommStats *comm_pointers[COMMS_MAX];
    uint32_t *silent_nodes;
};

static void picture_deinit(struct picture *p)
{
    for (size_t i = 0; p->stalls && i < p->stalls->n; i++) {
        free(p->stalls->messages[i].missing);
        free(p->stalls->messages[i].present);
    }
    free(p->ranks);
    free(p->rank_pointers);
    free(p->stalls);
    free(p->stall_pointers);
    free(p->links);
    free(p->link_pointers);
    free(p->gpus);
    free(p->gpu_pointers);
    free(p->silent_nodes);
}

/* On the coordinator: what that node has said of itself; NULL elsewhere, and before it has. */
static const Pb__JobStats *figures_of(const struct epoch *epoch, uint32_t node)
{
    return epoch->coordinator ? stats_round_figures(coordinator_stats(epoch->coordinator), node)
                              : NULL;
}

static uint32_t n_nodes(const struct epoch *epoch)
{
    return epoch->layout ? epoch->layout->n_nodes : 1;
}

static bool picture_init(struct picture *p, const struct epoch *epoch)
{
    size_t n_links = 0, n_stalls = STALLS_MAX, n_gpus = STATS_GPUS_MAX;
    for (uint32_t node = 0; node < n_nodes(epoch); node++) {
        const Pb__JobStats *figures = figures_of(epoch, node);
        n_links += figures ? figures->n_links : 0;
        n_stalls += figures ? figures->n_stalls : 0;
        n_gpus += figures ? figures->n_gpus : 0;
    }
    *p = (struct picture){
        .stats = PB__JOB_STATS__INIT,
        .ranks = calloc(epoch->size, sizeof *p->ranks),
        .rank_pointers = calloc(epoch->size, sizeof(*p->rank_pointers)),
        .stalls = calloc(1, sizeof *p->stalls),
        .stall_pointers = calloc(n_stalls, sizeof(*p->stall_pointers)),
        .links = list_links(epoch),
        .gpus = list_gpus(epoch),
        .gpu_pointers = calloc(n_gpus, sizeof(*p->gpu_pointers)),
        .silent_nodes = calloc(n_nodes(epoch), sizeof *p->silent_nodes),
    };
    n_links += p->links ? p->links->n : 0;
    p->link_pointers = calloc(n_links + 1, sizeof(*p->link_pointers));
    return p->ranks && p->rank_pointers && p->stalls && p->stall_pointers && p->link_pointers &&
           p->gpu_pointers && p->silent_nodes;
}

static void draw_own(struct picture *p, struct epoch *epoch, const struct region_quota *quota)
{
    const struct exec_stats *exec = exec_stats(epoch->exec);
    uint64_t now_ns = clock_now_ns();
    for (uint32_t i = 0; i < epoch->n_members; i++) {
        fill_rank(epoch, &epoch->members[i], &p->ranks[i]);
        p->rank_pointers[i] = &p->ranks[i];
    }
    if (epoch->plan)
        plan_list_stalls(epoch->plan, now_ns, add_stall, p->stalls);
    exec_list_stalls(epoch->exec, now_ns, epoch->setup->stall_warn_ns, add_stall, p->stalls);
    for (size_t i = 0; i < p->stalls->n; i++)
        p->stall_pointers[p->stats.n_stalls++] = &p->stalls->messages[i];
    for (size_t i = 0; p->links && i < p->links->n; i++)
        p->link_pointers[p->stats.n_links++] = &p->links->messages[i];
    for (size_t i = 0; p->gpus && i < p->gpus->n_gpus; i++)
        p->gpu_pointers[p->stats.n_gpus++] = &p->gpus->gpus[i];
    for (size_t i = 0; p->gpus && i < p->gpus->n_comms; i++)
        p->comm_pointers[p->stats.n_comms++] = &p->gpus->comms[i];
    p->stats.n_ranks = epoch->n_members;
    p->stats.ops = exec->ops;
    p->stats.device_ops = exec->device_ops;
    p->stats.staged_ops = exec->staged_ops;
    p->stats.bytes = exec->bytes;
    p->stats.batches = exec->batches;
    p->stats.memory_bytes = quota->used_bytes;
    p->stats.wait_us = exec->wait_us;
    p->stats.run_us = exec->run_us;
}

/* The node knows its ranks best, except how late they are, and whether they have left: that shows
 * where all are seen. */
static void correct_rank(struct picture *p, const struct epoch *epoch, uint32_t node,
                         const Pb__RankStats *said)
{
    for (uint32_t i = 0; i < epoch->n_members; i++) {
        Pb__RankStats *row = &p->ranks[i];
        if (row->rank != said->rank || epoch->members[i].node != node)
            continue;
        row->uid = said->uid;
        row->source = said->source;
        row->ops_done = said->ops_done;
        row->ops_failed = said->ops_failed;
        row->bytes = said->bytes;
        row->in_flight = said->in_flight;
        row->memory_bytes = said->memory_bytes;
    }
}

static void draw_node(struct picture *p, const struct epoch *epoch, uint32_t node,
                      const Pb__JobStats *said)
{
    for (size_t i = 0; i < said->n_ranks; i++)
        correct_rank(p, epoch, node, said->ranks[i]);
    for (size_t i = 0; i < said->n_stalls; i++)
        p->stall_pointers[p->stats.n_stalls++] = said->stalls[i];
    for (size_t i = 0; i < said->n_links; i++)
        if (said->links[i]->from_node == node)
            p->link_pointers[p->stats.n_links++] = said->links[i];
    for (size_t i = 0; i < said->n_gpus; i++)
        p->gpu_pointers[p->stats.n_gpus++] = said->gpus[i];
    p->stats.memory_bytes += said->memory_bytes;
    p->stats.stalls_left_out += said->stalls_left_out;
    p->stats.links_left_out += said->links_left_out;
    p->stats.gpus_left_out += said->gpus_left_out;
}

static void draw_others(struct picture *p, const struct epoch *epoch)
{
    for (uint32_t node = 0; epoch->coordinator && node < n_nodes(epoch); node++) {
        const Pb__JobStats *said = figures_of(epoch, node);
        if (said)
            draw_node(p, epoch, node, said);
        /* Ranks that it left out are shown without its figures. */
        if (stats_round_is_silent(coordinator_stats(epoch->coordinator), node) ||
            (said && said->ranks_left_out > 0))
            p->silent_nodes[p->stats.n_silent_nodes++] = node;
    }
}

static void send_empty(uint64_t seq, const struct region_quota *quota,
                       void (*push)(void *data, Pb__StatsReply *reply), void *data)
{
    Pb__JobStats stats = PB__JOB_STATS__INIT;
    stats.memory_bytes = quota->used_bytes;
    Pb__StatsReply reply = PB__STATS_REPLY__INIT;
    reply.seq = seq;
    reply.stats = &stats;
    push(data, &reply);
}

void stats_reply(struct epoch *epoch, const struct region_quota *quota, uint64_t seq,
                 void (*push)(void *data, Pb__StatsReply *reply), void *data)
{
    struct picture picture = {0};
    if (!epoch || !picture_init(&picture, epoch)) {
        send_empty(seq, quota, push, data);
        picture_deinit(&picture);
        return;
    }
    draw_own(&picture, epoch, quota);
    draw_others(&picture, epoch);
    Pb__JobStats *stats = &picture.stats;
    stats->ranks = picture.rank_pointers;
    stats->stalls = picture.stall_pointers;
    stats->links = picture.link_pointers;
    stats->gpus = picture.gpu_pointers;
    stats->comms = picture.comm_pointers;
    stats->silent_nodes = picture.silent_nodes;
    struct stats_fit fit;
    stats_fit_init(&fit, stats);
    Pb__StatsReply reply = PB__STATS_REPLY__INIT;
    reply.seq = seq;
    reply.stats = &fit.stats;
    push(data, &reply);
    stats_fit_deinit(&fit);
    picture_deinit(&picture);
}
