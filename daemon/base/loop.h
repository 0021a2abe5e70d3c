/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The event loop of a process. The only place that sees libevent.
 *
 * Thread: loop. The loop thread owns all mutable
 * state of the process; other threads reach it through an eventfd that it watches.
 *
 * Rule of life: a callback never frees its own object. It marks the object dead and calls
 * loop_defer(), which runs after the current callbacks.
 */
#ifndef GRADD_LOOP_H
#define GRADD_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct loop;
struct watch; /* an fd, a timer or a signal being watched */

enum watch_events {
    WATCH_READ = 1,
    WATCH_WRITE = 2,
};

/* fd is borrowed: it must outlive the watch and is never closed by it. */
typedef void watch_fd_fn(void *data, int fd, unsigned events);
typedef void watch_timer_fn(void *data);
typedef void watch_signal_fn(void *data, int signal_number);
typedef void loop_fn(void *data);

struct loop *loop_new(void); /* NULL: out of memory or descriptors */
/* Calls that are still deferred are dropped: what they refer to may be gone. NULL-safe. */
void loop_free(struct loop *loop);

/* Run until loop_stop(). 0 or -errno. */
int loop_run(struct loop *loop);
/* Run callbacks that are ready, once; wait for one when may_wait. For tests. */
int loop_step(struct loop *loop, bool may_wait);
void loop_stop(struct loop *loop);

/*
 * For this long from now, loop_run() looks for events between yields of the core instead of
 * sleeping: what comes soon is met without the cost of a wake-up. Other work on the core is let in
 * by every yield; when it makes the loop wait, spinning pauses for a while (see base/spin.h).
 */
void loop_spin(struct loop *loop, uint64_t ns);

/* Call fn on the loop thread, after the callbacks that run now, in order of posting. */
int loop_defer(struct loop *loop, loop_fn *fn, void *data);

/* Watch an fd (level triggered). events may be 0: watched later by watch_set(). NULL on failure. */
struct watch *watch_fd(struct loop *loop, int fd, unsigned events, watch_fd_fn *fn, void *data);
/* Change the events of an fd watch; cheap when unchanged. */
int watch_set(struct watch *watch, unsigned events);

/* A timer that is not running until watch_arm(). */
struct watch *watch_timer(struct loop *loop, watch_timer_fn *fn, void *data);
/* Fire once, delay_ns from now; replaces an earlier arming. */
int watch_arm(struct watch *watch, uint64_t delay_ns);
void watch_disarm(struct watch *watch);
bool watch_is_armed(const struct watch *watch);

struct watch *watch_signal(struct loop *loop, int signal_number, watch_signal_fn *fn, void *data);

/* Stop watching. Allowed inside the watch's own callback. NULL-safe. */
void watch_free(struct watch *watch);

#endif
