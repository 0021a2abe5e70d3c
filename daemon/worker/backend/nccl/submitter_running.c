/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/submitter_internal.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "base/clock.h"

enum {
    YIELDS = 200,       /* looks between which only the core is given away */
    PAUSE_NS = 50000,   /* then */
    CHECK_NS = 1000000, /* between questions for NCCL's own errors */
};

static void finish(struct submitter *s, struct submission *submission)
{
    if (submission->s.status == GRADD_OK)
        submission_collect_counters(submission);
    for (unsigned i = 0; i < submission->s.n_events; i++) {
        struct submission_event *event = &submission->s.events[i];
        if (event->device)
            launch_give_event(&s->launch, event->device, event->event);
        *event = (struct submission_event){0};
    }
    submitter_report_done(s, submission);
}

static void on_broken(struct submitter *s, struct submission *submission, CUresult rc)
{
    char text[512];
    const struct cuda_device *device = NULL;
    for (unsigned i = 0; i < submission->s.n_events && !device; i++)
        if (submission->s.events[i].is_recorded)
            device = submission->s.events[i].device;
    snprintf(text, sizeof text, "%s: an op failed on the GPU: %s", device ? device->uuid_text : "",
             device ? cuda_table_error(device->cuda, rc) : "");
    submission_fail(submission, GRADD_ERR_RANK_LOST, text);
    submitter_fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, true);
}

static void on_late(struct submitter *s, struct submission *submission)
{
    char text[512], where[256];
    const double seconds = (double)submission->client->op_timeout_ns / 1e9;
    comm_describe_gpus(submission->comms[0], 0, 3, where, sizeof where);
    snprintf(text, sizeof text,
             "%s: %zu %s of %u ranks did not end on the GPUs within %.3g s (op_timeout_s)", where,
             submission->batch->n_ops, submission->batch->n_ops > 1 ? "ops" : "op",
             submission->batch->ops[0]->n_ranks, seconds);
    submission->s.deadline_ns = 0;
    submitter_fail_client(s, submission->client, GRADD_ERR_TIMEOUT, text, false);
}

/* NCCL's own errors, such as a lost connection. */
static void check_comms(struct submitter *s, const struct submission *submission)
{
    const struct comm *last = NULL;
    for (size_t i = 0; i < submission->batch->n_ops; i++) {
        struct comm *comm = submission->comms[i];
        char text[400];
        if (comm == last || comm_is_single(comm))
            continue;
        last = comm;
        if (!comm_check(comm, text, sizeof text))
            submitter_fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, false);
    }
}

void submitter_look(struct submitter *s)
{
    const uint64_t now = clock_now_ns();
    const bool is_check = now - s->checked_ns > CHECK_NS;
    struct submission **link = &s->running, *submission;
    while ((submission = *link)) {
        const CUresult rc = submission_query(submission);
        if (rc == CUDA_ERROR_NOT_READY) {
            if (submission->s.deadline_ns && now > submission->s.deadline_ns)
                on_late(s, submission);
            if (is_check && submission->s.uses_nccl)
                check_comms(s, submission);
            link = &submission->s.next;
            continue;
        }
        if (rc != CUDA_SUCCESS)
            on_broken(s, submission, rc);
        *link = submission->s.next;
        finish(s, submission);
    }
    if (is_check)
        s->checked_ns = now;
}

/* After the first few looks without news it is time to sleep. */
static bool yield(struct submitter *s)
{
    if (s->n_looks >= YIELDS)
        return false;
    s->n_looks++;
    sched_yield();
    return true;
}

void submitter_pause(struct submitter *s)
{
    if (yield(s))
        return;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += PAUSE_NS;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&s->mutex);
    if (!s->first && !s->has_orders)
        pthread_cond_timedwait(&s->work, &s->mutex, &until);
    pthread_mutex_unlock(&s->mutex);
}

void submitter_pause_fully(struct submitter *s)
{
    if (!yield(s))
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

void submitter_abandon(struct submitter *s, const struct submitter_client *client)
{
    for (struct submission *running = s->running; running; running = running->s.next)
        if (running->client == client && running->s.uses_nccl)
            submission_fail(running, client->abort_status, client->abort_text);
    for (const struct submission *running = s->running; running; running = running->s.next)
        if (running->client == client)
            submission_poison(running);
}
