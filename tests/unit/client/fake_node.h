/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon and a worker played by the test, frame by frame, over real sockets. It keeps the rules
 * of the protocol: what the library sends is expected in order and by kind.
 *
 * Thread: the test's. gradd_init() and blocking ops of the library run in a thread of their own.
 */
#ifndef TEST_FAKE_NODE_H
#define TEST_FAKE_NODE_H

#include <pthread.h>
#include <stdint.h>

#include <gradd/gradd.h>

#include "wire.h"

struct fake_link {
    int fd;
    struct wire_in in;
    struct wire_out out;
};

struct fake_node {
    char directory[64];
    char socket[80];
    int listener;
    struct fake_link daemon, worker;
    int worker_end; /* the library's end of the worker's socket, before it is sent */
    struct gradd_options options;
    bool has_device_path; /* what Joined says: set them before fake_join() */
    uint32_t device_order;
    pthread_t joiner;
    struct gradd *g; /* once joined */
    int status;      /* of gradd_init() */
    char error[512];
};

/* Listen on a private socket. */
void fake_open(struct fake_node *node);
void fake_close(struct fake_node *node);

/* Run gradd_init() in a thread, accept its connection. */
void fake_start_join(struct fake_node *node, int rank, int size);
/* Wait for gradd_init() to return. */
void fake_end_join(struct fake_node *node);
/* All of it: node->g is joined, in epoch 5, with these limits. */
void fake_join(struct fake_node *node, uint32_t max_in_flight, uint64_t memory_bytes);

/* The next frame, which must be of this kind. Valid until the next call. out_fd may be NULL. */
const Pb__Envelope *fake_expect(struct fake_link *link, Pb__Envelope__BodyCase kind, int *out_fd);
/* The next frame, whatever it is; its descriptors are the caller's. */
void fake_next(struct fake_link *link, struct wire_frame *out);
/* No frame is there: proven by the library's having returned before. */
void fake_expect_nothing(struct fake_link *link);
void fake_send(struct fake_link *link, const Pb__Envelope *envelope, int fd);
void fake_hang_up(struct fake_link *link);

void fake_complete(struct fake_node *node, uint64_t id, int status, const char *text);
void fake_progress(struct fake_node *node, uint64_t id, uint64_t done);
void fake_enqueued(struct fake_node *node, uint64_t id);
void fake_answer_queue(struct fake_node *node, uint32_t queue, int status, const char *text);
void fake_answer_region(struct fake_node *node, uint32_t region, int status, const char *text);
void fake_fail_epoch(struct fake_link *link, int status, const char *text);

#endif
