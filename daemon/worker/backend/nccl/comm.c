/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/comm.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "worker/reduce/convert.h"

enum {
    DESCRIBED_MAX = 3, /* GPUs in one sentence */
    DESCRIBED_BYTES = 256,
};

static const uint64_t close_timeout_ns = 5000000000;

struct comm *comm_new(const struct nccl_table *nccl, const struct comm_config *config,
                      const uint32_t *ranks, const uint32_t *gpu_of, uint32_t n_ranks,
                      struct cuda_device *const *device_of_gpu, uint32_t n_gpus,
                      const ncclUniqueId *id)
{
    struct comm *comm = calloc(1, sizeof *comm);
    uint32_t *block = calloc(2 * (size_t)n_ranks + n_gpus, sizeof *block), n_local = 0;
    struct comm_gpu *gpus = calloc(n_gpus + 1, sizeof *gpus);
    if (!comm || !block || !gpus) {
        free(comm);
        free(block);
        free(gpus);
        return NULL;
    }
    uint32_t *local_of = block + 2 * (size_t)n_ranks;
    memcpy(block, ranks, n_ranks * sizeof *block);
    memcpy(block + n_ranks, gpu_of, n_ranks * sizeof *block);
    for (uint32_t gpu = 0; gpu < n_gpus; gpu++) {
        local_of[gpu] = device_of_gpu[gpu] ? n_local : LOWER_NO_GPU;
        if (device_of_gpu[gpu])
            gpus[n_local++] = (struct comm_gpu){.device = device_of_gpu[gpu], .rank = gpu};
    }
    *comm = (struct comm){
        .nccl = nccl,
        .config = *config,
        .map = {.n_ranks = n_ranks,
                .n_gpus = n_gpus,
                .gpu_of = block + n_ranks,
                .local_of = local_of,
                .n_local = n_local},
        .ranks = block,
        .gpus = gpus,
        .has_id = id,
    };
    if (id)
        comm->id = *id;
    return comm;
}

void comm_free(struct comm *comm)
{
    if (!comm)
        return;
    free(comm->ranks);
    free(comm->gpus);
    free(comm);
}

bool comm_is_of(const struct comm *comm, const uint32_t *ranks, uint32_t n_ranks)
{
    return comm->map.n_ranks == n_ranks && memcmp(comm->ranks, ranks, n_ranks * sizeof *ranks) == 0;
}

bool comm_has_gpus(const struct comm *comm, const uint32_t *gpu_of)
{
    return memcmp(comm->map.gpu_of, gpu_of, comm->map.n_ranks * sizeof *gpu_of) == 0;
}

bool comm_is_single(const struct comm *comm)
{
    return comm->map.n_gpus <= 1;
}

const char *comm_state_name(const struct comm *comm)
{
    static const char *const names[] = {
        [COMM_NEW] = "new",    [COMM_CREATING] = "creating", [COMM_READY] = "ready",
        [COMM_BUSY] = "ready", [COMM_FAILED] = "failed",     [COMM_GONE] = "aborted",
    };
    return comm_is_single(comm) ? "one GPU" : names[atomic_load(&comm->state)];
}

static void append(char *text, size_t bytes, const char *format, ...)
{
    const size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, bytes - used, format, args);
    va_end(args);
}

/* " (ranks 0, 2)" */
static void append_ranks(const struct comm *comm, uint32_t gpu_rank, char *text, size_t bytes)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < comm->map.n_ranks; i++)
        n += comm->map.gpu_of[i] == gpu_rank;
    const char *before = n == 1 ? " (rank " : " (ranks ";
    for (uint32_t i = 0; i < comm->map.n_ranks; i++) {
        if (comm->map.gpu_of[i] != gpu_rank)
            continue;
        append(text, bytes, "%s%u", before, comm->ranks[i]);
        before = ", ";
    }
    append(text, bytes, ")");
}

void comm_describe_gpus(const struct comm *comm, uint32_t first, uint32_t n, char *text,
                        size_t bytes)
{
    *text = '\0';
    for (uint32_t i = first; i < comm->map.n_local && i < first + n; i++) {
        append(text, bytes, "%s%s", i > first ? ", " : "", comm->gpus[i].device->uuid_text);
        append_ranks(comm, comm->gpus[i].rank, text, bytes);
    }
}

static void set_state(struct comm *comm, enum comm_state state)
{
    atomic_store(&comm->state, state);
}

/* gpu: on which this happened, or one beyond this node's. */
static void fail(struct comm *comm, uint32_t gpu, const char *what, ncclResult_t rc, char *text,
                 size_t bytes)
{
    char where[DESCRIBED_BYTES];
    const bool is_known = gpu < comm->map.n_local;
    set_state(comm, COMM_FAILED);
    comm_describe_gpus(comm, is_known ? gpu : 0, is_known ? 1 : DESCRIBED_MAX, where, sizeof where);
    snprintf(text, bytes, "%s: NCCL %s: %s", where, what, nccl_table_error(comm->nccl, rc));
}

/* ------------------------------------------------------------------ coming up */

static ncclConfig_t nccl_config(const struct comm *comm)
{
    ncclConfig_t config = nccl_abi_config();
    config.blocking = 0;
    config.commName = comm->config.name;
    if (comm->config.max_ctas)
        config.maxCTAs = (int)comm->config.max_ctas;
    if (comm->config.traffic_class >= 0)
        config.trafficClass = comm->config.traffic_class;
    return config;
}

static ncclResult_t init_ranks(struct comm *comm, uint32_t *out_gpu)
{
    ncclConfig_t config = nccl_config(comm);
    ncclResult_t rc = comm->nccl->group_start();
    *out_gpu = UINT32_MAX;
    for (uint32_t i = 0; rc == ncclSuccess && i < comm->map.n_local; i++) {
        struct comm_gpu *gpu = &comm->gpus[i];
        gpu->device->cuda->ctx_set(gpu->device->context);
        rc = comm->nccl->comm_init(&gpu->handle, (int)comm->map.n_gpus, comm->id, (int)gpu->rank,
                                   &config);
        if (rc == ncclInProgress)
            rc = ncclSuccess;
        if (rc != ncclSuccess)
            *out_gpu = i;
    }
    const ncclResult_t end = comm->nccl->group_end();
    return rc == ncclSuccess ? end : rc;
}

static void begin(struct comm *comm, uint64_t now_ns, char *text, size_t bytes)
{
    ncclResult_t rc = ncclSuccess;
    uint32_t gpu = UINT32_MAX;
    if (!comm->nccl) {
        set_state(comm, COMM_FAILED);
        const char *why = "";
        nccl_table_open(&why);
        snprintf(text, bytes, "ranks on several GPUs need NCCL: %s", why);
        return;
    }
    if (!comm->has_id)
        rc = comm->nccl->get_unique_id(&comm->id);
    comm->has_id = true;
    if (rc == ncclSuccess)
        rc = init_ranks(comm, &gpu);
    if (rc != ncclSuccess && rc != ncclInProgress) {
        fail(comm, gpu, "could not begin a communicator", rc, text, bytes);
        return;
    }
    comm->deadline_ns = now_ns + comm->config.timeout_ns;
    set_state(comm, COMM_CREATING);
}

/* ncclSuccess, ncclInProgress, or the first error, of GPU *out_gpu. */
static ncclResult_t ask_all(const struct comm *comm, uint32_t *out_gpu)
{
    ncclResult_t whole = ncclSuccess;
    *out_gpu = UINT32_MAX;
    for (uint32_t i = 0; i < comm->map.n_local; i++) {
        ncclResult_t now = ncclInternalError;
        ncclResult_t rc = comm->gpus[i].handle
                              ? comm->nccl->comm_async_error(comm->gpus[i].handle, &now)
                              : ncclInProgress;
        if (rc == ncclInProgress)
            now = ncclInProgress;
        else if (rc != ncclSuccess)
            now = rc;
        if (now != ncclSuccess)
            *out_gpu = i;
        if (now != ncclSuccess && now != ncclInProgress)
            return now;
        if (now == ncclInProgress)
            whole = now;
    }
    return whole;
}

static void poll(struct comm *comm, uint64_t now_ns, char *text, size_t bytes)
{
    const bool is_creating = atomic_load(&comm->state) == COMM_CREATING;
    uint32_t gpu;
    const ncclResult_t rc = ask_all(comm, &gpu);
    if (rc == ncclSuccess) {
        set_state(comm, COMM_READY);
    } else if (rc != ncclInProgress) {
        fail(comm, gpu, is_creating ? "could not make a communicator" : "could not launch", rc,
             text, bytes);
    } else if (now_ns > comm->deadline_ns) {
        char where[DESCRIBED_BYTES];
        comm_describe_gpus(comm, 0, DESCRIBED_MAX, where, sizeof where);
        set_state(comm, COMM_FAILED);
        snprintf(text, bytes, "%s: NCCL %s within %.3g s: do all %u GPUs reach each other?", where,
                 is_creating ? "did not connect the GPUs" : "did not launch",
                 (double)comm->config.timeout_ns / 1e9, comm->map.n_gpus);
    }
}

enum comm_state comm_advance(struct comm *comm, uint64_t now_ns, char *text, size_t bytes)
{
    if (comm->map.n_local == 0 || comm_is_single(comm))
        return COMM_READY; /* nothing to do with NCCL here */
    switch (atomic_load(&comm->state)) {
    case COMM_NEW:
        begin(comm, now_ns, text, bytes);
        break;
    case COMM_CREATING:
    case COMM_BUSY:
        poll(comm, now_ns, text, bytes);
        break;
    case COMM_FAILED:
    case COMM_GONE:
        snprintf(text, bytes, "the communicator has failed before");
        return COMM_FAILED;
    default:
        break;
    }
    return atomic_load(&comm->state);
}

/* ------------------------------------------------------------------ in use */

void comm_issued(struct comm *comm, ncclResult_t rc, uint64_t now_ns, char *text, size_t bytes)
{
    if (rc == ncclInProgress) {
        comm->deadline_ns = now_ns + comm->config.timeout_ns;
        set_state(comm, COMM_BUSY);
    } else if (rc != ncclSuccess) {
        fail(comm, UINT32_MAX, "could not launch", rc, text, bytes);
    }
}

bool comm_check(struct comm *comm, char *text, size_t bytes)
{
    if (atomic_load(&comm->state) != COMM_READY)
        return true;
    uint32_t gpu;
    const ncclResult_t rc = ask_all(comm, &gpu);
    if (rc == ncclSuccess || rc == ncclInProgress)
        return true;
    fail(comm, gpu, "met an error", rc, text, bytes);
    return false;
}

static ncclResult_t make_redop(struct comm *comm, struct comm_gpu *gpu,
                               const struct lower_step *step, ncclRedOp_t *out)
{
    union {
        double f64;
        float f32;
        uint16_t half;
    } scalar;
    const float narrow = (float)step->factor;
    if (step->dtype == GRADD_F64)
        scalar.f64 = step->factor;
    else if (step->dtype == GRADD_F32)
        scalar.f32 = narrow;
    else
        convert_narrow(step->dtype, &narrow, &scalar.half, 1);
    return comm->nccl->premul_sum(out, &scalar, step->dtype, ncclScalarHostImmediate, gpu->handle);
}

ncclResult_t comm_redop(struct comm *comm, struct comm_gpu *gpu, const struct lower_step *step,
                        ncclRedOp_t *out)
{
    if (step->redop != LOWER_PREMUL_SUM) {
        *out = step->redop; /* the numbers are NCCL's */
        return ncclSuccess;
    }
    for (uint32_t i = 0; i < gpu->n_redops; i++) {
        const struct comm_redop *known = &gpu->redops[i];
        if (known->dtype == step->dtype && known->factor == step->factor) {
            *out = known->op;
            return ncclSuccess;
        }
    }
    struct comm_redop *slot = &gpu->redops[gpu->next_redop];
    ncclResult_t rc = make_redop(comm, gpu, step, out);
    if (rc != ncclSuccess)
        return rc;
    if (gpu->n_redops == COMM_REDOPS_MAX)
        comm->nccl->redop_destroy(slot->op, gpu->handle);
    else
        gpu->n_redops++;
    gpu->next_redop = (gpu->next_redop + 1) % COMM_REDOPS_MAX;
    *slot = (struct comm_redop){step->dtype, step->factor, *out};
    return ncclSuccess;
}

/* ------------------------------------------------------------------ ends */

void comm_abort(struct comm *comm)
{
    for (uint32_t i = 0; i < comm->map.n_local; i++) {
        struct comm_gpu *gpu = &comm->gpus[i];
        /* All but the last return once they have told their kernels. */
        if (i + 1 == comm->map.n_local)
            atomic_store(&comm->is_ending, true);
        if (!gpu->handle)
            continue;
        gpu->device->cuda->ctx_set(gpu->device->context);
        comm->nccl->comm_abort(gpu->handle);
        gpu->handle = NULL;
        gpu->n_redops = gpu->next_redop = 0;
    }
    if (!comm_is_single(comm))
        set_state(comm, COMM_GONE);
}

bool comm_is_ending(const struct comm *comm)
{
    const int state = atomic_load(&comm->state);
    return atomic_load(&comm->is_ending) || state == COMM_NEW || state == COMM_GONE;
}

/* Call it on every handle; false: some have failed, or did not finish. */
static bool end_all(struct comm *comm, ncclResult_t (*end)(ncclComm_t comm))
{
    const uint64_t deadline_ns = clock_now_ns() + close_timeout_ns;
    ncclResult_t rc = comm->nccl->group_start();
    for (uint32_t i = 0; i < comm->map.n_local; i++) {
        comm->gpus[i].device->cuda->ctx_set(comm->gpus[i].device->context);
        const ncclResult_t one = end(comm->gpus[i].handle);
        if (one != ncclSuccess && one != ncclInProgress)
            rc = one;
    }
    const ncclResult_t last = comm->nccl->group_end();
    if (rc == ncclSuccess && last != ncclInProgress)
        rc = last;
    uint32_t gpu;
    while (rc == ncclSuccess && ask_all(comm, &gpu) == ncclInProgress &&
           clock_now_ns() < deadline_ns)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    return rc == ncclSuccess && ask_all(comm, &gpu) == ncclSuccess;
}

void comm_close(struct comm *comm)
{
    if (comm->map.n_local == 0 || atomic_load(&comm->state) != COMM_READY ||
        !end_all(comm, comm->nccl->comm_finalize)) {
        comm_abort(comm);
        return;
    }
    for (uint32_t i = 0; i < comm->map.n_local; i++) {
        comm->nccl->comm_destroy(comm->gpus[i].handle);
        comm->gpus[i].handle = NULL;
    }
    set_state(comm, COMM_GONE);
}
