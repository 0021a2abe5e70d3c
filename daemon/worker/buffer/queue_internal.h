/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of a queue share: queue.c (its life: loop and chores thread) and queue_order.c
 * (the order between two streams: submitter thread, and whoever has it pinned).
 */
#ifndef GRADD_QUEUE_INTERNAL_H
#define GRADD_QUEUE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "envelope.pb-c.h"
#include "worker/buffer/queue.h"

enum {
    QUEUE_PAGE_BYTES = 4096, /* of flag order */
    QUEUE_FINISHED_WORD = 8, /* word of slot 0; word 0 is `produced` */
};
_Static_assert(8 * (QUEUE_FINISHED_WORD + QUEUE_SLOTS_MAX) <= QUEUE_PAGE_BYTES,
               "every slot has a word");

enum queue_state {
    QUEUE_WAITING, /* for the device */
    QUEUE_OPENING,
    QUEUE_READY,
    QUEUE_CLOSED, /* out of the table; freed when nothing pins it */
};

/* One direction each: the trainer's stream marks, the worker's waits, and the other way round. */
struct queue_slot {
    CUevent in, out; /* event order: the trainer's, ours */
    uint64_t ticket; /* in flag order: whose ops are counted */
    uint32_t n_ended, n_launched;
};

struct queue {
    struct chore chore; /* first */
    uint32_t id, n_slots;
    enum queue_state state;
    int order;
    unsigned n_pins;
    struct queue_table *table; /* not once closed */
    struct chores *chores;
    struct cuda_device_table *devices;
    struct cuda_device *device;
    uint8_t *handles; /* event order: the trainer's, while opening; then ours */
    int fd;           /* flag order, while opening */
    _Atomic int64_t *words;
    CUdeviceptr words_on_device;
    _Atomic uint64_t unsure_from; /* from this ticket on nobody knows what was produced */
    bool is_registered;
    _Atomic bool writes_late; /* the stream has a write that no op's end is behind */
    int open_status;
    char text[240];
    queue_opened_fn *opened;
    void *data;
    pthread_mutex_t mutex; /* guards ticket, n_ended, n_launched of the slots */
    UT_hash_handle hh;
    struct queue_slot slots[];
};

/* Nobody says any more what the trainer's stream has produced: from here on it is unsure. */
void queue_set_unsure(struct queue *queue);

#endif
