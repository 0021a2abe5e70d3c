/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection to the worker, and whoever drives it: there is no thread, so every call that is
 * inside the library makes the progress that is due.
 *
 * Invariants: one thread at a time sleeps in poll() (`is_polling`), the others on `changed`; a
 * thread that did work which the poller may wait for wakes it; the lock is never held in a sleep.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "context.h"
#include "cuda.h"

enum {
    FEEDS_A_FRAME = 64,
    /* In and out: more takes the worker longer than it is worth looking. */
    SPIN_BYTES_MAX = 2 * 1024 * 1024,
};

/* How long the daemon has to say why the worker is gone. */
static const uint64_t cause_grace_ns = 1000000000u;

/*
 * How long the worker has to finish what it can once the daemon has ended the epoch: ops that every
 * rank submitted still run, though a rank has died. Only a stopped worker takes that long.
 */
static const uint64_t finish_grace_ns = 500000000u;

/* ------------------------------------------------------------------ sending */

static void signal_fd(int fd)
{
    uint64_t one = 1;
    if (fd >= 0 && write(fd, &one, sizeof one) < 0)
        return; /* the counter is full: it is readable already */
}

static void clear_fd(int fd)
{
    uint64_t count;
    if (fd >= 0 && read(fd, &count, sizeof count) < 0)
        return; /* nothing was there */
}

int channel_push(struct gradd *g, const Pb__Envelope *envelope, const int *fds, unsigned n_fds)
{
    int rc = 0;
    pthread_mutex_lock(&g->out_lock);
    if (!g->worker.is_broken)
        rc = wire_out_push(&g->worker.out, envelope, fds, n_fds);
    pthread_mutex_unlock(&g->out_lock);
    if (rc == -ENOBUFS) {
        context_fail(g, GRADD_ERR_INTERNAL, "job %s: the worker has stopped reading",
                     g->identity.job);
        return 0;
    }
    return rc;
}

/* Under out_lock. True when the socket is full: somebody must poll for writing. */
static bool flush_locked(struct link *worker)
{
    if (worker->is_broken || wire_out_is_empty(&worker->out))
        return false;
    int rc = wire_out_flush(&worker->out, worker->fd);
    if (rc < 0)
        worker->is_broken = true; /* reading will find the end of stream, and why */
    return rc == 1;
}

bool channel_flush_out(struct gradd *g)
{
    pthread_mutex_lock(&g->out_lock);
    bool is_full = flush_locked(&g->worker);
    pthread_mutex_unlock(&g->out_lock);
    return is_full;
}

void channel_flush(struct gradd *g)
{
    if (channel_flush_out(g) && g->is_polling)
        signal_fd(g->wake_fd); /* it must poll for writing too */
}

bool channel_send_frames(struct gradd *g, struct wire_out *frames)
{
    pthread_mutex_lock(&g->out_lock);
    if (!g->worker.is_broken && wire_out_move(&g->worker.out, frames) < 0)
        g->worker.is_broken = true; /* ops would be missing: the worker sees the end below */
    bool is_full = flush_locked(&g->worker);
    if (g->worker.is_broken && g->worker.fd >= 0)
        shutdown(g->worker.fd, SHUT_WR);
    pthread_mutex_unlock(&g->out_lock);
    if (is_full)
        signal_fd(g->wake_fd); /* a thread that polls must do so for writing too */
    return is_full;
}

static bool has_output(struct gradd *g)
{
    pthread_mutex_lock(&g->out_lock);
    bool has = !g->worker.is_broken && !wire_out_is_empty(&g->worker.out);
    pthread_mutex_unlock(&g->out_lock);
    return has;
}

void channel_push_feeds(struct gradd *g)
{
    while (g->feeds) {
        Pb__Feed feeds[FEEDS_A_FRAME], *pointers[FEEDS_A_FRAME];
        Pb__FeedBatch batch = PB__FEED_BATCH__INIT;
        batch.epoch = g->epoch;
        batch.feeds = pointers;
        while (g->feeds && batch.n_feeds < FEEDS_A_FRAME) {
            struct op *op = g->feeds;
            g->feeds = op->next_feed;
            op->has_feed = false;
            Pb__Feed *feed = &feeds[batch.n_feeds];
            pb__feed__init(feed);
            feed->id = (uint64_t)op->id;
            feed->ready = op->flow.fed / op->element_bytes;
            pointers[batch.n_feeds++] = feed;
        }
        Pb__Envelope envelope = PB__ENVELOPE__INIT;
        envelope.body_case = PB__ENVELOPE__BODY_FEED_BATCH;
        envelope.feed_batch = &batch;
        if (channel_push(g, &envelope, NULL, 0) < 0)
            context_fail(g, GRADD_ERR_NO_MEMORY, "job %s: out of memory", g->identity.job);
    }
}

void channel_feed(struct gradd *g, struct op *op)
{
    while (op->state == OP_RUNNING && stage_fill_chunk(op)) {
        if (!op->has_feed) {
            op->has_feed = true;
            op->next_feed = g->feeds;
            g->feeds = op;
        }
        channel_push_feeds(g);
        channel_flush(g);
    }
}

/* ------------------------------------------------------------------ receiving */

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

/* One look at the worker's socket; at the daemon's only where that may matter, as it is rare. */
static bool step(struct gradd *g, bool asks_daemon)
{
    if (g->is_solo || g->failure)
        return false;
    bool has_news = read_link(g, &g->worker, on_worker_frame);
    if (asks_daemon || g->verdict_ns)
        has_news |= read_link(g, &g->daemon, on_daemon_frame);
    check_verdict(g);
    channel_flush(g);
    if (has_news && g->is_polling)
        signal_fd(g->wake_fd);
    if (g->has_ended)
        channel_notify(g);
    return has_news;
}

bool channel_step(struct gradd *g)
{
    return step(g, true);
}

void channel_notify(struct gradd *g)
{
    g->has_ended = false;
    if (g->n_sleeping > 0)
        pthread_cond_broadcast(&g->changed);
    if (g->event_fd >= 0)
        signal_fd(g->event_fd);
    if (g->failure && g->epoll_fd >= 0) {
        /* A stream at its end is readable for ever; the event above is enough. */
        epoll_ctl(g->epoll_fd, EPOLL_CTL_DEL, g->worker.fd, NULL);
        epoll_ctl(g->epoll_fd, EPOLL_CTL_DEL, g->daemon.fd, NULL);
    }
}

/* ------------------------------------------------------------------ waiting */

static struct timespec to_timespec(uint64_t ns)
{
    return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}

/*
 * Sleep until a socket has something, another thread calls, or the deadline passes. True when the
 * daemon has something to say.
 */
static bool poll_links(struct gradd *g, uint64_t deadline_ns)
{
    struct pollfd fds[3] = {
        {.fd = g->worker.is_over ? -1 : g->worker.fd, .events = POLLIN},
        {.fd = g->daemon.is_over ? -1 : g->daemon.fd, .events = POLLIN},
        {.fd = g->wake_fd, .events = POLLIN},
    };
    if (has_output(g))
        fds[0].events |= POLLOUT;
    if (g->verdict_ns && !g->failure && (!deadline_ns || deadline_ns > g->verdict_ns))
        deadline_ns = g->verdict_ns;
    struct timespec timeout = {0};
    if (deadline_ns) {
        uint64_t now = context_now_ns();
        timeout = to_timespec(deadline_ns > now ? deadline_ns - now : 0);
    }
    g->is_polling = true;
    pthread_mutex_unlock(&g->lock);
    int n = ppoll(fds, 3, deadline_ns ? &timeout : NULL, NULL);
    pthread_mutex_lock(&g->lock);
    g->is_polling = false;
    if (n > 0 && fds[2].revents)
        clear_fd(g->wake_fd);
    return n > 0 && fds[1].revents;
}

static void sleep_until_changed(struct gradd *g, uint64_t deadline_ns)
{
    g->n_sleeping++;
    if (deadline_ns) {
        struct timespec until = to_timespec(deadline_ns);
        pthread_cond_timedwait(&g->changed, &g->lock, &until);
    } else {
        pthread_cond_wait(&g->changed, &g->lock);
    }
    g->n_sleeping--;
}

/* Look again for a short while, letting others have the core (and the context) in between. */
static bool spin(struct gradd *g)
{
    if (g->ops.bytes_running > SPIN_BYTES_MAX || !spin_begins(&g->spin))
        return false;
    uint64_t now = context_now_ns();
    const uint64_t until = now + SPIN_NS;
    while (now < until && !g->is_polling) {
        pthread_mutex_unlock(&g->lock);
        sched_yield();
        pthread_mutex_lock(&g->lock);
        if (step(g, false)) {
            spin_succeeded(&g->spin);
            return true;
        }
        uint64_t before = now;
        now = context_now_ns();
        if (now - before > SPIN_YIELD_NS)
            break;
    }
    spin_failed(&g->spin);
    return false;
}

int channel_wait(struct gradd *g, bool (*is_done)(const void *arg), const void *arg,
                 uint64_t deadline_ns)
{
    int rc = 0;
    bool asks_daemon = false;
    while (!is_done(arg)) {
        if (g->is_polling) {
            if (deadline_ns && context_now_ns() >= deadline_ns) {
                rc = GRADD_PENDING;
                break;
            }
            sleep_until_changed(g, deadline_ns);
            continue;
        }
        bool has_news = step(g, asks_daemon);
        asks_daemon = false;
        if (has_news || is_done(arg))
            continue;
        if (deadline_ns && context_now_ns() >= deadline_ns) {
            /* A caller that only ever looks must hear from the daemon too. */
            step(g, true);
            rc = is_done(arg) ? 0 : GRADD_PENDING;
            break;
        }
        if (!g->is_solo && spin(g))
            continue;
        if (g->is_polling || is_done(arg))
            continue; /* another thread came in between the looks */
        asks_daemon = poll_links(g, deadline_ns);
    }
    if (!g->is_polling && g->n_sleeping > 0)
        pthread_cond_broadcast(&g->changed); /* one of them must poll now */
    return rc;
}

/* ------------------------------------------------------------------ for callers' own loops */

static int watch(int epoll_fd, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    return fd < 0 ? 0 : epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

int channel_event_fd(struct gradd *g)
{
    if (g->epoll_fd >= 0)
        return g->epoll_fd;
    int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    int event_fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK); /* 1: ops may have ended before */
    if (epoll_fd >= 0 && event_fd >= 0 && watch(epoll_fd, event_fd) == 0 &&
        (g->worker.is_over || watch(epoll_fd, g->worker.fd) == 0) &&
        (g->daemon.is_over || watch(epoll_fd, g->daemon.fd) == 0)) {
        g->event_fd = event_fd;
        return g->epoll_fd = epoll_fd;
    }
    int rc = error_set(GRADD_ERR_NO_MEMORY, "no descriptor to poll: %s", strerror(errno));
    if (epoll_fd >= 0)
        close(epoll_fd);
    if (event_fd >= 0)
        close(event_fd);
    return rc;
}

void channel_clear_events(struct gradd *g)
{
    clear_fd(g->event_fd);
}
