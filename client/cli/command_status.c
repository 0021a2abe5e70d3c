/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl status: is this node's daemon well, and if not, why. */
#include "command.h"

static void write_gpus(struct writer *w, const Pb__StatusReply *s)
{
    static const struct column columns[] = {
        {"uuid", "GPU"},
        {"name", "NAME"},
        {"memory_bytes", "MEMORY"},
        {"compute", "COMPUTE"},
        {"mode", "MODE"},
        {"mps", "MPS"},
        {"workers", "WORKERS"},
        {"worker_bytes", "THEIR OWN MEMORY"},
        {"import_bytes", "OF TRAINERS"},
    };
    writer_table_begin(w, "gpus", "GPUs", columns, sizeof columns / sizeof columns[0]);
    for (size_t i = 0; i < s->n_gpus; i++) {
        const Pb__GpuSummary *g = s->gpus[i];
        const struct value values[] = {
            value_text(g->uuid),       value_text(g->name),          value_bytes(g->memory_bytes),
            value_text(g->compute),    value_text(g->mode),          value_bool(g->has_mps),
            value_count(g->n_workers), value_bytes(g->worker_bytes), value_bytes(g->import_bytes),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
}

static int run(struct context *context)
{
    Pb__StatusRequest body = PB__STATUS_REQUEST__INIT;
    const Pb__Envelope *reply;
    int result = link_request(context->link, PB__ENVELOPE__BODY_STATUS_REQUEST, &body,
                              PB__ENVELOPE__BODY_STATUS_REPLY, &reply);
    if (result != LINK_OK)
        return result;
    const Pb__StatusReply *s = reply->status_reply;
    struct writer *w = context->writer;
    bool is_degraded = s->n_problems > 0;
    writer_field(w, "node", "node", value_text(s->node));
    writer_field(w, "state", "state", value_text(s->state));
    writer_field(w, "degraded", "degraded", value_bool(is_degraded));
    writer_field(w, "problems", "problems", value_texts(s->problems, s->n_problems));
    writer_field(w, "version", "version", value_text(s->version));
    writer_field(w, "protocol_min", "protocol from", value_count(s->protocol_min));
    writer_field(w, "protocol_max", "protocol to", value_count(s->protocol_max));
    writer_field(w, "pid", "pid", value_count((uint64_t)s->pid));
    writer_field(w, "uptime_s", "up for", value_seconds(s->uptime_s));
    writer_field(w, "socket", "socket", value_text(context->link->socket));
    writer_field(w, "jobs", "jobs", value_count(s->n_jobs));
    writer_field(w, "sessions", "sessions", value_count(s->n_sessions));
    writer_field(w, "stalled", "stalled tensors", value_count(s->n_stalled));
    writer_field(w, "failed", "failed jobs", value_count(s->n_failed));
    writer_field(w, "config_file", "config file", value_text(s->config_file));
    writer_field(w, "config_error", "config error", value_text(s->config_error));
    writer_field(w, "cuda_driver", "CUDA driver", value_text(s->driver));
    writer_field(w, "nccl", "NCCL", value_text(s->nccl));
    writer_field(w, "gpu_kernels", "GPU kernels", value_text(s->gpu_kernels));
    writer_field(w, "device_path", "device memory", value_bool(s->device_path));
    writer_field(w, "device_text", "through the host", value_text(s->device_text));
    write_gpus(w, s);
    return is_degraded ? EXIT_CODE_DEGRADED : LINK_OK;
}

const struct command command_status = {
    .name = "status",
    .help = "the daemon's state, and what is wrong with it",
    .run = run,
};
