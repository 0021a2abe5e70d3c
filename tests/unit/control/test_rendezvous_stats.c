/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Questions about a job of the largest size, asked again and again over the link that the job
 * depends on: its queue never fills, and the link goes on. What goes over it is looked at here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/stats_fit.h"
#include "control/rendezvous.h"
#include "control/rendezvous_internal.h"
#include "run_suite.h"

enum { LINK_QUEUE_BYTES = 4 << 20, QUESTIONS = 200 };

static struct config config;
static struct jobs jobs;
static struct job *job;
static struct peer_link far; /* to the other daemon; nothing moves on it */

static void on_change(void *owner)
{
    (void)owner;
}

static void on_soon(void *data)
{
    (void)data;
}

/* What a worker tells of 4096 ranks in a frame that is full. */
static void tell_figures(void)
{
    static Pb__RankStats ranks[MEMBERSHIP_SIZE_MAX], *pointers[MEMBERSHIP_SIZE_MAX];
    static char tensor[230];
    Pb__JobStats stats = PB__JOB_STATS__INIT;
    memset(tensor, 't', sizeof tensor - 1);
    for (uint32_t rank = 0; rank < MEMBERSHIP_SIZE_MAX; rank++) {
        ranks[rank] = (Pb__RankStats)PB__RANK_STATS__INIT;
        ranks[rank].rank = rank;
        ranks[rank].node = (char *)"there";
        ranks[rank].last_tensor = tensor;
        pointers[rank] = &ranks[rank];
    }
    stats.ranks = pointers;
    stats.n_ranks = MEMBERSHIP_SIZE_MAX;
    job->stats_bytes = pb__job_stats__get_packed_size(&stats);
    ck_assert_uint_gt(job->stats_bytes, STATS_FIT_BYTES_MAX);
    ck_assert_uint_le(job->stats_bytes, WIRE_FRAME_MAX);
    job->stats = malloc(job->stats_bytes);
    ck_assert_ptr_nonnull(job->stats);
    pb__job_stats__pack(&stats, job->stats);
}

static void set_up(void)
{
    struct fault fault;
    config_init(&config);
    jobs = (struct jobs){
        .loop = loop_new(), .config = &config, .node = "here", .on_change = on_change};
    ck_assert_ptr_nonnull(jobs.loop);
    far = (struct peer_link){.state = PEER_UP, .name = "there", .fd = -1};
    far.soon = watch_timer(jobs.loop, on_soon, NULL);
    wire_out_init(&far.out, LINK_QUEUE_BYTES);
    job = job_obtain(&jobs, 0, "t", NULL, &fault);
    ck_assert_ptr_nonnull(job);
}

static void tear_down(void)
{
    jobs_deinit(&jobs);
    wire_out_deinit(&far.out);
    watch_free(far.soon);
    loop_free(jobs.loop);
}

static void ask(uint64_t seq)
{
    Pb__RemoteJobRequest request = PB__REMOTE_JOB_REQUEST__INIT;
    request.seq = seq;
    request.job = (char *)"t";
    rendezvous_on_job_request(&jobs, &far, &request);
}

START_TEST(the_figures_of_the_largest_job_are_told_as_far_as_they_fit)
{
    struct wire_in in;
    struct wire_frame frame;
    job->membership.state = JOB_RUNNING;
    tell_figures();
    ask(7);
    ck_assert_msg(!far.is_ending, "the link ended: %s", far.error);
    wire_in_init(&in);
    ck_assert_int_eq(wire_in_feed(&in, far.out.data + far.out.begin, peer_link_backlog(&far)), 0);
    ck_assert_int_eq(wire_in_next(&in, &frame), 1);
    ck_assert_int_eq(frame.envelope->body_case, PB__ENVELOPE__BODY_REMOTE_JOB_REPLY);
    const Pb__RemoteJobReply *reply = frame.envelope->remote_job_reply;
    ck_assert_uint_eq(reply->seq, 7);
    ck_assert_uint_gt(reply->stats->ranks_left_out, 0);
    ck_assert_uint_eq(reply->stats->n_ranks + reply->stats->ranks_left_out, MEMBERSHIP_SIZE_MAX);
    wire_in_deinit(&in);
}
END_TEST

START_TEST(answers_never_fill_a_link_that_does_not_move)
{
    job->membership.state = JOB_RUNNING;
    tell_figures();
    for (uint64_t i = 0; i < QUESTIONS; i++)
        ask(i);
    ck_assert_msg(!far.is_ending, "the link ended: %s", far.error);
    ck_assert_uint_lt(peer_link_backlog(&far), LINK_QUEUE_BYTES - WIRE_FRAME_MAX);
    ck_assert_uint_gt(peer_link_backlog(&far), WIRE_FRAME_MAX);
}
END_TEST

START_TEST(nothing_is_asked_over_a_link_that_is_busy)
{
    job->membership.gathering.coordinator = &far;
    ck_assert(rendezvous_ask(job, 1));
    tell_figures();
    for (uint64_t i = 0; i < QUESTIONS; i++) {
        job->membership.state = JOB_RUNNING;
        ask(i);
    }
    size_t backlog = peer_link_backlog(&far);
    ck_assert(!rendezvous_ask(job, 2));
    ck_assert_uint_eq(peer_link_backlog(&far), backlog);
    job->membership.gathering.coordinator = NULL;
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        the_figures_of_the_largest_job_are_told_as_far_as_they_fit,
        answers_never_fill_a_link_that_does_not_move,
        nothing_is_asked_over_a_link_that_is_busy,
    };
    return run_suite_with("rendezvous_stats", tests, sizeof tests / sizeof *tests, set_up,
                          tear_down, 0);
}
