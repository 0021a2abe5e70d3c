/* SPDX-License-Identifier: Apache-2.0 */
/* The figures of the largest job reach the other side of a frame, and what is cut is counted. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/stats_fit.h"
#include "run_suite.h"

enum {
    RANKS = 4096,
    NODES = 256,
    LINKS = NODES * (NODES - 1),
    STALLS = 64 * NODES,
    GPUS = 8 * NODES,
    COMMS = 64,
    NAME_BYTES = 255,
};

/* Of a job with all that there may be; its names are the longest. */
static struct {
    Pb__JobStats stats;
    Pb__RankStats ranks[RANKS], *rank_pointers[RANKS];
    Pb__LinkStats links[LINKS], *link_pointers[LINKS];
    Pb__Stall stalls[STALLS], *stall_pointers[STALLS];
    Pb__GpuStats gpus[GPUS], *gpu_pointers[GPUS];
    Pb__CommStats comms[COMMS], *comm_pointers[COMMS];
    uint32_t all_ranks[RANKS], nodes[NODES];
    char name[NAME_BYTES + 1];
} job;

static void draw_ranks(uint32_t n, char *name)
{
    for (uint32_t i = 0; i < n; i++) {
        job.ranks[i] = (Pb__RankStats)PB__RANK_STATS__INIT;
        job.ranks[i].rank = i;
        job.ranks[i].pid = 4000000;
        job.ranks[i].node = job.ranks[i].last_tensor = name;
        job.ranks[i].state = (char *)"active";
        job.ranks[i].late_mean_us = i + 0.5;
        job.ranks[i].bytes = job.ranks[i].memory_bytes = UINT64_MAX;
        job.rank_pointers[i] = &job.ranks[i];
        job.all_ranks[i] = i;
    }
    job.stats.ranks = job.rank_pointers;
    job.stats.n_ranks = n;
}

static void draw_links(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        job.links[i] = (Pb__LinkStats)PB__LINK_STATS__INIT;
        job.links[i].from_node = i / (NODES - 1);
        job.links[i].sent_bytes = i;
        job.links[i].received_bytes = UINT64_MAX;
        job.links[i].send_rate = job.links[i].busy_s = 1.5;
        job.link_pointers[i] = &job.links[i];
    }
    job.stats.links = job.link_pointers;
    job.stats.n_links = n;
}

static void draw_stalls(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        job.stalls[i] = (Pb__Stall)PB__STALL__INIT;
        job.stalls[i].name = job.name;
        job.stalls[i].waited_ms = i;
        job.stalls[i].missing = job.all_ranks;
        job.stalls[i].n_missing = RANKS;
        job.stall_pointers[i] = &job.stalls[i];
    }
    job.stats.stalls = job.stall_pointers;
    job.stats.n_stalls = n;
}

static void draw_gpus(void)
{
    for (uint32_t i = 0; i < GPUS; i++) {
        job.gpus[i] = (Pb__GpuStats)PB__GPU_STATS__INIT;
        job.gpus[i].node = job.gpus[i].name = job.gpus[i].uuid = job.name;
        job.gpu_pointers[i] = &job.gpus[i];
    }
    for (uint32_t i = 0; i < COMMS; i++) {
        job.comms[i] = (Pb__CommStats)PB__COMM_STATS__INIT;
        job.comms[i].ranks = job.all_ranks;
        job.comms[i].n_ranks = RANKS;
        job.comm_pointers[i] = &job.comms[i];
    }
    job.stats.gpus = job.gpu_pointers;
    job.stats.n_gpus = GPUS;
    job.stats.comms = job.comm_pointers;
    job.stats.n_comms = COMMS;
}

static void set_up(void)
{
    job.stats = (Pb__JobStats)PB__JOB_STATS__INIT;
    memset(job.name, 'x', NAME_BYTES);
    for (uint32_t i = 0; i < NODES; i++)
        job.nodes[i] = i;
}

static void draw_the_largest(void)
{
    draw_ranks(RANKS, job.name);
    draw_links(LINKS);
    draw_stalls(STALLS);
    draw_gpus();
    job.stats.silent_nodes = job.nodes;
    job.stats.n_silent_nodes = NODES;
}

/* Send it as a coordinator does, with all that can come along, and look at what arrives. */
static void check_that_it_travels(const Pb__JobStats *stats)
{
    struct wire_out out;
    struct wire_in in;
    struct wire_frame frame;
    Pb__RemoteJobReply reply = PB__REMOTE_JOB_REPLY__INIT;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    reply.stats = (Pb__JobStats *)stats;
    reply.missing = job.all_ranks;
    reply.n_missing = RANKS;
    envelope.body_case = PB__ENVELOPE__BODY_REMOTE_JOB_REPLY;
    envelope.remote_job_reply = &reply;
    wire_out_init(&out, 2 * WIRE_FRAME_MAX);
    wire_in_init(&in);
    ck_assert_int_eq(wire_out_push(&out, &envelope, NULL, 0), 0);
    ck_assert_int_eq(wire_in_feed(&in, out.data + out.begin, out.end - out.begin), 0);
    ck_assert_msg(wire_in_next(&in, &frame) == 1, "%s", in.error ? in.error : "out of memory");
    const Pb__JobStats *arrived = frame.envelope->remote_job_reply->stats;
    ck_assert_uint_eq(arrived->n_ranks, stats->n_ranks);
    ck_assert_uint_eq(arrived->n_links, stats->n_links);
    ck_assert_uint_eq(arrived->ranks_left_out, stats->ranks_left_out);
    wire_in_deinit(&in);
    wire_out_deinit(&out);
}

static void check_counts(const Pb__JobStats *stats)
{
    ck_assert_uint_eq(stats->n_ranks + stats->ranks_left_out, RANKS);
    ck_assert_uint_eq(stats->n_links + stats->links_left_out, LINKS);
    ck_assert_uint_eq(stats->n_stalls + stats->stalls_left_out, STALLS);
    ck_assert_uint_eq(stats->n_gpus + stats->gpus_left_out, GPUS);
    ck_assert_uint_eq(stats->n_comms + stats->comms_left_out, COMMS);
}

START_TEST(the_largest_job_fits_and_says_what_is_left_out)
{
    struct stats_fit fit;
    draw_the_largest();
    ck_assert_uint_gt(pb__job_stats__get_packed_size(&job.stats), 4u * WIRE_FRAME_MAX);
    stats_fit_init(&fit, &job.stats);
    ck_assert_uint_le(pb__job_stats__get_packed_size(&fit.stats), STATS_FIT_BYTES_MAX);
    check_counts(&fit.stats);
    ck_assert_uint_gt(fit.stats.n_ranks, 0);
    ck_assert_uint_gt(fit.stats.n_links, 0);
    ck_assert_uint_gt(fit.stats.n_stalls, 0);
    ck_assert_uint_gt(fit.stats.n_gpus, 0);
    ck_assert_uint_gt(fit.stats.n_comms, 0);
    check_that_it_travels(&fit.stats);
    stats_fit_deinit(&fit);
}
END_TEST

START_TEST(the_most_telling_rows_stay)
{
    struct stats_fit fit;
    draw_the_largest();
    job.ranks[7].late_mean_us = 1e9;
    job.ranks[9].late_mean_us = NAN;
    stats_fit_init(&fit, &job.stats);
    const Pb__JobStats *stats = &fit.stats;
    ck_assert_uint_eq(stats->ranks[0]->rank, 7);
    for (size_t i = 1; i < stats->n_ranks; i++)
        ck_assert_uint_eq(stats->ranks[i]->rank, RANKS - stats->n_ranks + i);
    for (size_t i = 0; i < stats->n_links; i++)
        ck_assert_uint_eq(stats->links[i]->sent_bytes, LINKS - 1 - i);
    for (size_t i = 0; i < stats->n_stalls; i++)
        ck_assert_uint_eq(stats->stalls[i]->waited_ms, STALLS - 1 - i);
    stats_fit_deinit(&fit);
}
END_TEST

START_TEST(all_ranks_of_the_largest_job_with_usual_names_are_shown)
{
    struct stats_fit fit;
    char name[] = "layers.31.self_attn.q_proj.weight";
    draw_ranks(RANKS, name);
    draw_links(LINKS);
    stats_fit_init(&fit, &job.stats);
    ck_assert_uint_eq(fit.stats.n_ranks, RANKS);
    ck_assert_uint_gt(fit.stats.links_left_out, 0);
    check_that_it_travels(&fit.stats);
    stats_fit_deinit(&fit);
}
END_TEST

START_TEST(what_fits_stays_as_it_is)
{
    struct stats_fit fit;
    draw_ranks(64, job.name);
    draw_links(56);
    job.stats.ops = 5;
    stats_fit_init(&fit, &job.stats);
    ck_assert_ptr_eq(fit.stats.ranks, job.stats.ranks);
    ck_assert_ptr_eq(fit.stats.links, job.stats.links);
    ck_assert_uint_eq(fit.stats.ops, 5);
    ck_assert_uint_eq(fit.stats.ranks_left_out + fit.stats.links_left_out, 0);
    stats_fit_deinit(&fit);
}
END_TEST

START_TEST(what_was_left_out_before_is_counted_too)
{
    struct stats_fit fit;
    draw_the_largest();
    job.stats.links_left_out = 100;
    job.stats.gpus_left_out = UINT32_MAX;
    stats_fit_init(&fit, &job.stats);
    ck_assert_uint_eq(fit.stats.n_links + fit.stats.links_left_out, LINKS + 100);
    ck_assert_uint_eq(fit.stats.gpus_left_out, UINT32_MAX);
    stats_fit_deinit(&fit);
}
END_TEST

/* A worker runs with its user's rights: what it says may be anything that a frame can carry. */
START_TEST(rows_larger_than_all_room_and_unknown_fields_are_dropped)
{
    struct stats_fit fit;
    char *huge = malloc(WIRE_FRAME_MAX);
    ck_assert_ptr_nonnull(huge);
    memset(huge, 'y', WIRE_FRAME_MAX - 1);
    huge[WIRE_FRAME_MAX - 1] = '\0';
    draw_ranks(3, job.name);
    job.ranks[2].source = huge;
    ProtobufCMessageUnknownField unknown = {.tag = 900,
                                            .wire_type = PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED,
                                            .len = WIRE_FRAME_MAX,
                                            .data = (uint8_t *)huge};
    job.stats.base.n_unknown_fields = 1;
    job.stats.base.unknown_fields = &unknown;
    stats_fit_init(&fit, &job.stats);
    ck_assert_uint_eq(fit.stats.n_ranks + fit.stats.ranks_left_out, 3);
    ck_assert_uint_ge(fit.stats.ranks_left_out, 1);
    ck_assert_uint_le(pb__job_stats__get_packed_size(&fit.stats), STATS_FIT_BYTES_MAX);
    check_that_it_travels(&fit.stats);
    stats_fit_deinit(&fit);
    free(huge);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        the_largest_job_fits_and_says_what_is_left_out,
        the_most_telling_rows_stay,
        all_ranks_of_the_largest_job_with_usual_names_are_shown,
        what_fits_stays_as_it_is,
        what_was_left_out_before_is_counted_too,
        rows_larger_than_all_room_and_unknown_fields_are_dropped,
    };
    return run_suite_with("stats_fit", tests, sizeof tests / sizeof tests[0], set_up, NULL, 0);
}
