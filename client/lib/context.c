/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The context: entering it, the end of its ops, its process sets.
 *
 * Invariant: an op that was submitted ends exactly once, by its completion or by the epoch's
 * failure; its record lives until its submission has ended, was released and nobody waits.
 */
#include "context.h"

#include "cuda.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

uint64_t context_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ------------------------------------------------------------------ entering */

int context_check_alive(const struct gradd *g)
{
    if (!g)
        return error_set(GRADD_ERR_INVALID, "the context is NULL");
    if (atomic_load_explicit(&g->is_forked, memory_order_relaxed))
        return error_set(GRADD_ERR_FORKED,
                         "job %s, rank %d: this process is a fork of the one that joined: call "
                         "gradd_init() here, or use the context in the parent only",
                         g->identity.job, g->identity.rank);
    return 0;
}

int context_enter(struct gradd *g)
{
    int rc = context_check_alive(g);
    if (rc == 0)
        pthread_mutex_lock(&g->lock);
    return rc;
}

void context_leave(struct gradd *g)
{
    pthread_mutex_unlock(&g->lock);
}

int context_check(const struct gradd *g)
{
    return g->failure ? error_set(g->failure, "%s", g->failure_text) : 0;
}

/* ------------------------------------------------------------------ the end of ops */

static void drop_feed(struct gradd *g, struct op *op)
{
    struct op **at = &g->feeds;
    while (*at && *at != op)
        at = &(*at)->next_feed;
    if (*at)
        *at = op->next_feed;
    op->has_feed = false;
}

/* Process sets come and go by ops of their own. 0 or -ENOMEM. */
static int note_set(struct gradd *g, struct op *op)
{
    if (op->kind == GRADD_SET_REMOVE)
        context_remove_set(g, op->set.id);
    if (op->kind != GRADD_SET_ADD || op->n_counts == 0)
        return 0;
    op->set.id = (uint32_t)op->counts[0];
    return context_add_set(g, &op->set);
}

void context_end_op(struct gradd *g, struct op *op, int status, const char *text)
{
    struct op *lead = op->lead;
    if (status == GRADD_OK && note_set(g, op) < 0) {
        status = GRADD_ERR_NO_MEMORY;
        text = "out of memory for the new process set";
    }
    if (status == GRADD_OK)
        stage_finish(op);
    if (op->has_feed)
        drop_feed(g, op);
    op_drop_regions(op);
    stage_release(g, op);
    if (op->cuda)
        cuda_op_ended(g, op, status);
    op->state = OP_ENDED;
    g->ops.n_running--;
    g->ops.bytes_running -= op->in_bytes + op->out_bytes;
    if (status != GRADD_OK && lead->status == GRADD_OK) {
        lead->status = status;
        lead->text = text ? strdup(text) : NULL;
    }
    if (--lead->n_running > 0)
        return;
    g->has_ended = true;
    context_reap(g, lead);
}

void context_reap(struct gradd *g, struct op *lead)
{
    if (lead->n_running > 0 || !lead->is_released || lead->n_waiting > 0)
        return;
    if (lead->cuda)
        cuda_settle(g, lead);
    while (lead) {
        struct op *next = lead->next;
        op_free(&g->ops, lead);
        lead = next;
    }
}

void context_fail(struct gradd *g, int status, const char *format, ...)
{
    if (g->failure)
        return;
    g->failure = status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(g->failure_text, sizeof g->failure_text, format, arguments);
    va_end(arguments);

    struct op *op;
    for (uint32_t slot = 0; (op = op_at(&g->ops, slot)); slot++)
        if (op->state == OP_RUNNING)
            context_end_op(g, op, status, NULL);
    for (struct region *region = g->unanswered; region; region = region->next) {
        region->is_answered = true;
        region->status = status;
    }
    if (g->cuda)
        cuda_failed(g);
    g->has_ended = true;
}

/* ------------------------------------------------------------------ sets */

const struct process_set *context_find_set(const struct gradd *g, uint32_t id)
{
    for (size_t i = 0; i < g->n_sets; i++)
        if (g->sets[i].id == id)
            return &g->sets[i];
    return NULL;
}

int context_add_set(struct gradd *g, const struct process_set *set)
{
    if (context_find_set(g, set->id))
        return 0;
    struct process_set *sets = realloc(g->sets, (g->n_sets + 1) * sizeof *sets);
    if (!sets)
        return -ENOMEM;
    g->sets = sets;
    sets[g->n_sets++] = *set;
    return 0;
}

void context_remove_set(struct gradd *g, uint32_t id)
{
    for (size_t i = 0; i < g->n_sets; i++)
        if (g->sets[i].id == id)
            g->sets[i] = g->sets[--g->n_sets];
}
