/* SPDX-License-Identifier: Apache-2.0 */
#include "control/worker_process.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/conn.h"
#include "base/log.h"
#include "control/worker_spawn.h"

enum {
    CHANNEL_QUEUE_BYTES = 8 << 20,
};

static const uint64_t START_LIMIT_NS = UINT64_C(20) * 1000000000;
/* From the end of its channel until it is killed. */
static const uint64_t END_LIMIT_NS = UINT64_C(1) * 1000000000;
/* A worker whose channel broke is dead or deaf; its job shall not wait for it. */
static const uint64_t BROKEN_LIMIT_NS = UINT64_C(200) * 1000000;

enum worker_state {
    WORKER_STARTING, /* configured, has not said Ready */
    WORKER_READY,
    WORKER_BROKEN,   /* its channel has ended; the owner waits for on_ended() */
    WORKER_ABANDONED /* has no owner any more; only to be reaped */
};

struct worker_process {
    LIST_ENTRY(worker_process) link;
    enum worker_state state;
    pid_t pid;
    struct conn *conn; /* NULL once it has ended */
    struct watch *timer;
    const struct worker_process_ops *ops;
    void *owner;
    char job[256];
    char backend[32], kernels[32];
    unsigned threads;
    struct {
        char uuid[48];
        uint64_t worker_bytes, import_bytes;
    } gpus[GPUS_MAX]; /* that it uses */
    unsigned n_gpus;
    bool is_configured, was_ready;
    bool takes_devices;
    char device_text[400]; /* why not */
    char trouble[128];     /* why the channel ended, when that was not the process ending */
};

/* All that have not been reaped. */
static LIST_HEAD(, worker_process) workers = LIST_HEAD_INITIALIZER(workers);

/* ------------------------------------------------------------------ set-up */

static bool is_program(char *path, size_t size, const char *format, const char *part)
{
    int n = snprintf(path, size, format, part);
    return n > 0 && (size_t)n < size && access(path, X_OK) == 0;
}

/* GRADD_WORKER, else beside this program in a build tree, else where it is installed. */
static int find_program(char *path, size_t size)
{
    const char *given = getenv("GRADD_WORKER");
    if (given && *given)
        return is_program(path, size, "%s", given) ? 0 : -ENOENT;
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    char *slash = NULL;
    if (n > 0) {
        self[n] = '\0';
        slash = strrchr(self, '/');
    }
    if (slash) {
        *slash = '\0';
        if (is_program(path, size, "%s/../worker/gradd-worker", self))
            return 0;
    }
    return is_program(path, size, "%s", GRADD_LIBEXEC_DIR "/gradd-worker") ? 0 : -ENOENT;
}

int worker_setup_init(struct worker_setup *setup, struct loop *loop, const struct config *config,
                      const char *node)
{
    setup->loop = loop;
    setup->config = config;
    setup->node = node;
    setup->may_change_user = worker_spawn_may_change_user();
    return find_program(setup->program, sizeof setup->program);
}

static void on_frame(void *data, struct conn *conn, struct wire_frame *frame);
static void on_closed(void *data, struct conn *conn, const char *reason);
static void on_timer(void *data);

static const struct conn_ops channel_ops = {.on_frame = on_frame, .on_closed = on_closed};

static struct log_fields fields_of(const struct worker_process *worker)
{
    return (struct log_fields){.job = worker->job, .pid = (int)worker->pid};
}

/* ------------------------------------------------------------------ start */

static void send_configure(struct worker_process *worker, const struct worker_setup *setup)
{
    const struct config *config = setup->config;
    Pb__Configure configure = PB__CONFIGURE__INIT;
    configure.job = worker->job;
    configure.node = (char *)setup->node;
    configure.threads = (uint32_t)config->worker_threads;
    configure.stall_warn_ms = (uint32_t)config->stall_warn_ms;
    configure.op_timeout_ms = (uint32_t)config->op_timeout_ms;
    configure.memory_bytes = config->job_memory_bytes;
    configure.fusion_bytes = config->fusion_bytes;
    configure.max_in_flight = (uint32_t)config->max_in_flight;
    configure.log_level = (char *)log_level_name((enum log_level)config->log_level);
    configure.peer_dead_ms = (uint32_t)config->peer_dead_ms;
    configure.device_path = setup->gpus->device_path;
    configure.max_ctas = config->max_ctas == CONFIG_AUTO ? 0 : (uint32_t)config->max_ctas;
    configure.traffic_class =
        config->traffic_class == CONFIG_AUTO ? -1 : (int32_t)config->traffic_class;
    snprintf(worker->device_text, sizeof worker->device_text, "%s", setup->gpus->text);
    worker->is_configured = true;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_CONFIGURE;
    envelope.configure = &configure;
    worker_process_send(worker, &envelope, -1);
}

/* Start the program with `channel` as its end. 0, or -errno. */
static int launch(struct worker_process *worker, const struct worker_setup *setup,
                  const struct peer *owner_peer, int channel)
{
    struct worker_spawn spawn = {
        .program = setup->program,
        .channel = channel,
        .changes_user = setup->may_change_user,
        .uid = owner_peer->uid,
        .gid = owner_peer->gid,
        .groups = owner_peer->groups,
        .n_groups = owner_peer->n_groups,
    };
    pid_t pid = worker_spawn(&spawn);
    if (pid < 0)
        return (int)pid;
    worker->pid = pid;
    LIST_INSERT_HEAD(&workers, worker, link);
    return 0;
}

static void worker_free(struct worker_process *worker)
{
    conn_free(worker->conn);
    watch_free(worker->timer);
    free(worker);
}

struct worker_process *worker_process_start(const struct worker_setup *setup, const char *job,
                                            const struct peer *owner_peer,
                                            const struct worker_process_ops *ops, void *owner,
                                            char *out_error, size_t error_size)
{
    if (!setup->may_change_user && owner_peer->uid != geteuid()) {
        snprintf(out_error, error_size,
                 "this daemon runs as uid %u without CAP_SETUID and can not start a worker for "
                 "uid %u",
                 (unsigned)geteuid(), (unsigned)owner_peer->uid);
        return NULL;
    }
    int ends[2] = {-1, -1};
    struct worker_process *worker = calloc(1, sizeof *worker);
    int rc = worker ? 0 : -ENOMEM;
    if (rc == 0 && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        rc = -errno;
    if (rc == 0) {
        snprintf(worker->job, sizeof worker->job, "%s", job);
        worker->ops = ops;
        worker->owner = owner;
        worker->timer = watch_timer(setup->loop, on_timer, worker);
        worker->conn = conn_new(setup->loop, ends[0], CHANNEL_QUEUE_BYTES, &channel_ops, worker);
        rc = worker->timer && worker->conn ? launch(worker, setup, owner_peer, ends[1]) : -ENOMEM;
    }
    if (ends[1] >= 0)
        close(ends[1]);
    if (rc < 0) {
        snprintf(out_error, error_size, "its worker can not be started: %s", strerror(-rc));
        if (worker)
            worker_free(worker);
        return NULL;
    }
    if (setup->gpus->is_done)
        send_configure(worker, setup);
    watch_arm(worker->timer, START_LIMIT_NS);
    struct log_fields fields = fields_of(worker);
    log_line(LOG_LEVEL_DEBUG, "worker", &fields, "started for uid %u", (unsigned)owner_peer->uid);
    return worker;
}

void worker_process_configure_all(const struct worker_setup *setup)
{
    struct worker_process *worker;
    LIST_FOREACH(worker, &workers, link)
    {
        if (worker->state == WORKER_STARTING && !worker->is_configured)
            send_configure(worker, setup);
    }
}

/* ------------------------------------------------------------------ life */

bool worker_process_is_ready(const struct worker_process *worker)
{
    return worker->state == WORKER_READY;
}

bool worker_process_was_ready(const struct worker_process *worker)
{
    return worker->was_ready;
}

pid_t worker_process_pid(const struct worker_process *worker)
{
    return worker->pid;
}

const char *worker_process_backend(const struct worker_process *worker)
{
    return worker->backend;
}

const char *worker_process_kernels(const struct worker_process *worker)
{
    return worker->kernels;
}

unsigned worker_process_threads(const struct worker_process *worker)
{
    return worker->threads;
}

bool worker_process_takes_devices(const struct worker_process *worker, const char **out_text)
{
    *out_text = worker ? worker->device_text : "the job has no worker";
    return worker && worker->takes_devices;
}

int worker_process_send(struct worker_process *worker, const Pb__Envelope *envelope, int fd)
{
    if (!worker->conn)
        return -EPIPE;
    int rc = fd >= 0 ? conn_push_fd(worker->conn, envelope, fd) : conn_push(worker->conn, envelope);
    if (rc == 0)
        conn_flush(worker->conn);
    return rc;
}

void worker_process_drain(struct worker_process *worker)
{
    if (worker->conn)
        conn_drain(worker->conn);
}

static void take_gpu_notice(struct worker_process *worker, const Pb__GpuNotice *notice)
{
    worker->n_gpus = 0;
    for (size_t i = 0; i < notice->n_gpus && i < GPUS_MAX; i++) {
        const Pb__GpuStats *gpu = notice->gpus[i];
        unsigned to = worker->n_gpus++;
        snprintf(worker->gpus[to].uuid, sizeof worker->gpus[to].uuid, "%s", gpu->uuid);
        worker->gpus[to].worker_bytes = gpu->context_bytes + gpu->scratch_bytes;
        worker->gpus[to].import_bytes = gpu->import_bytes;
    }
}

struct gpu_use worker_process_gpu_use(const char *uuid)
{
    struct gpu_use use = {0};
    const struct worker_process *worker;
    LIST_FOREACH(worker, &workers, link)
    {
        for (unsigned i = 0; i < worker->n_gpus; i++) {
            if (strcmp(worker->gpus[i].uuid, uuid) != 0)
                continue;
            use.n_workers++;
            use.worker_bytes += worker->gpus[i].worker_bytes;
            use.import_bytes += worker->gpus[i].import_bytes;
        }
    }
    return use;
}

static void on_frame(void *data, struct conn *conn, struct wire_frame *frame)
{
    struct worker_process *worker = data;
    const Pb__Envelope *envelope = frame->envelope;
    if (envelope->body_case == PB__ENVELOPE__BODY_GPU_NOTICE) {
        take_gpu_notice(worker, envelope->gpu_notice);
        return;
    }
    if (envelope->body_case != PB__ENVELOPE__BODY_READY) {
        if (worker->state == WORKER_READY)
            worker->ops->on_message(worker->owner, envelope);
        return;
    }
    if (worker->state != WORKER_STARTING)
        return;
    if (strcmp(envelope->ready->version, GRADD_VERSION) != 0) {
        char text[128];
        snprintf(text, sizeof text, "is version %.32s, the daemon is %s: install both together",
                 envelope->ready->version, GRADD_VERSION);
        conn_close(conn, text);
        return;
    }
    worker->state = WORKER_READY;
    worker->was_ready = true;
    watch_disarm(worker->timer);
    snprintf(worker->backend, sizeof worker->backend, "%s", envelope->ready->backend);
    snprintf(worker->kernels, sizeof worker->kernels, "%s", envelope->ready->kernels);
    worker->threads = envelope->ready->threads;
    worker->takes_devices = envelope->ready->device_path;
    if (*envelope->ready->device_text)
        snprintf(worker->device_text, sizeof worker->device_text, "%s",
                 envelope->ready->device_text);
    worker->ops->on_ready(worker->owner);
}

static void on_closed(void *data, struct conn *conn, const char *reason)
{
    struct worker_process *worker = data;
    snprintf(worker->trouble, sizeof worker->trouble, "%s",
             *reason ? reason : "closed its channel to the daemon");
    conn_free(conn);
    worker->conn = NULL;
    if (worker->state == WORKER_ABANDONED)
        return;
    worker->state = WORKER_BROKEN;
    /* Usually it has died and SIGCHLD is under way with a better reason. */
    watch_arm(worker->timer, BROKEN_LIMIT_NS);
}

void worker_process_kill(struct worker_process *worker)
{
    /* Its group first: it made one of its own before anything else could go wrong. */
    if (kill(-worker->pid, SIGKILL) < 0)
        kill(worker->pid, SIGKILL);
}

/* Tell the owner, once. The object goes on until it is reaped. */
static void report_end(struct worker_process *worker, const char *how)
{
    if (worker->state == WORKER_ABANDONED)
        return;
    worker->state = WORKER_ABANDONED;
    worker->ops->on_ended(worker->owner, how);
}

static void on_timer(void *data)
{
    struct worker_process *worker = data;
    struct log_fields fields = fields_of(worker);
    worker_process_kill(worker);
    switch (worker->state) {
    case WORKER_STARTING:
        report_end(worker, "did not start in 20 s and was killed");
        break;
    case WORKER_BROKEN:
        report_end(worker, worker->trouble);
        break;
    case WORKER_ABANDONED:
        log_line(LOG_LEVEL_INFO, "worker", &fields, "did not end when asked and was killed");
        break;
    case WORKER_READY:
        break;
    }
}

void worker_process_end(struct worker_process *worker)
{
    if (!worker || worker->state == WORKER_ABANDONED)
        return;
    worker->state = WORKER_ABANDONED;
    /* Not freed: the caller may be inside one of its frames. */
    if (worker->conn)
        conn_close(worker->conn, "");
    watch_arm(worker->timer, END_LIMIT_NS);
}

/* ------------------------------------------------------------------ all of them */

static void on_reaped(struct worker_process *worker, int status)
{
    LIST_REMOVE(worker, link);
    struct log_fields fields = fields_of(worker);
    char how[160];
    describe_wait_status(status, how, sizeof how);
    const char *step = WIFEXITED(status) ? worker_spawn_failure(WEXITSTATUS(status)) : NULL;
    if (step)
        snprintf(how, sizeof how, "%s", step);
    log_line(worker->state == WORKER_ABANDONED ? LOG_LEVEL_DEBUG : LOG_LEVEL_WARNING, "worker",
             &fields, "%s", how);
    /* What it said last comes before its end. */
    if (worker->state == WORKER_READY && worker->conn)
        conn_drain(worker->conn);
    report_end(worker, how);
    worker_free(worker);
}

void worker_process_reap(void)
{
    struct worker_process *worker, *next;
    for (worker = LIST_FIRST(&workers); worker; worker = next) {
        next = LIST_NEXT(worker, link);
        int status;
        if (waitpid(worker->pid, &status, WNOHANG) == worker->pid)
            on_reaped(worker, status);
    }
}

unsigned worker_process_count(void)
{
    unsigned n = 0;
    const struct worker_process *worker;
    LIST_FOREACH(worker, &workers, link)
    n++;
    return n;
}

void worker_process_kill_all(void)
{
    struct worker_process *worker;
    LIST_FOREACH(worker, &workers, link)
    worker_process_kill(worker);
}
