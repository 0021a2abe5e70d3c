/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/nccl.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

static const uint64_t abort_timeout_ns = 10000000000;
enum { ABORT_LOOKS = 50 }; /* within that time */

struct backend {
    struct submitter_client client; /* first */
    struct nccl_setup setup;
    struct comm_config config;
    char comm_name[128];
    struct cuda_device **devices; /* by rank; NULL: on another node, or no memory yet */
    struct submission *spare;
    struct submission *running, **running_tail; /* the submitter has them, in the order given */
    size_t n_running;
    struct watch *abort_timer; /* until an abort has come to its end */
    unsigned n_abort_looks;
    bool were_comms_ending; /* at the look before */
    bool is_aborting;       /* communicators are being aborted */
    bool is_freed;
    uint32_t *keys, *gpu_of; /* scratch, by rank */
    struct cuda_device **gpu_devices;
};

static void free_now(struct backend *nccl)
{
    struct submission *submission;
    struct comm *comm;
    while ((submission = nccl->spare)) {
        nccl->spare = submission->next;
        submission_free(submission);
    }
    while ((comm = nccl->client.comms)) {
        nccl->client.comms = comm->next;
        comm_free(comm);
    }
    watch_free(nccl->abort_timer);
    free(nccl->devices);
    free(nccl->keys);
    free(nccl->gpu_of);
    free(nccl->gpu_devices);
    free(nccl);
}

/* ------------------------------------------------------------------ ends */

static void on_enqueued(struct submission *submission)
{
    struct backend_batch *batch = submission->batch;
    if (batch->enqueued)
        batch->enqueued(batch->data, batch);
}

/* Nothing may be left of an epoch that failed, or the GPUs are not to be had any more. */
static void check_abort(struct backend *nccl)
{
    if (!watch_is_armed(nccl->abort_timer) || nccl->n_running > 0 || nccl->is_aborting)
        return;
    watch_disarm(nccl->abort_timer);
    if (nccl->setup.on_drained && !nccl->is_freed)
        nccl->setup.on_drained(nccl->setup.data);
}

bool nccl_is_draining(const struct backend *nccl)
{
    return watch_is_armed(nccl->abort_timer);
}

static void add_running(struct backend *nccl, struct submission *submission)
{
    submission->next = NULL;
    *nccl->running_tail = submission;
    nccl->running_tail = &submission->next;
    nccl->n_running++;
}

static void remove_running(struct backend *nccl, struct submission *submission)
{
    struct submission **link = &nccl->running; /* most often it is the first */
    while (*link != submission)
        link = &(*link)->next;
    *link = submission->next;
    if (!*link)
        nccl->running_tail = link;
    nccl->n_running--;
}

static void on_done(struct submission *submission)
{
    struct backend *nccl = (struct backend *)submission->client;
    struct backend_batch *batch = submission->batch;
    remove_running(nccl, submission);
    submission->next = nccl->spare;
    nccl->spare = submission;
    check_abort(nccl);
    batch->done(batch->data, batch);
}

static void on_failed(struct submitter_client *client, int status, const char *text, bool broken)
{
    struct backend *nccl = (struct backend *)client;
    if (!nccl->is_freed)
        nccl->setup.on_failed(nccl->setup.data, status, text, broken);
}

static void on_aborted(struct submitter_client *client)
{
    struct backend *nccl = (struct backend *)client;
    nccl->is_aborting = false;
    check_abort(nccl);
}

static void on_closed(struct submitter_client *client)
{
    free_now((struct backend *)client);
}

static bool are_comms_ending(const struct backend *nccl)
{
    for (const struct comm *comm = nccl->client.comms; comm; comm = comm->next)
        if (!comm_is_single(comm) && !comm_is_ending(comm))
            return false;
    return true;
}

/* ncclCommAbort() waits for its kernels, which wait, in their streams, for words that a trainer
 * that is lost will never write. So they are written here, once the kernels know that they are to
 * end, a look after NCCL was called: what was not there must not travel to other GPUs. */
static void release_aborts(struct backend *nccl)
{
    const bool were_ending = nccl->were_comms_ending;
    nccl->were_comms_ending = are_comms_ending(nccl);
    if (!nccl->is_aborting || !were_ending)
        return;
    for (const struct submission *running = nccl->running; running; running = running->next)
        submission_poison(running);
}

static void on_abort_timer(void *data)
{
    struct backend *nccl = data;
    if (++nccl->n_abort_looks < ABORT_LOOKS) {
        watch_arm(nccl->abort_timer, nccl->setup.abort_timeout_ns / ABORT_LOOKS);
        release_aborts(nccl);
        return;
    }
    log_error("nccl",
              "job %s: %s within %.3g s after the epoch failed: this worker ends, so that the GPUs "
              "are free for the next epoch",
              nccl->setup.job,
              nccl->is_aborting ? "NCCL did not abort its communicators"
                                : "what was launched on the GPUs did not end",
              (double)nccl->setup.abort_timeout_ns / 1e9);
    _exit(EXIT_FAILURE);
}

void nccl_abort(struct backend *nccl, int status, const char *text)
{
    if (atomic_load(&nccl->client.is_aborted))
        return;
    nccl->is_aborting = true;
    watch_arm(nccl->abort_timer, nccl->setup.abort_timeout_ns / ABORT_LOOKS);
    submitter_abort(&nccl->client, status, text);
}

/* ------------------------------------------------------------------ communicators */

struct backend *nccl_new(const struct nccl_setup *setup)
{
    struct backend *nccl = calloc(1, sizeof *nccl);
    if (!nccl)
        return NULL;
    nccl->setup = *setup;
    nccl->running_tail = &nccl->running;
    if (!setup->abort_timeout_ns)
        nccl->setup.abort_timeout_ns = abort_timeout_ns;
    nccl->client = (struct submitter_client){
        .submitter = setup->submitter,
        .op_timeout_ns = setup->op_timeout_ns,
        .on_enqueued = on_enqueued,
        .on_done = on_done,
        .on_failed = on_failed,
        .on_aborted = on_aborted,
        .on_closed = on_closed,
    };
    snprintf(nccl->comm_name, sizeof nccl->comm_name, "gradd:%.100s", setup->job);
    nccl->config = (struct comm_config){
        .name = nccl->comm_name,
        .max_ctas = setup->max_ctas,
        .traffic_class = setup->traffic_class,
        .timeout_ns = setup->create_timeout_ns,
    };
    nccl->abort_timer = watch_timer(setup->loop, on_abort_timer, nccl);
    nccl->devices = calloc(setup->n_ranks, sizeof(*nccl->devices));
    nccl->gpu_devices = calloc(setup->n_ranks, sizeof(*nccl->gpu_devices));
    nccl->keys = calloc(setup->n_ranks, sizeof *nccl->keys);
    nccl->gpu_of = calloc(setup->n_ranks, sizeof *nccl->gpu_of);
    if (!nccl->abort_timer || !nccl->devices || !nccl->gpu_devices || !nccl->keys ||
        !nccl->gpu_of) {
        free_now(nccl);
        return NULL;
    }
    return nccl;
}

void nccl_set_device(struct backend *nccl, uint32_t rank, struct cuda_device *device)
{
    nccl->devices[rank] = device;
}

bool nccl_unique_id(uint8_t *out_id, const char **out_text)
{
    const struct nccl_table *nccl = nccl_table_open(out_text);
    ncclUniqueId id;
    if (!nccl)
        return false;
    /* Touches no GPU, so this one call may be the loop's. */
    const ncclResult_t rc = nccl->get_unique_id(&id);
    if (rc != ncclSuccess) {
        *out_text = nccl_table_error(nccl, rc);
        return false;
    }
    memcpy(out_id, id.internal, sizeof id.internal);
    return true;
}

static struct comm *find_comm(const struct backend *nccl, const uint32_t *ranks, uint32_t n_ranks,
                              const uint32_t *gpu_of)
{
    for (struct comm *comm = nccl->client.comms; comm; comm = comm->next)
        if (comm_is_of(comm, ranks, n_ranks) && (!gpu_of || comm_has_gpus(comm, gpu_of)))
            return comm;
    return NULL;
}

bool nccl_has_comm(const struct backend *nccl, const uint32_t *ranks, const uint32_t *gpu_of,
                   uint32_t n_ranks)
{
    const struct comm *comm = find_comm(nccl, ranks, n_ranks, NULL);
    return comm && comm_has_gpus(comm, gpu_of);
}

/* gpu_devices[] is filled. NULL: out of memory. */
static struct comm *add_comm(struct backend *nccl, const uint32_t *ranks, const uint32_t *gpu_of,
                             uint32_t n_ranks, uint32_t n_gpus, const ncclUniqueId *id)
{
    const struct nccl_table *table = n_gpus > 1 ? nccl_table_open(NULL) : NULL;
    struct comm *comm =
        comm_new(table, &nccl->config, ranks, gpu_of, n_ranks, nccl->gpu_devices, n_gpus, id);
    if (comm)
        submitter_add_comm(&nccl->client, comm);
    return comm;
}

bool nccl_comm_begin(struct backend *nccl, const uint32_t *ranks, const uint32_t *gpu_of,
                     uint32_t n_ranks, uint32_t n_gpus, const uint8_t *unique_id, size_t id_bytes)
{
    ncclUniqueId id;
    if (n_ranks > nccl->setup.n_ranks || n_gpus > n_ranks || id_bytes != sizeof id.internal)
        return false;
    memcpy(id.internal, unique_id, sizeof id.internal);
    memset(nccl->gpu_devices, 0, n_gpus * sizeof(*nccl->gpu_devices));
    for (uint32_t i = 0; i < n_ranks; i++) {
        if (ranks[i] >= nccl->setup.n_ranks || (gpu_of[i] >= n_gpus && gpu_of[i] != LOWER_NO_GPU))
            return false;
        if (gpu_of[i] == LOWER_NO_GPU || !nccl->devices[ranks[i]])
            continue;
        struct cuda_device **device = &nccl->gpu_devices[gpu_of[i]];
        if (*device && *device != nccl->devices[ranks[i]])
            return false; /* one number for two GPUs */
        *device = nccl->devices[ranks[i]];
    }
    return add_comm(nccl, ranks, gpu_of, n_ranks, n_gpus, &id);
}

/* The communicator of an op; NULL: *out_text says why. */
static struct comm *comm_for(struct backend *nccl, const struct backend_op *op,
                             const char **out_text)
{
    struct comm *comm;
    if (!nccl->setup.is_alone) {
        comm = find_comm(nccl, op->ranks, op->n_ranks, NULL);
        *out_text = "the coordinator has not told where the GPUs of this op's ranks are";
        return comm;
    }
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        const struct cuda_device *device = nccl->devices[op->ranks[i]];
        nccl->keys[i] = device ? device->index : LOWER_NO_GPU;
    }
    const uint32_t n_gpus = lower_number_gpus(nccl->keys, op->n_ranks, nccl->gpu_of);
    comm = find_comm(nccl, op->ranks, op->n_ranks, nccl->gpu_of);
    if (comm)
        return comm;
    for (uint32_t i = 0; i < op->n_ranks; i++)
        if (nccl->gpu_of[i] != LOWER_NO_GPU)
            nccl->gpu_devices[nccl->gpu_of[i]] = nccl->devices[op->ranks[i]];
    *out_text = "the worker has no memory for a communicator";
    return add_comm(nccl, op->ranks, nccl->gpu_of, op->n_ranks, n_gpus, NULL);
}

const struct comm *nccl_comms(const struct backend *nccl)
{
    return nccl->client.comms;
}

/* ------------------------------------------------------------------ batches */

static struct submission *take_submission(struct backend *nccl, size_t n_ops)
{
    struct submission *submission = nccl->spare;
    if (submission)
        nccl->spare = submission->next;
    else
        submission = calloc(1, sizeof *submission);
    if (submission && submission->comms_capacity < n_ops) {
        struct comm **comms = realloc(submission->comms, n_ops * sizeof(*comms));
        if (!comms) {
            submission_free(submission);
            return NULL;
        }
        submission->comms = comms;
        submission->comms_capacity = n_ops;
    }
    return submission;
}

static void refuse(struct backend_batch *batch, int status, const char *text)
{
    for (size_t i = 0; i < batch->n_ops; i++) {
        batch->ops[i]->status = status;
        batch->ops[i]->text = text;
    }
    if (batch->enqueued)
        batch->enqueued(batch->data, batch);
    batch->done(batch->data, batch);
}

static void run(struct backend *nccl, struct backend_batch *batch)
{
    struct submission *submission = take_submission(nccl, batch->n_ops);
    const char *text = "the worker has no memory for this batch";
    int status = submission ? GRADD_OK : GRADD_ERR_NO_MEMORY;
    for (size_t i = 0; status == GRADD_OK && i < batch->n_ops; i++) {
        submission->comms[i] = comm_for(nccl, batch->ops[i], &text);
        if (!submission->comms[i])
            status = GRADD_ERR_INTERNAL;
    }
    if (status == GRADD_OK && atomic_load(&nccl->client.is_aborted)) {
        status = nccl->client.abort_status;
        text = nccl->client.abort_text;
    }
    if (status != GRADD_OK) {
        if (submission) {
            submission->next = nccl->spare;
            nccl->spare = submission;
        }
        refuse(batch, status, text);
        return;
    }
    submission->client = &nccl->client;
    submission->batch = batch;
    add_running(nccl, submission);
    submitter_push(nccl->client.submitter, submission);
}

static void nccl_free(struct backend *nccl)
{
    if (!nccl)
        return;
    nccl->is_freed = true;
    submitter_close(&nccl->client);
}

const struct backend_ops backend_nccl = {
    .name = "nccl",
    .free = nccl_free,
    .run = run,
};
