/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl job NAME: every rank of a job, how late it usually is, and what waits for whom. */
#include "command.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <gradd/types.h>

enum {
    SILENT_SHOWN_MAX = 256,
    STANDS_OUT = 2,                /* times the median: a late rank */
    LINK_STANDS_OUT = 3,           /* times slower than the fastest */
    LATE_MIN_US = 1000,            /* less is no news */
    RATED_BYTES = 8 * 1024 * 1024, /* fewer fit into a socket's buffer, at the speed of memory */
};

static const char *kind_name(uint32_t kind)
{
    static const char *const names[] = {
        [GRADD_ALLREDUCE] = "all-reduce",   [GRADD_BROADCAST] = "broadcast",
        [GRADD_ALLGATHER] = "all-gather",   [GRADD_REDUCE_SCATTER] = "reduce-scatter",
        [GRADD_ALLTOALL] = "all-to-all",    [GRADD_BARRIER] = "barrier",
        [GRADD_SET_ADD] = "add set",        [GRADD_SET_REMOVE] = "remove set",
        [GRADD_JOIN] = "join (out of data)"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : "unknown";
}

/* ------------------------------------------------------------------ which job */

static void say_no_such_job(struct context *context, const Pb__JobsReply *jobs)
{
    const char *name = context->options->name;
    FILE *stream = fmemopen(context->link->error, sizeof context->link->error, "w");
    if (!stream)
        return;
    fprintf(stream, "no job \"%s\"", name);
    if (context->options->has_uid)
        fprintf(stream, " of uid %u", context->options->uid);
    if (!jobs->sees_all)
        fprintf(stream, " that uid %d may see", (int)geteuid());
    fprintf(stream, "; there %s",
            jobs->n_jobs == 0   ? "are none"
            : jobs->n_jobs == 1 ? "is"
                                : "are");
    for (size_t i = 0; i < jobs->n_jobs; i++)
        fprintf(stream, "%s \"%s\" (uid %u)", i ? "," : "", jobs->jobs[i]->name,
                jobs->jobs[i]->uid);
    if (jobs->jobs_left_out)
        fprintf(stream, ", and %u more", jobs->jobs_left_out);
    fclose(stream);
}

/*
 * Whose job of that name is meant: the caller's own, else the only one there is. The answer comes
 * from the list of jobs, which also tells a person what there is instead.
 */
static int find_owner(struct context *context, uint32_t *out_uid)
{
    Pb__JobsRequest body = PB__JOBS_REQUEST__INIT;
    const Pb__Envelope *reply;
    int result = link_request(context->link, PB__ENVELOPE__BODY_JOBS_REQUEST, &body,
                              PB__ENVELOPE__BODY_JOBS_REPLY, &reply);
    if (result != LINK_OK)
        return result;
    const struct options *options = context->options;
    uint32_t wanted = options->has_uid ? options->uid : geteuid();
    size_t n_found = 0;
    bool has_wanted = false;
    for (size_t i = 0; i < reply->jobs_reply->n_jobs; i++) {
        const Pb__JobSummary *job = reply->jobs_reply->jobs[i];
        if (strcmp(job->name, options->name) != 0 || (options->has_uid && job->uid != wanted))
            continue;
        n_found++;
        has_wanted |= job->uid == wanted;
        *out_uid = job->uid;
    }
    if (has_wanted)
        *out_uid = wanted;
    if (n_found == 0 && reply->jobs_reply->jobs_left_out > 0) {
        *out_uid = wanted; /* it may be among those */
    } else if (n_found == 0) {
        say_no_such_job(context, reply->jobs_reply);
        return LINK_FAILED;
    }
    if (n_found > 1 && !has_wanted) {
        snprintf(context->link->error, sizeof context->link->error,
                 "%zu users have a job \"%s\": say which with --uid (gradctl jobs lists them)",
                 n_found, options->name);
        return LINK_FAILED;
    }
    return LINK_OK;
}

/* ------------------------------------------------------------------ what is said about it */

static const char *node_name(const Pb__JobReply *reply, uint32_t node)
{
    return node < reply->n_nodes ? reply->nodes[node] : "";
}

/* Nodes whose worker did not answer: what is shown of their ranks and links is old, or missing. */
static void write_silent(struct writer *w, const Pb__JobReply *reply, const Pb__JobStats *stats)
{
    char *names[SILENT_SHOWN_MAX];
    size_t n = 0;
    for (size_t i = 0; i < stats->n_silent_nodes && n < SILENT_SHOWN_MAX; i++)
        names[n++] = (char *)node_name(reply, stats->silent_nodes[i]);
    writer_field(w, "silent_nodes", "nodes that do not answer", value_texts(names, n));
}

static int compare_doubles(const void *a, const void *b)
{
    const double *left = a, *right = b;
    return (*left > *right) - (*left < *right);
}

/* Of n > 0 values, which are put into order; the lower of two middles. */
static double median(double *values, size_t n)
{
    qsort(values, n, sizeof *values, compare_doubles);
    return values[(n - 1) / 2];
}

/* A job may have more to tell than the daemon's answer can carry. */
static void write_left_out(const struct context *context, const Pb__JobStats *stats)
{
    const struct {
        const char *key, *label;
        uint32_t n;
    } rows[] = {
        {"ranks_left_out", "ranks not shown", stats->ranks_left_out},
        {"links_left_out", "links not shown", stats->links_left_out},
        {"gpus_left_out", "GPUs not shown", stats->gpus_left_out},
        {"communicators_left_out", "comms not shown", stats->comms_left_out},
        {"stalls_left_out", "stalls not shown", stats->stalls_left_out},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].n > 0 || context->options->is_json)
            writer_field(context->writer, rows[i].key, rows[i].label, value_count(rows[i].n));
}

/* The rank that the others wait for: whose mean lateness stands out. */
static void write_latest(struct writer *w, const Pb__JobStats *stats)
{
    const Pb__RankStats *latest = NULL;
    double *late = calloc(stats->n_ranks + 1, sizeof *late);
    char text[400] = "";
    for (size_t i = 0; late && i < stats->n_ranks; i++) {
        late[i] = stats->ranks[i]->late_mean_us;
        if (!latest || late[i] > latest->late_mean_us)
            latest = stats->ranks[i];
    }
    if (latest && latest->late_mean_us > LATE_MIN_US &&
        latest->late_mean_us > STANDS_OUT * median(late, stats->n_ranks))
        snprintf(text, sizeof text, "rank %u (node %.255s): mean %.3g ms after the first",
                 latest->rank, latest->node, latest->late_mean_us / 1e3);
    free(late);
    writer_field(w, "latest_rank", "latest rank", value_text(text));
}

static bool is_rated(const Pb__LinkStats *link)
{
    return link->sent_bytes >= RATED_BYTES && link->send_rate > 0;
}

static bool is_slow(const Pb__LinkStats *link, double fastest)
{
    return is_rated(link) && LINK_STANDS_OUT * link->send_rate < fastest;
}

/* A node that cannot send does not receive either: the link to it is slow through no fault of its
 * own. */
static bool is_held_up(const Pb__JobStats *stats, const Pb__LinkStats *link, double fastest)
{
    for (size_t i = 0; i < stats->n_links; i++)
        if (stats->links[i]->from_node == link->to_node && is_slow(stats->links[i], fastest))
            return true;
    return false;
}

/* The link that slows the ring down, among those that have carried much. */
static void write_slowest(struct writer *w, const Pb__JobReply *reply, const Pb__JobStats *stats)
{
    const Pb__LinkStats *slowest = NULL;
    char text[700] = "";
    double fastest = 0;
    for (size_t i = 0; i < stats->n_links; i++)
        if (is_rated(stats->links[i]) && stats->links[i]->send_rate > fastest)
            fastest = stats->links[i]->send_rate;
    for (size_t i = 0; i < stats->n_links; i++) {
        const Pb__LinkStats *link = stats->links[i];
        if (is_slow(link, fastest) && !is_held_up(stats, link, fastest) &&
            (!slowest || link->send_rate < slowest->send_rate))
            slowest = link;
    }
    if (slowest)
        snprintf(text, sizeof text, "%.255s -> %.255s: %.3g MB/s, the fastest %.3g MB/s",
                 node_name(reply, slowest->from_node), node_name(reply, slowest->to_node),
                 slowest->send_rate / 1e6, fastest / 1e6);
    writer_field(w, "slowest_link", "slowest link", value_text(text));
}

static void write_summary(const struct context *context, const Pb__JobReply *reply)
{
    static const Pb__JobStats no_stats = PB__JOB_STATS__INIT;
    struct writer *w = context->writer;
    const Pb__JobSummary *s = reply->summary;
    const Pb__JobStats *stats = reply->stats ? reply->stats : &no_stats;
    writer_field(w, "name", "job", value_text(s->name));
    writer_field(w, "uid", "uid", value_count(s->uid));
    writer_field(w, "user", "user", value_text(s->user));
    writer_field(w, "state", "state", value_text(s->state));
    writer_field(w, "last_error", "last error", value_text(s->last_error));
    writer_field(w, "size", "ranks", value_count(s->size));
    writer_field(w, "joined", "joined", value_count(s->n_joined));
    writer_field(w, "missing", "missing ranks", value_ranks(reply->missing, reply->n_missing));
    writer_field(w, "epoch", "epoch", value_count(s->epoch));
    writer_field(w, "age_s", "age", value_seconds(s->age_s));
    writer_field(w, "nodes", "nodes", value_texts(reply->nodes, reply->n_nodes));
    writer_field(w, "worker_pid", "worker pid",
                 value_count((uint64_t)(s->worker_pid > 0 ? s->worker_pid : 0)));
    writer_field(w, "backend", "backend", value_text(reply->backend));
    writer_field(w, "kernels", "kernels", value_text(reply->kernels));
    writer_field(w, "threads", "threads", value_count(reply->threads));
    writer_field(w, "ops", "ops done", value_count(stats->ops));
    writer_field(w, "device_ops", "ops on GPUs", value_count(stats->device_ops));
    writer_field(w, "staged_ops", "staged GPU ops", value_count(stats->staged_ops));
    writer_field(w, "batches", "batches", value_count(stats->batches));
    writer_field(w, "bytes", "bytes", value_bytes(stats->bytes));
    writer_field(w, "memory_bytes", "shared memory", value_bytes(stats->memory_bytes));
    writer_field(w, "wait_us", "mean wait", value_us(stats->wait_us));
    writer_field(w, "run_us", "mean run", value_us(stats->run_us));
    writer_field(w, "stats_stale", "figures stale", value_bool(reply->stats_stale));
    write_silent(w, reply, stats);
    write_left_out(context, stats);
    write_latest(w, stats);
    write_slowest(w, reply, stats);
}

static void write_ranks(struct writer *w, const Pb__JobStats *stats)
{
    static const struct column columns[] = {
        {"rank", "RANK"},
        {"local_rank", "LOCAL"},
        {"node", "NODE"},
        {"pid", "PID"},
        {"uid", "UID"},
        {"state", "STATE"},
        {"ops_done", "OPS"},
        {"ops_failed", "FAILED"},
        {"bytes", "BYTES"},
        {"in_flight", "IN FLIGHT"},
        {"late_mean_us", "LATE (MEAN)"},
        {"late_max_us", "LATE (MAX)"},
        {"memory_bytes", "MEMORY"},
        {"source", "IDENTITY FROM"},
        {"last_tensor", "LAST TENSOR"},
    };
    writer_table_begin(w, "ranks", "ranks", columns, sizeof columns / sizeof columns[0]);
    for (size_t i = 0; stats && i < stats->n_ranks; i++) {
        const Pb__RankStats *r = stats->ranks[i];
        const struct value values[] = {
            value_count(r->rank),         value_count(r->local_rank),
            value_text(r->node),          value_count((uint64_t)(r->pid > 0 ? r->pid : 0)),
            value_count(r->uid),          value_text(r->state),
            value_count(r->ops_done),     value_count(r->ops_failed),
            value_bytes(r->bytes),        value_count(r->in_flight),
            value_us(r->late_mean_us),    value_us(r->late_max_us),
            value_bytes(r->memory_bytes), value_text(r->source),
            value_text(r->last_tensor),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
}

static void write_links(struct writer *w, const Pb__JobReply *reply)
{
    static const struct column columns[] = {
        {"from_node", "LINK FROM"},
        {"to_node", "TO"},
        {"streams", "STREAMS"},
        {"sent_bytes", "SENT"},
        {"received_bytes", "RECEIVED"},
        {"busy_s", "BUSY"},
        {"send_bytes_per_s", "SENT PER BUSY SECOND"},
    };
    const Pb__JobStats *stats = reply->stats;
    writer_table_begin(w, "links", "links between nodes", columns,
                       sizeof columns / sizeof columns[0]);
    for (size_t i = 0; stats && i < stats->n_links; i++) {
        const Pb__LinkStats *l = stats->links[i];
        const struct value values[] = {
            value_text(node_name(reply, l->from_node)),
            value_text(node_name(reply, l->to_node)),
            value_count(l->streams),
            value_bytes(l->sent_bytes),
            value_bytes(l->received_bytes),
            value_seconds(l->busy_s),
            value_bytes(l->send_rate > 0 ? (uint64_t)l->send_rate : 0),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
}

static void write_gpus(struct writer *w, const Pb__JobStats *stats)
{
    static const struct column columns[] = {
        {"node", "NODE"},
        {"uuid", "GPU"},
        {"name", "NAME"},
        {"context_bytes", "CONTEXT"},
        {"scratch_bytes", "SCRATCH"},
        {"imports", "ALLOCATIONS"},
        {"import_bytes", "OF TRAINERS"},
        {"event_queues", "STREAMS BY EVENT"},
        {"flag_queues", "BY FLAG"},
    };
    writer_table_begin(w, "gpus", "GPUs", columns, sizeof columns / sizeof columns[0]);
    for (size_t i = 0; stats && i < stats->n_gpus; i++) {
        const Pb__GpuStats *g = stats->gpus[i];
        const struct value values[] = {
            value_text(g->node),           value_text(g->uuid),
            value_text(g->name),           value_bytes(g->context_bytes),
            value_bytes(g->scratch_bytes), value_count(g->imports),
            value_bytes(g->import_bytes),  value_count(g->event_queues),
            value_count(g->flag_queues),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
}

static void write_comms(struct writer *w, const Pb__JobStats *stats)
{
    static const struct column columns[] = {
        {"ranks", "COMMUNICATOR OF RANKS"},
        {"gpus", "GPUS"},
        {"state", "STATE"},
        {"ops", "OPS"},
    };
    writer_table_begin(w, "communicators", "communicators", columns,
                       sizeof columns / sizeof columns[0]);
    for (size_t i = 0; stats && i < stats->n_comms; i++) {
        const Pb__CommStats *c = stats->comms[i];
        const struct value values[] = {
            value_ranks(c->ranks, c->n_ranks),
            value_count(c->size),
            value_text(c->state),
            value_count(c->ops),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
}

static void write_stalls(struct writer *w, const Pb__JobStats *stats)
{
    static const struct column columns[] = {
        {"tensor", "STALLED TENSOR"},
        {"kind", "KIND"},
        {"waited_s", "FOR"},
        {"since", "SINCE"},
        {"missing", "WAITS FOR RANKS"},
        {"present", "RANKS PRESENT"},
    };
    double now = (double)time(NULL);
    writer_table_begin(w, "stalls", "stalls", columns, sizeof columns / sizeof columns[0]);
    for (size_t i = 0; stats && i < stats->n_stalls; i++) {
        const Pb__Stall *s = stats->stalls[i];
        double waited_s = (double)s->waited_ms / 1e3;
        const struct value values[] = {
            value_text(s->name),
            value_text(kind_name(s->kind)),
            value_seconds(waited_s),
            value_time(now - waited_s),
            value_ranks(s->missing, s->n_missing),
            value_ranks(s->present, s->n_present),
        };
        writer_row(w, values);
    }
    writer_table_end(w);
}

static int run(struct context *context)
{
    uint32_t uid = 0;
    int result = find_owner(context, &uid);
    if (result != LINK_OK)
        return result;
    Pb__JobRequest body = PB__JOB_REQUEST__INIT;
    body.name = (char *)context->options->name;
    body.has_uid = true;
    body.uid = uid;
    const Pb__Envelope *reply;
    result = link_request(context->link, PB__ENVELOPE__BODY_JOB_REQUEST, &body,
                          PB__ENVELOPE__BODY_JOB_REPLY, &reply);
    if (result != LINK_OK)
        return result;
    const Pb__JobReply *job = reply->job_reply;
    if (!job->summary) {
        snprintf(context->link->error, sizeof context->link->error,
                 "the daemon at %s (%s) described no job", context->link->socket,
                 context->link->version);
        return LINK_FAILED;
    }
    write_summary(context, job);
    write_ranks(context->writer, job->stats);
    write_links(context->writer, job);
    write_gpus(context->writer, job->stats);
    write_comms(context->writer, job->stats);
    write_stalls(context->writer, job->stats);
    bool is_degraded = strcmp(job->summary->state, "failed") == 0 || job->summary->n_stalled > 0 ||
                       (job->stats && job->stats->n_stalls > 0);
    return is_degraded ? EXIT_CODE_DEGRADED : LINK_OK;
}

const struct command command_job = {
    .name = "job",
    .argument = "NAME",
    .help = "one job: its ranks, how late each arrives, what is stalled",
    .takes_uid = true,
    .run = run,
};
