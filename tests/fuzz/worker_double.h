/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for worker_process.c: workers that are no processes and say what the fuzzer wants. As
 * the real ones, they report only to an owner that has not ended them, and end at most once.
 */
#ifndef FUZZ_WORKER_DOUBLE_H
#define FUZZ_WORKER_DOUBLE_H

#include <stddef.h>

#include "wire.h"

/* The i-th living worker (modulo how many there are) becomes ready, speaks, or ends. */
void worker_double_ready(size_t i);
void worker_double_speak(size_t i, const Pb__Envelope *envelope);
void worker_double_die(size_t i);
size_t worker_double_count(void);

#endif
