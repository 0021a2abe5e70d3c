/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What worker and daemon say: ends and progress of ops, answers, and the end of the epoch. The
 * daemon knows best why an epoch ends, and the worker what still came through: each has a while.
 *
 * Thread: any that holds the context's lock; nothing here waits.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#include "context.h"
#include "cuda.h"

/* How long the daemon has to say why the worker is gone. */
static const uint64_t cause_grace_ns = 1000000000u;

/*
 * How long the worker has to finish what it can once the daemon has ended the epoch: ops that every
 * rank submitted still run, though a rank has died. Only a stopped worker takes that long.
 */
static const uint64_t finish_grace_ns = 500000000u;

static void on_completion(struct gradd *g, const Pb__Completion *completion)
{
    struct op *op = op_find(&g->ops, (int64_t)completion->id);
    if (!op || op->state != OP_RUNNING)
        return;
    int status = error_status_from_wire(completion->code);
    const char *text = completion->text;
    op->nonfinite = completion->nonfinite;
    op->nonfinite_rank = (int32_t)completion->nonfinite_rank;
    if (status == GRADD_OK && op_set_counts(op, completion->counts, completion->n_counts) < 0) {
        status = GRADD_ERR_NO_MEMORY;
        text = "out of memory for the op's counts";
    }
    context_end_op(g, op, status, text);
}

static void on_progress(struct gradd *g, const Pb__Progress *progress)
{
    struct op *op = op_find(&g->ops, (int64_t)progress->id);
    if (!op || op->state != OP_RUNNING || !op->is_flowing)
        return;
    uint64_t done = progress->done * op->element_bytes;
    if (progress->done > op->count || done > op->flow.fed || done < op->flow.done) {
        context_fail(g, GRADD_ERR_PROTOCOL,
                     "job %s: the worker reports progress to element %llu, between %llu and %llu "
                     "is possible",
                     g->identity.job, (unsigned long long)progress->done,
                     (unsigned long long)(op->flow.done / op->element_bytes),
                     (unsigned long long)(op->flow.fed / op->element_bytes));
        return;
    }
    stage_drain(op, done);
    channel_feed(g, op);
}

/* The op's work is in the worker's stream. */
static void on_enqueued(struct gradd *g, uint64_t id)
{
    struct op *op = op_find(&g->ops, (int64_t)id);
    if (op && op->state == OP_RUNNING && op->cuda)
        cuda_op_enqueued(g, op);
}

static void on_region_reply(struct gradd *g, const Pb__RegionReply *reply)
{
    struct region *region = g->unanswered;
    while (region && region->id != reply->region)
        region = region->next;
    if (!region)
        return; /* the answer to Unregister, which nobody waits for */
    region->is_answered = true;
    g->has_ended = true; /* its thread may be asleep */
    region->status = error_status_from_wire(reply->code);
    if (reply->text[0] && !region->text)
        region->text = strdup(reply->text);
}

static void keep_verdict(struct gradd *g, const Pb__EpochFailed *failed)
{
    int status = error_status_from_wire(failed->code);
    g->verdict = status ? status : GRADD_ERR_RANK_LOST;
    snprintf(g->verdict_text, sizeof g->verdict_text, "%s",
             failed->text[0] ? failed->text : "the epoch ended without a word");
}

/* The worker has completed what it could: the epoch is over. The daemon knows the cause better. */
static void on_worker_failed(struct gradd *g, const Pb__EpochFailed *failed)
{
    if (failed->epoch != g->epoch)
        return;
    if (!g->verdict)
        keep_verdict(g, failed);
    context_fail(g, g->verdict, "%s", g->verdict_text);
}

/* The worker's own word follows, or its end; completions may come before. */
static void on_daemon_failed(struct gradd *g, const Pb__EpochFailed *failed)
{
    if (failed->epoch != g->epoch || g->verdict)
        return;
    keep_verdict(g, failed);
    g->verdict_ns = context_now_ns() + finish_grace_ns;
}

static void on_worker_frame(struct gradd *g, const Pb__Envelope *envelope)
{
    const Pb__CompletionBatch *batch;
    switch (envelope->body_case) {
    case PB__ENVELOPE__BODY_COMPLETION_BATCH:
        batch = envelope->completion_batch;
        if (batch->epoch != g->epoch)
            break;
        for (size_t i = 0; i < batch->n_enqueued; i++)
            on_enqueued(g, batch->enqueued[i]);
        for (size_t i = 0; i < batch->n_completions; i++)
            on_completion(g, batch->completions[i]);
        for (size_t i = 0; i < batch->n_progress; i++)
            on_progress(g, batch->progress[i]);
        break;
    case PB__ENVELOPE__BODY_REGION_REPLY:
        on_region_reply(g, envelope->region_reply);
        break;
    case PB__ENVELOPE__BODY_QUEUE_REPLY:
        cuda_queue_replied(g, envelope->queue_reply);
        break;
    case PB__ENVELOPE__BODY_EPOCH_FAILED:
        on_worker_failed(g, envelope->epoch_failed);
        break;
    case PB__ENVELOPE__BODY_ERROR:
        context_fail(g, error_status_from_wire(envelope->error->code), "%s", envelope->error->text);
        break;
    default:
        break; /* of a later version */
    }
}

static void on_daemon_frame(struct gradd *g, const Pb__Envelope *envelope)
{
    if (envelope->body_case == PB__ENVELOPE__BODY_EPOCH_FAILED)
        on_daemon_failed(g, envelope->epoch_failed);
}

/* The stream has ended. Without the daemon training goes on; without the worker it can not. */
static void on_end(struct gradd *g, struct link *link)
{
    link->is_over = true;
    pthread_mutex_lock(&g->out_lock);
    link->is_broken = true;
    pthread_mutex_unlock(&g->out_lock);
    if (link == &g->worker)
        g->verdict_ns = context_now_ns() + cause_grace_ns;
    if (link == &g->daemon && g->epoll_fd >= 0)
        epoll_ctl(g->epoll_fd, EPOLL_CTL_DEL, link->fd, NULL);
}

/* Read once and handle every whole frame. True when something arrived. */
static bool read_link(struct gradd *g, struct link *link,
                      void (*on_frame)(struct gradd *g, const Pb__Envelope *envelope))
{
    if (link->is_over)
        return false;
    bool has_news = false;
    int rc = wire_in_read(&link->in, link->fd);
    struct wire_frame frame;
    int next = 0;
    while (rc == 0 && (next = wire_in_next(&link->in, &frame)) == 1) {
        on_frame(g, frame.envelope);
        wire_frame_close_fds(&frame);
        has_news = true;
    }
    if (rc == -EPROTO || next < 0)
        context_fail(g, GRADD_ERR_PROTOCOL, "job %s: the %s sent %s", g->identity.job,
                     link == &g->worker ? "worker" : "daemon",
                     link->in.error ? link->in.error : "what does not fit into memory");
    if (rc < 0 || next < 0 || link->in.is_eof) {
        on_end(g, link);
        has_news = true;
    }
    return has_news;
}

/* Both sides have spoken or ended, or one has had its time: the epoch fails. */
static void check_verdict(struct gradd *g)
{
    if (!g->verdict_ns || g->failure)
        return;
    bool is_complete = g->worker.is_over && (g->verdict || g->daemon.is_over);
    if (!is_complete && context_now_ns() < g->verdict_ns) {
        g->has_ended = true; /* callers' own loops must come back: no descriptor tells the time */
        return;
    }
    if (g->verdict)
        context_fail(g, g->verdict, "%s", g->verdict_text);
    else
        context_fail(g, GRADD_ERR_RANK_LOST,
                     "job %s, epoch %llu: the worker ended without a word, and the daemon has not "
                     "said why: see its log",
                     g->identity.job, (unsigned long long)g->epoch);
}

bool channel_receive(struct gradd *g, bool asks_daemon)
{
    bool has_news = read_link(g, &g->worker, on_worker_frame);
    if (asks_daemon || g->verdict_ns)
        has_news |= read_link(g, &g->daemon, on_daemon_frame);
    check_verdict(g);
    return has_news;
}
