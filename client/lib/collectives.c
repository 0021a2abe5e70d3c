/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The single-op forms of the collectives, written in terms of a submission of one.
 */
#include <stdio.h>

#include "context.h"

static int run(struct gradd *g, const struct gradd_op *op, uint64_t *out_counts, size_t n_counts)
{
    gradd_handle handle = submit_ops(g, op, 1, STAGE_BLOCKING);
    if (handle < 0)
        return (int)handle;
    return handle_wait(g, handle, -1, out_counts, n_counts);
}

static struct gradd_op allreduce(const char *name, const void *in, void *out, uint64_t count,
                                 int dtype, int redop)
{
    return (struct gradd_op){
        .struct_size = sizeof(struct gradd_op),
        .kind = GRADD_ALLREDUCE,
        .name = name,
        .in = in,
        .out = out,
        .count = count,
        .dtype = dtype,
        .redop = redop,
    };
}

int gradd_allreduce(struct gradd *g, const char *name, const void *in, void *out, uint64_t count,
                    int dtype, int redop)
{
    struct gradd_op op = allreduce(name, in, out, count, dtype, redop);
    return run(g, &op, NULL, 0);
}

gradd_handle gradd_allreduce_async(struct gradd *g, const char *name, const void *in, void *out,
                                   uint64_t count, int dtype, int redop)
{
    struct gradd_op op = allreduce(name, in, out, count, dtype, redop);
    return submit_ops(g, &op, 1, STAGE_ASYNC);
}

static struct gradd_op broadcast(const struct gradd *g, const char *name, void *buffer,
                                 uint64_t count, int dtype, int root)
{
    bool is_root = g && g->identity.rank == root;
    return (struct gradd_op){
        .struct_size = sizeof(struct gradd_op),
        .kind = GRADD_BROADCAST,
        .name = name,
        .in = is_root ? buffer : NULL,
        .out = buffer,
        .count = count,
        .dtype = dtype,
        .root = root,
    };
}

int gradd_broadcast(struct gradd *g, const char *name, void *buffer, uint64_t count, int dtype,
                    int root)
{
    struct gradd_op op = broadcast(g, name, buffer, count, dtype, root);
    return run(g, &op, NULL, 0);
}

gradd_handle gradd_broadcast_async(struct gradd *g, const char *name, void *buffer, uint64_t count,
                                   int dtype, int root)
{
    struct gradd_op op = broadcast(g, name, buffer, count, dtype, root);
    return submit_ops(g, &op, 1, STAGE_ASYNC);
}

static struct gradd_op allgather(const char *name, const void *in, uint64_t count, void *out,
                                 uint64_t out_capacity, int dtype)
{
    return (struct gradd_op){
        .struct_size = sizeof(struct gradd_op),
        .kind = GRADD_ALLGATHER,
        .name = name,
        .in = in,
        .out = out,
        .count = count,
        .out_capacity = out_capacity,
        .dtype = dtype,
    };
}

int gradd_allgather(struct gradd *g, const char *name, const void *in, uint64_t count, void *out,
                    uint64_t out_capacity, int dtype, uint64_t *out_counts)
{
    struct gradd_op op = allgather(name, in, count, out, out_capacity, dtype);
    return run(g, &op, out_counts, g ? (size_t)g->identity.size : 0);
}

gradd_handle gradd_allgather_async(struct gradd *g, const char *name, const void *in,
                                   uint64_t count, void *out, uint64_t out_capacity, int dtype)
{
    struct gradd_op op = allgather(name, in, count, out, out_capacity, dtype);
    return submit_ops(g, &op, 1, STAGE_ASYNC);
}

static struct gradd_op reduce_scatter(const char *name, const void *in, uint64_t count, void *out,
                                      const uint64_t *counts, int dtype, int redop)
{
    return (struct gradd_op){
        .struct_size = sizeof(struct gradd_op),
        .kind = GRADD_REDUCE_SCATTER,
        .name = name,
        .in = in,
        .out = out,
        .count = count,
        .counts = counts,
        .dtype = dtype,
        .redop = redop,
    };
}

int gradd_reduce_scatter(struct gradd *g, const char *name, const void *in, uint64_t count,
                         void *out, const uint64_t *counts, int dtype, int redop)
{
    struct gradd_op op = reduce_scatter(name, in, count, out, counts, dtype, redop);
    return run(g, &op, NULL, 0);
}

gradd_handle gradd_reduce_scatter_async(struct gradd *g, const char *name, const void *in,
                                        uint64_t count, void *out, const uint64_t *counts,
                                        int dtype, int redop)
{
    struct gradd_op op = reduce_scatter(name, in, count, out, counts, dtype, redop);
    return submit_ops(g, &op, 1, STAGE_ASYNC);
}

static struct gradd_op alltoall(const char *name, const void *in, uint64_t count,
                                const uint64_t *send_counts, void *out, uint64_t out_capacity,
                                int dtype)
{
    return (struct gradd_op){
        .struct_size = sizeof(struct gradd_op),
        .kind = GRADD_ALLTOALL,
        .name = name,
        .in = in,
        .out = out,
        .count = count,
        .counts = send_counts,
        .out_capacity = out_capacity,
        .dtype = dtype,
    };
}

int gradd_alltoall(struct gradd *g, const char *name, const void *in, uint64_t count,
                   const uint64_t *send_counts, void *out, uint64_t out_capacity, int dtype,
                   uint64_t *out_counts)
{
    struct gradd_op op = alltoall(name, in, count, send_counts, out, out_capacity, dtype);
    return run(g, &op, out_counts, g ? (size_t)g->identity.size : 0);
}

gradd_handle gradd_alltoall_async(struct gradd *g, const char *name, const void *in, uint64_t count,
                                  const uint64_t *send_counts, void *out, uint64_t out_capacity,
                                  int dtype)
{
    struct gradd_op op = alltoall(name, in, count, send_counts, out, out_capacity, dtype);
    return submit_ops(g, &op, 1, STAGE_ASYNC);
}

int gradd_barrier(struct gradd *g, uint32_t set)
{
    char name[40] = "gradd.barrier";
    if (set > 0)
        snprintf(name, sizeof name, "gradd.barrier.%u", set);
    struct gradd_op op = {
        .struct_size = sizeof op,
        .kind = GRADD_BARRIER,
        .name = name,
        .set = set,
    };
    return run(g, &op, NULL, 0);
}
