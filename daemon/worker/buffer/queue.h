/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A queue: one stream of a trainer on one GPU, as the worker sees it. It carries the order between
 * that stream and the worker's, with no host waiting for a device (trainer.proto, OpenQueue).
 *
 * Threads: opened and closed on the loop (driver calls that may be slow on the chores thread);
 * queue_wait_inputs() and queue_mark_results() on the submitter thread, with the device's context
 * current. Life: a request that names the queue pins it; a closed queue is freed, with its events,
 * on the chores thread when its last pin goes.
 */
#ifndef GRADD_QUEUE_H
#define GRADD_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uthash.h>

#include "worker/buffer/cuda_device.h"

enum { QUEUE_SLOTS_MAX = 256 };

struct queue;

struct queue_table {
    struct chores *chores;
    struct cuda_device_table *devices; /* NULL: this worker takes no device memory */
    struct queue *by_id;
};

/* What OpenQueue said. */
struct queue_request {
    uint32_t id, slots;
    const uint8_t *uuid;
    int order;             /* PB__QUEUE_ORDER__... */
    const uint8_t *events; /* ORDER_EVENT: slots handles of 64 bytes, one after another */
    int take_fd;           /* ORDER_FLAG: owned from here on; else -1 */
};

/* events: the worker's handles for the trainer, slots * 64 bytes (ORDER_EVENT), valid for the call.
 */
typedef void queue_opened_fn(void *data, uint32_t id, int status, const char *text,
                             const uint8_t *events, uint32_t slots);

void queue_table_init(struct queue_table *table, struct chores *chores,
                      struct cuda_device_table *devices);
/*
 * Close every queue. is_lost: the trainer did not leave in order, so that nothing says any more
 * whether what its streams had under way has happened (queue_is_unsure()). What waits for them
 * waits on: only who has ended the communicators may let it go (queue_poison()).
 */
void queue_table_deinit(struct queue_table *table, bool is_lost);

void queue_open(struct queue_table *table, const struct queue_request *request,
                queue_opened_fn *opened, void *data);
/* False: no such queue. */
bool queue_close(struct queue_table *table, uint32_t id);

/* The ready queue with this id, pinned; NULL: *out_text says why not. */
struct queue *queue_pin(struct queue_table *table, uint32_t id, const char **out_text);
void queue_unpin(struct queue *queue); /* NULL-safe */

struct cuda_device *queue_device(const struct queue *queue);

/* Any thread, pinned. In flag order what waits for the trainer's stream waits no more; inputs that
 * were not there by then are unsure. */
void queue_poison(struct queue *queue);
/* Any thread, pinned: what ran after queue_wait_inputs() of this ticket may have run before the
 * trainer's stream came so far. */
bool queue_is_unsure(const struct queue *queue, uint64_t ticket);

/* Submitter thread: what is launched on the device's stream from here on sees the ticket's inputs.
 */
CUresult queue_wait_inputs(struct queue *queue, uint64_t ticket);
/*
 * Every op of a ticket is counted once, either as launched here, or as skipped:
 * what was launched and marked when the batch's enqueued() is called has status GRADD_OK then;
 * all others are skipped by their request's end (member_reply.c), and the backend does not count
 * them.
 *
 * Submitter thread: what has been launched so far on the device's stream is the result of n_ops ops
 * of this ticket, out of n_ticket_ops. In flag order the word is written with the last of them.
 */
CUresult queue_mark_results(struct queue *queue, uint64_t ticket, uint32_t n_ops,
                            uint32_t n_ticket_ops);
/* Loop: n_ops ops of this ticket ended without being launched. In flag order, with the last of a
 * ticket's ops, the host writes the word: no stream hangs for an op that failed. */
void queue_skip(struct queue *queue, uint64_t ticket, uint32_t n_ops, uint32_t n_ticket_ops);

#endif
