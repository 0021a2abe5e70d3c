/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a follower says for its ranks: their submissions, with names that travel once, and when they
 * leave, so that requests made at the same time share a message.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/central.h"
#include "worker/follower_internal.h"

static void on_flush_timer(void *data);

int follower_submit_init(struct follower *f)
{
    f->is_heard = calloc(f->epoch->size, sizeof *f->is_heard);
    f->flush_timer = watch_timer(f->epoch->setup->loop, on_flush_timer, f);
    return f->is_heard && f->flush_timer ? 0 : -ENOMEM;
}

void follower_submit_deinit(struct follower *f)
{
    struct follower_name *name, *next, *names = f->names;
    HASH_CLEAR(hh, f->names);
    HASH_CLEAR(hh_remote, f->pending); /* their members free them */
    HASH_ITER(hh, names, name, next)
    {
        free(name->text);
        free(name);
    }
    watch_free(f->flush_timer);
    free(f->is_heard);
}

/* Some of this node's ranks have submitted, others not. */
static bool is_partial(const struct follower *f)
{
    return f->n_heard > 0 && f->n_heard < f->epoch->n_added - f->epoch->n_gone;
}

void follower_flush_now(struct follower *f)
{
    if (f->has_yielded && is_partial(f))
        spin_failed(&f->spin);
    else if (f->has_yielded)
        spin_succeeded(&f->spin);
    f->has_yielded = false;
    watch_disarm(f->flush_timer);
    if (f->n_heard > 0)
        memset(f->is_heard, 0, f->epoch->size * sizeof *f->is_heard);
    f->n_heard = 0;
    if (f->conn)
        conn_flush(f->conn);
}

/* All that had come has been looked at. */
static void on_flush_timer(void *data)
{
    struct follower *f = data;
    if (!f->has_yielded && is_partial(f) && spin_begins(&f->spin)) {
        f->has_yielded = true;
        sched_yield();
        watch_arm(f->flush_timer, 0);
        return;
    }
    follower_flush_now(f);
}

/*
 * The ranks of a node tend to submit at the same time, and one message to another node costs less
 * than one for each: let the others run once, and look whether they have come.
 */
void follower_flush(struct follower *f)
{
    if (!is_partial(f))
        follower_flush_now(f);
    else if (!watch_is_armed(f->flush_timer))
        watch_arm(f->flush_timer, 0);
}

/* Put the name's id into the message, and the name itself the first time. */
static struct follower_name *set_name(struct follower *f, const char *text,
                                      Pb__RemoteSubmit *submit)
{
    struct follower_name *name;
    HASH_FIND_STR(f->names, text, name);
    if (name) {
        submit->name_id = name->id;
        return name;
    }
    submit->name = (char *)text;
    name = f->n_names < FOLLOWER_NAMES_MAX ? calloc(1, sizeof *name) : NULL;
    if (name && (name->text = strdup(text))) {
        name->id = ++f->n_names;
        submit->name_id = name->id;
        HASH_ADD_KEYPTR(hh, f->names, name->text, strlen(name->text), name);
        return name;
    }
    free(name);
    return NULL;
}

/* What the request's memory is good for. */
static void note_submitted(struct request *request, const struct process_set *set,
                           const struct signature *s)
{
    request->submitted.kind = s->kind;
    request->submitted.dtype = s->dtype;
    request->submitted.root = s->root;
    request->submitted.count = s->count;
    request->submitted.out_count = s->out_capacity;
    request->submitted.n_counts = s->n_counts;
    request->submitted.is_device = s->is_device;
    for (uint32_t i = 0; s->kind == GRADD_REDUCE_SCATTER && i < set->n_ranks; i++)
        if (set->ranks[i] == request->member->rank)
            request->submitted.out_count = i < s->n_counts ? s->counts[i] : 0;
}

int follower_submit(struct follower *f, const struct member *member, uint32_t set, const char *name,
                    const struct signature *s, struct request *request, const char **out_text)
{
    if (f->failed) {
        *out_text = f->failed_text;
        return f->failed;
    }
    const struct process_set *found = process_sets_find(&f->sets, set);
    if (!name[0] || strlen(name) > PLAN_NAME_MAX || !found) { /* an empty one stands for an id */
        *out_text = found ? "a name must have 1 to 255 bytes" : "there is no such process set";
        return GRADD_ERR_INVALID;
    }
    Pb__RemoteSubmit submit = PB__REMOTE_SUBMIT__INIT, *pointer = &submit;
    const struct follower_name *known = set_name(f, name, &submit);
    request->name = known ? known->text : "";
    note_submitted(request, found, s);
    f->n_heard += !f->is_heard[member->rank];
    f->is_heard[member->rank] = true;
    request->remote_id = ++f->last_remote_id;
    HASH_ADD(hh_remote, f->pending, remote_id, sizeof request->remote_id, request);
    submit.rank = member->rank;
    submit.request = request->remote_id;
    submit.set = set;
    submit.kind = s->kind;
    submit.dtype = s->dtype;
    submit.redop = s->redop;
    submit.root = s->root;
    submit.count = s->count;
    submit.out_capacity = s->out_capacity;
    submit.prescale = s->prescale == 1 ? 0 : s->prescale;
    submit.postscale = s->postscale == 1 ? 0 : s->postscale;
    submit.counts = (uint64_t *)s->counts;
    submit.n_counts = s->n_counts;
    submit.dims = (uint64_t *)s->dims;
    submit.n_dims = s->n_dims;
    submit.group = (char *)s->group;
    submit.group_size = s->group_size;
    submit.is_device = s->is_device;
    submit.check_finite = request->check_finite;
    if (central_offers(f->epoch->layout, s, request)) {
        submit.data.data = request->part.in.base;
        submit.data.len = request->bytes;
    }
    Pb__RemoteSubmitBatch batch = PB__REMOTE_SUBMIT_BATCH__INIT;
    batch.submits = &pointer;
    batch.n_submits = 1;
    follower_push(f, PB__ENVELOPE__BODY_REMOTE_SUBMIT_BATCH, &batch);
    return 0;
}

/* Numbers are never given twice, and a request has one while it is pending only: an answer that
 * comes late finds nothing, also when the rank has submitted an op of the same name again. */
struct request *follower_take_request(struct follower *f, uint64_t id, uint32_t rank)
{
    struct request *request;
    HASH_FIND(hh_remote, f->pending, &id, sizeof id, request);
    if (!request || request->member->rank != rank)
        return NULL;
    HASH_DELETE(hh_remote, f->pending, request);
    request->remote_id = 0;
    return request;
}

void follower_fail_all(struct follower *f, int status, const char *text)
{
    if (!f->failed) {
        f->failed = status;
        snprintf(f->failed_text, sizeof f->failed_text, "%s", text);
    }
    struct request *request, *next;
    HASH_ITER(hh_remote, f->pending, request, next)
    {
        HASH_DELETE(hh_remote, f->pending, request);
        request->remote_id = 0;
        member_complete(request, status, text, NULL);
    }
}
