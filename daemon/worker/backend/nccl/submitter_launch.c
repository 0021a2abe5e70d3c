/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/submitter_internal.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

static bool is_aborted(const struct submission *submission)
{
    return atomic_load(&submission->client->is_aborted);
}

/* Until the communicator takes calls. False: it never will. */
static bool await_comm(struct submitter *s, struct submission *submission, struct comm *comm)
{
    char text[400] = "";
    s->n_looks = 0; /* most groups are launched within microseconds */
    for (;;) {
        const enum comm_state state = comm_advance(comm, clock_now_ns(), text, sizeof text);
        if (state == COMM_READY)
            return true;
        if (state == COMM_FAILED) {
            submission_fail(submission, GRADD_ERR_RANK_LOST, text);
            submitter_fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, false);
            return false;
        }
        if (is_aborted(submission))
            return false;
        submitter_look(s);
        submitter_pause_fully(s);
    }
}

/* Ops from `begin` on the same communicator, as many as one chunk takes. Returns where it ends. */
static size_t gather_chunk(struct submitter *s, struct submission *submission, size_t begin,
                           struct comm *comm)
{
    const struct backend_batch *batch = submission->batch;
    size_t end = begin;
    launch_begin(&s->launch);
    while (end < batch->n_ops && submission->comms[end] == comm) {
        const CUdeviceptr counters =
            comm->map.n_local ? submission_counters_of(submission, end, comm->gpus[0].device) : 0;
        const enum launch_added added = launch_add(&s->launch, comm, batch->ops[end], counters);
        end++;
        /* Other nodes launch it: they must not wait for this one. */
        if (added == LAUNCH_REFUSED && !comm_is_single(comm) && comm->map.n_local > 0 &&
            comm->map.n_local < comm->map.n_gpus)
            submitter_fail_client(s, submission->client, batch->ops[end - 1]->status,
                                  batch->ops[end - 1]->text, false);
        if (added == LAUNCH_FULL)
            break;
    }
    return end;
}

static bool launch_chunk(struct submitter *s, struct submission *submission, struct comm *comm)
{
    struct launch_result result;
    char text[400];
    launch_calls(&s->launch, comm, &result);
    if (result.status == GRADD_OK && result.has_group) {
        submission->s.uses_nccl = true;
        comm_issued(comm, result.nccl, clock_now_ns(), text, sizeof text);
        if (atomic_load(&comm->state) == COMM_FAILED) {
            submission_fail(submission, GRADD_ERR_RANK_LOST, text);
            submitter_fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, false);
            return false;
        }
        if (!await_comm(s, submission, comm))
            return false;
    }
    if (result.status == GRADD_OK)
        launch_finish(&s->launch, comm, &result);
    if (result.status == GRADD_OK) {
        atomic_fetch_add(&comm->n_ops, s->launch.n_ops);
        return true;
    }
    submission_fail(submission, result.status, result.text);
    submitter_fail_client(s, submission->client, result.status, result.text,
                          result.is_device_broken);
    return false;
}

/* Launch the ops from `begin` on that make one chunk, or fail all the rest. Returns where the next
 * chunk begins. */
static size_t start_chunk(struct submitter *s, struct submission *submission, size_t begin)
{
    struct comm *comm = submission->comms[begin];
    const size_t n_ops = submission->batch->n_ops;
    size_t end = n_ops;
    bool is_launched = false;
    if (!is_aborted(submission) && await_comm(s, submission, comm)) {
        end = gather_chunk(s, submission, begin, comm);
        is_launched = s->launch.n_ops == 0 || launch_chunk(s, submission, comm);
    }
    if (is_launched)
        return end;
    if (is_aborted(submission))
        submission_fail(submission, submission->client->abort_status,
                        submission->client->abort_text);
    submission_end_ops(submission, begin, n_ops, submission->s.status, submission->s.text);
    return n_ops;
}

/* NULL: out of memory, or of events. */
static struct submission_event *event_on(struct submitter *s, struct submission *submission,
                                         struct cuda_device *device)
{
    if (device->index >= submission->s.n_events) {
        const unsigned n = device->index + 1;
        struct submission_event *events = realloc(submission->s.events, n * sizeof *events);
        if (!events)
            return NULL;
        memset(events + submission->s.n_events, 0, (n - submission->s.n_events) * sizeof *events);
        submission->s.events = events;
        submission->s.n_events = n;
    }
    struct submission_event *event = &submission->s.events[device->index];
    if (!event->device) {
        if (!launch_take_event(&s->launch, device, &event->event))
            return NULL;
        event->device = device;
    }
    return event;
}

/* What has been launched so far, on every GPU that the batch uses, ends with an event. */
static void record_ends(struct submitter *s, struct submission *submission)
{
    for (size_t i = 0; i < submission->batch->n_ops; i++) {
        const struct comm *comm = submission->comms[i];
        if (i > 0 && comm == submission->comms[i - 1])
            continue;
        for (uint32_t gpu = 0; gpu < comm->map.n_local; gpu++) {
            struct cuda_device *device = comm->gpus[gpu].device;
            struct submission_event *event = event_on(s, submission, device);
            CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;
            if (event) {
                device->cuda->ctx_set(device->context);
                rc = device->cuda->event_record(event->event, device->stream);
                event->is_recorded = rc == CUDA_SUCCESS;
            }
            if (rc != CUDA_SUCCESS) {
                char text[300];
                snprintf(text, sizeof text, "%s: the end of an op cannot be watched: %s",
                         device->uuid_text, cuda_table_error(device->cuda, rc));
                submission_fail(submission, GRADD_ERR_RANK_LOST, text);
                submitter_fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, true);
            }
        }
    }
}

void submitter_launch(struct submitter *s, struct submission *submission)
{
    const struct backend_batch *batch = submission->batch;
    const uint64_t timeout = submission->client->op_timeout_ns;
    submission->s.status = GRADD_OK;
    submission->s.uses_nccl = false;
    submission->s.n_counters = 0;
    submission_end_ops(submission, 0, batch->n_ops, GRADD_OK, "");
    for (size_t i = 0; i < batch->n_ops; i++) {
        if (!batch->ops[i]->nonfinite || submission->comms[i]->map.n_local == 0)
            continue;
        submission_prepare_counters(submission, submission->comms[i]->gpus[0].device);
        break;
    }
    for (size_t begin = 0; begin < batch->n_ops;)
        begin = start_chunk(s, submission, begin);
    record_ends(s, submission);
    submission->s.deadline_ns = timeout ? clock_now_ns() + timeout : 0;
    submission->s.next = NULL;
    struct submission **link = &s->running;
    while (*link)
        link = &(*link)->s.next;
    *link = submission;
    submitter_report_enqueued(s, submission);
}
