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

void epoch_watch_stalls(struct epoch *epoch)
{
    bool is_waiting = (epoch->plan && plan_n_waiting(epoch->plan) > 0) || epoch->n_stalled > 0 ||
                      exec_has_starved(epoch->exec) || (epoch->net && net_is_busy(epoch->net));
    if (!is_waiting || watch_is_armed(epoch->stall_timer))
        return;
    uint64_t delay = second;
    const uint64_t warn = epoch->setup->stall_warn_ns, timeout = epoch->setup->op_timeout_ns;
    if (warn && warn / 2 < delay)
        delay = warn / 2;
    if (timeout && timeout / 4 < delay)
        delay = timeout / 4;
    watch_arm(epoch->stall_timer, delay < 5 * ms ? 5 * ms : delay);
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

/* The daemons hear each other and a peer's kernel answers, and still no data comes: then a link
 * that only looks alive holds up every op. */
static void check_links(struct stall_report *report, uint64_t now_ns)
{
    struct epoch *epoch = report->epoch;
    const uint64_t warn = epoch->setup->stall_warn_ns, timeout = epoch->setup->op_timeout_ns;
    struct net_stall stall;
    bool is_late = false;
    if (epoch->net && net_find_stall(epoch->net, now_ns, &stall)) {
        const double waited_s = (double)stall.waited_ns / 1e9;
        is_late = warn && stall.waited_ns >= warn;
        report->n_stalled += is_late;
        if (is_late && !epoch->is_link_late) {
            snprintf(report->text, sizeof report->text,
                     "%s: the data connection to node %s has moved nothing since %.3g s (%s)",
                     epoch->label, epoch->layout->nodes[stall.node].name, waited_s, stall.text);
            log_stall(report, "net");
        }
        if (timeout && stall.waited_ns >= timeout) {
            char text[160];
            snprintf(text, sizeof text, "nothing moved for %.3g s (op_timeout_s), %s", waited_s,
                     stall.text);
            net_give_up(epoch->net, stall.node, text);
        }
    }
    epoch->is_link_late = is_late;
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
