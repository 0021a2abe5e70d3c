/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a caller does with a handle: test, wait, fetch results, release; and its own event loop.
 *
 * Invariant: a handle is valid from gradd_submit() to gradd_wait()'s end or gradd_release(), and
 * refers to the lead of its submission.
 */
#include <math.h>
#include <string.h>

#include "context.h"
#include "cuda.h"

static struct op *find_handle(const struct gradd *g, gradd_handle handle)
{
    struct op *lead = op_find(&g->ops, handle);
    if (lead && lead->lead == lead && !lead->is_released)
        return lead;
    error_set(GRADD_ERR_INVALID, "handle %lld is not in use: waited for or released before",
              (long long)handle);
    return NULL;
}

/* The submission's final status, with gradd_error() set when it failed. */
static int final_status(const struct gradd *g, const struct op *lead)
{
    if (lead->status == GRADD_OK)
        return GRADD_OK;
    return error_set(lead->status, "%s", lead->text ? lead->text : g->failure_text);
}

static bool has_ended(const void *arg)
{
    return ((const struct op *)arg)->n_running == 0;
}

/* Results may be on their way to the device still. */
static int test_delivery(struct gradd *g, struct op *lead)
{
    int rc = cuda_deliver(g, lead);
    if (rc == GRADD_PENDING) {
        g->has_ended = true; /* callers' own loops must come back: no descriptor tells of it */
        channel_notify(g);
    }
    return rc;
}

int gradd_test(struct gradd *g, gradd_handle handle)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    struct op *lead = find_handle(g, handle);
    if (!lead) {
        rc = GRADD_ERR_INVALID;
    } else {
        if (!has_ended(lead))
            channel_step(g);
        rc = has_ended(lead) ? final_status(g, lead) : GRADD_PENDING;
        if (rc == GRADD_OK && lead->cuda)
            rc = test_delivery(g, lead);
    }
    context_leave(g);
    return rc;
}

static uint64_t deadline_after(double timeout_s)
{
    if (timeout_s < 0 || timeout_s > 1e9)
        return WAIT_FOREVER;
    return context_now_ns() + (uint64_t)(timeout_s * 1e9);
}

static void copy_counts(const struct op *op, uint64_t *out_counts, size_t capacity)
{
    size_t n = op->n_counts < capacity ? op->n_counts : capacity;
    if (n && out_counts)
        memcpy(out_counts, op->counts, n * sizeof *out_counts);
}

/* Enter the context and hold the handle's op, or refuse. leave_wait() must follow success. */
static int enter_wait(struct gradd *g, gradd_handle handle, double timeout_s, struct op **out_lead)
{
    if (isnan(timeout_s))
        return error_set(GRADD_ERR_INVALID, "timeout_s is not a number");
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    struct op *lead = find_handle(g, handle);
    if (!lead) {
        context_leave(g);
        return GRADD_ERR_INVALID;
    }
    lead->n_waiting++;
    *out_lead = lead;
    return 0;
}

static void leave_wait(struct gradd *g, struct op *lead)
{
    lead->n_waiting--;
    context_reap(g, lead);
    context_leave(g);
}

int handle_wait(struct gradd *g, gradd_handle handle, double timeout_s, uint64_t *out_counts,
                size_t capacity)
{
    struct op *lead;
    int rc = enter_wait(g, handle, timeout_s, &lead);
    if (rc < 0)
        return rc;
    uint64_t deadline = deadline_after(timeout_s);
    rc = channel_wait(g, has_ended, lead, deadline);
    if (rc == 0 && lead->cuda && lead->status == GRADD_OK)
        rc = cuda_await_delivery(g, lead, deadline);
    if (rc != GRADD_PENDING) {
        if (rc == 0)
            rc = final_status(g, lead);
        if (rc == GRADD_OK)
            copy_counts(lead, out_counts, capacity);
        lead->is_released = true;
    }
    leave_wait(g, lead);
    return rc;
}

int gradd_wait(struct gradd *g, gradd_handle handle, double timeout_s)
{
    return handle_wait(g, handle, timeout_s, NULL, 0);
}

static int wait_stream(struct gradd *g, struct op *lead, void *stream, uint64_t deadline)
{
    int rc = channel_wait(g, lead->cuda ? cuda_is_launched : has_ended, lead, deadline);
    if (rc == 0 && has_ended(lead))
        rc = final_status(g, lead);
    if (rc == 0 && lead->cuda)
        rc = cuda_order_stream(g, lead, stream);
    return rc;
}

int gradd_wait_stream(struct gradd *g, gradd_handle handle, void *stream, double timeout_s)
{
    struct op *lead;
    int rc = enter_wait(g, handle, timeout_s, &lead);
    if (rc < 0)
        return rc;
    rc = wait_stream(g, lead, stream, deadline_after(timeout_s));
    leave_wait(g, lead);
    return rc;
}

int gradd_device_path(const struct gradd *g, const char **out_text)
{
    int rc = context_check_alive(g);
    if (rc < 0)
        return rc;
    if (!g->has_device_path && out_text)
        *out_text = g->device_text[0] ? g->device_text : "the daemon has not said why";
    return g->has_device_path;
}

int gradd_release(struct gradd *g, gradd_handle handle)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    struct op *lead = find_handle(g, handle);
    if (lead) {
        lead->is_released = true;
        if (lead->cuda)
            cuda_abandon(lead);
        context_reap(g, lead);
    }
    context_leave(g);
    return lead ? GRADD_OK : GRADD_ERR_INVALID;
}

/* The op at this place of a submission that has ended well. 0 or a status. */
static int find_ended(const struct gradd *g, gradd_handle handle, size_t index,
                      const struct op **out)
{
    const struct op *lead = find_handle(g, handle), *op = lead;
    if (!lead)
        return GRADD_ERR_INVALID;
    for (size_t i = 0; op && i < index; i++)
        op = op->next;
    if (!op)
        return error_set(GRADD_ERR_INVALID, "handle %lld has %u op%s, there is no index %zu",
                         (long long)handle, lead->n_ops, lead->n_ops == 1 ? "" : "s", index);
    if (!has_ended(lead))
        return error_set(GRADD_ERR_INVALID,
                         "handle %lld is still running: results come with its end",
                         (long long)handle);
    *out = op;
    return final_status(g, lead);
}

int64_t gradd_counts(struct gradd *g, gradd_handle handle, size_t index, uint64_t *out_counts,
                     size_t capacity)
{
    int64_t rc = context_enter(g);
    if (rc < 0)
        return rc;
    const struct op *op = NULL;
    rc = find_ended(g, handle, index, &op);
    if (rc == 0) {
        copy_counts(op, out_counts, capacity);
        rc = (int64_t)op->n_counts;
    }
    context_leave(g);
    return rc;
}

int gradd_nonfinite(struct gradd *g, gradd_handle handle, size_t index, int32_t *out_rank,
                    uint64_t *out_count)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    const struct op *op = NULL;
    rc = find_ended(g, handle, index, &op);
    if (rc == 0 && op->nonfinite > 0) {
        rc = 1;
        if (out_rank)
            *out_rank = op->nonfinite_rank;
        if (out_count)
            *out_count = op->nonfinite;
    }
    context_leave(g);
    return rc;
}

int gradd_fd(struct gradd *g)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    rc = channel_event_fd(g);
    context_leave(g);
    return rc;
}

int gradd_progress(struct gradd *g)
{
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    channel_clear_events(g);
    channel_step(g);
    if (!g->verdict_ns || g->failure)
        channel_clear_events(g); /* of what this call did */
    rc = context_check(g);
    context_leave(g);
    return rc;
}
