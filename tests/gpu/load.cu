/* SPDX-License-Identifier: Apache-2.0 */
/* Work for a GPU in tests: a producer that takes its time, and arithmetic that fills the device. */
#include "load.h"

/* Every thread waits on the device's clock, then writes: who reads too early sees what was there.
 */
extern "C" __global__ void gradd_test_produce(const __grid_constant__ load_produce p)
{
    unsigned long long begin, now;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < p.ns);
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < p.n;
         i += (unsigned long long)gridDim.x * blockDim.x)
        ((float *)p.out)[i] = p.value;
}

/* As a matrix product: multiply-adds without memory, on all multiprocessors. */
extern "C" __global__ void gradd_test_multiply(const __grid_constant__ load_multiply p)
{
    float a = threadIdx.x, b = 1.0f, c = 2.0f, d = 3.0f;

    for (unsigned long long i = 0; i < p.n; i++) {
        a = fmaf(a, 1.0001f, 0.5f);
        b = fmaf(b, 1.0002f, 0.25f);
        c = fmaf(c, 0.9999f, 0.125f);
        d = fmaf(d, 0.9998f, 0.0625f);
    }
    if (a + b + c + d == 12345.678f) /* never: keeps the loop */
        *(float *)p.out = a;
}
