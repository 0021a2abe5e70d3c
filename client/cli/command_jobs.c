/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl jobs: the jobs on this node that the caller may see. */
#include "command.h"

static const struct column columns[] = {
    {"name", "JOB"},
    {"uid", "UID"},
    {"user", "USER"},
    {"state", "STATE"},
    {"joined", "JOINED"},
    {"size", "RANKS"},
    {"epoch", "EPOCH"},
    {"age_s", "AGE"},
    {"stalled", "STALLED"},
    {"worker_pid", "WORKER PID"},
    {"last_error", "LAST ERROR"},
};

static int run(struct context *context)
{
    Pb__JobsRequest body = PB__JOBS_REQUEST__INIT;
    const Pb__Envelope *reply;
    int result = link_request(context->link, PB__ENVELOPE__BODY_JOBS_REQUEST, &body,
                              PB__ENVELOPE__BODY_JOBS_REPLY, &reply);
    if (result != LINK_OK)
        return result;
    const Pb__JobsReply *jobs = reply->jobs_reply;
    struct writer *w = context->writer;
    bool is_json = context->options->is_json;
    if (jobs->n_jobs == 0 && !is_json)
        writer_field(w, "", "jobs", value_text(jobs->sees_all ? "none" : "none that you may see"));
    if (jobs->jobs_left_out > 0 || is_json)
        writer_field(w, "jobs_left_out", "jobs not shown", value_count(jobs->jobs_left_out));
    writer_table_begin(w, "jobs", NULL, columns, sizeof columns / sizeof columns[0]);
    for (size_t i = 0; i < jobs->n_jobs; i++) {
        const Pb__JobSummary *j = jobs->jobs[i];
        const struct value values[] = {
            value_text(j->name),
            value_count(j->uid),
            value_text(j->user),
            value_text(j->state),
            value_count(j->n_joined),
            value_count(j->size),
            value_count(j->epoch),
            value_seconds(j->age_s),
            value_count(j->n_stalled),
            value_count((uint64_t)(j->worker_pid > 0 ? j->worker_pid : 0)),
            value_text(j->last_error),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
    return LINK_OK;
}

const struct command command_jobs = {
    .name = "jobs",
    .help = "the jobs on this node",
    .run = run,
};
