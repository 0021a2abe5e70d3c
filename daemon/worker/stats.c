/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/stats.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "worker/backend/net/net.h"

enum { STALLS_MAX = 64 }; /* reported at once; more are counted by StallNotice */

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
    Pb__Stall *pointers[STALLS_MAX];
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
    list->pointers[list->n++] = message;
}

struct link_list {
    struct net_link_stats stats[NET_NODES_MAX];
    Pb__LinkStats messages[NET_NODES_MAX];
    Pb__LinkStats *pointers[NET_NODES_MAX];
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
        list->pointers[i] = message;
    }
    return list;
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
    Pb__RankStats *ranks = epoch ? calloc(epoch->size, sizeof *ranks) : NULL;
    Pb__RankStats **pointers = epoch ? calloc(epoch->size, sizeof *pointers) : NULL;
    struct stall_list *stalls = epoch ? calloc(1, sizeof *stalls) : NULL;
    if (!ranks || !pointers || !stalls) {
        send_empty(seq, quota, push, data);
        free(ranks);
        free(pointers);
        free(stalls);
        return;
    }
    for (uint32_t i = 0; i < epoch->n_members; i++) {
        fill_rank(epoch, &epoch->members[i], &ranks[i]);
        pointers[i] = &ranks[i];
    }
    if (epoch->plan)
        plan_list_stalls(epoch->plan, clock_now_ns(), add_stall, stalls);
    exec_list_stalls(epoch->exec, clock_now_ns(), epoch->setup->stall_warn_ns, add_stall, stalls);
    const struct exec_stats *exec = exec_stats(epoch->exec);
    Pb__JobStats stats = PB__JOB_STATS__INIT;
    stats.ranks = pointers;
    stats.n_ranks = epoch->n_members;
    stats.stalls = stalls->pointers;
    stats.n_stalls = stalls->n;
    stats.ops = exec->ops;
    stats.bytes = exec->bytes;
    stats.batches = exec->batches;
    stats.memory_bytes = quota->used_bytes;
    struct link_list *links = list_links(epoch);
    if (links) {
        stats.links = links->pointers;
        stats.n_links = links->n;
    }
    stats.wait_us = exec->wait_us;
    stats.run_us = exec->run_us;
    Pb__StatsReply reply = PB__STATS_REPLY__INIT;
    reply.seq = seq;
    reply.stats = &stats;
    push(data, &reply);
    for (size_t i = 0; i < stalls->n; i++) {
        free(stalls->messages[i].missing);
        free(stalls->messages[i].present);
    }
    free(links);
    free(stalls);
    free(pointers);
    free(ranks);
}
