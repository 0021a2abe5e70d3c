/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the machine allows: N float32 tensors in memfds, each read once, the sum stored to all of
 * them, by threads that poll between calls, each on a core of its own. No other program can
 * all-reduce in place faster, as every byte must be read and written at least once; nothing of
 * gradd is in here.
 *
 * The threads take pieces of 64 KiB from a counter. A call begins when `call` moves on and ends
 * when every thread has left; only then may the counter be reset.
 */
#include <err.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"

enum { MAX_TENSORS = 8, MAX_THREADS = 8, PIECE_BYTES = 64 << 10 };

/* A cache line of floats; the compiler splits it where registers are narrower. */
typedef float vector __attribute__((vector_size(64), aligned(4), may_alias));
enum { VECTOR_FLOATS = sizeof(vector) / sizeof(float) };

struct limit {
    float *tensors[MAX_TENSORS];
    unsigned n_tensors, n_threads;
    size_t bytes; /* of this call */
    _Alignas(64) atomic_size_t next;
    _Alignas(64) atomic_uint call;
    _Alignas(64) atomic_uint n_left; /* threads that have finished this call */
};

/* n is a constant at each call, and the pointers are copies that no store can change: the inner
 * loops unroll into one load and one store a tensor. */
static inline __attribute__((always_inline)) void sum_n(const struct limit *l, size_t begin,
                                                        size_t end, unsigned n)
{
    float *t[MAX_TENSORS];
    for (unsigned k = 0; k < n; k++)
        t[k] = l->tensors[k];
    size_t i = begin;
    for (; i + VECTOR_FLOATS <= end; i += VECTOR_FLOATS) {
        vector sum = *(const vector *)(t[0] + i);
        for (unsigned k = 1; k < n; k++)
            sum += *(const vector *)(t[k] + i);
        for (unsigned k = 0; k < n; k++)
            *(vector *)(t[k] + i) = sum;
    }
    for (; i < end; i++) {
        float sum = t[0][i];
        for (unsigned k = 1; k < n; k++)
            sum += t[k][i];
        for (unsigned k = 0; k < n; k++)
            t[k][i] = sum;
    }
}

static void sum_piece(const struct limit *l, size_t begin, size_t end)
{
    switch (l->n_tensors) {
    case 2:
        sum_n(l, begin, end, 2);
        break;
    case 4:
        sum_n(l, begin, end, 4);
        break;
    default:
        sum_n(l, begin, end, l->n_tensors);
    }
}

static void sum_pieces(struct limit *l)
{
    const size_t step = PIECE_BYTES / sizeof(float), count = l->bytes / sizeof(float);
    for (size_t at; (at = atomic_fetch_add(&l->next, step)) < count;)
        sum_piece(l, at, count - at < step ? count : at + step);
}

static void relax(unsigned *turns)
{
    if (++*turns % 4096 == 0)
        sched_yield(); /* more threads than cores must not stop the one that works */
    __asm__ volatile("" ::: "memory");
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *helper(void *argument)
{
    struct limit *l = argument;
    for (unsigned seen = 0, turns = 0;; seen++) {
        while (atomic_load(&l->call) == seen)
            relax(&turns);
        sum_pieces(l);
        atomic_fetch_add(&l->n_left, 1);
    }
    return NULL;
}

static void allreduce(void *context, size_t bytes)
{
    struct limit *l = context;
    unsigned turns = 0;
    l->bytes = bytes;
    atomic_store(&l->next, 0);
    atomic_store(&l->n_left, 0);
    atomic_fetch_add(&l->call, 1);
    sum_pieces(l);
    while (atomic_load(&l->n_left) < l->n_threads - 1)
        relax(&turns);
}

static void barrier(void *context)
{
    (void)context;
}

static size_t sum(void *context, size_t value)
{
    (void)context;
    return value;
}

/*
 * Each tensor's memory is some pages longer than the one before, so that neighbours in the address
 * space never lie a multiple of 256 MiB apart. AMD's first-level cache guesses the way from a hash
 * of address bits 12 to 27 (Lipp et al., "Take A Way", AsiaCCS 2020): lines at the same offset of
 * such neighbours would evict each other, and the sum took ten times as long.
 */
static float *memfd_memory(size_t bytes, unsigned index)
{
    bytes += (index + 1) * 5 * (size_t)sysconf(_SC_PAGESIZE);
    int fd = memfd_create("limit", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        err(EXIT_FAILURE, "memfd of %zu bytes", bytes);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (memory == MAP_FAILED)
        err(EXIT_FAILURE, "memfd of %zu bytes", bytes);
    close(fd);
    return memory;
}

/* Thread i runs on the i-th core that this process may use, while there are enough. */
static void pin(pthread_t thread, const cpu_set_t *allowed, unsigned i)
{
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, allowed) || i-- > 0)
            continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(thread, sizeof one, &one); /* unpinned is only slower */
        return;
    }
}

/* The calling thread and n_threads - 1 helpers; 0: the cores, at most MAX_THREADS. */
static void start_threads(struct limit *l, unsigned n_threads)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        err(EXIT_FAILURE, "sched_getaffinity");
    unsigned n_cores = (unsigned)CPU_COUNT(&allowed);
    l->n_threads = n_threads ? n_threads : n_cores < MAX_THREADS ? n_cores : MAX_THREADS;
    for (unsigned i = 1; i < l->n_threads; i++) {
        pthread_t thread; /* ends with the process */
        int error = pthread_create(&thread, NULL, helper, l);
        if (error)
            errx(EXIT_FAILURE, "thread: %s", strerror(error));
        pin(thread, &allowed, i);
    }
    pin(pthread_self(), &allowed, 0);
}

int main(int argc, char **argv)
{
    static struct limit l;
    struct bench_options options;
    void *tensors[MAX_TENSORS];
    bench_parse(&options, argc, argv);
    if (options.dtype != GRADD_F32 || options.redop != GRADD_SUM)
        errx(2, "only float32 sums");
    if (options.ranks > MAX_TENSORS)
        errx(2, "at most %d tensors", MAX_TENSORS);
    l.n_tensors = options.ranks;
    for (unsigned i = 0; i < l.n_tensors; i++)
        tensors[i] = l.tensors[i] = memfd_memory(bench_max_size(&options), i);
    start_threads(&l, options.threads);
    struct bench_collective collective = {
        .program = "limit",
        .variant = "in place",
        .ranks = (int)l.n_tensors,
        .tensors = tensors,
        .n_tensors = l.n_tensors,
        .context = &l,
        .allreduce = allreduce,
        .barrier = barrier,
        .sum = sum,
    };
    return bench_run(&options, &collective);
}
