/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernels of kernels.cu are called and what they are given: plain values, read by the
 * host (cuda_kernels.c), by the device (kernels.cu) and by the tests' twins of the kernels. Each
 * kernel has one parameter, its struct, passed by value.
 *
 *   gradd_reduce_<type>_<op>   struct cuda_reduce_params    type: i8 u8 i32 i64 f16 f32 f64 bf16
 *                                                           op: sum prod max min
 *   gradd_copy                 struct cuda_copy_params      grid.y: segments
 *   gradd_nonfinite_<type>     struct cuda_nonfinite_params type: f16 f32 f64 bf16
 *
 * The grid is one block of CUDA_KERNELS_THREADS threads or more, in x; every kernel strides over
 * the grid, so any number of blocks is right.
 */
#ifndef GRADD_CUDA_PARAMS_H
#define GRADD_CUDA_PARAMS_H

enum {
    CUDA_KERNELS_THREADS = 512,
    CUDA_REDUCE_MAX = 64,    /* inputs, and outputs, of one launch */
    CUDA_COPY_SEGMENTS = 128 /* of one launch: the parameters of a kernel are 4 KiB at most */
};

/* As struct reduction of reduce.h: the same order, rounding and factors. */
struct cuda_reduce_params {
    unsigned long long in[CUDA_REDUCE_MAX];  /* device addresses, aligned to an element */
    unsigned long long out[CUDA_REDUCE_MAX]; /* each may equal an input exactly */
    unsigned long long n;                    /* elements */
    double prescale, postscale;              /* 1: none */
    unsigned n_in, n_out;                    /* 1 to CUDA_REDUCE_MAX */
    unsigned n_zero;                         /* operands of value 0, after the inputs */
    unsigned divisor;                        /* of op sum: ranks of an average; 0: a sum */
};

struct cuda_copy_segment {
    unsigned long long to, from, bytes; /* any alignment; fast when to = from modulo 16 */
};

struct cuda_copy_params {
    struct cuda_copy_segment segments[CUDA_COPY_SEGMENTS];
};

struct cuda_nonfinite_params {
    unsigned long long in;
    unsigned long long n;     /* elements */
    unsigned long long count; /* device address of a uint64_t: NaN and infinite ones are added */
};

#endif
