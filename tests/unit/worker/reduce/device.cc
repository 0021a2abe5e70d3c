/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words of CUDA C that kernels.cu uses, for the CPU, and then kernels.cu itself. The
 * conversions of half types are the compiler's own here, where the device has instructions.
 */
#include "device.h"

#include <string.h>

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct uint4 {
    unsigned x, y, z, w;
} __attribute__((aligned(16)));

struct position {
    unsigned x, y, z;
};
static position threadIdx, blockIdx, blockDim, gridDim;

static inline void *__cvta_global_to_generic(unsigned long long address)
{
    return (void *)address;
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
static inline double __dadd_rn(double a, double b)
{
    return a + b;
}
static inline double __dmul_rn(double a, double b)
{
    return a * b;
}
static inline double __ddiv_rn(double a, double b)
{
    return a / b;
}
static inline unsigned __float_as_uint(float x)
{
    unsigned bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
static inline float __uint_as_float(unsigned bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}
static inline int __double2hiint(double x)
{
    unsigned long long bits;

    memcpy(&bits, &x, sizeof(bits));
    return (int)(bits >> 32);
}
/* The warp's lanes come in descending order: the first lane has them all. */
static inline unsigned __reduce_add_sync(unsigned, unsigned count)
{
    static unsigned sum;
    const unsigned so_far = sum + count;

    sum = threadIdx.x % 32 == 0 ? 0 : so_far;
    return so_far;
}
static inline void atomicAdd(unsigned long long *p, unsigned long long n)
{
    *p += n;
}

extern "C" {
float device_float_of_f16(unsigned short h);
unsigned short device_f16_of_float(float f);
unsigned short device_bf16_of_float(float f);
}
#define float_of_f16  device_float_of_f16
#define f16_of_float  device_f16_of_float
#define bf16_of_float device_bf16_of_float

#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#include "worker/reduce/kernels.cu"

template <typename P>
static void run(void (*kernel)(const P), unsigned grid_x, unsigned grid_y, unsigned threads,
                const void *params)
{
    P p;

    memcpy(&p, params, sizeof(p));
    gridDim = {grid_x, grid_y, 1};
    blockDim = {threads, 1, 1};
    for (blockIdx.y = grid_y; blockIdx.y-- > 0;)
        for (blockIdx.x = grid_x; blockIdx.x-- > 0;)
            for (threadIdx.x = threads; threadIdx.x-- > 0;)
                kernel(p);
}

#define IS(kernel)                                                                                 \
    if (strcmp(name, #kernel) == 0) {                                                              \
        run(kernel, grid_x, grid_y, threads, params);                                              \
        return true;                                                                               \
    }
#define IS_TYPE(type)                                                                              \
    IS(gradd_reduce_##type##_sum)                                                                  \
    IS(gradd_reduce_##type##_prod)                                                                 \
    IS(gradd_reduce_##type##_max)                                                                  \
    IS(gradd_reduce_##type##_min)

bool device_run(const char *name, unsigned grid_x, unsigned grid_y, unsigned threads,
                const void *params)
{
    IS_TYPE(i8)
    IS_TYPE(u8)
    IS_TYPE(i32)
    IS_TYPE(i64)
    IS_TYPE(f16)
    IS_TYPE(f32)
    IS_TYPE(f64)
    IS_TYPE(bf16)
    IS(gradd_copy)
    IS(gradd_nonfinite_f16)
    IS(gradd_nonfinite_f32)
    IS(gradd_nonfinite_f64)
    IS(gradd_nonfinite_bf16)
    return false;
}
