/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NCCL without gradd, to compare with: gpu_nccl FIFO RANK SIZE OPS BYTES. Ranks meet at the FIFO,
 * which the first to come makes.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device.h"
#include "worker/backend/nccl/nccl_table.h"

static const struct nccl_table *nccl;

static void check(ncclResult_t rc, const char *what)
{
    if (rc != ncclSuccess)
        fail("%s: %s", what, nccl_table_error(nccl, rc));
}

/* The id that rank 0 makes. It keeps the FIFO open, for what is in one that nobody has open is
 * lost, and the others wait in open(), or in read(), until it comes. */
static ncclUniqueId meet(const char *path, int rank, int size)
{
    ncclUniqueId id;

    if (mkfifo(path, 0600) < 0 && errno != EEXIST)
        fail("%s: %s", path, strerror(errno));
    const int fd = open(path, (rank == 0 ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (fd < 0)
        fail("%s: %s", path, strerror(errno));
    if (rank != 0) {
        if (read(fd, &id, sizeof(id)) != sizeof(id))
            fail("%s: rank 0 has left", path);
        close(fd);
        return id;
    }
    check(nccl->get_unique_id(&id), "ncclGetUniqueId");
    for (int i = 1; i < size; i++)
        if (write(fd, &id, sizeof(id)) != sizeof(id))
            fail("%s: cannot be written", path);
    return id;
}

int main(int argc, char **argv)
{
    const char *why = "";
    ncclComm_t comm;
    double median, p99;

    if (argc != 6)
        fail("usage: gpu_nccl FIFO RANK SIZE OPS BYTES");
    const int rank = atoi(argv[2]), size = atoi(argv[3]);
    const size_t n = strtoul(argv[4], NULL, 10), count = strtoul(argv[5], NULL, 10) / sizeof(float);
    double *seconds = calloc(n, sizeof(*seconds));

    device_open(0);
    nccl = nccl_table_open(&why);
    if (!nccl)
        fail("%s", why);
    float *x = floats_new(count);
    floats_fill(x, count, 1, 0);
    check(nccl->comm_init(&comm, size, meet(argv[1], rank, size), rank, NULL),
          "ncclCommInitRankConfig");
    for (size_t i = 0; i < n + 20; i++) { /* the first 20 warm up */
        const CUevent mark = timer_mark();

        check(nccl->all_reduce(x, x, count, ncclFloat32, ncclAvg, comm, stream), "ncclAllReduce");
        const double one = timer_between(mark, timer_mark());
        if (i >= 20)
            seconds[i - 20] = one;
    }
    percentiles(seconds, n, &median, &p99);
    free(seconds);
    report("\"what\": \"nccl\", \"rank\": %d, \"op_us\": %.1f, \"p99_us\": %.1f", rank,
           1e6 * median, 1e6 * p99);
    check(nccl->comm_destroy(comm), "ncclCommDestroy");
    return 0;
}
