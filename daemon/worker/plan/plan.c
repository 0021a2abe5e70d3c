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
    ENTRY_DECIDED, /* on plan->decided, or handed out: the caller owes plan_op_done() */
    ENTRY_OWED,    /* failed and told; kept for the ranks that have still to submit it */
};

/* One op of an entry, with the memory that its plan_op points to. */
struct entry_op {
    struct plan_op op; /* first: plan_op_done() gets back to it */
    struct entry *entry;
    char name[PLAN_NAME_MAX + 1];
    uint64_t *counts;
    size_t counts_capacity;
    struct plan_part *parts; /* [n_ranks of the world], so that entries can be recycled */
};

/* What ranks are matched on: one op, or the ops of a group. */
struct entry {
    enum entry_state state;
    struct name_slot *slot; /* NULL: one rank's refused group, found by nobody */
    struct process_set *set;
    uint32_t n_ops, n_out, n_done; /* ops; handed out by plan_next(); ended */
    struct entry_op **ops;
    uint32_t ops_capacity; /* of `ops`; those beyond n_ops are kept for reuse */
    bool *accounted;       /* per rank of the set: has submitted, or never will */
    uint32_t n_accounted;
    uint32_t first; /* index of the rank that submitted first */
    uint64_t first_ns;
    int status;
    bool is_stalled; /* reported by plan_check() */
    char text[TEXT_MAX];
    TAILQ_ENTRY(entry) in_slot;
    TAILQ_ENTRY(entry) link; /* waiting, decided, or spare */
};
TAILQ_HEAD(entry_list, entry);

/* What entries are found by: uthash compares the set and the name's own bytes. */
struct key {
    uint32_t set;
    char name[PLAN_NAME_MAX + 1];
};

/* The entries that bear one name, oldest first. Later ones exist only behind a failed one. */
struct name_slot {
    struct key key;
    struct entry_list entries;
    UT_hash_handle hh;
    STAILQ_ENTRY(name_slot) link; /* when spare */
};

/* What a rank submits: an op, or one of a group that is not whole yet. */
struct item {
    const char *name;
    struct signature signature;
    void *request;
};

/* A group whose ops are arriving from a rank. The items own their names and counts. */
struct assembly {
    uint32_t set, n, size; /* size 0: none */
    char name[PLAN_NAME_MAX + 1];
    struct item *items;
    int status; /* of the first refused op: the whole group is refused */
    char text[TEXT_MAX];
};

struct rank {
    bool is_joined; /* out of data */
    int left;       /* 0, or the status for ops that need this rank */
    struct assembly assembly;
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
    struct entry_list waiting, decided, spare;
    STAILQ_HEAD(, name_slot) spare_names;
    uint32_t n_ops, n_waiting; /* ops in entries; entries that wait */
    int failed;                /* plan_fail_all() */
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

static void entry_op_free(struct entry_op *op)
{
    free(op->parts);
    free(op->counts);
    free(op);
}

static void entry_free(struct entry *entry)
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

/* The entry is over for everybody: recycle it. It is on no list but its slot's. */
static void entry_release(struct plan *plan, struct entry *entry)
{
    struct name_slot *slot = entry->slot;
    if (slot) {
        TAILQ_REMOVE(&slot->entries, entry, in_slot);
        if (TAILQ_EMPTY(&slot->entries)) {
            HASH_DEL(plan->names, slot);
            STAILQ_INSERT_HEAD(&plan->spare_names, slot, link);
        }
    }
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
static struct entry *entry_open(struct plan *plan, struct process_set *set,
                                const struct item *items, uint32_t n, uint32_t index,
                                uint64_t now_ns)
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

/* ------------------------------------------------------------------ decisions */

static void decide(struct plan *plan, struct entry *entry)
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
static void fail_entry(struct plan *plan, struct entry *entry, int status, const char *format, ...)
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
    decide(plan, entry);
}

static void set_failed(struct entry *entry, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void set_failed(struct entry *entry, int status, const char *format, ...)
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
        set_failed(entry, GRADD_ERR_DUPLICATE, "%s: these ranks are process set %u already",
                   plan->label, set->id);
        return;
    }
    set = HASH_COUNT(plan->sets.by_id) < MAX_SETS
              ? process_sets_add(&plan->sets, s->counts, s->n_counts)
              : NULL;
    if (set)
        op->result = set->id;
    else
        set_failed(entry, GRADD_ERR_NO_MEMORY,
                   "%s: no memory for another process set (the limit is %d)", plan->label,
                   MAX_SETS);
}

static void remove_set(struct plan *plan, struct entry *entry)
{
    const int32_t id = entry->ops[0]->op.signature.root;
    struct process_set *set = process_sets_find(&plan->sets, (uint32_t)id);
    if (!set || set->id == 0) {
        set_failed(entry, GRADD_ERR_INVALID, "%s: there is no process set %d to remove",
                   plan->label, id);
        return;
    }
    struct entry *other, *next;
    for (other = TAILQ_FIRST(&plan->waiting); other; other = next) {
        next = TAILQ_NEXT(other, link);
        if (other->set == set)
            fail_entry(plan, other, GRADD_ERR_INVALID, "%s: \"%s\": process set %u was removed",
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
        fail_entry(plan, entry, GRADD_ERR_INVALID,
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
    decide(plan, entry);
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

static bool is_for_all(enum gradd_kind kind)
{
    return kind == GRADD_SET_ADD || kind == GRADD_SET_REMOVE || kind == GRADD_JOIN;
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
    if (is_for_all(s->kind) && (set_id != 0 || s->group_size > 0))
        return refuse(plan, out_text, GRADD_ERR_INVALID,
                      "%s: \"%s\": %s is for all ranks and stands alone", plan->label, name,
                      kind_name(s->kind));
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

/* The oldest entry of this name to which the rank has not submitted yet. */
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
            if (entry->state != ENTRY_OWED && entry->ops[0]->op.parts[index].request)
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

/* Write how the rank's ops differ from the entry's; false when they do not. */
static bool find_difference(const struct plan *plan, const struct entry *entry, uint32_t index,
                            const struct item *items, uint32_t n, char *text, size_t bytes)
{
    const char *who = plan->ranks[entry->set->ranks[index]].who;
    const char *first_who = plan->ranks[entry->set->ranks[entry->first]].who;
    char mine[200], theirs[200];
    if (n != entry->n_ops) {
        snprintf(text, bytes, "%s: \"%s\": %s submitted a group of %u ops, %s of %u", plan->label,
                 entry->slot->key.name, who, n, first_who, entry->n_ops);
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

/* Find or open the entry that the rank's ops belong to. On refusal the rank is accounted for. */
static int match(struct plan *plan, struct process_set *set, uint32_t index, const char *name,
                 const struct item *items, uint32_t n, uint64_t now_ns, struct entry **out_entry,
                 const char **out_text)
{
    struct entry *entry;
    int rc = find_open(plan, set, index, name, &entry, out_text);
    if (rc < 0)
        return rc;
    if (entry && entry->status != GRADD_OK) {
        rc = refuse(plan, out_text, entry->status, "%s", entry->text);
        account(plan, entry, index);
        return rc;
    }
    if (entry) {
        char text[TEXT_MAX];
        if (find_difference(plan, entry, index, items, n, text, sizeof text)) {
            fail_entry(plan, entry, GRADD_ERR_DISAGREE, "%s", text);
            account(plan, entry, index);
            return refuse(plan, out_text, GRADD_ERR_DISAGREE, "%s", text);
        }
        *out_entry = entry;
        return 0;
    }
    rc = check_left(plan, set, name, out_text);
    if (rc < 0)
        return rc;
    if (n > plan->limits.max_entries || plan->n_ops > plan->limits.max_entries - n)
        return refuse(plan, out_text, GRADD_ERR_NO_MEMORY,
                      "%s: \"%s\": %u ops wait for other ranks already (the limit)", plan->label,
                      name, plan->n_ops);
    entry = entry_open(plan, set, items, n, index, now_ns);
    struct name_slot *slot = entry ? slot_get(plan, set->id, name) : NULL;
    if (!slot) {
        if (entry)
            entry_release(plan, entry);
        return refuse(plan, out_text, GRADD_ERR_NO_MEMORY, "%s: \"%s\": no memory", plan->label,
                      name);
    }
    entry->slot = slot;
    entry->state = ENTRY_WAITING;
    TAILQ_INSERT_TAIL(&slot->entries, entry, in_slot);
    TAILQ_INSERT_TAIL(&plan->waiting, entry, link);
    plan->n_waiting++;
    *out_entry = entry;
    return 0;
}

static void set_parts(struct entry *entry, uint32_t index, const struct item *items,
                      uint64_t now_ns)
{
    for (uint32_t i = 0; i < entry->n_ops; i++) {
        struct plan_op *op = &entry->ops[i]->op;
        const struct signature *s = &items[i].signature;
        op->parts[index] = (struct plan_part){items[i].request, now_ns, s->count, s->out_capacity};
        op->ready_ns = now_ns;
    }
}

/* The rank submits n ops under one name: its own, or the group's. */
static int submit_items(struct plan *plan, uint32_t rank, struct process_set *set, const char *name,
                        const struct item *items, uint32_t n, uint64_t now_ns,
                        const char **out_text)
{
    uint32_t index = (uint32_t)set->index_of[rank];
    struct entry *entry;
    int rc = match(plan, set, index, name, items, n, now_ns, &entry, out_text);
    if (rc < 0)
        return rc;
    set_parts(entry, index, items, now_ns);
    account(plan, entry, index);
    if (items[0].signature.kind == GRADD_JOIN)
        mark_joined(plan, rank);
    if (entry->state == ENTRY_WAITING && is_complete(plan, entry))
        on_ready(plan, entry);
    return 0;
}

/* ------------------------------------------------------------------ groups that arrive */

static void assembly_clear(struct assembly *assembly)
{
    for (uint32_t i = 0; i < assembly->n; i++) {
        free((char *)assembly->items[i].name);
        free((uint64_t *)assembly->items[i].signature.counts);
    }
    free(assembly->items);
    *assembly = (struct assembly){0};
}

/* Keep an op of a group until the group is whole. */
static bool assembly_add(struct assembly *assembly, const char *name, const struct signature *s,
                         void *request)
{
    struct item *items = realloc(assembly->items, (assembly->n + 1) * sizeof *items);
    if (!items)
        return false;
    assembly->items = items;
    struct item *item = &items[assembly->n];
    *item = (struct item){.name = strdup(name), .signature = *s, .request = request};
    item->signature.counts = NULL;
    item->signature.group = "";
    if (s->n_counts > 0) {
        uint64_t *counts = malloc(s->n_counts * sizeof *counts);
        item->signature.counts = counts;
        if (counts)
            memcpy(counts, s->counts, s->n_counts * sizeof *counts);
    }
    assembly->n++; /* also when incomplete: assembly_clear() frees what there is */
    return item->name && (!s->n_counts || item->signature.counts);
}

/* Every request that the rank has submitted of the group ends with this failure. */
static int refuse_group(struct plan *plan, struct process_set *set, uint32_t rank,
                        struct assembly *assembly, int status, const char *text, uint64_t now_ns,
                        const char **out_text)
{
    uint32_t index = set && set->index_of[rank] >= 0 ? (uint32_t)set->index_of[rank] : 0;
    if (!set || set->index_of[rank] < 0) {
        /* Told under the world's set: the rank has an index there. */
        set = process_sets_find(&plan->sets, 0);
        index = rank;
    }
    struct entry *entry = entry_open(plan, set, assembly->items, assembly->n, index, now_ns);
    if (!entry) /* only the last request can still be told */
        return refuse(plan, out_text, GRADD_ERR_NO_MEMORY, "%s: no memory", plan->label);
    set_parts(entry, index, assembly->items, now_ns);
    entry->n_accounted = set->n_ranks;
    set_failed(entry, status, "%s", text);
    decide(plan, entry);
    return 0;
}

static int submit_grouped(struct plan *plan, uint32_t rank, struct process_set *set,
                          uint32_t set_id, const char *name, const struct signature *s,
                          void *request, uint64_t now_ns, const char **out_text)
{
    struct assembly *assembly = &plan->ranks[rank].assembly;
    int rc = check_request(plan, rank, set, set_id, name, s, out_text);
    if (assembly->size == 0) {
        if (s->group_size > plan->limits.max_entries)
            return refuse(plan, out_text, GRADD_ERR_NO_MEMORY,
                          "%s: group \"%s\" of %u ops is beyond the limit of %u", plan->label,
                          s->group, s->group_size, plan->limits.max_entries);
        assembly->size = s->group_size;
        assembly->set = set_id;
        snprintf(assembly->name, sizeof assembly->name, "%s", s->group);
    } else if (assembly->size != s->group_size || assembly->set != set_id ||
               strcmp(assembly->name, s->group) != 0) {
        return refuse(plan, out_text, GRADD_ERR_INVALID,
                      "%s: \"%s\": rank %u has submitted only %u of the %u ops of group \"%s\"",
                      plan->label, name, rank, assembly->n, assembly->size, assembly->name);
    }
    if (rc < 0 && !assembly->status) {
        assembly->status = rc;
        snprintf(assembly->text, sizeof assembly->text, "%s", *out_text);
    }
    if (!assembly_add(assembly, name, s, request) && !assembly->status) {
        assembly->status = GRADD_ERR_NO_MEMORY;
        snprintf(assembly->text, sizeof assembly->text, "%s: no memory for a group", plan->label);
    }
    if (assembly->n < assembly->size)
        return 0;
    if (!assembly->status) {
        rc = submit_items(plan, rank, set, assembly->name, assembly->items, assembly->n, now_ns,
                          out_text);
        if (rc < 0) {
            assembly->status = rc;
            snprintf(assembly->text, sizeof assembly->text, "%s", *out_text);
        }
    }
    rc = assembly->status ? refuse_group(plan, set, rank, assembly, assembly->status,
                                         assembly->text, now_ns, out_text)
                          : 0;
    assembly_clear(assembly);
    return rc;
}

int plan_submit(struct plan *plan, uint32_t rank, uint32_t set_id, const char *name,
                const struct signature *s, void *request, uint64_t now_ns, const char **out_text)
{
    struct process_set *set = process_sets_find(&plan->sets, set_id);
    if (s->group_size > 0 && s->group[0])
        return submit_grouped(plan, rank, set, set_id, name, s, request, now_ns, out_text);
    int rc = check_request(plan, rank, set, set_id, name, s, out_text);
    if (rc < 0)
        return rc;
    const struct item item = {.name = name, .signature = *s, .request = request};
    return submit_items(plan, rank, set, name, &item, 1, now_ns, out_text);
}

/* ------------------------------------------------------------------ results */

struct plan_op *plan_next(struct plan *plan)
{
    struct entry *entry = TAILQ_FIRST(&plan->decided);
    if (!entry)
        return NULL;
    struct plan_op *op = &entry->ops[entry->n_out++]->op;
    if (entry->n_out == entry->n_ops)
        TAILQ_REMOVE(&plan->decided, entry, link);
    return op;
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

/* The group of a rank that will not become whole: tell what has arrived of it. */
static void fail_assembly(struct plan *plan, uint32_t rank, int status, const char *text)
{
    const char *ignored;
    struct assembly *assembly = &plan->ranks[rank].assembly;
    if (assembly->n > 0)
        refuse_group(plan, NULL, rank, assembly, status, text, 0, &ignored);
    assembly_clear(assembly);
}

void plan_rank_left(struct plan *plan, uint32_t rank, int status, const char *text)
{
    struct rank *r = &plan->ranks[rank];
    r->left = status;
    snprintf(r->left_text, sizeof r->left_text, "%s", text);
    fail_assembly(plan, rank, status, text);
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
                fail_entry(plan, entry, status, "%s: \"%s\": %s", plan->label, slot->key.name,
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
    for (uint32_t r = 0; r < plan->n_ranks; r++)
        fail_assembly(plan, r, status, plan->failed_text);
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
    struct entry *entry, *next;
    for (entry = TAILQ_FIRST(&plan->decided); entry; entry = next) {
        next = TAILQ_NEXT(entry, link);
        if (!entry->slot) /* the others are freed by their slots */
            entry_free(entry);
    }
    struct name_slot *slot, *next_slot;
    HASH_ITER(hh, plan->names, slot, next_slot)
    {
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
    free_entries(&plan->spare);
    process_sets_deinit(&plan->sets);
    for (uint32_t r = 0; plan->ranks && r < plan->n_ranks; r++)
        assembly_clear(&plan->ranks[r].assembly);
    free(plan->ranks);
    free(plan);
}
