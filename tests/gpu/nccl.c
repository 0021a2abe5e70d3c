/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NCCL without gradd, to compare with: gpu_nccl ID-FILE RANK SIZE OPS BYTES. Ranks meet by a file
 * that rank 0 writes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device.h"
#include "worker/backend/nccl/nccl_table.h"

static const struct nccl_table *nccl;

static void check(ncclResult_t rc, const char *what)
{
    if (rc != ncclSuccess)
        fail("%s: %s", what, nccl_table_error(nccl, rc));
}

/* Written whole under another name, then moved to its own. */
static ncclUniqueId meet(const char *path, int rank)
{
    char whole[300];
    ncclUniqueId id;
    FILE *file;

    snprintf(whole, sizeof(whole), "%s.new", path);
    if (rank == 0) {
        check(nccl->get_unique_id(&id), "ncclGetUniqueId");
        file = fopen(whole, "wb");
        if (!file || fwrite(&id, sizeof(id), 1, file) != 1 || fclose(file) != 0 ||
            rename(whole, path) != 0)
            fail("%s: cannot be written", path);
        return id;
    }
    for (int tries = 0; !(file = fopen(path, "rb")); tries++) {
        if (tries > 20000)
            fail("%s: rank 0 did not come", path);
        usleep(1000);
    }
    if (fread(&id, sizeof(id), 1, file) != 1)
        fail("%s: too short", path);
    fclose(file);
    return id;
}

int main(int argc, char **argv)
{
    const char *why = "";
    ncclComm_t comm;
    double median, p99;

    if (argc != 6)
        fail("usage: gpu_nccl ID-FILE RANK SIZE OPS BYTES");
    const int rank = atoi(argv[2]), size = atoi(argv[3]);
    const size_t n = strtoul(argv[4], NULL, 10), count = strtoul(argv[5], NULL, 10) / sizeof(float);
    double *seconds = calloc(n, sizeof(*seconds));

    device_open(0);
    nccl = nccl_table_open(&why);
    if (!nccl)
        fail("%s", why);
    float *x = floats_new(count);
    floats_fill(x, count, 1, 0);
    check(nccl->comm_init(&comm, size, meet(argv[1], rank), rank, NULL), "ncclCommInitRankConfig");
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
