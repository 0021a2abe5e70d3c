/* SPDX-License-Identifier: Apache-2.0 */
/* Entries and the names by which they are found; both are recycled, not freed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/plan/plan_state.h"

static size_t key_bytes(const char *name)
{
    return sizeof(uint32_t) + strlen(name);
}

static void key_set(struct key *key, uint32_t set, const char *name)
{
    key->set = set;
    snprintf(key->name, sizeof key->name, "%s", name);
}

static void entry_op_free(struct entry_op *op)
{
    free(op->parts);
    free(op->counts);
    free(op);
}

void entry_free(struct entry *entry)
{
    for (uint32_t i = 0; i < entry->ops_capacity; i++)
        entry_op_free(entry->ops[i]);
    free(entry->ops);
    free(entry->accounted);
    free(entry);
}

static struct entry_op *entry_op_new(uint32_t n_ranks)
{
    struct entry_op *op = calloc(1, sizeof *op);
    if (!op)
        return NULL;
    op->parts = calloc(n_ranks, sizeof *op->parts);
    if (!op->parts) {
        free(op);
        return NULL;
    }
    return op;
}

static bool entry_reserve_ops(const struct plan *plan, struct entry *entry, uint32_t n)
{
    if (n <= entry->ops_capacity)
        return true;
    struct entry_op **ops = realloc(entry->ops, n * sizeof *ops);
    if (!ops)
        return false;
    entry->ops = ops;
    while (entry->ops_capacity < n) {
        struct entry_op *op = entry_op_new(plan->n_ranks);
        if (!op)
            return false;
        entry->ops[entry->ops_capacity++] = op;
    }
    return true;
}

/* An unused entry with room for n ops. NULL: out of memory. */
static struct entry *entry_new(struct plan *plan, uint32_t n)
{
    struct entry *entry = TAILQ_FIRST(&plan->spare);
    if (entry) {
        TAILQ_REMOVE(&plan->spare, entry, link);
    } else {
        entry = calloc(1, sizeof *entry);
        if (!entry)
            return NULL;
        entry->accounted = calloc(plan->n_ranks, sizeof *entry->accounted);
        if (!entry->accounted) {
            entry_free(entry);
            return NULL;
        }
    }
    if (!entry_reserve_ops(plan, entry, n)) {
        TAILQ_INSERT_HEAD(&plan->spare, entry, link);
        return NULL;
    }
    return entry;
}

struct name_slot *slot_find(const struct plan *plan, uint32_t set, const char *name)
{
    struct key key;
    struct name_slot *slot;
    key_set(&key, set, name);
    HASH_FIND(hh, plan->names, &key, key_bytes(name), slot);
    return slot;
}

struct name_slot *slot_get(struct plan *plan, uint32_t set, const char *name)
{
    struct name_slot *slot = slot_find(plan, set, name);
    if (slot)
        return slot;
    slot = STAILQ_FIRST(&plan->spare_names);
    if (slot)
        STAILQ_REMOVE_HEAD(&plan->spare_names, link);
    else
        slot = calloc(1, sizeof *slot);
    if (!slot)
        return NULL;
    key_set(&slot->key, set, name);
    TAILQ_INIT(&slot->entries);
    HASH_ADD(hh, plan->names, key, key_bytes(name), slot);
    return slot;
}

/* The entry is over for everybody: recycle it. It is on no list but its slot's. */
void entry_detach(struct plan *plan, struct entry *entry)
{
    struct name_slot *slot = entry->slot;
    if (!slot)
        return;
    entry->slot = NULL;
    TAILQ_REMOVE(&slot->entries, entry, in_slot);
    if (TAILQ_EMPTY(&slot->entries)) {
        HASH_DEL(plan->names, slot);
        STAILQ_INSERT_HEAD(&plan->spare_names, slot, link);
    }
}

void entry_release(struct plan *plan, struct entry *entry)
{
    entry_detach(plan, entry);
    process_set_release_entry(&plan->sets, entry->set);
    plan->n_ops -= entry->n_ops;
    TAILQ_INSERT_HEAD(&plan->spare, entry, link);
}

static bool copy_signature(struct entry_op *op, const struct signature *s)
{
    if (s->n_counts > op->counts_capacity) {
        uint64_t *counts = realloc(op->counts, s->n_counts * sizeof *counts);
        if (!counts)
            return false;
        op->counts = counts;
        op->counts_capacity = s->n_counts;
    }
    if (s->n_counts)
        memcpy(op->counts, s->counts, s->n_counts * sizeof *s->counts);
    op->op.signature = *s;
    op->op.signature.counts = op->counts;
    op->op.signature.dims = op->dims;
    if (s->n_dims)
        memcpy(op->dims, s->dims, s->n_dims * sizeof *s->dims);
    op->op.signature.group = "";
    return true;
}

static bool fill_op(struct entry *entry, struct entry_op *op, const struct item *item,
                    uint64_t now_ns)
{
    const struct process_set *set = entry->set;
    memset(op->parts, 0, set->n_ranks * sizeof *op->parts);
    snprintf(op->name, sizeof op->name, "%s", item->name);
    op->entry = entry;
    op->op = (struct plan_op){
        .name = op->name,
        .set = set->id,
        .status = GRADD_OK,
        .text = "",
        .n_ranks = set->n_ranks,
        .ranks = set->ranks,
        .parts = op->parts,
        .first_ns = now_ns,
        .ready_ns = now_ns,
    };
    return copy_signature(op, &item->signature);
}

/* An entry with these ops, no rank accounted, on no list. NULL: out of memory. */
struct entry *entry_open(struct plan *plan, struct process_set *set, const struct item *items,
                         uint32_t n, uint32_t index, uint64_t now_ns)
{
    struct entry *entry = entry_new(plan, n);
    if (!entry)
        return NULL;
    entry->set = set;
    entry->slot = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (!fill_op(entry, entry->ops[i], &items[i], now_ns)) {
            TAILQ_INSERT_HEAD(&plan->spare, entry, link);
            return NULL;
        }
    }
    memset(entry->accounted, 0, set->n_ranks * sizeof *entry->accounted);
    entry->n_ops = n;
    entry->n_out = entry->n_done = entry->n_accounted = 0;
    entry->first = index;
    entry->first_ns = now_ns;
    entry->status = GRADD_OK;
    entry->is_stalled = false;
    set->n_entries++;
    plan->n_ops += n;
    return entry;
}

void entry_set_parts(struct entry *entry, uint32_t index, const struct item *items, uint64_t now_ns)
{
    for (uint32_t i = 0; i < entry->n_ops; i++) {
        struct plan_op *op = &entry->ops[i]->op;
        const struct signature *s = &items[i].signature;
        op->parts[index] = (struct plan_part){
            .request = items[i].request,
            .arrived_ns = now_ns,
            .count = s->count,
            .out_capacity = s->out_capacity,
        };
        op->ready_ns = now_ns;
    }
}
