/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How close the reduction kernels come to the memory: time of a reduction of tensors of S bytes,
 * beside a memcpy, a read and a memset of S bytes in the same run.
 *
 * Only ratios inside one run mean anything. All cases of a size run interleaved, once per round;
 * the table gives the minimum and the median over the rounds. Buffers are memfds and the threads
 * take pieces of 64 KiB a buffer from one counter, as the worker's do.
 *
 *   bench_reduce [-t THREADS] [-r ROUNDS] [-v VARIANT] [SIZE_KIB...]
 */
#include "reduce.h"

#include <err.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

enum { MAX_BUFFERS = 8, MAX_ROUNDS = 200, MAX_THREADS = 64, PIECE_BYTES = 65536 };

enum work { WORK_COPY, WORK_READ, WORK_WRITE, WORK_REDUCE };

struct bench_case {
    const char *name;
    enum work work;
    enum gradd_dtype dtype;
    size_t element_bytes;
    unsigned n_in, n_out; /* outputs are the first inputs; n_out 0: one buffer that is no input */
    enum gradd_redop redop;
};

static const struct bench_case cases[] = {
    {"memcpy", WORK_COPY, GRADD_U8, 1, 1, 1, GRADD_SUM},
    {"read", WORK_READ, GRADD_U8, 1, 1, 1, GRADD_SUM},
    {"memset", WORK_WRITE, GRADD_U8, 1, 1, 1, GRADD_SUM},
    {"float32 N=2", WORK_REDUCE, GRADD_F32, 4, 2, 2, GRADD_SUM},
    {"float32 N=2 avg", WORK_REDUCE, GRADD_F32, 4, 2, 2, GRADD_AVG},
    {"float32 N=2 max", WORK_REDUCE, GRADD_F32, 4, 2, 2, GRADD_MAX},
    {"float32 N=2 -> 1", WORK_REDUCE, GRADD_F32, 4, 2, 0, GRADD_SUM},
    {"float32 N=3", WORK_REDUCE, GRADD_F32, 4, 3, 3, GRADD_SUM},
    {"float32 N=3 avg", WORK_REDUCE, GRADD_F32, 4, 3, 3, GRADD_AVG},
    {"float32 N=4", WORK_REDUCE, GRADD_F32, 4, 4, 4, GRADD_SUM},
    {"float64 N=2", WORK_REDUCE, GRADD_F64, 8, 2, 2, GRADD_SUM},
    {"bfloat16 N=2", WORK_REDUCE, GRADD_BF16, 2, 2, 2, GRADD_SUM},
    {"bfloat16 N=3", WORK_REDUCE, GRADD_BF16, 2, 3, 3, GRADD_SUM},
    {"bfloat16 N=4", WORK_REDUCE, GRADD_BF16, 2, 4, 4, GRADD_SUM},
    {"float16 N=2", WORK_REDUCE, GRADD_F16, 2, 2, 2, GRADD_SUM},
    {"float16 N=4", WORK_REDUCE, GRADD_F16, 2, 4, 4, GRADD_SUM},
    {"int32 N=2", WORK_REDUCE, GRADD_I32, 4, 2, 2, GRADD_SUM},
    {"int8 N=2 max", WORK_REDUCE, GRADD_I8, 1, 2, 2, GRADD_MAX},
    {"int8 N=2 prod", WORK_REDUCE, GRADD_I8, 1, 2, 2, GRADD_PROD},
};

/* One call: every thread works on pieces until the counter has passed the end. Threads spin
 * between calls, since waking them would be timed otherwise. */
static struct {
    const struct bench_case *c;
    char *buffer[MAX_BUFFERS];
    size_t bytes;
    unsigned n_threads;
    _Alignas(64) _Atomic size_t next;
    _Alignas(64) _Atomic unsigned generation;
    _Alignas(64) _Atomic unsigned n_done;
    _Atomic bool is_over;
} call;

static _Atomic uint64_t sink; /* keeps the reads */

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void read_piece(const char *p, size_t n)
{
    uint64_t lanes[32] = {0};

    for (size_t i = 0; i + sizeof(lanes) <= n; i += sizeof(lanes)) {
        uint64_t x[32];

        memcpy(x, p + i, sizeof(x));
        for (size_t l = 0; l < 32; l++)
            lanes[l] |= x[l];
    }
    for (size_t l = 1; l < 32; l++)
        lanes[0] |= lanes[l];
    atomic_fetch_or_explicit(&sink, lanes[0], memory_order_relaxed);
}

static void reduce_piece(const struct bench_case *c, size_t at, size_t n)
{
    const void *in[MAX_BUFFERS];
    void *out[MAX_BUFFERS];
    const struct reduction r = {
        .dtype = c->dtype,
        .redop = c->redop,
        .n_in = c->n_in,
        .n_out = c->n_out ? c->n_out : 1,
        .in = in,
        .out = out,
        .divisor = c->n_in,
        .prescale = 1,
        .postscale = 1,
    };

    for (unsigned i = 0; i < MAX_BUFFERS; i++)
        in[i] = out[i] = call.buffer[i];
    if (c->n_out == 0)
        out[0] = call.buffer[c->n_in];
    reduce_run(&r, at / c->element_bytes, (at + n) / c->element_bytes);
}

static void work(void)
{
    size_t at;

    while ((at = atomic_fetch_add(&call.next, PIECE_BYTES)) < call.bytes) {
        const size_t n = call.bytes - at < PIECE_BYTES ? call.bytes - at : PIECE_BYTES;

        switch (call.c->work) {
        case WORK_COPY:
            memcpy(call.buffer[1] + at, call.buffer[0] + at, n);
            break;
        case WORK_READ:
            read_piece(call.buffer[0] + at, n);
            break;
        case WORK_WRITE:
            memset(call.buffer[0] + at, 0, n);
            break;
        case WORK_REDUCE:
            reduce_piece(call.c, at, n);
            break;
        }
    }
    atomic_fetch_add(&call.n_done, 1);
}

static void *help(void *arg)
{
    unsigned seen = 0;

    (void)arg;
    while (!atomic_load(&call.is_over)) {
        if (atomic_load(&call.generation) == seen)
            continue;
        seen++;
        work();
    }
    return NULL;
}

static double time_call_us(const struct bench_case *c)
{
    double start;

    call.c = c;
    atomic_store(&call.next, 0);
    atomic_store(&call.n_done, 0);
    start = now_us();
    atomic_fetch_add(&call.generation, 1);
    work();
    while (atomic_load(&call.n_done) < call.n_threads)
        ;
    return now_us() - start;
}

/* The best of a few calls back to back, the first of which warms the caches. */
static double time_case_us(const struct bench_case *c)
{
    const size_t n_calls = call.bytes <= 1 << 20 ? 12 : call.bytes <= 32 << 20 ? 3 : 2;
    double best = 0;

    for (size_t i = 0; i < n_calls; i++) {
        const double t = time_call_us(c);

        if (i > 0 && (best == 0 || t < best))
            best = t;
    }
    return best;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void bench_size(size_t bytes, unsigned n_rounds)
{
    static double us[ARRAY_SIZE(cases)][MAX_ROUNDS];

    call.bytes = bytes;
    for (unsigned round = 0; round < n_rounds; round++)
        for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
            us[i][round] = time_case_us(&cases[i]);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        qsort(us[i], n_rounds, sizeof(us[i][0]), compare_doubles);
    printf("%zu KiB, %u threads, %s, %u rounds\n", bytes >> 10, call.n_threads, reduce_variant(),
           n_rounds);
    printf("  %-18s %10s %10s %9s %9s\n", "", "min us", "median us", "/memcpy", "/memcpy");
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        printf("  %-18s %10.1f %10.1f %9.2f %9.2f\n", cases[i].name, us[i][0], us[i][n_rounds / 2],
               us[i][0] / us[0][0], us[i][n_rounds / 2] / us[0][n_rounds / 2]);
}

static void pin(pthread_t thread, unsigned cpu)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof(set), &set); /* fails in a small cpuset: not pinned */
}

/* Maps fd at an address that differs from the other buffers' modulo 256 MiB: Zen's L1 predicts its
 * way by a hash of address bits 12 to 27, and buffers that agree in it take up to three times as
 * long. */
static char *map_staggered(int fd, size_t bytes, size_t index)
{
    const size_t skew = index * 17 * (size_t)sysconf(_SC_PAGESIZE);
    const size_t alignment = (size_t)1 << 28;
    char *room = mmap(NULL, bytes + skew + alignment, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (room == MAP_FAILED)
        return MAP_FAILED;
    room += -(uintptr_t)room % alignment + skew;
    return mmap(room, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
}

static void map_buffers(size_t bytes)
{
    for (size_t i = 0; i < MAX_BUFFERS; i++) {
        const int fd = memfd_create("bench", MFD_CLOEXEC);

        if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
            err(1, "memfd of %zu bytes", bytes);
        call.buffer[i] = map_staggered(fd, bytes, i);
        if (call.buffer[i] == MAP_FAILED)
            err(1, "mmap of %zu bytes", bytes);
        close(fd);
        if (i < 5)
            memset(call.buffer[i], 0, bytes);
    }
}

static unsigned number(const char *text, unsigned low, unsigned high)
{
    const long n = strtol(text, NULL, 10);

    if (n < (long)low || n > (long)high)
        errx(2, "%s: must be from %u to %u", text, low, high);
    return (unsigned)n;
}

int main(int argc, char **argv)
{
    static const char *const default_sizes[] = {"64", "1024", "16384", "65536"};
    pthread_t helper[MAX_THREADS];
    unsigned n_rounds = 7;
    const char *const *sizes;
    size_t n_sizes, largest = 0;
    int option;

    call.n_threads = 1;
    while ((option = getopt(argc, argv, "t:r:v:")) != -1) {
        if (option == 't')
            call.n_threads = number(optarg, 1, MAX_THREADS);
        else if (option == 'r')
            n_rounds = number(optarg, 1, MAX_ROUNDS);
        else if (option != 'v' || !reduce_force_variant(optarg))
            errx(2, "usage: bench_reduce [-t threads] [-r rounds] [-v variant] [size in KiB...]");
    }
    sizes = optind < argc ? (const char *const *)argv + optind : default_sizes;
    n_sizes = optind < argc ? (size_t)(argc - optind) : ARRAY_SIZE(default_sizes);
    for (size_t i = 0; i < n_sizes; i++) {
        const size_t bytes = (size_t)number(sizes[i], 1, 1 << 21) << 10;

        largest = bytes > largest ? bytes : largest;
    }
    map_buffers(largest);
    pin(pthread_self(), 0);
    for (unsigned t = 1; t < call.n_threads; t++) {
        if (pthread_create(&helper[t], NULL, help, NULL) != 0)
            errx(1, "cannot start thread %u", t);
        pin(helper[t], t);
    }
    for (size_t i = 0; i < n_sizes; i++)
        bench_size((size_t)number(sizes[i], 1, 1 << 21) << 10, n_rounds);
    atomic_store(&call.is_over, true);
    for (unsigned t = 1; t < call.n_threads; t++)
        pthread_join(helper[t], NULL);
    return 0;
}
