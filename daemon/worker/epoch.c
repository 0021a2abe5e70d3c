/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/epoch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

enum {
    /* The daemon watches the process itself and knows better how it ended: wait that long. */
    LOST_GRACE_MS = 200,
    ENTRIES_PER_RANK = 4, /* ops waiting or owed, as a multiple of max_in_flight */
};

static const uint64_t ms = 1000000, second = 1000000000;

static void on_stall_timer(void *data);
static void on_lost_timer(void *data);
static void on_exec_flush(void *data);

struct epoch *epoch_new(const struct epoch_setup *setup, uint64_t number, uint32_t size)
{
    struct epoch *epoch = calloc(1, sizeof *epoch);
    if (!epoch)
        return NULL;
    epoch->setup = setup;
    epoch->number = number;
    epoch->size = size;
    snprintf(epoch->label, sizeof epoch->label, "job %s", setup->job);
    const struct plan_limits limits = {
        .max_entries = setup->max_in_flight * ENTRIES_PER_RANK,
        .stall_warn_ns = setup->stall_warn_ns,
        .op_timeout_ns = setup->op_timeout_ns,
    };
    epoch->members = calloc(size, sizeof *epoch->members);
    epoch->plan = plan_new(epoch->label, size, &limits);
    epoch->exec = epoch->plan ? exec_new(epoch->plan, setup->backend_ops, setup->backend,
                                         on_exec_flush, epoch)
                              : NULL;
    epoch->stall_timer = watch_timer(setup->loop, on_stall_timer, epoch);
    epoch->lost_timer = watch_timer(setup->loop, on_lost_timer, epoch);
    if (!epoch->members || !epoch->exec || !epoch->stall_timer || !epoch->lost_timer) {
        epoch_free(epoch);
        return NULL;
    }
    return epoch;
}

void epoch_free(struct epoch *epoch)
{
    if (!epoch)
        return;
    for (uint32_t i = 0; epoch->members && i < epoch->n_added; i++)
        member_deinit(&epoch->members[i]);
    exec_free(epoch->exec);
    plan_free(epoch->plan);
    watch_free(epoch->stall_timer);
    watch_free(epoch->lost_timer);
    free(epoch->members);
    free(epoch);
}

static void describe_member(const struct epoch *epoch, const struct member *member, char *text,
                            size_t bytes)
{
    snprintf(text, bytes, "rank %u (node %.40s, pid %d)", member->rank, epoch->setup->node,
             member->pid);
}

int epoch_add_member(struct epoch *epoch, const struct epoch_member *who, int take_fd)
{
    bool is_taken = who->rank >= epoch->size || epoch->n_added == epoch->size;
    for (uint32_t i = 0; i < epoch->n_added; i++)
        is_taken |= epoch->members[i].rank == who->rank;
    if (is_taken) {
        close(take_fd);
        return -EINVAL;
    }
    struct member *member = &epoch->members[epoch->n_added];
    int rc = member_init(member, epoch, who->rank, take_fd);
    if (rc < 0)
        return rc;
    epoch->n_added++;
    member->local_rank = who->local_rank;
    member->pid = who->pid;
    member->uid = who->uid;
    snprintf(member->source, sizeof member->source, "%s", who->source);
    char text[96];
    describe_member(epoch, member, text, sizeof text);
    plan_describe_rank(epoch->plan, member->rank, text);
    return 0;
}

/* ------------------------------------------------------------------ turns */

static void flush_members(struct epoch *epoch)
{
    for (uint32_t i = 0; i < epoch->n_added; i++)
        member_flush(&epoch->members[i]);
}

/* Something waits: look at it when it would become late, and every second while it is. */
static void watch_stalls(struct epoch *epoch)
{
    if ((plan_n_waiting(epoch->plan) == 0 && epoch->n_stalled == 0) ||
        watch_is_armed(epoch->stall_timer))
        return;
    uint64_t delay = second;
    const uint64_t warn = epoch->setup->stall_warn_ns, timeout = epoch->setup->op_timeout_ns;
    if (warn && warn / 2 < delay)
        delay = warn / 2;
    if (timeout && timeout / 2 < delay)
        delay = timeout / 2;
    watch_arm(epoch->stall_timer, delay < 5 * ms ? 5 * ms : delay);
}

void epoch_turn(struct epoch *epoch)
{
    if (epoch->is_turning)
        return;
    epoch->is_turning = true;
    exec_turn(epoch->exec);
    flush_members(epoch);
    epoch->is_turning = false;
    if (!epoch->is_retired)
        watch_stalls(epoch);
}

static void announce_failure(struct epoch *epoch);

static void on_exec_flush(void *data)
{
    struct epoch *epoch = data;
    flush_members(epoch);
    announce_failure(epoch);
    if (epoch->is_retired && epoch_is_idle(epoch))
        epoch->setup->on_over(epoch->setup->data);
}

/* ------------------------------------------------------------------ stalls */

struct stall_report {
    struct epoch *epoch;
    uint32_t n_stalled;
    bool has_new;
    char text[512];
};

/* The member of a rank, or NULL. */
static const struct member *find_member(const struct epoch *epoch, uint32_t rank)
{
    for (uint32_t i = 0; i < epoch->n_added; i++)
        if (epoch->members[i].rank == rank)
            return &epoch->members[i];
    return NULL;
}

static void on_stall(void *data, const struct plan_stall *stall)
{
    struct stall_report *report = data;
    struct epoch *epoch = report->epoch;
    report->n_stalled++;
    if (!stall->is_new)
        return;
    char who[300] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < stall->n_missing && used + 100 < sizeof who; i++) {
        char one[96] = "";
        const struct member *member = find_member(epoch, stall->missing[i]);
        if (member)
            describe_member(epoch, member, one, sizeof one);
        used += (size_t)snprintf(who + used, sizeof who - used, "%s%s", i ? ", " : "", one);
    }
    report->has_new = true;
    snprintf(report->text, sizeof report->text, "%s: \"%.150s\": %s waits for %s since %.3g s",
             epoch->label, stall->name, kind_name(stall->kind), who,
             (double)stall->waited_ns / 1e9);
    log_line(LOG_LEVEL_WARNING, "plan",
             &(struct log_fields){.job = epoch->setup->job, .epoch = epoch->number}, "%s",
             report->text);
}

static void on_stall_timer(void *data)
{
    struct epoch *epoch = data;
    struct stall_report report = {.epoch = epoch};
    plan_check(epoch->plan, clock_now_ns(), on_stall, &report);
    epoch_turn(epoch);
    if (report.has_new || report.n_stalled != epoch->n_stalled) {
        epoch->n_stalled = report.n_stalled;
        epoch->setup->on_stall(epoch->setup->data, epoch->number, report.n_stalled, report.text);
    }
    watch_stalls(epoch);
}

/* ------------------------------------------------------------------ ends */

/* Tell the members, once what still ran has been told. */
static void announce_failure(struct epoch *epoch)
{
    if (!epoch->failure.status || epoch->failure.is_announced || !exec_is_idle(epoch->exec))
        return;
    epoch->failure.is_announced = true;
    for (uint32_t i = 0; i < epoch->n_added; i++)
        member_push_failed(&epoch->members[i], epoch->number, epoch->failure.status,
                           epoch->failure.text, epoch->failure.rank, epoch->failure.pid);
    flush_members(epoch);
}

void epoch_fail(struct epoch *epoch, int status, const char *text, int rank, int pid)
{
    if (epoch->failure.status)
        return;
    exec_turn(epoch->exec); /* what all ranks have submitted runs to its end */
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
    plan_fail_all(epoch->plan, status, text);
    exec_abort(epoch->exec, status, text);
    exec_turn(epoch->exec);
    for (uint32_t i = 0; i < epoch->n_added; i++)
        if (epoch->members[i].state == MEMBER_ENDED)
            epoch->members[i].state = MEMBER_LOST;
    flush_members(epoch);
    announce_failure(epoch);
}

/* The member's connection is over and what it has sent has been taken. */
static void member_is_gone(struct epoch *epoch, struct member *member, enum member_state state,
                           int status, const char *text)
{
    member_disconnect(member, state);
    epoch->n_gone++;
    epoch->setup->on_member_gone(epoch->setup->data, epoch->number, member, status, text);
    if (epoch->n_gone == epoch->n_added && epoch->n_added == epoch->size)
        epoch->setup->on_over(epoch->setup->data);
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
    describe_member(epoch, member, who, sizeof who);
    if (reason[0])
        snprintf(text, bytes, "%s: %s was cut off: %s", epoch->label, who, reason);
    else if (state == 0 || state == 'Z')
        snprintf(text, bytes, "%s: %s ended without leaving the job", epoch->label, who);
    else
        snprintf(text, bytes, "%s: %s closed its connection without leaving the job", epoch->label,
                 who);
}

/* The daemon has said nothing: fail with what can be seen from here. */
static void on_lost_timer(void *data)
{
    struct epoch *epoch = data;
    for (uint32_t i = 0; i < epoch->n_added; i++) {
        struct member *member = &epoch->members[i];
        if (member->state != MEMBER_ENDED)
            continue;
        char text[400];
        describe_loss(epoch, member, "", text, sizeof text);
        epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, (int)member->rank, member->pid);
        return;
    }
}

void epoch_on_member_closed(struct epoch *epoch, struct member *member, const char *reason)
{
    char text[400] = "";
    if (member->state == MEMBER_LEFT) {
        char who[96];
        describe_member(epoch, member, who, sizeof who);
        snprintf(text, sizeof text, "%s has left the job", who);
        member_is_gone(epoch, member, MEMBER_LEFT, GRADD_OK, "");
        plan_rank_left(epoch->plan, member->rank, GRADD_ERR_RANK_LOST, text);
        epoch_turn(epoch);
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

void epoch_retire(struct epoch *epoch)
{
    if (epoch->is_retired)
        return;
    for (uint32_t i = 0; i < epoch->n_added; i++)
        if (epoch->members[i].conn)
            conn_drain(epoch->members[i].conn);
    epoch->is_retired = true;
    exec_turn(epoch->exec);
    plan_fail_all(epoch->plan, GRADD_ERR_RANK_LOST, "the job has begun another epoch");
    exec_abort(epoch->exec, GRADD_ERR_RANK_LOST, "the job has begun another epoch");
    exec_turn(epoch->exec);
    for (uint32_t i = 0; i < epoch->n_added; i++) {
        member_flush(&epoch->members[i]);
        member_disconnect(&epoch->members[i], epoch->members[i].state);
    }
    watch_disarm(epoch->stall_timer);
    watch_disarm(epoch->lost_timer);
}

bool epoch_is_idle(const struct epoch *epoch)
{
    return exec_is_idle(epoch->exec);
}
