/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For tests of the fake CUDA driver: the driver, opened with its environment as the test has set
 * it, and a second process with a driver of its own.
 *
 * A test opens the driver after setting its environment and after starting its peers, since a
 * forked child cannot use the parent's.
 */
#ifndef TEST_FAKE_DRIVER_H
#define TEST_FAKE_DRIVER_H

#include <check.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include "cuda/entries.h"
#include "cuda/fake_cuda.h"

struct fake_driver {
#define FIELD(name, parameters) CUresult(*name) parameters;
    FAKE_ENTRIES(FIELD)
#undef FIELD
    __typeof__(&fake_cuda_stream_push) stream_push;
    __typeof__(&fake_cuda_view) view;
    __typeof__(&fake_cuda_count) count;
    __typeof__(&fake_cuda_pointer_device) pointer_device;
    __typeof__(&fake_cuda_stream_device) stream_device;
    __typeof__(&fake_cuda_physical_device) physical_device;
    __typeof__(&fake_cuda_context_fail) context_fail;
    void *library;
};
extern struct fake_driver cu;

/* Load the library only; and make the primary context of a device current as well. */
void driver_load(void);
void driver_open(int device);

/* A child of the test's own making: what fails in it is its status, not the suite's. */
void driver_in_child(void);

struct peer {
    pid_t pid;
    int fd;
};
/* A child that runs `run(fd)` and exits with 0. */
struct peer peer_start(void (*run)(int fd));
void peer_end(struct peer peer);
void put(int fd, const void *bytes, size_t n);
void take(int fd, void *bytes, size_t n);
void put_fd(int fd, int sent);
int take_fd(int fd);

/* The child that runs `breach` is killed by the signal; its stderr has the words. */
void dies(void (*breach)(void), int sig, const char *words);

/* In any of the processes: the call succeeds, or gives this error. */
#define OK(call)        gives(CUDA_SUCCESS, call, #call, __LINE__)
#define GIVES(rc, call) gives(rc, call, #call, __LINE__)
void gives(CUresult wanted, CUresult got, const char *call, int line);
#define HOLDS(condition) holds(condition, #condition, __LINE__)
void holds(bool condition, const char *text, int line);

/* The suite, in a directory of its own for the fake's files. */
int run_fake_suite(Suite *suite);

#endif
