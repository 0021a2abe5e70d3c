/* SPDX-License-Identifier: Apache-2.0 */
/* The peer on shared memory: MPI_Allreduce in place. Run it under mpirun. */
#include <err.h>
#include <limits.h>
#include <mpi.h>
#include <stdlib.h>

#include "bench.h"
#include "names.h"

struct peer {
    void *tensor;
    MPI_Datatype type;
    MPI_Op op;
    size_t element;
};

/* MPI 3 has no half types and no average. */
static MPI_Datatype type_of(enum gradd_dtype dtype)
{
    switch (dtype) {
    case GRADD_I8:
        return MPI_INT8_T;
    case GRADD_U8:
        return MPI_UINT8_T;
    case GRADD_I32:
        return MPI_INT32_T;
    case GRADD_I64:
        return MPI_INT64_T;
    case GRADD_F32:
        return MPI_FLOAT;
    case GRADD_F64:
        return MPI_DOUBLE;
    default:
        errx(2, "MPI has no %s", dtype_name(dtype));
    }
}

static MPI_Op op_of(enum gradd_redop redop)
{
    switch (redop) {
    case GRADD_SUM:
        return MPI_SUM;
    case GRADD_PROD:
        return MPI_PROD;
    case GRADD_MAX:
        return MPI_MAX;
    case GRADD_MIN:
        return MPI_MIN;
    default:
        errx(2, "MPI has no %s", redop_name(redop));
    }
}

/* Errors end the job inside MPI: MPI_ERRORS_ARE_FATAL is the default handler. */
static void allreduce(void *context, size_t bytes)
{
    struct peer *p = context;
    size_t count = bytes / p->element;
    if (count > INT_MAX)
        errx(2, "MPI counts up to %d elements", INT_MAX);
    MPI_Allreduce(MPI_IN_PLACE, p->tensor, (int)count, p->type, p->op, MPI_COMM_WORLD);
}

static void barrier(void *context)
{
    (void)context;
    MPI_Barrier(MPI_COMM_WORLD);
}

static size_t sum(void *context, size_t value)
{
    unsigned long long total = value;
    (void)context;
    MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    return (size_t)total;
}

int main(int argc, char **argv)
{
    struct bench_options options;
    MPI_Init(&argc, &argv);
    bench_parse(&options, argc, argv);
    struct peer peer = {
        .tensor = bench_memory(bench_max_size(&options)),
        .type = type_of(options.dtype),
        .op = op_of(options.redop),
        .element = dtype_size(options.dtype),
    };
    struct bench_collective collective = {
        .program = "openmpi",
        .variant = "in place",
        .tensors = &peer.tensor,
        .n_tensors = 1,
        .context = &peer,
        .allreduce = allreduce,
        .barrier = barrier,
        .sum = sum,
    };
    MPI_Comm_rank(MPI_COMM_WORLD, &collective.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &collective.ranks);
    int status = bench_run(&options, &collective);
    MPI_Finalize();
    return status;
}
