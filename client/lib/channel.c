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

enum {
    FEEDS_A_FRAME = 64,
    /* In and out: more takes the worker longer than it is worth looking. */
    SPIN_BYTES_MAX = 2 * 1024 * 1024,
};

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

/* ------------------------------------------------------------------ steps */

static bool step(struct gradd *g, bool asks_daemon)
{
    if (g->is_solo || g->failure)
        return false;
    bool has_news = channel_receive(g, asks_daemon);
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
