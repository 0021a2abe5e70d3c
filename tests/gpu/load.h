/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of load.cu's kernels, by value: gradd_test_produce, gradd_test_multiply. */
#ifndef GRADD_GPU_LOAD_H
#define GRADD_GPU_LOAD_H

struct load_produce {
    unsigned long long out, n, ns; /* floats at `out` become `value` after ns */
    float value;
};

struct load_multiply {
    unsigned long long out, n; /* 4 n multiply-adds per thread */
};

#endif
