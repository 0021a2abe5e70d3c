/* SPDX-License-Identifier: Apache-2.0 */
#include "base/loop.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/queue.h>

#include <event2/event.h>

#include "base/clock.h"
#include "spin.h"

struct deferred {
    STAILQ_ENTRY(deferred) link;
    loop_fn *fn;
    void *data;
};

struct loop {
    struct event_base *base;
    struct event *defer_event; /* active while `deferred` holds calls */
    STAILQ_HEAD(, deferred) deferred;
    bool is_stopped;
    uint64_t n_events; /* callbacks of fds so far: tells whether a look found something */
    uint64_t spin_until_ns;
    struct spin spin;
};

struct watch {
    struct loop *loop;
    struct event *event;
    int fd;
    unsigned events;
    union {
        watch_fd_fn *on_fd;
        watch_timer_fn *on_timer;
        watch_signal_fn *on_signal;
    };
    void *data;
};

/* Runs what was deferred before this turn; what these calls defer runs in the next. */
static void run_deferred(evutil_socket_t fd, short events, void *data)
{
    (void)fd;
    (void)events;
    struct loop *loop = data;
    STAILQ_HEAD(, deferred) now = STAILQ_HEAD_INITIALIZER(now);
    STAILQ_CONCAT(&now, &loop->deferred);
    struct deferred *call;
    while ((call = STAILQ_FIRST(&now))) {
        STAILQ_REMOVE_HEAD(&now, link);
        call->fn(call->data);
        free(call);
    }
}

struct loop *loop_new(void)
{
    struct loop *loop = calloc(1, sizeof *loop);
    if (!loop)
        return NULL;
    STAILQ_INIT(&loop->deferred);
    struct event_config *config = event_config_new();
    if (config)
        event_config_set_flag(config, EVENT_BASE_FLAG_NOLOCK | EVENT_BASE_FLAG_IGNORE_ENV);
    loop->base = config ? event_base_new_with_config(config) : NULL;
    if (config)
        event_config_free(config);
    loop->defer_event = loop->base ? event_new(loop->base, -1, 0, run_deferred, loop) : NULL;
    if (!loop->defer_event) {
        loop_free(loop);
        return NULL;
    }
    return loop;
}

void loop_free(struct loop *loop)
{
    if (!loop)
        return;
    struct deferred *call;
    while ((call = STAILQ_FIRST(&loop->deferred))) {
        STAILQ_REMOVE_HEAD(&loop->deferred, link);
        free(call);
    }
    if (loop->defer_event)
        event_free(loop->defer_event);
    if (loop->base)
        event_base_free(loop->base);
    free(loop);
}

/* Look for events without sleeping, while that was asked for and pays. */
static int run_spinning(struct loop *loop)
{
    uint64_t now = clock_now_ns(), seen = loop->n_events;
    while (!loop->is_stopped && now < loop->spin_until_ns) {
        sched_yield();
        if (event_base_loop(loop->base, EVLOOP_NONBLOCK) < 0)
            return -EIO;
        if (loop->n_events != seen) {
            spin_succeeded(&loop->spin);
            seen = loop->n_events;
        }
        uint64_t before = now;
        now = clock_now_ns();
        if (now - before > SPIN_YIELD_NS)
            break;
    }
    if (loop->n_events == seen)
        spin_failed(&loop->spin);
    loop->spin_until_ns = 0;
    return 0;
}

int loop_run(struct loop *loop)
{
    int rc = 0;
    loop->is_stopped = false;
    while (rc == 0 && !loop->is_stopped) {
        if (loop->spin_until_ns)
            rc = run_spinning(loop);
        if (rc == 0 && !loop->is_stopped)
            rc = event_base_loop(loop->base, EVLOOP_ONCE | EVLOOP_NO_EXIT_ON_EMPTY) < 0 ? -EIO : 0;
    }
    return rc;
}

void loop_spin(struct loop *loop, uint64_t ns)
{
    if (loop->spin_until_ns || spin_begins(&loop->spin))
        loop->spin_until_ns = clock_now_ns() + ns;
}

int loop_step(struct loop *loop, bool may_wait)
{
    int flags = may_wait ? EVLOOP_ONCE : EVLOOP_NONBLOCK;
    return event_base_loop(loop->base, flags) < 0 ? -EIO : 0;
}

void loop_stop(struct loop *loop)
{
    loop->is_stopped = true;
    event_base_loopbreak(loop->base);
}

int loop_defer(struct loop *loop, loop_fn *fn, void *data)
{
    struct deferred *call = malloc(sizeof *call);
    if (!call)
        return -ENOMEM;
    *call = (struct deferred){.fn = fn, .data = data};
    STAILQ_INSERT_TAIL(&loop->deferred, call, link);
    event_active(loop->defer_event, EV_TIMEOUT, 0);
    return 0;
}

static void on_fd_event(evutil_socket_t fd, short events, void *data)
{
    struct watch *watch = data;
    watch->loop->n_events++;
    watch->on_fd(watch->data, fd,
                 (events & EV_READ ? WATCH_READ : 0u) | (events & EV_WRITE ? WATCH_WRITE : 0u));
}

static void on_timer_event(evutil_socket_t fd, short events, void *data)
{
    (void)fd;
    (void)events;
    struct watch *watch = data;
    watch->on_timer(watch->data);
}

static void on_signal_event(evutil_socket_t number, short events, void *data)
{
    (void)events;
    struct watch *watch = data;
    watch->on_signal(watch->data, number);
}

static short to_event_flags(unsigned events)
{
    return (short)((events & WATCH_READ ? EV_READ : 0) | (events & WATCH_WRITE ? EV_WRITE : 0) |
                   EV_PERSIST);
}

static struct watch *watch_new(struct loop *loop, int fd, short flags, event_callback_fn fn,
                               void *data)
{
    struct watch *watch = calloc(1, sizeof *watch);
    if (!watch)
        return NULL;
    watch->loop = loop;
    watch->fd = fd;
    watch->data = data;
    watch->event = event_new(loop->base, fd, flags, fn, watch);
    if (!watch->event) {
        free(watch);
        return NULL;
    }
    return watch;
}

struct watch *watch_fd(struct loop *loop, int fd, unsigned events, watch_fd_fn *fn, void *data)
{
    struct watch *watch = watch_new(loop, fd, to_event_flags(events), on_fd_event, data);
    if (!watch)
        return NULL;
    watch->on_fd = fn;
    watch->events = events;
    if (events && event_add(watch->event, NULL) < 0) {
        watch_free(watch);
        return NULL;
    }
    return watch;
}

int watch_set(struct watch *watch, unsigned events)
{
    if (watch->events == events)
        return 0;
    event_del(watch->event);
    watch->events = events;
    if (!events)
        return 0;
    event_assign(watch->event, watch->loop->base, watch->fd, to_event_flags(events), on_fd_event,
                 watch);
    return event_add(watch->event, NULL) < 0 ? -ENOMEM : 0;
}

struct watch *watch_timer(struct loop *loop, watch_timer_fn *fn, void *data)
{
    struct watch *watch = watch_new(loop, -1, 0, on_timer_event, data);
    if (watch)
        watch->on_timer = fn;
    return watch;
}

int watch_arm(struct watch *watch, uint64_t delay_ns)
{
    struct timeval delay = {
        .tv_sec = (time_t)(delay_ns / 1000000000u),
        .tv_usec = (suseconds_t)(delay_ns % 1000000000u / 1000u),
    };
    return event_add(watch->event, &delay) < 0 ? -ENOMEM : 0;
}

void watch_disarm(struct watch *watch)
{
    event_del(watch->event);
}

bool watch_is_armed(const struct watch *watch)
{
    return event_pending(watch->event, EV_TIMEOUT, NULL);
}

struct watch *watch_signal(struct loop *loop, int signal_number, watch_signal_fn *fn, void *data)
{
    struct watch *watch =
        watch_new(loop, signal_number, EV_SIGNAL | EV_PERSIST, on_signal_event, data);
    if (!watch)
        return NULL;
    watch->on_signal = fn;
    if (event_add(watch->event, NULL) < 0) {
        watch_free(watch);
        return NULL;
    }
    return watch;
}

void watch_free(struct watch *watch)
{
    if (!watch)
        return;
    event_free(watch->event);
    free(watch);
}
