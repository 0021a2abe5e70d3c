/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPU as the programs of tests/gpu see it: the driver, a context, a stream, timing. What goes
 * wrong here ends the program with a sentence.
 *
 * Results are lines on stdout: a JSON object each, which tests/gpu/run reads.
 */
#ifndef GRADD_GPU_DEVICE_H
#define GRADD_GPU_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_table.h"

extern const struct cuda_table *cuda;
extern CUstream stream;

enum { EXIT_NO_GPU = 77 };

/* The driver, a context on the device and a stream; without a GPU the program exits with 77. */
void device_open(int ordinal);
/* What <nvcc> compiled of load.cu (or any image for the fake driver): file in GRADD_GPU_LOAD. */
CUfunction load_function(const char *name);
void load_produce(float *out, size_t n, float value, double seconds);
void load_multiply(uint64_t n, unsigned blocks);

_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void check_cuda(CUresult rc, const char *call);
#define CU(call) check_cuda(cuda->call, #call)
/* One line of results: format is the inside of a JSON object. */
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));

float *floats_new(size_t n); /* device memory of cuMemAlloc() */
void floats_fill(float *p, size_t n, float value, float step);
void floats_read(const float *p, float *out, size_t n); /* waits for the stream */

double now(void); /* seconds */
/* Seconds of the device between two events recorded on the stream. */
CUevent timer_mark(void);
double timer_between(CUevent from, CUevent to);
double device_free_mib(void);
const char *device_name(void);
/* The median and the 99th percentile of n figures, which are sorted. */
void percentiles(double *figures, size_t n, double *out_median, double *out_p99);

#endif
