/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl status: how the daemon and its GPUs are, and all that is wrong, in sentences. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "control/admin_internal.h"
#include "control/daemon.h"
#include "gradd/types.h"

enum {
    PROBLEMS_MAX = 16,
    PROBLEM_TEXT_MAX = 768,
};

/* Sentences in memory of fixed size, as protobuf-c wants them. */
struct problems {
    char texts[PROBLEMS_MAX + 1][PROBLEM_TEXT_MAX]; /* the last: how many are not told */
    char *pointers[PROBLEMS_MAX + 1];
    size_t n;
    unsigned n_left_out;
};

__attribute__((format(printf, 2, 3))) static void add_problem(struct problems *problems,
                                                              const char *format, ...)
{
    if (problems->n == PROBLEMS_MAX) {
        problems->n_left_out++;
        return;
    }
    char *text = problems->texts[problems->n];
    va_list args;
    va_start(args, format);
    vsnprintf(text, PROBLEM_TEXT_MAX, format, args);
    va_end(args);
    problems->pointers[problems->n++] = text;
}

static void end_problems(struct problems *problems)
{
    if (problems->n_left_out == 0)
        return;
    char *text = problems->texts[problems->n];
    snprintf(text, PROBLEM_TEXT_MAX, "and %u more", problems->n_left_out);
    problems->pointers[problems->n++] = text;
}

static void count_job(Pb__StatusReply *reply, struct problems *problems, const struct job *job)
{
    reply->n_jobs++;
    reply->n_stalled += job->n_stalled;
    if (job->n_stalled)
        add_problem(problems, "%s",
                    *job->stall_text ? job->stall_text : "some tensors are stalled");
    if (job->membership.state == JOB_FAILED) {
        reply->n_failed++;
        add_problem(problems, "%s", job->membership.last_error);
    }
}

static void fill_gpus(Pb__StatusReply *reply, struct gpus *gpus, Pb__GpuSummary *rows,
                      Pb__GpuSummary **pointers)
{
    for (unsigned i = 0; i < gpus->n_gpus; i++) {
        struct gpu *gpu = &gpus->gpus[i];
        const struct gpu_use use = worker_process_gpu_use(gpu->uuid);
        pb__gpu_summary__init(&rows[i]);
        rows[i].uuid = gpu->uuid;
        rows[i].name = gpu->name;
        rows[i].memory_bytes = gpu->memory_bytes;
        rows[i].compute = gpu->compute;
        rows[i].mode = gpu->mode;
        rows[i].has_mps = gpu->has_mps;
        rows[i].n_workers = use.n_workers;
        rows[i].worker_bytes = use.worker_bytes;
        rows[i].import_bytes = use.import_bytes;
        pointers[i] = &rows[i];
    }
    reply->gpus = pointers;
    reply->n_gpus = gpus->n_gpus;
    reply->driver = gpus->driver;
    reply->nccl = gpus->nccl;
    reply->gpu_kernels = gpus->kernels;
    reply->device_path = gpus->device_path;
    reply->device_text = gpus->is_done ? gpus->text : (char *)"gradd-worker --gpus still looks";
}

void admin_on_status(struct session *session)
{
    struct daemon *daemon = session->daemon;
    struct problems *problems = calloc(1, sizeof *problems);
    if (!problems) {
        admin_reply_no_memory(session);
        return;
    }
    Pb__StatusReply reply = PB__STATUS_REPLY__INIT;
    reply.version = (char *)GRADD_VERSION;
    reply.protocol_min = WIRE_PROTOCOL_MIN;
    reply.protocol_max = WIRE_PROTOCOL_MAX;
    reply.node = daemon->node;
    reply.pid = (int32_t)getpid();
    reply.uptime_s = admin_seconds_since(daemon->started_ns);
    reply.state = (char *)(daemon->state == DAEMON_RUNNING ? "running" : "draining");
    reply.n_sessions = daemon->n_sessions;
    reply.config_file =
        daemon->arguments->config_file ? (char *)daemon->arguments->config_file : (char *)"";
    reply.config_error = daemon->config_error.text;
    if (*daemon->config_error.text)
        add_problem(problems, "the configuration was not reloaded: %s", daemon->config_error.text);
    if (daemon->config.backend == BACKEND_NCCL && daemon->gpus.is_done && !daemon->gpus.device_path)
        add_problem(problems, "backend = nccl, but jobs are refused: %s", daemon->gpus.text);
    Pb__GpuSummary gpus[GPUS_MAX], *gpu_pointers[GPUS_MAX];
    fill_gpus(&reply, &daemon->gpus, gpus, gpu_pointers);
    for (const struct job *job = daemon->jobs.by_key; job; job = job->hh.next)
        if (admin_may_see(session, job))
            count_job(&reply, problems, job);
    end_problems(problems);
    reply.problems = problems->pointers;
    reply.n_problems = problems->n;
    admin_reply(session, PB__ENVELOPE__BODY_STATUS_REPLY, &reply);
    free(problems);
}
