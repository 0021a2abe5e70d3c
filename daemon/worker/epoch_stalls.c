/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What waits too long, for a rank, for its data or for another node's: reported with the names to
 * log and daemon, and failed after op_timeout_s.
 */
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "worker/backend/net/net.h"
#include "worker/epoch_internal.h"

static const uint64_t ms = 1000000, second = 1000000000;

static uint64_t look_interval(const struct epoch_setup *setup)
{
    uint64_t interval = second;
    if (setup->stall_warn_ns && setup->stall_warn_ns / 2 < interval)
        interval = setup->stall_warn_ns / 2;
    if (setup->op_timeout_ns && setup->op_timeout_ns / 4 < interval)
        interval = setup->op_timeout_ns / 4;
    return interval < 5 * ms ? 5 * ms : interval;
}

void epoch_watch_stalls(struct epoch *epoch)
{
    bool is_waiting = (epoch->plan && plan_n_waiting(epoch->plan) > 0) || epoch->n_stalled > 0 ||
                      exec_has_starved(epoch->exec) || (epoch->net && net_is_busy(epoch->net));
    if (!is_waiting || watch_is_armed(epoch->stall_timer))
        return;
    watch_arm(epoch->stall_timer, look_interval(epoch->setup));
}

struct stall_report {
    struct epoch *epoch;
    uint32_t n_stalled;
    bool has_new;
    char text[512];
};

static void log_stall(struct stall_report *report, const char *topic)
{
    const struct epoch *epoch = report->epoch;
    report->has_new = true;
    log_line(LOG_LEVEL_WARNING, topic,
             &(struct log_fields){.job = epoch->setup->job, .epoch = epoch->number}, "%s",
             report->text);
}

/* The member of a rank, or NULL. */
static const struct member *find_member(const struct epoch *epoch, uint32_t rank)
{
    for (uint32_t i = 0; i < epoch->n_members; i++)
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
            epoch_describe_member(epoch, member, one, sizeof one);
        used += (size_t)snprintf(who + used, sizeof who - used, "%s%s", i ? ", " : "", one);
    }
    snprintf(report->text, sizeof report->text, "%s: \"%.150s\": %s waits for %s since %.3g s",
             epoch->label, stall->name, kind_name(stall->kind), who,
             (double)stall->waited_ns / 1e9);
    log_stall(report, "plan");
}

static void warn_of_link(struct stall_report *report, const struct net_stall *stall)
{
    const struct epoch *epoch = report->epoch;
    snprintf(report->text, sizeof report->text,
             "%s: the data connection to node %s has moved nothing since %.3g s (%s)", epoch->label,
             epoch->layout->nodes[stall->node].name, (double)stall->waited_ns / 1e9, stall->text);
    log_stall(report, "net");
}

static void give_up_link(struct epoch *epoch, const struct net_stall *stall)
{
    char text[200];
    snprintf(text, sizeof text, "nothing moved for %.3g s (op_timeout_s), %s",
             (double)stall->waited_ns / 1e9, stall->text);
    net_give_up(epoch->net, stall->node, text);
}

/*
 * The daemons hear each other and a peer's kernel answers, and still no data comes: then a link
 * that only looks alive holds up every op, and every node waits. Who cannot be sure that it is its
 * own link leaves the word to the others, by as much as their looks may be apart.
 */
static void check_links(struct stall_report *report, uint64_t now_ns)
{
    struct epoch *epoch = report->epoch;
    const uint64_t warn = epoch->setup->stall_warn_ns, timeout = epoch->setup->op_timeout_ns;
    struct net_stall stall;
    if (!epoch->net || !net_find_stall(epoch->net, now_ns, &stall)) {
        epoch->is_link_late = false;
        return;
    }
    if (warn && stall.waited_ns >= warn) {
        report->n_stalled++;
        if (!epoch->is_link_late)
            warn_of_link(report, &stall);
        epoch->is_link_late = true;
    }
    const uint64_t grace = stall.is_sure ? 0 : 2 * look_interval(epoch->setup);
    if (timeout && stall.waited_ns >= timeout + grace)
        give_up_link(epoch, &stall);
}

void epoch_on_stall_timer(void *data)
{
    struct epoch *epoch = data;
    struct stall_report report = {.epoch = epoch};
    const uint64_t now = clock_now_ns();
    if (epoch->plan)
        plan_check(epoch->plan, now, on_stall, &report);
    exec_check(epoch->exec, now, epoch->setup->stall_warn_ns, epoch->setup->op_timeout_ns, on_stall,
               &report);
    check_links(&report, now);
    epoch_turn(epoch);
    if (report.has_new || report.n_stalled != epoch->n_stalled) {
        epoch->n_stalled = report.n_stalled;
        epoch->setup->on_stall(epoch->setup->data, epoch->number, report.n_stalled, report.text);
    }
    epoch_watch_stalls(epoch);
}
