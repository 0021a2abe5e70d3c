/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The context behind `struct gradd *`: one rank's membership, shared by all of the library's files.
 *
 * Thread: any. `lock` guards every field that is not marked constant; it is never held while
 * blocking. Identity is constant after gradd_init().
 */
#ifndef GRADD_CLIENT_CONTEXT_H
#define GRADD_CLIENT_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include <gradd/gradd.h>

#include "spin.h"
#include "env.h"
#include "error.h"
#include "op.h"
#include "region.h"
#include "stage.h"
#include "wire.h"

/* A socket and its codec. Closed only at the end, so that no poll can meet a reused descriptor. */
struct link {
    int fd; /* -1: none */
    struct wire_in in;
    struct wire_out out;
    bool is_over;   /* end of stream: do not read or poll again */
    bool is_broken; /* writing failed: what is queued is lost */
};

struct cuda;
struct submit_scratch;

struct gradd {
    LIST_ENTRY(gradd) all; /* under the list's own lock: see fork.c */
    pthread_mutex_t lock;
    /* Guards worker.out and worker.is_broken: a stream's host function sends without `lock`, which
     * may be held by a thread that waits for that very stream. Taken alone or within `lock`. */
    pthread_mutex_t out_lock;
    pthread_cond_t changed; /* CLOCK_MONOTONIC: ops ended, or the poller stepped down */
    atomic_bool is_forked;

    /* Constant. */
    struct identity identity;
    int32_t node_rank, n_nodes;
    uint64_t epoch;
    uint32_t max_in_flight;
    uint64_t memory_bytes;
    bool is_solo;
    bool has_device_path;  /* the worker takes device memory; else device_text says why not */
    uint32_t device_order; /* enum pb__queue_order: what is configured */
    char device_text[ERROR_TEXT_BYTES];
    struct spin spin;

    struct link daemon, worker;
    /*
     * The epoch is about to fail: the worker's stream ended and the daemon may know why, or the
     * daemon said so and the worker may have completions under way. 0: no.
     */
    uint64_t verdict_ns; /* when to stop waiting for the other one */
    int verdict;         /* what the daemon said, or 0 */
    char verdict_text[ERROR_TEXT_BYTES];
    int failure; /* status that ended the epoch, or 0 */
    char failure_text[ERROR_TEXT_BYTES];

    int wake_fd;  /* eventfd: makes the polling thread look again */
    int event_fd; /* eventfd behind gradd_fd(), -1 until asked for */
    int epoll_fd; /* what gradd_fd() returned, or -1 */
    bool is_polling;
    unsigned n_sleeping; /* threads that wait for `changed` */
    bool has_ended;      /* a submission ended and nobody has been told yet */
    struct op *feeds;    /* ops whose flow.fed grew since the worker heard of it */

    struct region_table regions;
    struct region *unanswered; /* registrations in flight */
    uint32_t next_region;
    struct stage_pool stage;
    struct op_pool ops;
    struct process_set *sets;
    size_t n_sets;
    uint32_t n_sets_made;           /* in a world of one: the last id given */
    struct submit_scratch *scratch; /* owned by submit.c */
    struct cuda *cuda;              /* owned by cuda.c; NULL until an op has device memory */
};

/* ---- context.c */

/* 0, or a status with gradd_error() set: NULL, or a fork of the process that joined. */
int context_check_alive(const struct gradd *g);
/* Take the lock for an API call. 0, or a status with gradd_error() set (and no lock). */
int context_enter(struct gradd *g);
void context_leave(struct gradd *g);
/* As the epoch stands: 0, or its failure with gradd_error() set. */
int context_check(const struct gradd *g);
/* End the epoch: every op in flight ends with this status. Only the first call counts. */
void context_fail(struct gradd *g, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* End one op; text may be NULL when it went well. */
void context_end_op(struct gradd *g, struct op *op, int status, const char *text);
/* Free the submission's records once it has ended, is released and nobody waits for it. */
void context_reap(struct gradd *g, struct op *lead);
/* The set with this id (never 0), or NULL. */
const struct process_set *context_find_set(const struct gradd *g, uint32_t id);
/* Remember a set that was created. 0 or -ENOMEM. */
int context_add_set(struct gradd *g, const struct process_set *set);
void context_remove_set(struct gradd *g, uint32_t id);
uint64_t context_now_ns(void);

/* ---- memory.c */

/* A region that the worker knows too. May release the lock meanwhile. 0 or a status. */
int memory_new_region(struct gradd *g, size_t bytes, bool is_staging, struct region **out);
void memory_free_region(struct gradd *g, struct region *region);
/* Tell the worker that it may close the region, without waiting. */
void memory_unregister(struct gradd *g, const struct region *region);
/* Wait for the worker's word on the region, whose message was pushed. 0 or a status. */
int memory_await_answer(struct gradd *g, struct region *region);

/* ---- channel.c */

enum { WAIT_FOREVER = 0 };

/* Do what can be done without blocking. True when something arrived. */
bool channel_step(struct gradd *g);
/*
 * Make progress until is_done(arg) or until deadline_ns (monotonic; WAIT_FOREVER: none). Releases
 * the lock while it sleeps. 0, or GRADD_PENDING when time ran out.
 */
int channel_wait(struct gradd *g, bool (*is_done)(const void *arg), const void *arg,
                 uint64_t deadline_ns);
/*
 * Queue an envelope for the worker. 0 or -errno; when the worker can not be told any more the
 * epoch ends by itself, and that is 0 too.
 */
int channel_push(struct gradd *g, const Pb__Envelope *envelope, const int *fds, unsigned n_fds);
/* Queue news of every op that may go further. */
void channel_push_feeds(struct gradd *g);
/* Send what is queued, as far as the socket takes it. */
void channel_flush(struct gradd *g);
/* The same from a thread without the lock. True when the socket is full. */
bool channel_flush_out(struct gradd *g);
/* Queue frames that were made before, and flush. Thread: any, without the lock. True when the
 * socket is full. */
bool channel_send_frames(struct gradd *g, struct wire_out *frames);
/* Copy in what fits, and tell the worker piece by piece. */
void channel_feed(struct gradd *g, struct op *op);
/* The pollable descriptor, created on first use. fd, or a status with gradd_error() set. */
int channel_event_fd(struct gradd *g);
/* Take back the events that led to this call. */
void channel_clear_events(struct gradd *g);
/* Some op ended: wake threads that wait for it, and gradd_fd(). */
void channel_notify(struct gradd *g);

/* ---- channel_receive.c */

/* Read once what the worker has sent, and handle it; what the daemon has only where asked for or
 * where it may matter, as it is rare. True when something arrived. */
bool channel_receive(struct gradd *g, bool asks_daemon);

/* ---- session.c */

/* Join through the daemon at `socket`: fills links, identity and limits. 0 or a status. */
int session_join(struct gradd *g, const char *socket, double timeout_s);
/* Leave in order, and close both links. */
void session_leave(struct gradd *g);
void link_init(struct link *link, int take_fd);
void link_deinit(struct link *link);

/* ---- validate.c */

/* What an op amounts to, once it has been found sound. */
struct op_shape {
    uint64_t in_bytes, out_bytes;
    const uint64_t *counts; /* explicit, one per rank of the set; NULL where the kind has none */
    size_t n_counts;
    uint64_t out_count; /* reduce-scatter: this rank's part */
    double prescale, postscale;
    bool needs_in, needs_out;
};

/*
 * Is the op sound? even: room for one count per rank of its set, used when the op gives none.
 * 0, or a status with gradd_error() set.
 */
int validate_op(const struct gradd *g, const struct gradd_op *op, uint64_t *even,
                struct op_shape *out);
/* Ranks of a set, or 0 when this rank does not know the set. */
uint32_t validate_set_size(const struct gradd *g, uint32_t set);
/*
 * Copy a struct that the caller compiled with its own version of the header. 0, or a status when
 * its size or an unknown field makes no sense.
 */
int validate_struct(void *dst, size_t known_bytes, const void *src, size_t first_bytes,
                    const char *what);

/* ---- submit.c */

gradd_handle submit_ops(struct gradd *g, const struct gradd_op *ops, size_t n,
                        enum stage_window window);
void submit_scratch_free(struct submit_scratch *scratch);

/* ---- handle.c */

/*
 * Wait for the handle, fetch its first op's counts (out_counts may be NULL), release it.
 */
int handle_wait(struct gradd *g, gradd_handle handle, double timeout_s, uint64_t *out_counts,
                size_t capacity);

/* ---- solo.c */

/* Run the op in this process: a world of one. 0, or a status with *out_text set. */
int solo_run(struct gradd *g, struct op *op, const struct gradd_op *request,
             const struct op_shape *shape, const char **out_text);
/* What an all-reduce or reduce-scatter does to host memory; elements that are NaN or infinite. */
void solo_reduce(const struct gradd_op *request, const struct op_shape *shape);
uint64_t solo_count_nonfinite(const struct gradd_op *request);

/* ---- fork.c */

void fork_watch(struct gradd *g);
void fork_unwatch(struct gradd *g);

#endif
