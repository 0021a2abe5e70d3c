/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For tests of the fake NCCL: ranks are processes, each with a driver, a library and a stream of
 * its own; what they print and how they end is collected.
 */
#ifndef TEST_FAKE_NCCL_H
#define TEST_FAKE_NCCL_H

#include "fake_driver.h"
#include "worker/backend/nccl/nccl_table.h"

enum { RANKS_MAX = 4 };

extern const struct nccl_table *nccl; /* after rank_open() */

struct rank {
    int rank, n_ranks;
    ncclUniqueId id, other_id;
    int fd; /* to the test: put(), take() */
    ncclComm_t comm;
    CUstream stream;
};

/* In the rank's process: driver, library, stream; on this device. */
void rank_open(struct rank *self, int device);
/* And a communicator, blocking or not, made to the end. */
void rank_join(struct rank *self, int blocking);
ncclConfig_t config_of(int blocking);
/* Until the state is not ncclInProgress; returns it. */
ncclResult_t rank_poll(ncclComm_t comm);

/* Device memory, filled with value, value + step, ... */
float *floats_new(size_t n, float value, float step);
/* Where the CPU sees them, once the stream is done. */
const float *floats_of(struct rank *self, const float *device, size_t n);

struct outcome {
    pid_t pid;
    int fd;
    int status; /* of waitpid() */
};
struct outcomes {
    struct outcome ranks[RANKS_MAX];
    int n, stderr_fd;
    char text[4096]; /* what they wrote to stderr */
};
/* Start n processes; each exits with 0 when `run` returns. A variable may be set for one rank. */
struct outcomes ranks_start(int n, void (*run)(struct rank *self));
void ranks_set(int rank, const char *variable, const char *value); /* before ranks_start() */
void ranks_wait(struct outcomes *outcomes);

/* All end with 0. */
void ranks_succeed(int n, void (*run)(struct rank *self));
/* At least one is aborted with these words. Who waits for it then is killed. */
void ranks_die(int n, void (*run)(struct rank *self), const char *words);

#define NOK(call)        gives((CUresult)ncclSuccess, (CUresult)(call), #call, __LINE__)
#define NGIVES(rc, call) gives((CUresult)(rc), (CUresult)(call), #call, __LINE__)

#endif
