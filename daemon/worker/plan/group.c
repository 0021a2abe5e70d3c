/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: a rank's ops of one group are kept until it is whole, then submitted as one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/plan/plan_state.h"

void group_clear(struct assembly *assembly)
{
    for (uint32_t i = 0; i < assembly->n; i++) {
        free((char *)assembly->items[i].name);
        free((uint64_t *)assembly->items[i].signature.counts);
        free((uint64_t *)assembly->items[i].signature.dims);
    }
    free(assembly->items);
    *assembly = (struct assembly){0};
}

static bool copy_numbers(const uint64_t *from, size_t n, const uint64_t **out_copy)
{
    if (n == 0)
        return true;
    uint64_t *copy = malloc(n * sizeof *copy);
    if (copy)
        memcpy(copy, from, n * sizeof *copy);
    *out_copy = copy;
    return copy;
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
    item->signature.dims = NULL;
    item->signature.group = "";
    bool is_whole = item->name && copy_numbers(s->counts, s->n_counts, &item->signature.counts) &&
                    copy_numbers(s->dims, s->n_dims, &item->signature.dims);
    assembly->n++; /* also when incomplete: group_clear() frees what there is */
    return is_whole;
}

/* Every request that the rank has submitted of the group ends with this failure. */
static int refuse_all(struct plan *plan, struct process_set *set, uint32_t rank,
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
        return plan_refuse(plan, out_text, GRADD_ERR_NO_MEMORY, "%s: no memory", plan->label);
    entry_set_parts(entry, index, assembly->items, now_ns);
    entry->n_accounted = set->n_ranks;
    entry_set_failed(entry, status, "%s", text);
    entry_decide(plan, entry);
    return 0;
}

static int compare_items(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    return strcmp(x->name ? x->name : "", y->name ? y->name : "");
}

int group_submit(struct plan *plan, uint32_t rank, struct process_set *set, uint32_t set_id,
                 const char *name, const struct signature *s, void *request, uint64_t now_ns,
                 const char **out_text)
{
    struct assembly *assembly = &plan->ranks[rank].assembly;
    int rc = plan_check_request(plan, rank, set, set_id, name, s, out_text);
    if (assembly->size == 0) {
        if (s->group_size > plan->limits.max_entries)
            return plan_refuse(plan, out_text, GRADD_ERR_NO_MEMORY,
                               "%s: group \"%s\" of %u ops is beyond the limit of %u", plan->label,
                               s->group, s->group_size, plan->limits.max_entries);
        assembly->size = s->group_size;
        assembly->set = set_id;
        snprintf(assembly->name, sizeof assembly->name, "%s", s->group);
    } else if (assembly->size != s->group_size || assembly->set != set_id ||
               strcmp(assembly->name, s->group) != 0) {
        return plan_refuse(
            plan, out_text, GRADD_ERR_INVALID,
            "%s: \"%s\": rank %u has submitted only %u of the %u ops of group \"%s\"", plan->label,
            name, rank, assembly->n, assembly->size, assembly->name);
    }
    if (rc < 0 && !assembly->status) {
        assembly->status = rc;
        snprintf(assembly->text, sizeof assembly->text, "%s", *out_text);
    }
    struct signature kept = *s;
    if (rc < 0) /* its numbers may be more than an entry has room for */
        kept.n_counts = kept.n_dims = 0;
    if (!assembly_add(assembly, name, &kept, request) && !assembly->status) {
        assembly->status = GRADD_ERR_NO_MEMORY;
        snprintf(assembly->text, sizeof assembly->text, "%s: no memory for a group", plan->label);
    }
    if (assembly->n < assembly->size)
        return 0;
    /* Ranks may list a group's ops in different orders. */
    qsort(assembly->items, assembly->n, sizeof *assembly->items, compare_items);
    if (!assembly->status) {
        rc = plan_submit_items(plan, rank, set, assembly->name, assembly->items, assembly->n,
                               now_ns, out_text);
        if (rc < 0) {
            assembly->status = rc;
            snprintf(assembly->text, sizeof assembly->text, "%s", *out_text);
        }
    }
    rc = assembly->status ? refuse_all(plan, set, rank, assembly, assembly->status, assembly->text,
                                       now_ns, out_text)
                          : 0;
    group_clear(assembly);
    return rc;
}

void group_fail(struct plan *plan, uint32_t rank, int status, const char *text)
{
    const char *ignored;
    struct assembly *assembly = &plan->ranks[rank].assembly;
    if (assembly->n > 0)
        refuse_all(plan, NULL, rank, assembly, status, text, 0, &ignored);
    group_clear(assembly);
}
