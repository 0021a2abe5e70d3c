/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tensors' contents. Element i of rank r is a small whole number that depends on i only
 * through i modulo a small period: one block is made with care and copied, and a result is checked
 * block by block. Sums, products, averages are exact, or rounded once as gradd rounds them.
 */
#ifndef BENCH_TENSOR_H
#define BENCH_TENSOR_H

#include "bench.h"

/* Write rank's contribution. */
void tensor_fill(const struct bench_options *options, void *tensor, size_t bytes, int rank);

/* Bytes of `tensor` that differ from the exact all-reduce of tensor_fill() over `ranks`. */
size_t tensor_n_wrong(const struct bench_options *options, const void *tensor, size_t bytes,
                      int ranks);

#endif
