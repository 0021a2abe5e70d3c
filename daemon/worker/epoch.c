/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of an epoch: its members come, ops run in turns, members go, it is retired.
 */
#include "worker/epoch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "worker/backend/nccl/nccl.h"
#include "worker/backend/net/net.h"
#include "worker/coordinator.h"
#include "worker/epoch_internal.h"
#include "worker/follower.h"
#include "worker/mesh.h"

void epoch_describe_member(const struct epoch *epoch, const struct member *member, char *text,
                           size_t bytes)
{
    const char *node = epoch->layout ? epoch->layout->nodes[member->node].name : epoch->setup->node;
    snprintf(text, bytes, "rank %u (node %.40s, pid %d)", member->rank, node, member->pid);
}

void epoch_describe_to_plan(const struct epoch *epoch, const struct member *member)
{
    char text[96];
    epoch_describe_member(epoch, member, text, sizeof text);
    if (epoch->plan)
        plan_describe_rank(epoch->plan, member->rank, text);
}

struct epoch *epoch_new(const struct epoch_setup *setup, uint64_t number, uint32_t size,
                        uint32_t n_local, struct layout *take_layout)
{
    struct epoch *epoch = calloc(1, sizeof *epoch);
    if (!epoch) {
        layout_free(take_layout);
        return NULL;
    }
    epoch->setup = setup;
    epoch->number = number;
    epoch->size = size;
    epoch->n_local = n_local;
    epoch->layout = take_layout;
    epoch->device_path = setup->devices && (!take_layout || take_layout->device_path);
    snprintf(epoch->label, sizeof epoch->label, "job %s", setup->job);
    epoch->members = calloc(size, sizeof *epoch->members);
    epoch->of_rank = calloc(size, sizeof(*epoch->of_rank));
    epoch->stall_timer = watch_timer(setup->loop, epoch_on_stall_timer, epoch);
    epoch->lost_timer = watch_timer(setup->loop, epoch_on_lost_timer, epoch);
    if (!epoch->members || !epoch->of_rank || !epoch->stall_timer || !epoch->lost_timer ||
        !epoch_open_order(epoch) || !epoch_open_device_backend(epoch)) {
        epoch_free(epoch);
        return NULL;
    }
    if (!epoch->layout) {
        exec_set_backend(epoch->exec, setup->backend_ops, setup->backend, NULL);
    } else if (!epoch_open_links(epoch)) {
        epoch_free(epoch);
        return NULL;
    }
    return epoch;
}

void epoch_free(struct epoch *epoch)
{
    if (!epoch)
        return;
    mesh_free(epoch->mesh);
    if (epoch->net)
        backend_net.free(epoch->net);
    backend_nccl.free(epoch->device);
    exec_free(epoch->exec);
    plan_free(epoch->plan);
    coordinator_free(epoch->coordinator);
    follower_free(epoch->follower);
    /* Last: all of the above point to their requests. */
    for (uint32_t i = 0; epoch->members && i < epoch->n_members; i++)
        member_deinit(&epoch->members[i]);
    watch_free(epoch->stall_timer);
    watch_free(epoch->lost_timer);
    free(epoch->members);
    free(epoch->of_rank);
    layout_free(epoch->layout);
    free(epoch);
}

void epoch_start_members(struct epoch *epoch)
{
    for (uint32_t i = 0; i < epoch->n_members; i++)
        member_start(&epoch->members[i]);
}

int epoch_add_member(struct epoch *epoch, const struct epoch_member *who, int take_fd)
{
    const struct layout *layout = epoch->layout;
    if (who->rank >= epoch->size || epoch->of_rank[who->rank] || epoch->n_added == epoch->n_local ||
        (layout && layout->node_of[who->rank] != layout->node_rank)) {
        close(take_fd);
        return -EINVAL;
    }
    struct member *member = &epoch->members[epoch->n_members];
    int rc = member_init(member, epoch, who->rank, take_fd);
    if (rc < 0)
        return rc;
    epoch->of_rank[who->rank] = member;
    epoch->n_members++;
    epoch->n_added++;
    member->local_rank = who->local_rank;
    member->pid = who->pid;
    member->uid = who->uid;
    member->node = layout ? layout->node_rank : 0;
    snprintf(member->source, sizeof member->source, "%s", who->source);
    epoch_describe_to_plan(epoch, member);
    if (!layout || epoch->net || epoch->failure.status)
        member_start(member);
    return 0;
}

struct member *epoch_remote_member(struct epoch *epoch, uint32_t rank, uint32_t node)
{
    struct member *member = rank < epoch->size ? epoch->of_rank[rank] : NULL;
    return member && member->is_remote && member->node == node ? member : NULL;
}

bool epoch_node_has_left(const struct epoch *epoch, uint32_t node)
{
    for (uint32_t i = 0; i < epoch->n_members; i++)
        if (epoch->members[i].node == node && epoch->members[i].state != MEMBER_LEFT)
            return false;
    return true;
}

void epoch_on_rank_left(struct epoch *epoch, struct member *member, const char *text)
{
    if (member->is_remote && member->state == MEMBER_ACTIVE) {
        member->state = MEMBER_LEFT;
        epoch->n_remote_left++;
        epoch_check_over(epoch);
    }
    if (epoch->plan)
        plan_rank_left(epoch->plan, member->rank, GRADD_ERR_RANK_LOST, text);
    else
        follower_rank_left(epoch->follower, member->rank, text);
    epoch_turn(epoch);
}

void epoch_flush_members(struct epoch *epoch)
{
    /* Other nodes first: they are farther away. */
    if (epoch->coordinator)
        coordinator_flush(epoch->coordinator);
    if (epoch->follower)
        follower_flush(epoch->follower);
    for (uint32_t i = 0; i < epoch->n_members; i++)
        member_flush(&epoch->members[i]);
}

void epoch_turn(struct epoch *epoch)
{
    if (epoch->is_turning)
        return;
    epoch->is_turning = true;
    exec_turn(epoch->exec);
    epoch_await_cause(epoch);
    epoch_flush_members(epoch);
    epoch_announce_failure(epoch); /* it may have come up in this turn */
    epoch->is_turning = false;
    if (!epoch->is_retired)
        epoch_watch_stalls(epoch);
}

void epoch_settle(struct epoch *epoch)
{
    epoch_await_cause(epoch);
    epoch_flush_members(epoch);
    epoch_announce_failure(epoch);
    epoch_check_idle(epoch);
}

bool epoch_is_over(const struct epoch *epoch)
{
    return epoch->n_gone == epoch->n_local &&
           (epoch->n_remote_left == epoch->n_members - epoch->n_added || epoch->failure.status);
}

void epoch_check_over(struct epoch *epoch)
{
    if (epoch_is_over(epoch))
        epoch->setup->on_over(epoch->setup->data);
}

bool epoch_is_idle(const struct epoch *epoch)
{
    return exec_is_idle(epoch->exec) && !epoch_is_draining(epoch);
}

void epoch_check_idle(struct epoch *epoch)
{
    if (epoch->is_retired && epoch_is_idle(epoch))
        epoch->setup->on_over(epoch->setup->data);
}

void epoch_retire(struct epoch *epoch)
{
    if (epoch->is_retired)
        return;
    for (uint32_t i = 0; i < epoch->n_members; i++)
        if (epoch->members[i].conn)
            conn_drain(epoch->members[i].conn);
    epoch->is_retired = true;
    exec_turn(epoch->exec);
    epoch_fail_waiting(epoch, GRADD_ERR_RANK_LOST, "the job has begun another epoch");
    for (uint32_t i = 0; i < epoch->n_members; i++) {
        member_flush(&epoch->members[i]);
        member_disconnect(&epoch->members[i], epoch->members[i].state);
    }
    watch_disarm(epoch->stall_timer);
    watch_disarm(epoch->lost_timer);
}
