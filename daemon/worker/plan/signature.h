/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one rank asks for under a name, and whether two ranks ask for the same thing.
 * Pure: no sockets, clock, threads or log. Thread: any.
 */
#ifndef GRADD_SIGNATURE_H
#define GRADD_SIGNATURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <gradd/types.h>

enum {
    PLAN_NAME_MAX = 255, /* bytes of a tensor's or group's name */
    PLAN_DIMS_MAX = 32,  /* dimensions that are compared; a tensor with more counts as flat */
};

struct signature {
    enum gradd_kind kind;
    enum gradd_dtype dtype;
    enum gradd_redop redop;
    int32_t root; /* broadcast: global rank; GRADD_SET_REMOVE: the set's id */
    uint64_t count;
    uint64_t out_capacity; /* may differ between ranks */
    double prescale, postscale;
    const uint64_t *counts; /* reduce-scatter and all-to-all: one per rank of the set */
    size_t n_counts;
    const uint64_t *dims; /* the tensor's shape, outermost first */
    size_t n_dims;        /* 0: not known, agrees with any shape */
    const char *group;    /* "": none. Ops of a group are matched together, under its name */
    uint32_t group_size;
    bool is_device; /* the tensor is on a GPU, wherever the bytes that we see are */
};

const char *kind_name(enum gradd_kind kind);
const char *redop_name(enum gradd_redop redop);
const char *dtype_name(enum gradd_dtype dtype);
size_t dtype_bytes(enum gradd_dtype dtype); /* 0: no such type */

/* True when ranks may run as one. False: the ops disagree; signature_describe() shows how. */
bool signature_matches(const struct signature *a, const struct signature *b);

/*
 * Write the part in which a differs from b, such as "float32[12]" or "broadcast from root 1".
 * Returns text.
 */
const char *signature_describe(const struct signature *a, const struct signature *b, char *text,
                               size_t bytes);

/* The sentence why a rank's request makes no sense by itself, or NULL. n_ranks: of its set. */
const char *signature_check(const struct signature *s, uint32_t n_ranks);

#endif
