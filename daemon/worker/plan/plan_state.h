/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan's own structures, shared by the files of this folder only: entry.c keeps entries and
 * names, group.c assembles groups, stall.c finds what waits too long, plan.c decides.
 *
 * Thread: loop. Life of an entry: waiting -> decided -> (owed) -> spare.
 */
#ifndef GRADD_PLAN_STATE_H
#define GRADD_PLAN_STATE_H

#include <sys/queue.h>

#include <uthash.h>

#include "worker/plan/plan.h"
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
    uint64_t dims[PLAN_DIMS_MAX];
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

/* Write a refusal's sentence, give it to the caller, return the status. */
int plan_refuse(struct plan *plan, const char **out_text, int status, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* entry.c */

/* The name's slot, or NULL. */
struct name_slot *slot_find(const struct plan *plan, uint32_t set, const char *name);
/* The same, made when there is none. NULL: out of memory. */
struct name_slot *slot_get(struct plan *plan, uint32_t set, const char *name);
/* An entry with these ops, no rank accounted, on no list. NULL: out of memory. */
struct entry *entry_open(struct plan *plan, struct process_set *set, const struct item *items,
                         uint32_t n, uint32_t index, uint64_t now_ns);
/* The rank's requests become parts of the entry's ops. */
void entry_set_parts(struct entry *entry, uint32_t index, const struct item *items,
                     uint64_t now_ns);
/* Its name finds it no longer. Idempotent. */
void entry_detach(struct plan *plan, struct entry *entry);
/* The entry is over for everybody: recycle it. It is on no list but its slot's. */
void entry_release(struct plan *plan, struct entry *entry);
void entry_free(struct entry *entry);

/* plan.c */

/* The entry's ops will come out of plan_next(), with its status. */
void entry_decide(struct plan *plan, struct entry *entry);
/* A waiting entry fails for all: those that have submitted are told now, the others when they do.
 */
void entry_fail(struct plan *plan, struct entry *entry, int status, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Only the verdict: the caller decides the entry. */
void entry_set_failed(struct entry *entry, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* What makes a request impossible whatever the others do; 0 when nothing does. */
int plan_check_request(struct plan *plan, uint32_t rank, const struct process_set *set,
                       uint32_t set_id, const char *name, const struct signature *s,
                       const char **out_text);
/* The rank submits n ops under one name: its own, or the group's. */
int plan_submit_items(struct plan *plan, uint32_t rank, struct process_set *set, const char *name,
                      const struct item *items, uint32_t n, uint64_t now_ns, const char **out_text);

/* group.c */

/* One op of a group has come; the last one submits the group. Refusals of the group as a whole are
 * told through plan_next(). */
int group_submit(struct plan *plan, uint32_t rank, struct process_set *set, uint32_t set_id,
                 const char *name, const struct signature *s, void *request, uint64_t now_ns,
                 const char **out_text);
/* The rank's group will not become whole: what has come of it fails. */
void group_fail(struct plan *plan, uint32_t rank, int status, const char *text);
void group_clear(struct assembly *assembly);

#endif
