/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How an epoch fails: what is lost waits for the daemons, who know better why; then what can still
 * end ends, and the members are told the one cause.
 *
 * Invariant: the first failure is the epoch's; members hear of it once, after the last op that ran.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "worker/backend/nccl/nccl.h"
#include "worker/backend/net/net.h"
#include "worker/coordinator.h"
#include "worker/epoch_internal.h"
#include "worker/follower.h"

enum {
    /* The daemon watches the process itself and knows better how it ended: wait that long. */
    LOST_GRACE_MS = 200,
    LOST_LINK_GRACE_MS = 500, /* the daemon asks another node's */
};

static const uint64_t ms = 1000000;

/* The coordinator's daemon knows best why, and tells; ops that the link broke wait for that. */
void epoch_link_lost(struct epoch *epoch, uint32_t node, const char *text)
{
    if (epoch->is_retired || epoch->failure.status)
        return;
    bool is_waiting = watch_is_armed(epoch->lost_timer);
    if (!epoch->lost_link[0] || !is_waiting) {
        snprintf(epoch->lost_link, sizeof epoch->lost_link, "node %s lost node %s: %.150s",
                 epoch->setup->node, epoch->layout->nodes[node].name, text);
        epoch->lost_node = node;
    }
    if (!is_waiting)
        watch_arm(epoch->lost_timer, LOST_LINK_GRACE_MS * ms);
    epoch->setup->on_link_lost(epoch->setup->data, epoch->number, node, text);
}

void epoch_suspect_device(struct epoch *epoch, const char *sentence)
{
    if (!epoch->lost_device[0])
        snprintf(epoch->lost_device, sizeof epoch->lost_device, "%s", sentence);
    if (!watch_is_armed(epoch->lost_timer))
        watch_arm(epoch->lost_timer, LOST_LINK_GRACE_MS * ms);
}

void epoch_await_cause(struct epoch *epoch)
{
    if (epoch->awaits_cause || epoch->failure.status || !exec_has_broken(epoch->exec))
        return;
    epoch->awaits_cause = true;
    if (!watch_is_armed(epoch->lost_timer))
        watch_arm(epoch->lost_timer, LOST_LINK_GRACE_MS * ms);
}

void epoch_announce_failure(struct epoch *epoch)
{
    if (!epoch->failure.status || epoch->failure.is_announced || !exec_is_idle(epoch->exec))
        return;
    epoch->failure.is_announced = true;
    for (uint32_t i = 0; i < epoch->n_members; i++)
        member_push_failed(&epoch->members[i], epoch->number, epoch->failure.status,
                           epoch->failure.text, epoch->failure.rank, epoch->failure.pid);
    epoch_flush_members(epoch);
    epoch->setup->on_over(epoch->setup->data);
    if (epoch->is_broken)
        epoch->setup->on_broken(epoch->setup->data);
}

void epoch_fail_waiting(struct epoch *epoch, int status, const char *text)
{
    if (epoch->plan)
        plan_fail_all(epoch->plan, status, text);
    if (epoch->follower)
        follower_fail_all(epoch->follower, status, text);
    exec_abort(epoch->exec, status, text);
    if (epoch->net)
        net_abort(epoch->net, status, text);
    if (epoch->device && (epoch->failure.status || !exec_is_idle(epoch->exec)))
        nccl_abort(epoch->device, status, text);
    exec_turn(epoch->exec);
}

void epoch_fail(struct epoch *epoch, int status, const char *text, int rank, int pid)
{
    if (epoch->failure.status)
        return;
    exec_turn(epoch->exec);      /* what all ranks have submitted runs to its end */
    if (epoch->failure.status) { /* it could not begin */
        epoch_announce_failure(epoch);
        return;
    }
    epoch->failure.status = status;
    epoch->failure.rank = rank;
    epoch->failure.pid = pid;
    snprintf(epoch->failure.text, sizeof epoch->failure.text, "%s", text);
    watch_disarm(epoch->lost_timer);
    log_line(LOG_LEVEL_DEBUG, "epoch",
             &(struct log_fields){.job = epoch->setup->job,
                                  .epoch = epoch->number,
                                  .has_rank = rank >= 0,
                                  .rank = rank,
                                  .pid = pid},
             "failed: %s", text); /* the daemon logs it for the operator */
    epoch_fail_waiting(epoch, status, text);
    for (uint32_t i = 0; i < epoch->n_members; i++)
        if (epoch->members[i].state == MEMBER_ENDED)
            epoch->members[i].state = MEMBER_LOST;
    if (epoch->coordinator)
        coordinator_close(epoch->coordinator);
    if (epoch->follower)
        follower_close(epoch->follower);
    epoch_flush_members(epoch);
    epoch_announce_failure(epoch);
    epoch_start_members(epoch); /* the links may not stand yet, and members leave all the same */
    epoch_check_over(epoch);    /* who is left may be on other nodes only */
}

void epoch_fail_by_device(struct epoch *epoch, int status, const char *text)
{
    epoch->setup->on_failed(epoch->setup->data, epoch->number, status, text);
    epoch_fail(epoch, status, text, -1, 0);
}

void epoch_fail_here(struct epoch *epoch, int status, const char *text)
{
    char sentence[640];
    snprintf(sentence, sizeof sentence, "%s epoch %llu: worker (node %.80s, pid %d): %s",
             epoch->label, (unsigned long long)epoch->number, epoch->setup->node, (int)getpid(),
             text);
    epoch_fail_by_device(epoch, status, sentence);
}

/* "D", "S", "Z", … of a process, or 0 when there is none. */
static char process_state(int pid)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    char *end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return end && end[1] == ' ' ? end[2] : 0;
}

static void describe_loss(const struct epoch *epoch, const struct member *member,
                          const char *reason, char *text, size_t bytes)
{
    char who[96];
    char state = member->pid > 0 ? process_state(member->pid) : 0;
    epoch_describe_member(epoch, member, who, sizeof who);
    if (reason[0])
        snprintf(text, bytes, "%s: %s was cut off: %s", epoch->label, who, reason);
    else if (state == 0 || state == 'Z')
        snprintf(text, bytes, "%s: %s ended without leaving the job", epoch->label, who);
    else
        snprintf(text, bytes, "%s: %s closed its connection without leaving the job", epoch->label,
                 who);
}

/* A node whose ranks have all left in order takes its links with it, and nobody misses them. */
static bool needs_lost_node(const struct epoch *epoch)
{
    if (exec_has_broken(epoch->exec))
        return true;
    if (!epoch->lost_link[0])
        return false;
    /* The coordinator knows who has left, be it a moment after the link was lost. */
    return epoch->coordinator ? !epoch_node_has_left(epoch, epoch->lost_node)
                              : !epoch->net || epoch->lost_node == 0;
}

void epoch_on_lost_timer(void *data)
{
    struct epoch *epoch = data;
    for (uint32_t i = 0; i < epoch->n_members; i++) {
        struct member *member = &epoch->members[i];
        if (member->state != MEMBER_ENDED)
            continue;
        char text[400];
        describe_loss(epoch, member, "", text, sizeof text);
        epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, (int)member->rank, member->pid);
        return;
    }
    if (epoch->lost_device[0]) {
        epoch_fail_by_device(epoch, GRADD_ERR_RANK_LOST, epoch->lost_device);
    } else if (needs_lost_node(epoch)) {
        char text[640];
        snprintf(text, sizeof text, "%s epoch %llu: %s", epoch->label,
                 (unsigned long long)epoch->number,
                 epoch->lost_link[0] ? epoch->lost_link
                 : epoch->layout     ? "the links between its nodes are gone"
                                     : "an op ended without its data, and nobody has said why");
        epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, -1, 0);
    }
}

void epoch_on_daemon_gone(struct epoch *epoch)
{
    if (!epoch->mesh || epoch->net)
        return; /* one node, or the links stand */
    char text[400];
    snprintf(text, sizeof text,
             "%s epoch %llu: the daemon of node %s was gone before the links to other nodes stood",
             epoch->label, (unsigned long long)epoch->number, epoch->setup->node);
    epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, -1, 0);
}

/* The member's connection is over and what it has sent has been taken. */
static void member_is_gone(struct epoch *epoch, struct member *member, enum member_state state,
                           int status, const char *text)
{
    member_disconnect(member, state);
    epoch->n_gone++;
    epoch->setup->on_member_gone(epoch->setup->data, epoch->number, member, status, text);
    epoch_check_over(epoch);
}

void epoch_on_member_closed(struct epoch *epoch, struct member *member, const char *reason)
{
    char text[400] = "";
    if (member->state == MEMBER_LEFT) {
        char who[96];
        epoch_describe_member(epoch, member, who, sizeof who);
        snprintf(text, sizeof text, "%s has left the job", who);
        member_is_gone(epoch, member, MEMBER_LEFT, GRADD_OK, "");
        epoch_on_rank_left(epoch, member, text);
        return;
    }
    describe_loss(epoch, member, reason, text, sizeof text);
    bool is_cut = reason[0];
    member_is_gone(epoch, member, is_cut ? MEMBER_LOST : MEMBER_ENDED, GRADD_ERR_RANK_LOST, text);
    if (epoch->failure.status || epoch->is_retired)
        return;
    if (is_cut)
        epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, (int)member->rank, member->pid);
    else
        watch_arm(epoch->lost_timer, LOST_GRACE_MS * ms);
}
