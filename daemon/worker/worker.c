/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/conn.h"
#include "base/log.h"
#include "worker/coordinator.h"
#include "worker/backend/nccl/nccl.h"
#include "worker/backend/nccl/nccl_table.h"
#include "worker/buffer/cuda_import.h"
#include "worker/backend/nccl/submitter.h"
#include "worker/epoch.h"
#include "worker/reduce/reduce.h"
#include "worker/stats.h"

enum {
    DRAIN_TIMEOUT_S = 10,
    DAEMON_QUEUE_BYTES = 16 * 1024 * 1024,
    GPU_NOTICE_BYTES = 64 * 1024,
};

static const uint64_t GPU_NOTICE_NS = UINT64_C(2) * 1000000000;

struct worker {
    struct loop *loop;
    struct conn *daemon; /* NULL: gone */
    struct chores *chores;
    struct region_quota quota;
    struct cuda_import_table imports;
    /* Once a GPU is in use, the daemon hears of what is taken of it. */
    struct watch *gpu_timer;
    uint8_t *gpu_notice; /* the last one, packed */
    size_t gpu_notice_bytes;
    struct epoch_setup setup;
    struct epoch *epoch;   /* the current one, or NULL */
    struct epoch *retired; /* still running on the backend */
};

/* ------------------------------------------------------------------ to the daemon */

static void push(struct worker *worker, Pb__Envelope__BodyCase body_case, void *body)
{
    if (!worker->daemon)
        return;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.ready = body; /* the members of the union are all pointers */
    conn_push(worker->daemon, &envelope);
}

static void on_member_gone(void *data, uint64_t epoch, const struct member *member, int status,
                           const char *text)
{
    Pb__MemberGone gone = PB__MEMBER_GONE__INIT;
    gone.epoch = epoch;
    gone.rank = member->rank;
    gone.failed = status != GRADD_OK;
    gone.code = (uint32_t)-status;
    gone.text = (char *)text;
    push(data, PB__ENVELOPE__BODY_MEMBER_GONE, &gone);
}

static void on_stall(void *data, uint64_t epoch, uint32_t n_stalled, const char *text)
{
    Pb__StallNotice notice = PB__STALL_NOTICE__INIT;
    notice.epoch = epoch;
    notice.n_stalled = n_stalled;
    notice.text = (char *)text;
    push(data, PB__ENVELOPE__BODY_STALL_NOTICE, &notice);
}

static void on_failed(void *data, uint64_t epoch, int status, const char *text)
{
    Pb__EpochFailed failed = PB__EPOCH_FAILED__INIT;
    failed.epoch = epoch;
    failed.code = (uint32_t)-status;
    failed.text = (char *)text;
    failed.rank = -1;
    push(data, PB__ENVELOPE__BODY_EPOCH_FAILED, &failed);
}

static void on_links_up(void *data, uint64_t epoch)
{
    Pb__LinksUp up = PB__LINKS_UP__INIT;
    up.epoch = epoch;
    push(data, PB__ENVELOPE__BODY_LINKS_UP, &up);
}

static void on_link_lost(void *data, uint64_t epoch, uint32_t node, const char *text)
{
    Pb__LinkLost lost = PB__LINK_LOST__INIT;
    lost.epoch = epoch;
    lost.node = node;
    lost.text = (char *)text;
    push(data, PB__ENVELOPE__BODY_LINK_LOST, &lost);
}

/* ------------------------------------------------------------------ epochs */

static void settle(void *data);

static void retire_epoch(struct worker *worker)
{
    if (!worker->epoch)
        return;
    epoch_retire(worker->epoch);
    worker->epoch->next = worker->retired;
    worker->retired = worker->epoch;
    worker->epoch = NULL;
    loop_defer(worker->loop, settle, worker);
}

/* Nobody needs the epoch: all have left, or it has failed, all were told, and no daemon will begin
 * another for those who still hold it. */
static bool is_epoch_done(const struct worker *worker)
{
    const struct epoch *epoch = worker->epoch;
    return epoch && (epoch_is_over(epoch) || (!worker->daemon && epoch->failure.is_announced));
}

/* Retire an epoch that is over, free the retired ones of which nothing runs any more. */
static void settle(void *data)
{
    struct worker *worker = data;
    /* Looked at again, as another epoch may have begun since this was deferred. */
    if (is_epoch_done(worker))
        retire_epoch(worker);
    struct epoch **link = &worker->retired;
    while (*link) {
        struct epoch *epoch = *link;
        if (epoch_is_idle(epoch)) {
            *link = epoch->next;
            epoch_free(epoch);
        } else {
            link = &epoch->next;
        }
    }
    if (!worker->daemon && !worker->epoch && !worker->retired)
        loop_stop(worker->loop);
}

/* Everybody has left the epoch, or a retired one has finished its last op. */
static void on_over(void *data)
{
    struct worker *worker = data;
    loop_defer(worker->loop, settle, worker);
}

/* The daemon starts another worker for the next epoch. Nothing of a lost context can be given back,
 * and who tries may wait for ever. */
static void end_process(void *data)
{
    struct worker *worker = data;
    log_error("worker", "job %s: a GPU's context is lost: this worker ends", worker->setup.job);
    if (worker->daemon)
        conn_flush(worker->daemon);
    _exit(EXIT_FAILURE);
}

static void on_broken(void *data)
{
    struct worker *worker = data;
    loop_defer(worker->loop, end_process, worker);
}

static void on_epoch_begin(struct worker *worker, struct wire_frame *frame)
{
    const Pb__EpochBegin *begin = frame->envelope->epoch_begin;
    retire_epoch(worker);
    struct layout *layout = begin->layout ? layout_new(begin->layout) : NULL;
    worker->epoch = !begin->layout || layout ? epoch_new(&worker->setup, begin->epoch, begin->size,
                                                         begin->n_local, layout)
                                             : NULL;
    if (!worker->epoch)
        log_error("worker", "job %s: no memory for epoch %llu of %u rank%s", worker->setup.job,
                  (unsigned long long)begin->epoch, begin->size, begin->size == 1 ? "" : "s");
}

static void on_add_member(struct worker *worker, struct wire_frame *frame)
{
    const Pb__AddMember *add = frame->envelope->add_member;
    if (frame->n_fds != 1 || !worker->epoch || worker->epoch->number != add->epoch)
        return; /* closing the socket tells the trainer */
    const struct epoch_member who = {
        .rank = add->rank,
        .local_rank = add->local_rank,
        .uid = add->uid,
        .pid = add->pid,
        .source = add->source,
    };
    int fd = frame->fds[0];
    frame->fds[0] = -1;
    if (epoch_add_member(worker->epoch, &who, fd) < 0)
        log_error("worker", "job %s: rank %u could not be added", worker->setup.job, add->rank);
}

static void on_link_arrived(struct worker *worker, struct wire_frame *frame)
{
    const Pb__LinkArrived *arrived = frame->envelope->link_arrived;
    if (frame->n_fds != 1 || !worker->epoch || worker->epoch->number != arrived->epoch)
        return;
    int fd = frame->fds[0];
    frame->fds[0] = -1;
    epoch_link_arrived(worker->epoch, arrived->from_node, arrived->stream, fd);
}

static void on_epoch_abort(struct worker *worker, struct wire_frame *frame)
{
    const Pb__EpochAbort *abort = frame->envelope->epoch_abort;
    if (!worker->epoch || worker->epoch->number != abort->epoch)
        return;
    /* What the trainer sent before it died counts. */
    for (uint32_t i = 0; i < worker->epoch->n_members; i++)
        if (worker->epoch->members[i].conn)
            conn_drain(worker->epoch->members[i].conn);
    epoch_fail(worker->epoch, -(int)abort->code, abort->text, abort->rank, abort->pid);
}

/* ------------------------------------------------------------------ GPUs in use */

static void on_gpu_timer(void *data)
{
    struct worker *worker = data;
    Pb__GpuStats gpus[STATS_GPUS_MAX], *pointers[STATS_GPUS_MAX];
    uint8_t packed[GPU_NOTICE_BYTES];
    Pb__GpuNotice notice = PB__GPU_NOTICE__INIT;
    notice.n_gpus = stats_gpus(worker->setup.devices, worker->setup.node, gpus, STATS_GPUS_MAX);
    for (size_t i = 0; i < notice.n_gpus; i++)
        pointers[i] = &gpus[i];
    notice.gpus = pointers;
    size_t bytes = pb__gpu_notice__get_packed_size(&notice);
    if (bytes <= sizeof packed)
        pb__gpu_notice__pack(&notice, packed);
    if (bytes <= sizeof packed &&
        (bytes != worker->gpu_notice_bytes || memcmp(packed, worker->gpu_notice, bytes) != 0)) {
        push(worker, PB__ENVELOPE__BODY_GPU_NOTICE, &notice);
        memcpy(worker->gpu_notice, packed, bytes);
        worker->gpu_notice_bytes = bytes;
    }
    watch_arm(worker->gpu_timer, GPU_NOTICE_NS);
}

static void on_gpu_opened(void *data)
{
    struct worker *worker = data;
    watch_arm(worker->gpu_timer, 0);
}

static bool watch_gpus(struct worker *worker)
{
    worker->gpu_timer = watch_timer(worker->loop, on_gpu_timer, worker);
    worker->gpu_notice = malloc(GPU_NOTICE_BYTES);
    cuda_device_table_watch(worker->setup.devices, on_gpu_opened, worker);
    return worker->gpu_timer && worker->gpu_notice;
}

/* ------------------------------------------------------------------ setup and statistics */

static uint64_t ms_to_ns(uint32_t milliseconds)
{
    return (uint64_t)milliseconds * 1000000u;
}

/* The libraries for device memory. Without them device tensors are staged by the trainers. */
static bool open_device_path(struct worker *worker, const char **out_text)
{
    struct epoch_setup *setup = &worker->setup;
    const struct cuda_table *cuda = cuda_table_open(CUDA_OPEN_LOAD, out_text);
    setup->nccl = cuda ? nccl_table_open(out_text) : NULL;
    if (!setup->nccl)
        return false;
    setup->devices = cuda_device_table_new(cuda, worker->chores);
    if (!setup->devices) {
        *out_text = "the worker has no memory";
        return false;
    }
    setup->submitter = submitter_new(worker->loop);
    if (!setup->submitter || !watch_gpus(worker)) {
        submitter_free(setup->submitter);
        setup->submitter = NULL;
        cuda_device_table_free(setup->devices);
        setup->devices = NULL;
        *out_text = "the worker has no memory, descriptors or threads";
        return false;
    }
    worker->imports.chores = worker->chores;
    worker->imports.devices = setup->devices;
    setup->imports = &worker->imports;
    return true;
}

static void on_configure(struct worker *worker, struct wire_frame *frame)
{
    const Pb__Configure *configure = frame->envelope->configure;
    struct epoch_setup *setup = &worker->setup;
    enum log_level level;
    if (log_level_parse(configure->log_level, &level))
        log_set_level(level);
    snprintf(setup->job, sizeof setup->job, "%s", configure->job);
    snprintf(setup->node, sizeof setup->node, "%s", configure->node);
    setup->max_in_flight = configure->max_in_flight ? configure->max_in_flight : 16384;
    setup->stall_warn_ns = ms_to_ns(configure->stall_warn_ms);
    setup->op_timeout_ns = ms_to_ns(configure->op_timeout_ms);
    setup->peer_dead_ns = ms_to_ns(configure->peer_dead_ms ? configure->peer_dead_ms : 5000);
    setup->fusion_bytes = configure->fusion_bytes ? configure->fusion_bytes : UINT64_MAX;
    worker->quota.limit_bytes = configure->memory_bytes ? configure->memory_bytes : UINT64_MAX;
    const char *text = "";
    if (!setup->backend) {
        setup->backend_ops = &backend_host;
        setup->backend = backend_host.new(worker->loop, configure->threads, &text);
        if (!setup->backend) {
            log_error("worker", "job %s: %s", setup->job, text);
            conn_close(worker->daemon, text);
            return;
        }
    }
    setup->max_ctas = configure->max_ctas;
    setup->traffic_class = configure->traffic_class;
    const char *device_text = "";
    if (configure->device_path && !setup->devices && !open_device_path(worker, &device_text))
        log_warning("worker", "job %s: device memory goes through the host: %s", setup->job,
                    device_text);
    Pb__Ready ready = PB__READY__INIT;
    ready.device_path = setup->devices != NULL;
    ready.device_text = (char *)device_text;
    ready.version = (char *)GRADD_VERSION;
    ready.backend = (char *)setup->backend_ops->name;
    ready.kernels = (char *)reduce_variant();
    ready.threads = setup->backend_ops->n_threads(setup->backend);
    push(worker, PB__ENVELOPE__BODY_READY, &ready);
}

/* The GPUs are not free for another epoch, or this process is about to end. */
static bool is_draining(const struct worker *worker)
{
    for (const struct epoch *epoch = worker->retired; epoch; epoch = epoch->next)
        if (epoch_is_draining(epoch))
            return true;
    return worker->epoch && epoch_is_draining(worker->epoch);
}

static void push_stats(void *data, Pb__StatsReply *reply)
{
    reply->is_draining = is_draining(data);
    push(data, PB__ENVELOPE__BODY_STATS_REPLY, reply);
}

/* Of the epoch of now, whichever the question was about. */
static void answer_stats(void *data, uint64_t seq)
{
    struct worker *worker = data;
    stats_reply(worker->epoch, &worker->quota, seq, push_stats, worker);
}

static void on_stats_request(struct worker *worker, struct wire_frame *frame)
{
    const Pb__StatsRequest *request = frame->envelope->stats_request;
    if (request->all_nodes && worker->epoch && worker->epoch->coordinator)
        coordinator_ask_stats(worker->epoch->coordinator, request->seq, answer_stats, worker);
    else
        answer_stats(worker, request->seq);
}

/* ------------------------------------------------------------------ the channel */

static const struct {
    Pb__Envelope__BodyCase body_case;
    void (*handle)(struct worker *worker, struct wire_frame *frame);
} handlers[] = {
    {PB__ENVELOPE__BODY_CONFIGURE, on_configure},
    {PB__ENVELOPE__BODY_EPOCH_BEGIN, on_epoch_begin},
    {PB__ENVELOPE__BODY_ADD_MEMBER, on_add_member},
    {PB__ENVELOPE__BODY_LINK_ARRIVED, on_link_arrived},
    {PB__ENVELOPE__BODY_EPOCH_ABORT, on_epoch_abort},
    {PB__ENVELOPE__BODY_STATS_REQUEST, on_stats_request},
};

static void on_frame(void *owner, struct conn *conn, struct wire_frame *frame)
{
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
        if (handlers[i].body_case == frame->envelope->body_case)
            handlers[i].handle(owner, frame);
}

static void on_closed(void *owner, struct conn *conn, const char *reason)
{
    struct worker *worker = owner;
    conn_free(conn);
    worker->daemon = NULL;
    if (worker->epoch && worker->epoch->n_added < worker->epoch->n_local)
        retire_epoch(worker); /* it will never be complete */
    else if (worker->epoch)
        epoch_on_daemon_gone(worker->epoch);
    settle(worker);
}

static const struct conn_ops daemon_ops = {.on_frame = on_frame, .on_closed = on_closed};

struct worker *worker_new(struct loop *loop, int take_fd)
{
    struct worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return NULL;
    worker->loop = loop;
    worker->chores = chores_new(loop);
    worker->daemon =
        worker->chores ? conn_new(loop, take_fd, DAEMON_QUEUE_BYTES, &daemon_ops, worker) : NULL;
    if (!worker->daemon) {
        worker_free(worker);
        return NULL;
    }
    worker->setup = (struct epoch_setup){
        .loop = loop,
        .chores = worker->chores,
        .quota = &worker->quota,
        .on_member_gone = on_member_gone,
        .on_stall = on_stall,
        .on_failed = on_failed,
        .on_links_up = on_links_up,
        .on_link_lost = on_link_lost,
        .on_over = on_over,
        .on_broken = on_broken,
        .data = worker,
    };
    return worker;
}

static void abort_gpus(struct epoch *epoch)
{
    if (epoch && epoch->device && !epoch_is_idle(epoch))
        nccl_abort(epoch->device, GRADD_ERR_SHUTDOWN, "the worker ends");
}

/* Batches on GPUs belong to their epochs: they end first. */
static void end_gpus(struct worker *worker)
{
    if (!worker->setup.submitter)
        return;
    abort_gpus(worker->epoch);
    for (struct epoch *epoch = worker->retired; epoch; epoch = epoch->next)
        abort_gpus(epoch);
    if (submitter_drain(worker->setup.submitter, DRAIN_TIMEOUT_S))
        return;
    log_error("worker", "job %s: the GPUs are still busy after %d s: this worker ends regardless",
              worker->setup.job, DRAIN_TIMEOUT_S);
    _exit(EXIT_FAILURE);
}

void worker_free(struct worker *worker)
{
    if (!worker)
        return;
    end_gpus(worker);
    conn_free(worker->daemon);
    worker->daemon = NULL;
    if (worker->setup.backend)
        worker->setup.backend_ops->free(worker->setup.backend);
    epoch_free(worker->epoch);
    while (worker->retired) {
        struct epoch *epoch = worker->retired;
        worker->retired = epoch->next;
        epoch_free(epoch);
    }
    submitter_free(worker->setup.submitter);
    chores_free(worker->chores);
    cuda_device_table_free(worker->setup.devices);
    watch_free(worker->gpu_timer);
    free(worker->gpu_notice);
    free(worker);
}
