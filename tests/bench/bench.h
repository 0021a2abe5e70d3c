/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What gradd's benchmark, its peers and the machine's limit have in common: the same options, the
 * same tensors, the same number of calls and the same rows, so that `compare` sets like beside
 * like. Only the call that is timed differs.
 *
 * Thread: one.
 */
#ifndef BENCH_H
#define BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <gradd/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { BENCH_MAX_SIZES = 64 };

struct bench_options {
    size_t sizes[BENCH_MAX_SIZES]; /* bytes of a tensor, each a multiple of the element */
    unsigned n_sizes;
    enum gradd_dtype dtype;
    enum gradd_redop redop;
    unsigned iters;        /* timed calls of a size; 0: fewer for larger tensors */
    unsigned ranks;        /* programs that start their ranks themselves */
    unsigned threads;      /* limit: threads that reduce */
    unsigned tensors;      /* allreduce: of each size, submitted in one call */
    unsigned streams;      /* peer_socket: connections */
    int rank;              /* peers: this process is that rank; -1: start all ranks here */
    const char *algorithm; /* gloo, peer_socket; this and the next are borrowed from argv */
    const char *store;     /* gloo with a rank: an empty directory that all ranks see */
    const char *interface; /* gloo: of the network */
    const char *address;   /* peer_socket: of rank 0, HOST:PORT */
    bool one_by_one;       /* allreduce: wait for each of the tensors before the next */
    bool unregistered;     /* gradd: ordinary memory instead of gradd_alloc() */
    bool dirty;            /* rewrite every tensor before each call, untimed */
    bool check;            /* compare with the exact result, once a size */
    bool json;             /* one JSON object a row */
    double idle_s;         /* gradd: ranks wait for rank 0 for that long; nothing is timed */
};

/* Options from the command line. Exits on --help and on bad usage (status 2). */
void bench_parse(struct bench_options *out, int argc, char **argv);

/* The largest of the sizes. */
size_t bench_max_size(const struct bench_options *options);

/* One rank of a program under measurement; the hooks end the process when they fail. */
struct bench_collective {
    const char *program, *variant; /* for the rows: "gradd", "registered" */
    int rank, ranks;
    void *const *tensors; /* n_tensors of bench_max_size() bytes; tensor i belongs to rank + i */
    unsigned n_tensors;   /* 1, unless this process stands for several ranks */
    void *context;        /* the hooks' first argument */
    void (*prepare)(void *context, size_t bytes); /* before the calls of a size; may be NULL */
    void (*allreduce)(void *context, size_t bytes);
    void (*barrier)(void *context);
    size_t (*sum)(void *context, size_t value); /* over the ranks */
};

/* Every size: check if asked, then time; rank 0 prints. @return the program's exit status. */
int bench_run(const struct bench_options *options, const struct bench_collective *collective);

/* Page-aligned memory that is already there (populated); freed with the process. */
void *bench_memory(size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
