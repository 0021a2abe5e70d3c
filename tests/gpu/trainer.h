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

void check(int status, const char *what);
/* 1 + 2 + ... + size: the sum when rank r brings r + 1. */
float sum_of_ranks(void);
/* A sum of `count` float32 in place, in this stream; its handle. */
gradd_handle submit_sum(const char *name, float *p, size_t count, CUstream in);
/* Element i is value + step * (i % 97). n: at most that of check_reductions(). */
void expect(const float *p, size_t n, float value, float step, const char *what);
/* Exportable memory of cuMemCreate(), or private one, in one chunk. */
float *chunk_new(size_t bytes, bool is_exportable);

/* corners.c: what programs may do, and rarely do. Shuts the context down. */
void corners(void);

#endif
