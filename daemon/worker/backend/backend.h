/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contract of a backend: it executes ops whose ranks have all agreed and submitted.
 *
 * Thread: loop. run() takes a batch; done() is called on the loop thread, possibly before run()
 * returns. Batches may finish in another order than they were given. A backend never fails an op
 * half way in silence: it sets status and text and still calls done().
 */
#ifndef GRADD_BACKEND_H
#define GRADD_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <gradd/types.h>

#include "base/loop.h"

struct queue;

/* Memory of a tensor: byte b is at base + b, or at base + b % ring_bytes when ring_bytes > 0. On a
 * device the address is one that only the device may use. */
struct backend_span {
    uint8_t *base; /* NULL: none */
    uint64_t ring_bytes;
};

/* One rank's share of an op. */
struct backend_part {
    struct backend_span in, out; /* without base: the rank is on another node, or out of data */
    uint32_t node;               /* index of the rank's node in the job */
    uint64_t count;              /* elements of `in` */
    const uint64_t *counts;      /* all-to-all: elements for each rank of the set */
    struct queue *queue;         /* of device memory on this node: orders it; else NULL */
    uint64_t ticket;             /* of the queue */
    uint32_t ticket_ops;         /* ops of that ticket, at least 1 */
};

struct backend_op {
    enum gradd_kind kind;
    enum gradd_dtype dtype;
    enum gradd_redop redop;
    double prescale, postscale;
    uint32_t n_ranks; /* of the process set */
    uint32_t root;    /* broadcast: index into parts */
    uint32_t n_joined;
    bool is_device;        /* the parts are device memory */
    const uint32_t *ranks; /* of the process set: global ranks, ascending */
    const struct backend_part *parts;
    const uint64_t *counts; /* reduce-scatter: elements that each rank receives */
    /* The slice of elements to execute; the whole op except all-reduce and broadcast. */
    uint64_t begin, end;
    /* NULL, or, for each part that has an input, in order: where to add the number of its NaN and
     * infinite elements. Written by any thread. */
    _Atomic uint64_t *nonfinite;
    /* Of several nodes: the same on all of them, and no other op's. Nodes prove to each other with
     * it that they mean the same op. */
    uint64_t number;
    int status; /* out: GRADD_OK, or why the op failed */
    const char *text;
};

struct backend_batch {
    struct backend_op **ops;
    size_t n_ops;
    /* Device memory: all ops are launched, or have failed, and each queue's results are marked:
     * trainers may issue their waits. Called once before done(), on the loop. NULL: nobody asks. */
    void (*enqueued)(void *data, struct backend_batch *batch);
    void (*done)(void *data, struct backend_batch *batch);
    void *data;
    struct backend_batch *next; /* the backend's */
};

struct backend;

struct backend_ops {
    const char *name;
    /* n_threads 0: the cores that the process may use, at most 8. NULL: *out_text says why. */
    struct backend *(*new)(struct loop *loop, unsigned n_threads, const char **out_text);
    void (*free)(struct backend *backend); /* finishes what runs, without calling done() */
    void (*run)(struct backend *backend, struct backend_batch *batch);
    unsigned (*n_threads)(const struct backend *backend);
};

extern const struct backend_ops backend_host;

#endif
