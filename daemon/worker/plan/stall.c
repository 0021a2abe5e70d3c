/* SPDX-License-Identifier: Apache-2.0 */
/* What has waited too long, for whom; and its failure after op_timeout. */
#include <stdio.h>
#include <stdlib.h>

#include "worker/plan/plan_state.h"

/* Split an entry's ranks; the arrays belong to the caller and hold n_ranks each. */
static void split_ranks(const struct plan *plan, const struct entry *entry, uint32_t *missing,
                        uint32_t *present, struct plan_stall *stall)
{
    stall->n_missing = stall->n_present = 0;
    for (uint32_t i = 0; i < entry->set->n_ranks; i++) {
        uint32_t rank = entry->set->ranks[i];
        if (entry->accounted[i])
            present[stall->n_present++] = rank;
        else if (!plan->ranks[rank].is_joined)
            missing[stall->n_missing++] = rank;
    }
    stall->missing = missing;
    stall->present = present;
}

static void fail_late(struct plan *plan, struct entry *entry, const struct plan_stall *stall)
{
    char who[320] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < stall->n_missing && used + WHO_MAX + 16 < sizeof who; i++)
        used += (size_t)snprintf(who + used, sizeof who - used, "%s%s", i ? ", " : "",
                                 plan->ranks[stall->missing[i]].who);
    entry_fail(plan, entry, GRADD_ERR_TIMEOUT,
               "%s: \"%s\": not submitted within op_timeout_s (%.3g s) by %s%s", plan->label,
               entry->slot->key.name, (double)plan->limits.op_timeout_ns / 1e9, who,
               stall->n_missing > 3 ? ", …" : "");
}

uint64_t plan_check(struct plan *plan, uint64_t now_ns, plan_stall_fn *on_stall, void *data)
{
    const uint64_t warn_ns = plan->limits.stall_warn_ns, timeout_ns = plan->limits.op_timeout_ns;
    uint64_t next_ns = 0;
    uint32_t *ranks = TAILQ_EMPTY(&plan->waiting) ? NULL : calloc(plan->n_ranks, 2 * sizeof *ranks);
    struct entry *entry, *next;
    for (entry = TAILQ_FIRST(&plan->waiting); ranks && entry; entry = next) {
        next = TAILQ_NEXT(entry, link);
        struct plan_stall stall = {.name = entry->slot->key.name,
                                   .kind = entry->ops[0]->op.signature.kind,
                                   .waited_ns = now_ns - entry->first_ns,
                                   .is_new = !entry->is_stalled};
        if (warn_ns && stall.waited_ns >= warn_ns) {
            split_ranks(plan, entry, ranks, ranks + plan->n_ranks, &stall);
            entry->is_stalled = true;
            on_stall(data, &stall);
        } else if (warn_ns && (!next_ns || entry->first_ns + warn_ns < next_ns)) {
            next_ns = entry->first_ns + warn_ns;
        }
        if (timeout_ns && stall.waited_ns >= timeout_ns) {
            split_ranks(plan, entry, ranks, ranks + plan->n_ranks, &stall);
            fail_late(plan, entry, &stall);
        } else if (timeout_ns && (!next_ns || entry->first_ns + timeout_ns < next_ns)) {
            next_ns = entry->first_ns + timeout_ns;
        }
    }
    free(ranks);
    return next_ns;
}

void plan_list_stalls(const struct plan *plan, uint64_t now_ns, plan_stall_fn *on_stall, void *data)
{
    uint32_t *ranks = TAILQ_EMPTY(&plan->waiting) ? NULL : calloc(plan->n_ranks, 2 * sizeof *ranks);
    const struct entry *entry;
    if (!ranks)
        return;
    TAILQ_FOREACH(entry, &plan->waiting, link)
    {
        struct plan_stall stall = {.name = entry->slot->key.name,
                                   .kind = entry->ops[0]->op.signature.kind,
                                   .waited_ns = now_ns - entry->first_ns};
        if (!plan->limits.stall_warn_ns || stall.waited_ns < plan->limits.stall_warn_ns)
            continue;
        split_ranks(plan, entry, ranks, ranks + plan->n_ranks, &stall);
        on_stall(data, &stall);
    }
    free(ranks);
}
