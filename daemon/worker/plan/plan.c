/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/plan/plan.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include <uthash.h>

#include "worker/plan/process_set.h"

enum { TEXT_MAX = 640, WHO_MAX = 96, MAX_SETS = 1024 };

enum entry_state {
    ENTRY_WAITING, /* some rank has not submitted yet; on plan->waiting */
    ENTRY_GROUPED, /* every rank has submitted; other ops of its group have not; on group->ready */
    ENTRY_DECIDED, /* on plan->decided, or handed out: the caller owes plan_op_done() */
    ENTRY_OWED,    /* failed and told; kept for the ranks that have still to submit it */
};

struct entry {
    struct plan_op op; /* first: plan_op_done() gets the entry back */
    enum entry_state state;
    struct name_slot *slot;
    struct process_set *set;
    bool *accounted; /* per rank of the set: has submitted this op, or never will */
    uint32_t n_accounted;
    uint32_t first;  /* index of the rank that submitted first */
    bool is_stalled; /* reported by plan_check() */
    size_t counts_capacity;
    uint64_t *counts;
    char group[PLAN_NAME_MAX + 1];
    char text[TEXT_MAX];
    TAILQ_ENTRY(entry) in_slot;
    TAILQ_ENTRY(entry) link; /* waiting, a group's ready list, decided, or free */
};
TAILQ_HEAD(entry_list, entry);

/* What ops and groups are found by: uthash compares the set and the name's own bytes. */
struct key {
    uint32_t set;
    char name[PLAN_NAME_MAX + 1];
};

/* The ops that bear one name, oldest first. Later ones exist only behind a failed one. */
struct name_slot {
    struct key key;
    struct entry_list entries;
    UT_hash_handle hh;
    STAILQ_ENTRY(name_slot) link; /* when free */
};

struct group {
    struct key key;
    uint32_t size, n_in; /* ops in the group; those that became ready or failed */
    int status;
    char text[TEXT_MAX];
    struct entry_list ready;
    UT_hash_handle hh;
};

struct rank {
    bool is_joined; /* out of data */
    int left;       /* 0, or the status for ops that need this rank */
    char left_text[TEXT_MAX];
    char who[WHO_MAX];
};

struct plan {
    char label[PLAN_NAME_MAX + 32];
    struct plan_limits limits;
    uint32_t n_ranks;
    struct rank *ranks;
    uint32_t n_joined, last_joined;
    struct process_sets sets;
    struct name_slot *names;
    struct group *groups;
    struct entry_list waiting, decided, spare;
    STAILQ_HEAD(, name_slot) spare_names;
    uint32_t n_entries, n_waiting;
    int failed; /* plan_fail_all() */
    char failed_text[TEXT_MAX];
    char text[TEXT_MAX]; /* of the last refused submission */
};

static void fail_entry(struct plan *plan, struct entry *entry, int status, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* ------------------------------------------------------------------ entries and names */

static size_t key_bytes(const char *name)
{
    return sizeof(uint32_t) + strlen(name);
}

static void key_set(struct key *key, uint32_t set, const char *name)
{
    key->set = set;
    snprintf(key->name, sizeof key->name, "%s", name);
}

static void entry_free(struct entry *entry)
{
    free(entry->op.parts);
    free(entry->accounted);
    free(entry->counts);
    free(entry);
}

/* parts are sized for the world, so that entries can be recycled between sets. */
static struct entry *entry_new(struct plan *plan)
{
    struct entry *entry = TAILQ_FIRST(&plan->spare);
    if (entry) {
        TAILQ_REMOVE(&plan->spare, entry, link);
        return entry;
    }
    entry = calloc(1, sizeof *entry);
    if (!entry)
        return NULL;
    entry->op.parts = calloc(plan->n_ranks, sizeof *entry->op.parts);
    entry->accounted = calloc(plan->n_ranks, sizeof *entry->accounted);
    if (!entry->op.parts || !entry->accounted) {
        entry_free(entry);
        return NULL;
    }
    return entry;
}

static struct name_slot *slot_get(struct plan *plan, uint32_t set, const char *name)
{
    struct key key;
    struct name_slot *slot;
    key_set(&key, set, name);
    HASH_FIND(hh, plan->names, &key, key_bytes(name), slot);
    if (slot)
        return slot;
    slot = STAILQ_FIRST(&plan->spare_names);
    if (slot)
        STAILQ_REMOVE_HEAD(&plan->spare_names, link);
    else
        slot = calloc(1, sizeof *slot);
    if (!slot)
        return NULL;
    slot->key = key;
    TAILQ_INIT(&slot->entries);
    HASH_ADD(hh, plan->names, key, key_bytes(name), slot);
    return slot;
}

static void slot_release(struct plan *plan, struct name_slot *slot)
{
    if (!TAILQ_EMPTY(&slot->entries))
        return;
    HASH_DEL(plan->names, slot);
    STAILQ_INSERT_HEAD(&plan->spare_names, slot, link);
}

/* The entry is over for everybody: recycle it. It is on no list but its slot's. */
static void entry_release(struct plan *plan, struct entry *entry)
{
    TAILQ_REMOVE(&entry->slot->entries, entry, in_slot);
    slot_release(plan, entry->slot);
    process_set_release_entry(&plan->sets, entry->set);
    TAILQ_INSERT_HEAD(&plan->spare, entry, link);
    plan->n_entries--;
}

static bool copy_signature(struct entry *entry, const struct signature *s)
{
    if (s->n_counts > entry->counts_capacity) {
        uint64_t *counts = realloc(entry->counts, s->n_counts * sizeof *counts);
        if (!counts)
            return false;
        entry->counts = counts;
        entry->counts_capacity = s->n_counts;
    }
    if (s->n_counts)
        memcpy(entry->counts, s->counts, s->n_counts * sizeof *s->counts);
    snprintf(entry->group, sizeof entry->group, "%s", s->group);
    entry->op.signature = *s;
    entry->op.signature.counts = entry->counts;
    entry->op.signature.group = entry->group;
    return true;
}

/* A new op under a name, waiting for its ranks. NULL: out of memory. */
static struct entry *entry_open(struct plan *plan, struct process_set *set, const char *name,
                                const struct signature *signature, uint32_t index, uint64_t now_ns)
{
    struct entry *entry = entry_new(plan);
    if (!entry)
        return NULL;
    struct name_slot *slot =
        copy_signature(entry, signature) ? slot_get(plan, set->id, name) : NULL;
    if (!slot) {
        TAILQ_INSERT_HEAD(&plan->spare, entry, link);
        return NULL;
    }
    struct plan_op *op = &entry->op;
    memset(op->parts, 0, set->n_ranks * sizeof *op->parts);
    memset(entry->accounted, 0, set->n_ranks * sizeof *entry->accounted);
    op->name = slot->key.name;
    op->set = set->id;
    op->n_ranks = set->n_ranks;
    op->ranks = set->ranks;
    op->status = GRADD_OK;
    op->text = "";
    op->n_joined = 0;
    op->result = 0;
    op->first_ns = now_ns;
    op->ready_ns = now_ns;
    entry->state = ENTRY_WAITING;
    entry->slot = slot;
    entry->set = set;
    entry->n_accounted = 0;
    entry->first = index;
    entry->is_stalled = false;
    set->n_entries++;
    plan->n_entries++;
    plan->n_waiting++;
    TAILQ_INSERT_TAIL(&slot->entries, entry, in_slot);
    TAILQ_INSERT_TAIL(&plan->waiting, entry, link);
    return entry;
}

/* ------------------------------------------------------------------ groups */

static struct group *group_get(struct plan *plan, const struct entry *entry)
{
    struct key key;
    struct group *group;
    key_set(&key, entry->op.set, entry->group);
    HASH_FIND(hh, plan->groups, &key, key_bytes(key.name), group);
    if (group)
        return group;
    group = calloc(1, sizeof *group);
    if (!group)
        return NULL;
    group->key = key;
    group->size = entry->op.signature.group_size;
    TAILQ_INIT(&group->ready);
    HASH_ADD(hh, plan->groups, key, key_bytes(key.name), group);
    return group;
}

static void group_release_if_over(struct plan *plan, struct group *group)
{
    if (group->n_in < group->size)
        return;
    HASH_DEL(plan->groups, group);
    free(group);
}

/* ------------------------------------------------------------------ decisions */

static void decide(struct plan *plan, struct entry *entry)
{
    entry->state = ENTRY_DECIDED;
    TAILQ_INSERT_TAIL(&plan->decided, entry, link);
}

static void leave_waiting(struct plan *plan, struct entry *entry)
{
    TAILQ_REMOVE(&plan->waiting, entry, link);
    plan->n_waiting--;
}

static void set_failed(struct entry *entry, int status, const char *text)
{
    if (text != entry->text)
        snprintf(entry->text, sizeof entry->text, "%s", text);
    entry->op.status = status;
    entry->op.text = entry->text;
}

/* What waits for ranks in a failed group would wait in vain. */
static void fail_waiting_of_group(struct plan *plan, const struct entry *failed)
{
    struct entry *other, *next;
    for (other = TAILQ_FIRST(&plan->waiting); other; other = next) {
        next = TAILQ_NEXT(other, link);
        if (other->set == failed->set && strcmp(other->group, failed->group) == 0)
            fail_entry(plan, other, failed->op.status, "%s", failed->text);
    }
}

/* The entry's group fails with it: what the group has collected, what waits, and what will come. */
static void fail_group(struct plan *plan, struct entry *entry)
{
    struct group *group = group_get(plan, entry);
    if (!group)
        return;
    bool is_first = !group->status;
    if (is_first) {
        group->status = entry->op.status;
        snprintf(group->text, sizeof group->text, "%s", entry->text);
    }
    struct entry *other;
    while ((other = TAILQ_FIRST(&group->ready))) {
        TAILQ_REMOVE(&group->ready, other, link);
        set_failed(other, group->status, group->text);
        decide(plan, other);
    }
    group->n_in++;
    group_release_if_over(plan, group);
    if (is_first)
        fail_waiting_of_group(plan, entry);
}

/* A waiting entry fails for all: those that have submitted are told now, the others when they do.
 */
static void fail_entry(struct plan *plan, struct entry *entry, int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(entry->text, sizeof entry->text, format, args);
    va_end(args);
    set_failed(entry, status, entry->text);
    leave_waiting(plan, entry);
    for (uint32_t i = 0; plan->n_joined > 0 && i < entry->set->n_ranks; i++) {
        if (!entry->accounted[i] && plan->ranks[entry->set->ranks[i]].is_joined) {
            entry->accounted[i] = true; /* out of data: it will not submit this op */
            entry->n_accounted++;
        }
    }
    decide(plan, entry);
    if (entry->op.signature.group_size)
        fail_group(plan, entry);
}

static void add_set(struct plan *plan, struct entry *entry)
{
    const struct signature *s = &entry->op.signature;
    struct process_set *set = process_sets_find_ranks(&plan->sets, s->counts, s->n_counts);
    if (set) {
        snprintf(entry->text, sizeof entry->text, "%s: these ranks are process set %u already",
                 plan->label, set->id);
        set_failed(entry, GRADD_ERR_DUPLICATE, entry->text);
        return;
    }
    set = HASH_COUNT(plan->sets.by_id) < MAX_SETS
              ? process_sets_add(&plan->sets, s->counts, s->n_counts)
              : NULL;
    if (!set)
        set_failed(entry, GRADD_ERR_NO_MEMORY, "no memory for another process set (limit 1024)");
    else
        entry->op.result = set->id;
}

static void remove_set(struct plan *plan, struct entry *entry)
{
    struct process_set *set = process_sets_find(&plan->sets, (uint32_t)entry->op.signature.root);
    if (!set || set->id == 0) {
        snprintf(entry->text, sizeof entry->text, "%s: there is no process set %d to remove",
                 plan->label, entry->op.signature.root);
        set_failed(entry, GRADD_ERR_INVALID, entry->text);
        return;
    }
    struct entry *other, *next;
    for (other = TAILQ_FIRST(&plan->waiting); other; other = next) {
        next = TAILQ_NEXT(other, link);
        if (other->set == set)
            fail_entry(plan, other, GRADD_ERR_INVALID, "%s: \"%s\": process set %u was removed",
                       plan->label, other->op.name, set->id);
    }
    process_sets_remove(&plan->sets, set);
}

static void end_join(struct plan *plan, struct entry *entry)
{
    entry->op.result = plan->last_joined;
    plan->n_joined = 0;
    for (uint32_t r = 0; r < plan->n_ranks; r++)
        plan->ranks[r].is_joined = false;
}

/* Every rank of the set has submitted, or is out of data. */
static void on_ready(struct plan *plan, struct entry *entry)
{
    struct plan_op *op = &entry->op;
    op->n_joined = entry->set->n_ranks - entry->n_accounted;
    if (op->n_joined > 0 && op->signature.kind != GRADD_ALLREDUCE) {
        fail_entry(plan, entry, GRADD_ERR_INVALID,
                   "%s: \"%s\": %s does not work while %s has joined out of data", plan->label,
                   op->name, kind_name(op->signature.kind), plan->ranks[plan->last_joined].who);
        return;
    }
    leave_waiting(plan, entry);
    if (op->signature.kind == GRADD_SET_ADD)
        add_set(plan, entry);
    else if (op->signature.kind == GRADD_SET_REMOVE)
        remove_set(plan, entry);
    else if (op->signature.kind == GRADD_JOIN)
        end_join(plan, entry);
    if (!op->signature.group_size) {
        decide(plan, entry);
        return;
    }
    struct group *group = group_get(plan, entry);
    if (!group || group->status) {
        set_failed(entry, group ? group->status : GRADD_ERR_NO_MEMORY,
                   group ? group->text : "no memory for a group");
        decide(plan, entry);
    } else {
        entry->state = ENTRY_GROUPED;
        TAILQ_INSERT_TAIL(&group->ready, entry, link);
    }
    if (!group || ++group->n_in < group->size)
        return;
    while ((entry = TAILQ_FIRST(&group->ready))) {
        TAILQ_REMOVE(&group->ready, entry, link);
        decide(plan, entry);
    }
    group_release_if_over(plan, group);
}

static bool is_complete(const struct plan *plan, const struct entry *entry)
{
    if (entry->n_accounted == entry->set->n_ranks)
        return true;
    if (plan->n_joined == 0 || entry->op.signature.kind == GRADD_JOIN || entry->n_accounted == 0)
        return false;
    for (uint32_t i = 0; i < entry->set->n_ranks; i++)
        if (!entry->accounted[i] && !plan->ranks[entry->set->ranks[i]].is_joined)
            return false;
    return true;
}

static void mark_joined(struct plan *plan, uint32_t rank)
{
    plan->ranks[rank].is_joined = true;
    plan->n_joined++;
    plan->last_joined = rank;
    struct entry *entry, *next;
    for (entry = TAILQ_FIRST(&plan->waiting); entry; entry = next) {
        next = TAILQ_NEXT(entry, link);
        if (is_complete(plan, entry))
            on_ready(plan, entry);
    }
}

/* ------------------------------------------------------------------ submission */

static int refuse(struct plan *plan, const char **out_text, int status, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int refuse(struct plan *plan, const char **out_text, int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(plan->text, sizeof plan->text, format, args);
    va_end(args);
    *out_text = plan->text;
    return status;
}

/* What makes the request impossible whatever the others do; 0 when nothing does. */
static int check_request(struct plan *plan, uint32_t rank, const struct process_set *set,
                         uint32_t set_id, const char *name, const struct signature *s,
                         const char **out_text)
{
    if (plan->failed)
        return refuse(plan, out_text, plan->failed, "%s", plan->failed_text);
    if (!name[0] || strlen(name) > PLAN_NAME_MAX || strlen(s->group) > PLAN_NAME_MAX)
        return refuse(plan, out_text, GRADD_ERR_INVALID, "%s: a name must have 1 to %d bytes",
                      plan->label, PLAN_NAME_MAX);
    if (!set)
        return refuse(plan, out_text, GRADD_ERR_INVALID, "%s: \"%s\": there is no process set %u",
                      plan->label, name, set_id);
    if (set->index_of[rank] < 0)
        return refuse(plan, out_text, GRADD_ERR_INVALID,
                      "%s: \"%s\": rank %u is not in process set %u", plan->label, name, rank,
                      set_id);
    const char *wrong = signature_check(s, set->n_ranks);
    if (wrong)
        return refuse(plan, out_text, GRADD_ERR_INVALID, "%s: \"%s\": rank %u submitted %s",
                      plan->label, name, rank, wrong);
    if (s->kind == GRADD_BROADCAST &&
        (s->root < 0 || (uint32_t)s->root >= plan->n_ranks || set->index_of[s->root] < 0))
        return refuse(plan, out_text, GRADD_ERR_INVALID,
                      "%s: \"%s\": broadcast root %d is not a rank of process set %u", plan->label,
                      name, s->root, set_id);
    if ((s->kind == GRADD_SET_ADD || s->kind == GRADD_SET_REMOVE || s->kind == GRADD_JOIN) &&
        set_id != 0)
        return refuse(plan, out_text, GRADD_ERR_INVALID, "%s: \"%s\": %s is for all ranks",
                      plan->label, name, kind_name(s->kind));
    if (s->kind == GRADD_SET_ADD && !process_sets_ranks_valid(&plan->sets, s->counts, s->n_counts))
        return refuse(plan, out_text, GRADD_ERR_INVALID,
                      "%s: a process set is an ascending list of ranks below %u", plan->label,
                      plan->n_ranks);
    if (plan->ranks[rank].is_joined)
        return refuse(plan, out_text, GRADD_ERR_INVALID,
                      "%s: \"%s\": rank %u has joined out of data; it submits nothing until all "
                      "ranks have joined",
                      plan->label, name, rank);
    return 0;
}

/* The oldest op of this name to which the rank has not submitted yet. */
static int find_open(struct plan *plan, const struct process_set *set, uint32_t index,
                     const char *name, struct entry **out_entry, const char **out_text)
{
    struct key key;
    struct name_slot *slot;
    struct entry *entry = NULL;
    key_set(&key, set->id, name);
    HASH_FIND(hh, plan->names, &key, key_bytes(name), slot);
    if (slot) {
        TAILQ_FOREACH(entry, &slot->entries, in_slot)
        {
            if (!entry->accounted[index])
                break;
            if (entry->state != ENTRY_OWED && entry->op.parts[index].request)
                return refuse(plan, out_text, GRADD_ERR_DUPLICATE,
                              "%s: \"%s\": rank %u has an op of this name in flight already",
                              plan->label, name, set->ranks[index]);
        }
    }
    *out_entry = entry;
    return 0;
}

static void account(struct plan *plan, struct entry *entry, uint32_t index)
{
    entry->accounted[index] = true;
    entry->n_accounted++;
    if (entry->state == ENTRY_OWED && entry->n_accounted == entry->set->n_ranks)
        entry_release(plan, entry);
}

/* A rank that has left makes the op impossible. */
static int check_left(struct plan *plan, const struct process_set *set, const char *name,
                      const char **out_text)
{
    for (uint32_t i = 0; i < set->n_ranks; i++) {
        const struct rank *rank = &plan->ranks[set->ranks[i]];
        if (rank->left)
            return refuse(plan, out_text, rank->left, "%s: \"%s\": %s", plan->label, name,
                          rank->left_text);
    }
    return 0;
}

/* Rank `index` disagrees with the first: the op fails for all; this rank is told by return. */
static int disagree(struct plan *plan, struct entry *entry, uint32_t index,
                    const struct signature *s, const char **out_text)
{
    char mine[200], theirs[200];
    const struct signature *first = &entry->op.signature;
    fail_entry(plan, entry, GRADD_ERR_DISAGREE, "%s: \"%s\": %s submitted %s, %s submitted %s",
               plan->label, entry->op.name, plan->ranks[entry->set->ranks[index]].who,
               signature_describe(s, first, mine, sizeof mine),
               plan->ranks[entry->set->ranks[entry->first]].who,
               signature_describe(first, s, theirs, sizeof theirs));
    account(plan, entry, index);
    return refuse(plan, out_text, GRADD_ERR_DISAGREE, "%s", entry->text);
}

int plan_submit(struct plan *plan, uint32_t rank, uint32_t set_id, const char *name,
                const struct signature *s, void *request, uint64_t now_ns, const char **out_text)
{
    struct process_set *set = process_sets_find(&plan->sets, set_id);
    int rc = check_request(plan, rank, set, set_id, name, s, out_text);
    if (rc < 0)
        return rc;
    uint32_t index = (uint32_t)set->index_of[rank];
    struct entry *entry;
    rc = find_open(plan, set, index, name, &entry, out_text);
    if (rc < 0)
        return rc;
    if (entry && (entry->state == ENTRY_OWED || entry->op.status != GRADD_OK)) {
        rc = refuse(plan, out_text, entry->op.status, "%s", entry->text);
        account(plan, entry, index);
        return rc;
    }
    if (!entry) {
        rc = check_left(plan, set, name, out_text);
        if (rc < 0)
            return rc;
        if (plan->n_entries >= plan->limits.max_entries)
            return refuse(plan, out_text, GRADD_ERR_NO_MEMORY,
                          "%s: \"%s\": %u ops wait for other ranks already (the limit)",
                          plan->label, name, plan->n_entries);
        entry = entry_open(plan, set, name, s, index, now_ns);
        if (!entry)
            return refuse(plan, out_text, GRADD_ERR_NO_MEMORY, "%s: \"%s\": no memory", plan->label,
                          name);
    } else if (!signature_matches(s, &entry->op.signature)) {
        return disagree(plan, entry, index, s, out_text);
    }
    entry->op.parts[index] = (struct plan_part){request, now_ns, s->count, s->out_capacity};
    entry->op.ready_ns = now_ns;
    account(plan, entry, index);
    if (s->kind == GRADD_JOIN)
        mark_joined(plan, rank);
    if (entry->state == ENTRY_WAITING && is_complete(plan, entry))
        on_ready(plan, entry);
    return 0;
}

/* ------------------------------------------------------------------ results */

struct plan_op *plan_next(struct plan *plan)
{
    struct entry *entry = TAILQ_FIRST(&plan->decided);
    if (!entry)
        return NULL;
    TAILQ_REMOVE(&plan->decided, entry, link);
    return &entry->op;
}

void plan_op_done(struct plan *plan, struct plan_op *op)
{
    struct entry *entry = (struct entry *)op;
    bool is_owed =
        op->status != GRADD_OK && entry->n_accounted < entry->set->n_ranks && !plan->failed;
    entry->state = ENTRY_OWED;
    if (!is_owed)
        entry_release(plan, entry);
}

void plan_rank_left(struct plan *plan, uint32_t rank, int status, const char *text)
{
    struct rank *r = &plan->ranks[rank];
    r->left = status;
    snprintf(r->left_text, sizeof r->left_text, "%s", text);
    struct name_slot *slot, *next_slot;
    HASH_ITER(hh, plan->names, slot, next_slot)
    {
        struct entry *entry, *next;
        for (entry = TAILQ_FIRST(&slot->entries); entry; entry = next) {
            next = TAILQ_NEXT(entry, in_slot);
            int32_t index = entry->set->index_of[rank];
            if (index < 0 || entry->accounted[index])
                continue;
            if (entry->state == ENTRY_WAITING)
                fail_entry(plan, entry, status, "%s: \"%s\": %s", plan->label, entry->op.name,
                           r->left_text);
            account(plan, entry, (uint32_t)index);
        }
    }
}

void plan_fail_all(struct plan *plan, int status, const char *text)
{
    plan->failed = status;
    snprintf(plan->failed_text, sizeof plan->failed_text, "%s", text);
    struct entry *entry;
    while ((entry = TAILQ_FIRST(&plan->waiting)))
        fail_entry(plan, entry, status, "%s", plan->failed_text);
    struct group *group, *next;
    HASH_ITER(hh, plan->groups, group, next)
    {
        while ((entry = TAILQ_FIRST(&group->ready))) {
            TAILQ_REMOVE(&group->ready, entry, link);
            set_failed(entry, status, plan->failed_text);
            decide(plan, entry);
        }
        HASH_DEL(plan->groups, group);
        free(group);
    }
}

/* ------------------------------------------------------------------ stalls */

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
    fail_entry(plan, entry, GRADD_ERR_TIMEOUT,
               "%s: \"%s\": not submitted within op_timeout_s (%.3g s) by %s%s", plan->label,
               entry->op.name, (double)plan->limits.op_timeout_ns / 1e9, who,
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
        struct plan_stall stall = {.name = entry->op.name,
                                   .kind = entry->op.signature.kind,
                                   .waited_ns = now_ns - entry->op.first_ns,
                                   .is_new = !entry->is_stalled};
        if (warn_ns && stall.waited_ns >= warn_ns) {
            split_ranks(plan, entry, ranks, ranks + plan->n_ranks, &stall);
            entry->is_stalled = true;
            on_stall(data, &stall);
        } else if (warn_ns && (!next_ns || entry->op.first_ns + warn_ns < next_ns)) {
            next_ns = entry->op.first_ns + warn_ns;
        }
        if (timeout_ns && stall.waited_ns >= timeout_ns) {
            split_ranks(plan, entry, ranks, ranks + plan->n_ranks, &stall);
            fail_late(plan, entry, &stall);
        } else if (timeout_ns && (!next_ns || entry->op.first_ns + timeout_ns < next_ns)) {
            next_ns = entry->op.first_ns + timeout_ns;
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
        struct plan_stall stall = {.name = entry->op.name,
                                   .kind = entry->op.signature.kind,
                                   .waited_ns = now_ns - entry->op.first_ns};
        if (!plan->limits.stall_warn_ns || stall.waited_ns < plan->limits.stall_warn_ns)
            continue;
        split_ranks(plan, entry, ranks, ranks + plan->n_ranks, &stall);
        on_stall(data, &stall);
    }
    free(ranks);
}

uint32_t plan_n_waiting(const struct plan *plan)
{
    return plan->n_waiting;
}

/* ------------------------------------------------------------------ life */

uint32_t plan_set_ranks(const struct plan *plan, uint32_t id, const uint32_t **out_ranks)
{
    const struct process_set *set = process_sets_find(&plan->sets, id);
    *out_ranks = set ? set->ranks : NULL;
    return set ? set->n_ranks : 0;
}

void plan_describe_rank(struct plan *plan, uint32_t rank, const char *text)
{
    snprintf(plan->ranks[rank].who, WHO_MAX, "%s", text);
}

struct plan *plan_new(const char *label, uint32_t n_ranks, const struct plan_limits *limits)
{
    struct plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return NULL;
    snprintf(plan->label, sizeof plan->label, "%s", label);
    plan->limits = *limits;
    plan->n_ranks = n_ranks;
    TAILQ_INIT(&plan->waiting);
    TAILQ_INIT(&plan->decided);
    TAILQ_INIT(&plan->spare);
    STAILQ_INIT(&plan->spare_names);
    plan->ranks = calloc(n_ranks, sizeof *plan->ranks);
    if (!plan->ranks || process_sets_init(&plan->sets, n_ranks) < 0) {
        plan_free(plan);
        return NULL;
    }
    for (uint32_t r = 0; r < n_ranks; r++)
        snprintf(plan->ranks[r].who, WHO_MAX, "rank %u", r);
    return plan;
}

static void free_entries(struct entry_list *list)
{
    struct entry *entry;
    while ((entry = TAILQ_FIRST(list))) {
        TAILQ_REMOVE(list, entry, link);
        entry_free(entry);
    }
}

void plan_free(struct plan *plan)
{
    if (!plan)
        return;
    struct name_slot *slot, *next_slot;
    HASH_ITER(hh, plan->names, slot, next_slot)
    {
        struct entry *entry;
        while ((entry = TAILQ_FIRST(&slot->entries))) {
            TAILQ_REMOVE(&slot->entries, entry, in_slot);
            entry_free(entry);
        }
        HASH_DEL(plan->names, slot);
        free(slot);
    }
    while ((slot = STAILQ_FIRST(&plan->spare_names))) {
        STAILQ_REMOVE_HEAD(&plan->spare_names, link);
        free(slot);
    }
    struct group *group, *next_group;
    HASH_ITER(hh, plan->groups, group, next_group)
    {
        HASH_DEL(plan->groups, group);
        free(group);
    }
    free_entries(&plan->spare);
    process_sets_deinit(&plan->sets);
    free(plan->ranks);
    free(plan);
}
