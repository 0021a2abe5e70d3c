/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of gpu_trainer share: the rank, and ops whose results are known beforehand. What
 * goes wrong ends the program with a sentence.
 */
#ifndef GRADD_GPU_TRAINER_H
#define GRADD_GPU_TRAINER_H

#include <gradd/gradd.h>

#include "device.h"

extern struct gradd *g; /* NULL: shut down */
extern int rank, size;

enum {
    N = 100003, /* elements of most tensors: odd, and more than a thread block's */
    EXPECT_MAX = 8 * N,
};

void check(int status, const char *what);

/* An op on float32 whose input `stream` makes; sums, where it reduces. */
struct gradd_op make_op(int kind, const char *name, const float *in, float *out, size_t count);
struct gradd_op make_sum(const char *name, const float *in, float *out, size_t count);
struct gradd_op make_average(const char *name, float *x, size_t count);
gradd_handle submit(const struct gradd_op *ops, size_t n);
/* Submit, and make `stream` wait for the result; the handle is still to be ended. */
gradd_handle start(struct gradd_op op);
/* The same, and end it. */
void run(struct gradd_op op);

/* 1 + 2 + ... + size: the sum when rank r brings r + 1. */
float sum_of_ranks(void);
/* A sum of `count` float32 in place, in this stream; its handle. */
gradd_handle submit_sum(const char *name, float *p, size_t count, CUstream in);
/* Element i is value + step * (i % 97). n: at most EXPECT_MAX. */
void expect(const float *p, size_t n, float value, float step, const char *what);
/* Exportable memory of cuMemCreate(), or private one, in one chunk. */
float *chunk_new(size_t bytes, bool is_exportable);

/* collectives.c: every kind. */
void collectives(void);

/* corners.c: what programs may do, and rarely do. Shuts the context down. */
void corners(void);

#endif
