/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker's side of device memory in a test: loop, chores, devices and tables, on the fake
 * driver. The trainer's side is a peer (tests/unit/fakes/fake_driver.h), a process of its own.
 */
#ifndef TEST_TRAINER_H
#define TEST_TRAINER_H

#include "../../fakes/fake_driver.h"
#include "worker/buffer/queue.h"
#include "worker/buffer/region.h"

struct bench {
    struct loop *loop;
    struct chores *chores;
    struct cuda_device_table *devices;
    struct cuda_import_table imports;
    struct region_quota quota;
    struct region_table regions;
    struct queue_table queues;
    /* The last answer, and how many there were. */
    int status;
    char text[400];
    unsigned n_opened, n_closed;
    unsigned n_bad_handles; /* that the test has given, and the driver refused */
    uint8_t events[QUEUE_SLOTS_MAX * 64];
};
extern struct bench bench;

/* After the peers have been started: a forked child can not use the parent's driver. */
void bench_setup(void);
/* Everything is given back: descriptors and imports. */
void bench_teardown(void);

/* The UUID of the fake's GPU of that number. */
const uint8_t *gpu(uint8_t number);

/* Wait for one more answer; its status. */
int await_opened(unsigned n_before);
int open_handle(uint32_t id, uint64_t bytes, const void *handle);
void bench_on_region(void *data, uint32_t id, int status, const char *text);
void bench_on_closed(void *data, uint32_t id);
void bench_on_queue(void *data, uint32_t id, int status, const char *text, const uint8_t *events,
                    uint32_t slots);

/* The region's device address; fails the test when it can not be pinned. */
CUdeviceptr pin(uint32_t id, uint64_t offset, uint64_t bytes, struct region **out_region);

/* On the device's stream, with its context current; waits for it. */
void fill(CUdeviceptr p, unsigned char value, size_t bytes);
unsigned char first_byte(CUdeviceptr p);
/* The first device of the table, with its context current from here on. */
struct cuda_device *use_device(void);

#endif
