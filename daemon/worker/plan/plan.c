/* SPDX-License-Identifier: Apache-2.0 */
/* Decisions: submissions are matched, compared, decided and handed out. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/plan/plan_state.h"

/* ------------------------------------------------------------------ decisions */

void entry_decide(struct plan *plan, struct entry *entry)
{
    entry->state = ENTRY_DECIDED;
    for (uint32_t i = 0; i < entry->n_ops; i++) {
        entry->ops[i]->op.status = entry->status;
        entry->ops[i]->op.text = entry->status == GRADD_OK ? "" : entry->text;
    }
    TAILQ_INSERT_TAIL(&plan->decided, entry, link);
}

static void leave_waiting(struct plan *plan, struct entry *entry)
{
    TAILQ_REMOVE(&plan->waiting, entry, link);
    plan->n_waiting--;
}

/* A waiting entry fails for all: those that have submitted are told now, the others when they do.
 */
void entry_fail(struct plan *plan, struct entry *entry, int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(entry->text, sizeof entry->text, format, args);
    va_end(args);
    entry->status = status;
    leave_waiting(plan, entry);
    for (uint32_t i = 0; plan->n_joined > 0 && i < entry->set->n_ranks; i++) {
        if (!entry->accounted[i] && plan->ranks[entry->set->ranks[i]].is_joined) {
            entry->accounted[i] = true; /* out of data: it will not submit this op */
            entry->n_accounted++;
        }
    }
    entry_decide(plan, entry);
}

void entry_set_failed(struct entry *entry, int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(entry->text, sizeof entry->text, format, args);
    va_end(args);
    entry->status = status;
}

static void add_set(struct plan *plan, struct entry *entry)
{
    struct plan_op *op = &entry->ops[0]->op;
    const struct signature *s = &op->signature;
    struct process_set *set = process_sets_find_ranks(&plan->sets, s->counts, s->n_counts);
    if (set) {
        entry_set_failed(entry, GRADD_ERR_DUPLICATE, "%s: these ranks are process set %u already",
                         plan->label, set->id);
        return;
    }
    set = HASH_COUNT(plan->sets.by_id) < MAX_SETS
              ? process_sets_add(&plan->sets, s->counts, s->n_counts)
              : NULL;
    if (set)
        op->result = set->id;
    else
        entry_set_failed(entry, GRADD_ERR_NO_MEMORY,
                         "%s: no memory for another process set (the limit is %d)", plan->label,
                         MAX_SETS);
}

static void remove_set(struct plan *plan, struct entry *entry)
{
    const int32_t id = entry->ops[0]->op.signature.root;
    struct process_set *set = process_sets_find(&plan->sets, (uint32_t)id);
    if (!set || set->id == 0) {
        entry_set_failed(entry, GRADD_ERR_INVALID, "%s: there is no process set %d to remove",
                         plan->label, id);
        return;
    }
    struct entry *other, *next;
    for (other = TAILQ_FIRST(&plan->waiting); other; other = next) {
        next = TAILQ_NEXT(other, link);
        if (other->set == set)
            entry_fail(plan, other, GRADD_ERR_INVALID, "%s: \"%s\": process set %u was removed",
                       plan->label, other->slot->key.name, set->id);
    }
    process_sets_remove(&plan->sets, set);
}

static void end_join(struct plan *plan, struct entry *entry)
{
    entry->ops[0]->op.result = plan->last_joined;
    plan->n_joined = 0;
    for (uint32_t r = 0; r < plan->n_ranks; r++)
        plan->ranks[r].is_joined = false;
}

/* Ops that work while a rank is out of data: those in which it can count as zeros. */
static const struct plan_op *find_unjoinable(const struct entry *entry)
{
    for (uint32_t i = 0; i < entry->n_ops; i++)
        if (entry->ops[i]->op.signature.kind != GRADD_ALLREDUCE)
            return &entry->ops[i]->op;
    return NULL;
}

/* Every rank of the set has submitted, or is out of data. */
static void on_ready(struct plan *plan, struct entry *entry)
{
    const uint32_t n_joined = entry->set->n_ranks - entry->n_accounted;
    const struct plan_op *wrong = n_joined > 0 ? find_unjoinable(entry) : NULL;
    if (wrong) {
        entry_fail(plan, entry, GRADD_ERR_INVALID,
                   "%s: \"%s\": %s does not work while %s has joined out of data", plan->label,
                   wrong->name, kind_name(wrong->signature.kind),
                   plan->ranks[plan->last_joined].who);
        return;
    }
    for (uint32_t i = 0; i < entry->n_ops; i++)
        entry->ops[i]->op.n_joined = n_joined;
    leave_waiting(plan, entry);
    switch (entry->ops[0]->op.signature.kind) {
    case GRADD_SET_ADD:
        add_set(plan, entry);
        break;
    case GRADD_SET_REMOVE:
        remove_set(plan, entry);
        break;
    case GRADD_JOIN:
        end_join(plan, entry);
        break;
    default:
        break;
    }
    entry_decide(plan, entry);
}

static bool is_complete(const struct plan *plan, const struct entry *entry)
{
    if (entry->n_accounted == entry->set->n_ranks)
        return true;
    if (plan->n_joined == 0 || entry->ops[0]->op.signature.kind == GRADD_JOIN)
        return false;
    for (uint32_t i = 0; i < entry->set->n_ranks; i++)
        if (!entry->accounted[i] && !plan->ranks[entry->set->ranks[i]].is_joined)
            return false;
    return true;
}

static void account(struct plan *plan, struct entry *entry, uint32_t index);

/* Failures that the rank was still to hear of: it will not submit those ops. */
static void forgive_owed(struct plan *plan, uint32_t rank)
{
    struct name_slot *slot, *next_slot;
    HASH_ITER(hh, plan->names, slot, next_slot)
    {
        struct entry *entry, *next;
        for (entry = TAILQ_FIRST(&slot->entries); entry; entry = next) {
            next = TAILQ_NEXT(entry, in_slot);
            int32_t index = entry->set->index_of[rank];
            bool is_failed = entry->state == ENTRY_OWED || entry->status != GRADD_OK;
            if (is_failed && index >= 0 && !entry->accounted[index])
                account(plan, entry, (uint32_t)index);
        }
    }
}

static void mark_joined(struct plan *plan, uint32_t rank)
{
    forgive_owed(plan, rank);
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

int plan_refuse(struct plan *plan, const char **out_text, int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(plan->text, sizeof plan->text, format, args);
    va_end(args);
    *out_text = plan->text;
    return status;
}

static bool is_for_all(enum gradd_kind kind)
{
    return kind == GRADD_SET_ADD || kind == GRADD_SET_REMOVE || kind == GRADD_JOIN;
}

/* What makes the request impossible whatever the others do; 0 when nothing does. */
int plan_check_request(struct plan *plan, uint32_t rank, const struct process_set *set,
                       uint32_t set_id, const char *name, const struct signature *s,
                       const char **out_text)
{
    if (plan->failed)
        return plan_refuse(plan, out_text, plan->failed, "%s", plan->failed_text);
    if (!name[0] || strlen(name) > PLAN_NAME_MAX || strlen(s->group) > PLAN_NAME_MAX)
        return plan_refuse(plan, out_text, GRADD_ERR_INVALID, "%s: a name must have 1 to %d bytes",
                           plan->label, PLAN_NAME_MAX);
    if (!set)
        return plan_refuse(plan, out_text, GRADD_ERR_INVALID,
                           "%s: \"%s\": there is no process set %u", plan->label, name, set_id);
    if (set->index_of[rank] < 0)
        return plan_refuse(plan, out_text, GRADD_ERR_INVALID,
                           "%s: \"%s\": rank %u is not in process set %u", plan->label, name, rank,
                           set_id);
    const char *wrong = signature_check(s, set->n_ranks);
    if (wrong)
        return plan_refuse(plan, out_text, GRADD_ERR_INVALID, "%s: \"%s\": rank %u submitted %s",
                           plan->label, name, rank, wrong);
    if (s->kind == GRADD_BROADCAST &&
        (s->root < 0 || (uint32_t)s->root >= plan->n_ranks || set->index_of[s->root] < 0))
        return plan_refuse(plan, out_text, GRADD_ERR_INVALID,
                           "%s: \"%s\": broadcast root %d is not a rank of process set %u",
                           plan->label, name, s->root, set_id);
    if (is_for_all(s->kind) && (set_id != 0 || s->group_size > 0))
        return plan_refuse(plan, out_text, GRADD_ERR_INVALID,
                           "%s: \"%s\": %s is for all ranks and stands alone", plan->label, name,
                           kind_name(s->kind));
    if (s->kind == GRADD_SET_ADD && !process_sets_ranks_valid(&plan->sets, s->counts, s->n_counts))
        return plan_refuse(plan, out_text, GRADD_ERR_INVALID,
                           "%s: a process set is an ascending list of ranks below %u", plan->label,
                           plan->n_ranks);
    if (plan->ranks[rank].is_joined)
        return plan_refuse(
            plan, out_text, GRADD_ERR_INVALID,
            "%s: \"%s\": rank %u has joined out of data; it submits nothing until all "
            "ranks have joined",
            plan->label, name, rank);
    return 0;
}

/* The oldest entry of this name to which the rank has not submitted yet. */
static int find_open(struct plan *plan, const struct process_set *set, uint32_t index,
                     const char *name, struct entry **out_entry, const char **out_text)
{
    struct name_slot *slot = slot_find(plan, set->id, name);
    struct entry *entry = NULL;
    if (slot) {
        TAILQ_FOREACH(entry, &slot->entries, in_slot)
        {
            if (!entry->accounted[index])
                break;
            if (entry->state != ENTRY_OWED && entry->ops[0]->op.parts[index].request)
                return plan_refuse(plan, out_text, GRADD_ERR_DUPLICATE,
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
            return plan_refuse(plan, out_text, rank->left, "%s: \"%s\": %s", plan->label, name,
                               rank->left_text);
    }
    return 0;
}

/* Write how the rank's ops differ from the entry's; false when they do not. */
static bool find_difference(const struct plan *plan, const struct entry *entry, uint32_t index,
                            const struct item *items, uint32_t n, char *text, size_t bytes)
{
    const char *who = plan->ranks[entry->set->ranks[index]].who;
    const char *first_who = plan->ranks[entry->set->ranks[entry->first]].who;
    char mine[200], theirs[200];
    if (n != entry->n_ops) {
        snprintf(text, bytes, "%s: \"%s\": %s submitted a group of %u op%s, %s of %u", plan->label,
                 entry->slot->key.name, who, n, n == 1 ? "" : "s", first_who, entry->n_ops);
        return true;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_op *first = &entry->ops[i]->op;
        const struct signature *s = &items[i].signature;
        if (strcmp(first->name, items[i].name) != 0) {
            snprintf(text, bytes, "%s: group \"%s\": %s submitted \"%s\" as op %u, %s \"%s\"",
                     plan->label, entry->slot->key.name, who, items[i].name, i, first_who,
                     first->name);
            return true;
        }
        if (!signature_matches(s, &first->signature)) {
            snprintf(text, bytes, "%s: \"%s\": %s submitted %s, %s submitted %s", plan->label,
                     first->name, who, signature_describe(s, &first->signature, mine, sizeof mine),
                     first_who, signature_describe(&first->signature, s, theirs, sizeof theirs));
            return true;
        }
    }
    return false;
}

/* Find or open the entry that the rank's ops belong to. On refusal the rank is accounted for, and
 * there is no entry. */
static int match(struct plan *plan, struct process_set *set, uint32_t index, const char *name,
                 const struct item *items, uint32_t n, uint64_t now_ns, struct entry **out_entry,
                 const char **out_text)
{
    struct entry *entry = NULL;
    int rc = find_open(plan, set, index, name, &entry, out_text);
    if (rc < 0)
        return rc;
    if (entry && entry->status != GRADD_OK) {
        rc = plan_refuse(plan, out_text, entry->status, "%s", entry->text);
        account(plan, entry, index);
        return rc;
    }
    if (entry) {
        char text[TEXT_MAX];
        if (find_difference(plan, entry, index, items, n, text, sizeof text)) {
            entry_fail(plan, entry, GRADD_ERR_DISAGREE, "%s", text);
            account(plan, entry, index);
            return plan_refuse(plan, out_text, GRADD_ERR_DISAGREE, "%s", text);
        }
        *out_entry = entry;
        return 0;
    }
    rc = check_left(plan, set, name, out_text);
    if (rc < 0)
        return rc;
    if (n > plan->limits.max_entries || plan->n_ops > plan->limits.max_entries - n)
        return plan_refuse(plan, out_text, GRADD_ERR_NO_MEMORY,
                           "%s: \"%s\": %u ops wait for other ranks already (the limit)",
                           plan->label, name, plan->n_ops);
    entry = entry_open(plan, set, items, n, index, now_ns);
    struct name_slot *slot = entry ? slot_get(plan, set->id, name) : NULL;
    if (!slot) {
        if (entry)
            entry_release(plan, entry);
        return plan_refuse(plan, out_text, GRADD_ERR_NO_MEMORY, "%s: \"%s\": no memory",
                           plan->label, name);
    }
    entry->slot = slot;
    entry->state = ENTRY_WAITING;
    TAILQ_INSERT_TAIL(&slot->entries, entry, in_slot);
    TAILQ_INSERT_TAIL(&plan->waiting, entry, link);
    plan->n_waiting++;
    *out_entry = entry;
    return 0;
}

/* The rank submits n ops under one name: its own, or the group's. */
int plan_submit_items(struct plan *plan, uint32_t rank, struct process_set *set, const char *name,
                      const struct item *items, uint32_t n, uint64_t now_ns, const char **out_text)
{
    uint32_t index = (uint32_t)set->index_of[rank];
    struct entry *entry = NULL;
    int rc = match(plan, set, index, name, items, n, now_ns, &entry, out_text);
    if (!entry)
        return rc;
    entry_set_parts(entry, index, items, now_ns);
    account(plan, entry, index);
    if (items[0].signature.kind == GRADD_JOIN)
        mark_joined(plan, rank);
    if (entry->state == ENTRY_WAITING && is_complete(plan, entry))
        on_ready(plan, entry);
    return 0;
}

int plan_submit(struct plan *plan, uint32_t rank, uint32_t set_id, const char *name,
                const struct signature *s, void *request, uint64_t now_ns, const char **out_text)
{
    struct process_set *set = process_sets_find(&plan->sets, set_id);
    if (s->group_size > 0 && s->group[0])
        return group_submit(plan, rank, set, set_id, name, s, request, now_ns, out_text);
    int rc = plan_check_request(plan, rank, set, set_id, name, s, out_text);
    if (rc < 0)
        return rc;
    const struct item item = {.name = name, .signature = *s, .request = request};
    return plan_submit_items(plan, rank, set, name, &item, 1, now_ns, out_text);
}

/* ------------------------------------------------------------------ results */

struct plan_op *plan_next(struct plan *plan)
{
    struct entry *entry = TAILQ_FIRST(&plan->decided);
    if (!entry)
        return NULL;
    struct plan_op *op = &entry->ops[entry->n_out++]->op;
    op->n_following = entry->n_ops - entry->n_out;
    if (op->n_following == 0)
        TAILQ_REMOVE(&plan->decided, entry, link);
    return op;
}

void plan_op_detach(struct plan *plan, struct plan_op *op)
{
    entry_detach(plan, ((struct entry_op *)op)->entry);
}

void plan_op_done(struct plan *plan, struct plan_op *op)
{
    struct entry *entry = ((struct entry_op *)op)->entry;
    if (++entry->n_done < entry->n_ops)
        return;
    bool is_owed =
        entry->status != GRADD_OK && entry->n_accounted < entry->set->n_ranks && !plan->failed;
    entry->state = ENTRY_OWED;
    if (!is_owed)
        entry_release(plan, entry);
}

void plan_rank_left(struct plan *plan, uint32_t rank, int status, const char *text)
{
    struct rank *r = &plan->ranks[rank];
    r->left = status;
    snprintf(r->left_text, sizeof r->left_text, "%s", text);
    group_fail(plan, rank, status, text);
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
                entry_fail(plan, entry, status, "%s: \"%s\": %s", plan->label, slot->key.name,
                           r->left_text);
            account(plan, entry, (uint32_t)index);
        }
    }
}

void plan_fail_all(struct plan *plan, int status, const char *text)
{
    plan->failed = status;
    snprintf(plan->failed_text, sizeof plan->failed_text, "%s", text);
    struct entry *entry = NULL;
    while ((entry = TAILQ_FIRST(&plan->waiting)))
        entry_fail(plan, entry, status, "%s", plan->failed_text);
    for (uint32_t r = 0; r < plan->n_ranks; r++)
        group_fail(plan, r, status, plan->failed_text);
}

/* ------------------------------------------------------------------ life */

uint32_t plan_n_waiting(const struct plan *plan)
{
    return plan->n_waiting;
}

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
    struct entry *entry, *next;
    for (entry = TAILQ_FIRST(&plan->decided); entry; entry = next) {
        next = TAILQ_NEXT(entry, link);
        if (!entry->slot) /* the others are freed by their slots */
            entry_free(entry);
    }
    struct name_slot *slot, *next_slot, *names = plan->names;
    HASH_CLEAR(hh, plan->names);
    HASH_ITER(hh, names, slot, next_slot)
    {
        while ((entry = TAILQ_FIRST(&slot->entries))) {
            TAILQ_REMOVE(&slot->entries, entry, in_slot);
            entry_free(entry);
        }
        free(slot);
    }
    while ((slot = STAILQ_FIRST(&plan->spare_names))) {
        STAILQ_REMOVE_HEAD(&plan->spare_names, link);
        free(slot);
    }
    free_entries(&plan->spare);
    process_sets_deinit(&plan->sets);
    for (uint32_t r = 0; plan->ranks && r < plan->n_ranks; r++)
        group_clear(&plan->ranks[r].assembly);
    free(plan->ranks);
    free(plan);
}
