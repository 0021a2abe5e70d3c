/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who decides what runs: the plan here, or that of the coordinator elsewhere. Joins the one or the
 * other to the execution of ops and to what members submit.
 */
#include "base/clock.h"
#include "worker/central.h"
#include "worker/coordinator.h"
#include "worker/epoch_internal.h"
#include "worker/follower.h"

enum {
    ENTRIES_PER_RANK = 4, /* ops waiting or owed, as a multiple of max_in_flight */
    BATCH_MAX = 256,      /* ops */
};

static void on_exec_flush(void *data)
{
    epoch_settle(data);
}

static size_t on_exec_batch(void *data, struct plan_op *const *ops, size_t n)
{
    struct epoch *epoch = data;
    return epoch->coordinator ? coordinator_execute(epoch->coordinator, ops, n) : n;
}

static bool on_exec_counted(void *data, const struct plan_op *op, uint32_t rank, uint64_t count)
{
    struct epoch *epoch = data;
    const struct layout *layout = epoch->layout;
    uint32_t i = 0;
    while (i < op->n_ranks && layout->node_of[op->ranks[i]] != layout->node_rank)
        i++;
    if (i == op->n_ranks)
        return false; /* only other nodes have ranks in it */
    if (epoch->follower)
        follower_count(epoch->follower, op->finite_check, rank, count);
    else
        coordinator_count(epoch->coordinator, 0, op->finite_check, rank, count);
    return true;
}

static bool on_exec_is_central(void *data, const struct plan_op *op)
{
    const struct epoch *epoch = data;
    return epoch->coordinator && central_takes(op);
}

static const struct exec_ops exec_ops_single = {.on_flush = on_exec_flush};
static const struct exec_ops exec_ops_nodes = {.on_flush = on_exec_flush,
                                               .is_central = on_exec_is_central,
                                               .on_batch = on_exec_batch,
                                               .on_counted = on_exec_counted};

static struct plan_op *next_of_plan(void *data)
{
    struct epoch *epoch = data;
    return epoch->coordinator ? coordinator_next(epoch->coordinator) : plan_next(epoch->plan);
}

static void done_to_plan(void *data, struct plan_op *op)
{
    plan_op_done(((struct epoch *)data)->plan, op);
}

static struct plan_op *next_of_follower(void *data)
{
    return follower_next(data);
}

static void done_to_follower(void *data, struct plan_op *op)
{
    follower_op_done(data, op);
}

/* The ranks of other nodes, as the coordinator's plan sees them. */
static void add_remote_members(struct epoch *epoch)
{
    const struct layout *layout = epoch->layout;
    for (uint32_t rank = 0; rank < epoch->size; rank++) {
        if (layout->node_of[rank] == layout->node_rank)
            continue;
        struct member *member = &epoch->members[epoch->n_members++];
        member_init_remote(member, epoch, rank);
        epoch->of_rank[rank] = member;
        epoch_describe_to_plan(epoch, member);
    }
}

bool epoch_open_order(struct epoch *epoch)
{
    const struct epoch_setup *setup = epoch->setup;
    const struct layout *layout = epoch->layout;
    struct exec_source source = {.batch_max = BATCH_MAX, .batch_bytes = setup->fusion_bytes};
    if (layout && layout->node_rank != 0) {
        epoch->follower = follower_new(epoch);
        source.next = next_of_follower;
        source.done = done_to_follower;
        source.data = epoch->follower;
        source.batch_max = SIZE_MAX; /* the coordinator has cut them */
        source.batch_bytes = UINT64_MAX;
    } else {
        const struct plan_limits limits = {
            .max_entries = setup->max_in_flight * ENTRIES_PER_RANK,
            .stall_warn_ns = setup->stall_warn_ns,
            .op_timeout_ns = setup->op_timeout_ns,
        };
        epoch->plan = plan_new(epoch->label, epoch->size, &limits);
        source.next = next_of_plan;
        source.done = done_to_plan;
        source.data = epoch;
    }
    if (!epoch->plan && !epoch->follower)
        return false;
    if (epoch->plan && layout) {
        epoch->coordinator = coordinator_new(epoch);
        if (!epoch->coordinator)
            return false;
        add_remote_members(epoch);
    }
    epoch->exec = exec_new(&source, layout ? &exec_ops_nodes : &exec_ops_single, epoch);
    return epoch->exec;
}

int epoch_submit(struct epoch *epoch, struct member *member, uint32_t set, const char *name,
                 const struct signature *signature, struct request *request, const char **out_text)
{
    if (epoch->follower)
        return follower_submit(epoch->follower, member, set, name, signature, request, out_text);
    return plan_submit(epoch->plan, member->rank, set, name, signature, request, clock_now_ns(),
                       out_text);
}

uint32_t epoch_set_ranks(const struct epoch *epoch, uint32_t set, const uint32_t **out_ranks)
{
    return epoch->follower ? follower_set_ranks(epoch->follower, set, out_ranks)
                           : plan_set_ranks(epoch->plan, set, out_ranks);
}
