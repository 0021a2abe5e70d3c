/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a trainer is told about its ops. Successes are collected and leave as one frame; whatever
 * else is said goes behind those that came before it.
 */
#include <stdatomic.h>

#include "worker/coordinator.h"
#include "worker/epoch.h"
#include "worker/member_internal.h"

void member_push(struct member *member, Pb__Envelope__BodyCase body_case, void *body)
{
    if (!member->conn)
        return;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.completion_batch = body; /* the members of the union are all pointers */
    conn_push(member->conn, &envelope);
}

static void push_done(struct member *member)
{
    if (member->n_done == 0 && member->n_enqueued == 0)
        return;
    Pb__Completion completions[MEMBER_DONE_MAX];
    Pb__Completion *pointers[MEMBER_DONE_MAX];
    for (size_t i = 0; i < member->n_done; i++) {
        completions[i] = (Pb__Completion)PB__COMPLETION__INIT;
        completions[i].id = member->done_ids[i];
        pointers[i] = &completions[i];
    }
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.epoch = member->epoch->number;
    batch.completions = pointers;
    batch.n_completions = member->n_done;
    batch.enqueued = member->enqueued_ids;
    batch.n_enqueued = member->n_enqueued;
    member->n_done = member->n_enqueued = 0;
    member_push(member, PB__ENVELOPE__BODY_COMPLETION_BATCH, &batch);
}

void member_push_completion(struct member *member, uint64_t id, int status, const char *text,
                            const struct request_result *result)
{
    push_done(member);
    Pb__Completion completion = PB__COMPLETION__INIT;
    Pb__Completion *pointer = &completion;
    completion.id = id;
    completion.code = (uint32_t)-status;
    completion.text = (char *)text;
    if (result) {
        completion.counts = (uint64_t *)result->counts;
        completion.n_counts = result->n_counts;
        completion.nonfinite = result->nonfinite;
        completion.nonfinite_rank = result->nonfinite_rank;
    }
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.epoch = member->epoch->number;
    batch.completions = &pointer;
    batch.n_completions = 1;
    member_push(member, PB__ENVELOPE__BODY_COMPLETION_BATCH, &batch);
}

void member_enqueued(struct request *request)
{
    struct member *member = request->member;
    request->is_enqueued = true;
    if (member->n_enqueued == MEMBER_DONE_MAX)
        push_done(member);
    member->enqueued_ids[member->n_enqueued++] = request->id;
}

/* Streams that wait for this op's end go on, however it ended. */
static void release_streams(struct request *request)
{
    struct backend_part *part = &request->part;
    if (part->queue && !request->is_enqueued)
        queue_skip(part->queue, part->ticket, 1, part->ticket_ops);
    if (request->signal)
        atomic_store_explicit(request->signal, request->signal_value, memory_order_release);
}

void member_complete(struct request *request, int status, const char *text,
                     const struct request_result *result)
{
    struct member *member = request->member;
    if (request->part.queue || request->signal)
        release_streams(request);
    if (status == GRADD_OK) {
        member->stats.ops_done++;
        member->stats.bytes += request->bytes;
    } else {
        member->stats.ops_failed++;
    }
    if (member->is_remote) {
        if (status != GRADD_OK)
            coordinator_refuse(member->epoch->coordinator, member, request->id, status, text);
        else if (request->is_central)
            coordinator_give(member->epoch->coordinator, request);
        /* else its node completes it */
    } else if (status != GRADD_OK || result) {
        member_push_completion(member, request->id, status, text, result);
    } else {
        if (member->n_done == MEMBER_DONE_MAX)
            push_done(member);
        member->done_ids[member->n_done++] = request->id;
    }
    request_release(request);
}

void member_progress(struct request *request, uint64_t done)
{
    Pb__Progress progress = PB__PROGRESS__INIT;
    Pb__Progress *pointer = &progress;
    progress.id = request->id;
    progress.done = done;
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.epoch = request->member->epoch->number;
    batch.progress = &pointer;
    batch.n_progress = 1;
    member_push(request->member, PB__ENVELOPE__BODY_COMPLETION_BATCH, &batch);
}

void member_flush(struct member *member)
{
    if (!member->conn)
        return;
    push_done(member);
    conn_flush(member->conn);
}

void member_push_failed(struct member *member, uint64_t epoch, int status, const char *text,
                        int rank, int pid)
{
    Pb__EpochFailed failed = PB__EPOCH_FAILED__INIT;
    failed.epoch = epoch;
    failed.code = (uint32_t)-status;
    failed.text = (char *)text;
    failed.rank = rank;
    failed.pid = pid;
    push_done(member);
    member_push(member, PB__ENVELOPE__BODY_EPOCH_FAILED, &failed);
}
