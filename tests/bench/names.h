/* SPDX-License-Identifier: Apache-2.0 */
/* The names of element types and operators on the benchmarks' command line and in their rows. */
#ifndef BENCH_NAMES_H
#define BENCH_NAMES_H

#include <stddef.h>

/* The value, or -1. */
int dtype_from_name(const char *name);
int redop_from_name(const char *name);

const char *dtype_name(int dtype);
const char *redop_name(int redop);

/* Bytes of an element. */
size_t dtype_size(int dtype);

#endif
