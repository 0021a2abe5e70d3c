/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels of cuda_params.h: a reduction per type and operator, a copy of many pieces, a count
 * of what is not finite. reduce_scalar.c is the reference; they equal it bit for bit (NaN for NaN).
 *
 * All are bound by memory, so everything serves that: 16 bytes per load and store wherever all
 * addresses are equal modulo 16, several loads in flight per thread, each input read once, each
 * output written once. Arithmetic is written with the _rn intrinsics, which the compiler never
 * contracts into fused multiply-adds: a fused one would round differently from the host.
 *
 * An element's inputs are all read before its first output is written, by the same thread: an
 * output may equal an input.
 */
#include "cuda_params.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/* Device memory of the global state space: loads and stores without a look at which space it is. */
template <typename T> __device__ __forceinline__ T *global(u64 address)
{
    return (T *)__cvta_global_to_generic(address);
}

enum op { SUM, PROD, MAX, MIN };

/* ---- Element types: how they are stored, what they are combined in ---- */

template <typename A> __device__ __forceinline__ A larger(A a, A b)
{
    return a > b || a != a ? a : b;
}

template <typename A> __device__ __forceinline__ A smaller(A a, A b)
{
    return a < b || a != a ? a : b;
}

#ifdef __CUDACC__ /* else the test that runs this source on the CPU has them */
__device__ __forceinline__ float float_of_f16(u16 h)
{
    float f;

    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 f16_of_float(float f)
{
    u16 h;

    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

__device__ __forceinline__ u16 bf16_of_float(float f)
{
    u16 h;

    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
#endif

/* What float32 and the half types share: they are combined in float32. */
struct in_float {
    typedef float accumulator;

    template <enum op OP> static __device__ __forceinline__ float combine(float a, float b)
    {
        return OP == SUM    ? __fadd_rn(a, b)
               : OP == PROD ? __fmul_rn(a, b)
               : OP == MAX  ? larger(a, b)
                            : smaller(a, b);
    }
    static __device__ __forceinline__ float times(float a, float factor)
    {
        return __fmul_rn(a, factor);
    }
    static __device__ __forceinline__ float over(float a, float divisor)
    {
        return __fdiv_rn(a, divisor);
    }
    static __device__ __forceinline__ bool is_finite(float x)
    {
        return (__float_as_uint(x) & 0x7f800000) != 0x7f800000;
    }
};

struct f32 : in_float {
    typedef float stored;
    static __device__ __forceinline__ float get(float x)
    {
        return x;
    }
    static __device__ __forceinline__ float put(float x)
    {
        return x;
    }
};

struct f16 : in_float {
    typedef u16 stored;
    static __device__ __forceinline__ float get(u16 h)
    {
        return float_of_f16(h);
    }
    static __device__ __forceinline__ u16 put(float f)
    {
        return f16_of_float(f);
    }
};

struct bf16 : in_float {
    typedef u16 stored;
    static __device__ __forceinline__ float get(u16 h)
    {
        return __uint_as_float((u32)h << 16);
    }
    static __device__ __forceinline__ u16 put(float f)
    {
        return bf16_of_float(f);
    }
};

struct f64 {
    typedef double stored;
    typedef double accumulator;

    static __device__ __forceinline__ double get(double x)
    {
        return x;
    }
    static __device__ __forceinline__ double put(double x)
    {
        return x;
    }
    template <enum op OP> static __device__ __forceinline__ double combine(double a, double b)
    {
        return OP == SUM    ? __dadd_rn(a, b)
               : OP == PROD ? __dmul_rn(a, b)
               : OP == MAX  ? larger(a, b)
                            : smaller(a, b);
    }
    static __device__ __forceinline__ double times(double a, double factor)
    {
        return __dmul_rn(a, factor);
    }
    static __device__ __forceinline__ double over(double a, double divisor)
    {
        return __ddiv_rn(a, divisor);
    }
    static __device__ __forceinline__ bool is_finite(double x)
    {
        return (__double2hiint(x) & 0x7ff00000) != 0x7ff00000;
    }
};

/* Sums and products are made modulo the accumulator's range, which is right modulo any narrower
 * type too. */
template <typename STORED, typename ACCUMULATOR, typename WRAPPING> struct integer {
    typedef STORED stored;
    typedef ACCUMULATOR accumulator;
    static constexpr int bits = 8 * sizeof(STORED);
    static constexpr bool is_signed = (STORED)-1 < (STORED)0;
    static constexpr i64 high =
        (i64)(((u64)1 << (is_signed ? bits - 1 : bits) % 64) - 1); /* no u64 here */
    static constexpr i64 low = is_signed ? -high - 1 : 0;

    static __device__ __forceinline__ ACCUMULATOR get(STORED x)
    {
        return x;
    }
    static __device__ __forceinline__ STORED put(ACCUMULATOR x)
    {
        return (STORED)x;
    }
    template <enum op OP>
    static __device__ __forceinline__ ACCUMULATOR combine(ACCUMULATOR a, ACCUMULATOR b)
    {
        return OP == SUM    ? (ACCUMULATOR)((WRAPPING)a + (WRAPPING)b)
               : OP == PROD ? (ACCUMULATOR)((WRAPPING)a * (WRAPPING)b)
               : OP == MAX  ? (a > b ? a : b)
                            : (a < b ? a : b);
    }
};

typedef integer<signed char, int, u32> i8;
typedef integer<u8, int, u32> u8_;
typedef integer<int, int, u32> i32;
typedef integer<i64, i64, u64> i64_;

/* ---- 16 bytes at a time ---- */

template <typename STORED> union vector {
    uint4 words;
    STORED elements[16 / sizeof(STORED)];
};

/* Elements before the first that lies at a multiple of 16 bytes in every input and output; n when
 * there is no such element. */
template <typename STORED> __device__ __forceinline__ u64 head_elements(const cuda_reduce_params &p)
{
    const u64 first = p.in[0];
    u64 differ = 0, head;

#pragma unroll 1
    for (u32 i = 1; i < p.n_in; i++)
        differ |= p.in[i] ^ first;
#pragma unroll 1
    for (u32 o = 0; o < p.n_out; o++)
        differ |= p.out[o] ^ first;
    head = (-first & 15) / sizeof(STORED);
    return (differ & 15) != 0 || (first & (sizeof(STORED) - 1)) != 0 || head > p.n ? p.n : head;
}

/* ---- What is done to each input and to the result ---- */

/* Floating point: a factor of 1 changes no value, so it is applied without asking. */
template <typename T> struct factors {
    typedef typename T::accumulator accumulator;
    accumulator prescale, postscale, divisor, inverse;
    bool is_average, is_power; /* dividing by a power of two is multiplying by its inverse */

    __device__ __forceinline__ factors(const cuda_reduce_params &p)
        : prescale(p.prescale), postscale(p.postscale), divisor(p.divisor),
          inverse((accumulator)1 / (accumulator)(p.divisor != 0 ? p.divisor : 1)),
          is_average(p.divisor != 0), is_power((p.divisor & (p.divisor - 1)) == 0)
    {
    }
    __device__ __forceinline__ accumulator begin(accumulator x) const
    {
        return T::times(x, prescale);
    }
    __device__ __forceinline__ accumulator finish(accumulator x) const
    {
        if (is_average)
            x = is_power ? T::times(x, inverse) : T::over(x, divisor);
        return T::times(x, postscale);
    }
};

/* Integers without factors; those with go through reduce_scaled(). */
template <typename T> struct no_factors {
    typedef typename T::accumulator accumulator;

    __device__ __forceinline__ no_factors(const cuda_reduce_params &)
    {
    }
    __device__ __forceinline__ accumulator begin(accumulator x) const
    {
        return x;
    }
    __device__ __forceinline__ accumulator finish(accumulator x) const
    {
        return x;
    }
};

/* ---- The reduction ---- */

template <typename T, enum op OP, typename F>
__device__ __forceinline__ void reduce_one(const cuda_reduce_params &p, const F &f, u64 at)
{
    typedef typename T::stored stored;
    typename T::accumulator x = f.begin(T::get(global<const stored>(p.in[0])[at]));

#pragma unroll 1
    for (u32 i = 1; i < p.n_in; i++)
        x = T::template combine<OP>(x, f.begin(T::get(global<const stored>(p.in[i])[at])));
    if (p.n_zero != 0) /* once is as good as n_zero times, for every operator */
        x = T::template combine<OP>(x, 0);
    x = f.finish(x);
#pragma unroll 1
    for (u32 o = 0; o < p.n_out; o++)
        global<stored>(p.out[o])[at] = T::put(x);
}

/* N vectors per thread and input, blockDim.x apart, so that a warp's loads are neighbours. `skip`
 * bytes lie before the first vector. */
template <typename T, enum op OP, int N, typename F>
__device__ __forceinline__ void reduce_vectors(const cuda_reduce_params &p, const F &f, u64 skip,
                                               u64 at)
{
    typedef typename T::stored stored;
    constexpr int per = 16 / sizeof(stored);
    typename T::accumulator x[N][per];
    vector<stored> v[N];

#pragma unroll
    for (int k = 0; k < N; k++)
        v[k].words = global<const uint4>(p.in[0] + skip)[at + k * blockDim.x];
#pragma unroll
    for (int k = 0; k < N; k++)
#pragma unroll
        for (int e = 0; e < per; e++)
            x[k][e] = f.begin(T::get(v[k].elements[e]));

#pragma unroll 2
    for (u32 i = 1; i < p.n_in; i++) {
#pragma unroll
        for (int k = 0; k < N; k++)
            v[k].words = global<const uint4>(p.in[i] + skip)[at + k * blockDim.x];
#pragma unroll
        for (int k = 0; k < N; k++)
#pragma unroll
            for (int e = 0; e < per; e++)
                x[k][e] = T::template combine<OP>(x[k][e], f.begin(T::get(v[k].elements[e])));
    }

#pragma unroll
    for (int k = 0; k < N; k++)
#pragma unroll
        for (int e = 0; e < per; e++) {
            if (p.n_zero != 0)
                x[k][e] = T::template combine<OP>(x[k][e], 0);
            v[k].elements[e] = T::put(f.finish(x[k][e]));
        }
#pragma unroll 1
    for (u32 o = 0; o < p.n_out; o++)
#pragma unroll
        for (int k = 0; k < N; k++)
            global<uint4>(p.out[o] + skip)[at + k * blockDim.x] = v[k].words;
}

/* Vectors between a head and a tail of single elements. */
template <typename T, enum op OP, typename F>
__device__ __forceinline__ void reduce_all(const cuda_reduce_params &p)
{
    typedef typename T::stored stored;
    constexpr u32 per = 16 / sizeof(stored);
    constexpr int N = sizeof(stored) >= 4 ? 4 : sizeof(stored); /* 16 accumulators */
    const F f(p);
    const u64 head = head_elements<stored>(p);
    const u64 n_vectors = (p.n - head) / per;
    const u64 skip = head * sizeof(stored), tail = head + n_vectors * per;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 n_threads = (u64)gridDim.x * blockDim.x;

#pragma unroll 1
    for (u64 block = (u64)blockIdx.x * blockDim.x * N; block < n_vectors; block += n_threads * N) {
        const u64 at = block + threadIdx.x;

        if (block + (u64)blockDim.x * N <= n_vectors) {
            reduce_vectors<T, OP, N>(p, f, skip, at);
            continue;
        }
#pragma unroll 1
        for (u64 single = at; single < n_vectors && single < block + (u64)blockDim.x * N;
             single += blockDim.x)
            reduce_vectors<T, OP, 1>(p, f, skip, single);
    }
#pragma unroll 1
    for (u64 at = thread; at < head; at += n_threads)
        reduce_one<T, OP>(p, f, at);
#pragma unroll 1
    for (u64 at = tail + thread; at < p.n; at += n_threads)
        reduce_one<T, OP>(p, f, at);
}

/* ---- Integers with factors, or averaged ---- */

template <typename T> __device__ __forceinline__ i64 scale_integer(i64 x, double factor)
{
    const double scaled = __dmul_rn((double)x, factor);

    if (scaled != scaled)
        return 0;
    if (scaled <= (double)T::low)
        return T::low;
    if (scaled >= (double)T::high)
        return T::high;
    return (i64)scaled;
}

/* In int64, one element after the other: rare, so it is small rather than fast. */
template <typename T, enum op OP>
__device__ __forceinline__ void reduce_scaled(const cuda_reduce_params &p)
{
    typedef typename T::stored stored;
    const u64 n_threads = (u64)gridDim.x * blockDim.x;

#pragma unroll 1
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < p.n; at += n_threads) {
        i64 x = 0;

#pragma unroll 1
        for (u32 i = 0; i < p.n_in; i++) {
            i64 y = global<const stored>(p.in[i])[at];

            if (p.prescale != 1)
                y = scale_integer<T>(y, p.prescale);
            x = i == 0 ? y : i64_::combine<OP>(x, y);
        }
        if (p.n_zero != 0)
            x = i64_::combine<OP>(x, 0);
        if (p.divisor != 0)
            x /= (i64)p.divisor;
        x = (stored)x;
        if (p.postscale != 1)
            x = scale_integer<T>(x, p.postscale);
#pragma unroll 1
        for (u32 o = 0; o < p.n_out; o++)
            global<stored>(p.out[o])[at] = (stored)x;
    }
}

/* ---- Entry points ---- */

template <typename T, enum op OP>
__device__ __forceinline__ void run_float(const cuda_reduce_params &p)
{
    reduce_all<T, OP, factors<T>>(p);
}

template <typename T, enum op OP>
__device__ __forceinline__ void run_integer(const cuda_reduce_params &p)
{
    if (p.prescale != 1 || p.postscale != 1 || p.divisor != 0)
        reduce_scaled<T, OP>(p);
    else
        reduce_all<T, OP, no_factors<T>>(p);
}

/* Two blocks per multiprocessor leave 64 registers to a thread: enough for what is in flight. */
#define REDUCE(name, run, type, op)                                                                \
    extern "C" __global__ void __launch_bounds__(CUDA_KERNELS_THREADS, 2)                          \
        gradd_reduce_##name(const __grid_constant__ cuda_reduce_params p)                          \
    {                                                                                              \
        run<type, op>(p);                                                                          \
    }
#define REDUCE_TYPE(name, run, type)                                                               \
    REDUCE(name##_sum, run, type, SUM)                                                             \
    REDUCE(name##_prod, run, type, PROD)                                                           \
    REDUCE(name##_max, run, type, MAX)                                                             \
    REDUCE(name##_min, run, type, MIN)

REDUCE_TYPE(i8, run_integer, i8)
REDUCE_TYPE(u8, run_integer, u8_)
REDUCE_TYPE(i32, run_integer, i32)
REDUCE_TYPE(i64, run_integer, i64_)
REDUCE_TYPE(f16, run_float, f16)
REDUCE_TYPE(f32, run_float, f32)
REDUCE_TYPE(f64, run_float, f64)
REDUCE_TYPE(bf16, run_float, bf16)

/* ---- Copies of many pieces ---- */

/* The bytes before the first whole WORD, then words, then the bytes after the last. */
template <typename WORD>
__device__ __forceinline__ void copy_words(const cuda_copy_segment &s, u64 thread, u64 n_threads)
{
    const u64 to_first = -s.to & (sizeof(WORD) - 1);
    const u64 head = to_first < s.bytes ? to_first : s.bytes;
    const u64 n_words = (s.bytes - head) / sizeof(WORD), tail = head + n_words * sizeof(WORD);

#pragma unroll 1
    for (u64 at = thread; at < head; at += n_threads)
        global<u8>(s.to)[at] = global<const u8>(s.from)[at];
#pragma unroll 1
    for (u64 at = thread; at < n_words; at += n_threads)
        global<WORD>(s.to + head)[at] = global<const WORD>(s.from + head)[at];
#pragma unroll 1
    for (u64 at = tail + thread; at < s.bytes; at += n_threads)
        global<u8>(s.to)[at] = global<const u8>(s.from)[at];
}

extern "C" __global__ void __launch_bounds__(CUDA_KERNELS_THREADS)
    gradd_copy(const __grid_constant__ cuda_copy_params p)
{
    const cuda_copy_segment &s = p.segments[blockIdx.y];
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 n_threads = (u64)gridDim.x * blockDim.x, differ = s.to ^ s.from;

    if ((differ & 15) == 0)
        copy_words<uint4>(s, thread, n_threads);
    else if ((differ & 3) == 0)
        copy_words<u32>(s, thread, n_threads);
    else if ((differ & 1) == 0)
        copy_words<u16>(s, thread, n_threads);
    else
        copy_words<u8>(s, thread, n_threads);
}

/* ---- What is not finite ---- */

template <typename T>
__device__ __forceinline__ void count_nonfinite(const cuda_nonfinite_params &p)
{
    typedef typename T::stored stored;
    constexpr u32 per = 16 / sizeof(stored);
    const u64 first = (-p.in & 15) / sizeof(stored), head = first < p.n ? first : p.n;
    const u64 n_vectors = (p.n - head) / per, tail = head + n_vectors * per;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 n_threads = (u64)gridDim.x * blockDim.x;
    u32 count = 0;

#pragma unroll 1
    for (u64 at = thread; at < n_vectors; at += n_threads) {
        vector<stored> v;

        v.words = global<const uint4>(p.in + head * sizeof(stored))[at];
#pragma unroll
        for (u32 e = 0; e < per; e++)
            count += !T::is_finite(T::get(v.elements[e]));
    }
#pragma unroll 1
    for (u64 at = thread; at < head; at += n_threads)
        count += !T::is_finite(T::get(global<const stored>(p.in)[at]));
#pragma unroll 1
    for (u64 at = tail + thread; at < p.n; at += n_threads)
        count += !T::is_finite(T::get(global<const stored>(p.in)[at]));

    count = __reduce_add_sync(0xffffffff, count);
    if (threadIdx.x % 32 == 0 && count != 0)
        atomicAdd(global<u64>(p.count), (u64)count);
}

#define NONFINITE(type)                                                                            \
    extern "C" __global__ void __launch_bounds__(CUDA_KERNELS_THREADS)                             \
        gradd_nonfinite_##type(const __grid_constant__ cuda_nonfinite_params p)                    \
    {                                                                                              \
        count_nonfinite<type>(p);                                                                  \
    }

NONFINITE(f16)
NONFINITE(f32)
NONFINITE(f64)
NONFINITE(bf16)
