/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The peer that frameworks use on CPUs: Gloo over TCP (Debian's Gloo predates its shared memory
 * path). float32 sums only. It starts its ranks itself, by fork, before Gloo has a thread; with
 * --rank it is one of them, and the others run on other hosts.
 */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <err.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gloo/algorithm.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/barrier.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include "bench.h"

namespace
{

struct peer {
    std::shared_ptr<gloo::rendezvous::Context> context;
    float *tensor;
    bool ring;
    size_t prepared_bytes; /* what halving_doubling was made for */
    std::unique_ptr<gloo::Algorithm> halving_doubling;
};

void prepare(void *context, size_t bytes)
{
    auto p = static_cast<peer *>(context);
    if (p->ring)
        return;
    p->halving_doubling = std::make_unique<gloo::AllreduceHalvingDoubling<float>>(
        p->context, std::vector<float *>{p->tensor}, static_cast<int>(bytes / sizeof(float)));
    p->prepared_bytes = bytes;
}

void ring_allreduce(peer *p, float *data, size_t count)
{
    gloo::AllreduceOptions options(p->context);
    void (*add)(void *, const void *, const void *, size_t) = &gloo::sum<float>;
    options.setOutput(data, count);
    options.setReduceFunction(add);
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    gloo::allreduce(options);
}

void allreduce(void *context, size_t bytes)
{
    auto p = static_cast<peer *>(context);
    if (p->ring)
        ring_allreduce(p, p->tensor, bytes / sizeof(float));
    else
        p->halving_doubling->run();
}

void barrier(void *context)
{
    gloo::BarrierOptions options(static_cast<peer *>(context)->context);
    gloo::barrier(options);
}

/* float holds every count of wrong bytes that matters: 0 or not. */
size_t sum(void *context, size_t value)
{
    auto total = static_cast<float>(value);
    ring_allreduce(static_cast<peer *>(context), &total, 1);
    return static_cast<size_t>(total);
}

int run_rank(const bench_options &options, const std::string &store_path, int rank)
{
    gloo::transport::tcp::attr attr;
    attr.iface = options.interface;
    auto device = gloo::transport::tcp::CreateDevice(attr);
    gloo::rendezvous::FileStore store(store_path);
    peer p{};
    p.context = std::make_shared<gloo::rendezvous::Context>(rank, static_cast<int>(options.ranks));
    p.context->connectFullMesh(store, device);
    p.ring = std::strcmp(options.algorithm, "ring") == 0;
    void *tensor = bench_memory(bench_max_size(&options));
    p.tensor = static_cast<float *>(tensor);

    bench_collective collective{};
    collective.program = "gloo";
    collective.variant = options.algorithm;
    collective.rank = rank;
    collective.ranks = static_cast<int>(options.ranks);
    collective.tensors = &tensor;
    collective.n_tensors = 1;
    collective.context = &p;
    collective.prepare = prepare;
    collective.allreduce = allreduce;
    collective.barrier = barrier;
    collective.sum = sum;
    return bench_run(&options, &collective);
}

int run_rank_or_complain(const bench_options &options, const std::string &store, int rank)
{
    try {
        return run_rank(options, store, rank);
    } catch (const std::exception &e) {
        warnx("rank %d: %s", rank, e.what());
        return EXIT_FAILURE;
    }
}

/* The other ranks; they end with this process. */
void start_ranks(const bench_options &options, const std::string &store)
{
    for (int rank = 1; rank < static_cast<int>(options.ranks); rank++) {
        pid_t pid = fork();
        if (pid < 0)
            err(EXIT_FAILURE, "fork");
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(run_rank_or_complain(options, store, rank));
        }
    }
}

} // namespace

int main(int argc, char **argv)
{
    bench_options options;
    bench_parse(&options, argc, argv);
    if (!options.algorithm)
        options.algorithm = "ring";
    if (std::strcmp(options.algorithm, "ring") &&
        std::strcmp(options.algorithm, "halving-doubling"))
        errx(2, "--algorithm: ring or halving-doubling");
    if (options.dtype != GRADD_F32 || options.redop != GRADD_SUM)
        errx(2, "only float32 sums");

    if (options.rank >= 0) {
        if (!options.store || options.rank >= static_cast<int>(options.ranks))
            errx(2, "--rank needs --store, and --ranks above it");
        return run_rank_or_complain(options, options.store, options.rank);
    }
    std::string store = std::filesystem::temp_directory_path() / "gradd-bench-gloo-XXXXXX";
    if (!mkdtemp(store.data()))
        err(EXIT_FAILURE, "%s", store.c_str());
    start_ranks(options, store);
    int status = run_rank_or_complain(options, store, 0);
    std::filesystem::remove_all(store);
    if (status != EXIT_SUCCESS)
        return status; /* the others die with this process */
    /* Rank 0 has measured. Gloo has no orderly end: a rank may still complain that others are gone. */
    while (wait(nullptr) > 0)
        continue;
    return status;
}
