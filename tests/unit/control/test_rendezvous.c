/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A refusal is for one attempt of a rank to join: it may cross, on its way, the next attempt of the
 * same rank, which it is not for. Both sides are this process; what goes over the link between them
 * is looked at and handed over by the test.
 */
#include <stdio.h>
#include <string.h>

#include "control/rendezvous.h"
#include "control/rendezvous_internal.h"
#include "control/session.h"
#include "gradd/types.h"
#include "run_suite.h"

static struct config config;
static struct jobs jobs;
static struct peer_link far; /* to the other daemon; nothing moves on it */
static struct member waiting;
static unsigned n_refused;

/* ------------------------------------------------------------------ doubles */

int session_on_joined(struct session *session, const struct session_place *place, int fd)
{
    (void)session, (void)place, (void)fd;
    ck_abort_msg("nobody joins");
    return -1;
}

void session_on_join_refused(struct session *session, const struct fault *fault)
{
    (void)session;
    ck_assert_str_eq(fault->text, "the ranks did not come");
    n_refused++;
}

void session_on_epoch_failed(struct session *session, const struct session_failure *failure)
{
    (void)session, (void)failure;
    ck_abort_msg("there is no epoch");
}

void session_on_lost_at_worker(struct session *session)
{
    (void)session;
    ck_abort_msg("there is no worker");
}

static void on_change(void *owner)
{
    (void)owner;
}

static void on_soon(void *data)
{
    (void)data;
}

/* ------------------------------------------------------------------ the scene */

static void open_jobs(void)
{
    config_init(&config);
    jobs = (struct jobs){
        .loop = loop_new(), .config = &config, .node = "here", .on_change = on_change};
    ck_assert_ptr_nonnull(jobs.loop);
    far = (struct peer_link){.state = PEER_UP, .name = "there", .fd = -1};
    far.soon = watch_timer(jobs.loop, on_soon, NULL);
    wire_out_init(&far.out, WIRE_FRAME_MAX);
    n_refused = 0;
}

static void close_jobs(void)
{
    jobs_deinit(&jobs);
    wire_out_deinit(&far.out);
    watch_free(far.soon);
    loop_free(jobs.loop);
}

/* Rank 1 waits here, and the coordinator has been told, or is about to be. */
static void wait_as_rank_1(uint64_t attempt, bool is_forwarded)
{
    struct fault fault;
    struct job *job = job_obtain(&jobs, 0, "t", NULL, &fault);
    ck_assert_ptr_nonnull(job);
    waiting = (struct member){.rank = 1, .size = 2, .coordinator = &far};
    ck_assert_int_eq(membership_join(&job->membership, &waiting, &fault), 0);
    waiting.is_forwarded = is_forwarded;
    waiting.forwarded_ns = attempt;
}

static void refuse_rank_1(uint64_t attempt)
{
    Pb__RemoteRefusal refusal = PB__REMOTE_REFUSAL__INIT;
    refusal.job = (char *)"t";
    refusal.rank = 1;
    refusal.code = (uint32_t)-GRADD_ERR_TIMEOUT;
    refusal.text = (char *)"the ranks did not come";
    refusal.attempt = attempt;
    rendezvous_on_refusal(&jobs, &far, &refusal);
}

static void join_as_rank_1(uint32_t size, uint64_t attempt)
{
    Pb__RemoteJoin join = PB__REMOTE_JOIN__INIT;
    join.job = (char *)"t";
    join.rank = 1;
    join.size = size;
    join.attempt = attempt;
    rendezvous_on_join(&jobs, &far, &join);
}

/* The attempt that the coordinator's only message refuses. */
static uint64_t refused_attempt(void)
{
    struct wire_in in;
    struct wire_frame frame;
    wire_in_init(&in);
    ck_assert_int_eq(wire_in_feed(&in, far.out.data + far.out.begin, far.out.end - far.out.begin),
                     0);
    ck_assert_int_eq(wire_in_next(&in, &frame), 1);
    ck_assert_int_eq(frame.envelope->body_case, PB__ENVELOPE__BODY_REMOTE_REFUSAL);
    const uint64_t attempt = frame.envelope->remote_refusal->attempt;
    ck_assert_int_eq(wire_in_next(&in, &frame), 0);
    wire_in_deinit(&in);
    return attempt;
}

/* ------------------------------------------------------------------ tests */

START_TEST(a_refusal_ends_the_attempt_that_it_is_for)
{
    open_jobs();
    wait_as_rank_1(70, true);
    refuse_rank_1(70);
    ck_assert_uint_eq(n_refused, 1);
    ck_assert_int_eq(waiting.state, MEMBER_NONE);
    close_jobs();
}
END_TEST

START_TEST(a_refusal_that_comes_late_ends_no_later_attempt)
{
    open_jobs();
    wait_as_rank_1(80, true);
    refuse_rank_1(70);
    ck_assert_uint_eq(n_refused, 0);
    ck_assert_int_eq(waiting.state, MEMBER_WAITING);
    refuse_rank_1(80);
    ck_assert_uint_eq(n_refused, 1);
    close_jobs();
}
END_TEST

/* The record of a session that joins again still tells its last attempt. */
START_TEST(a_refusal_is_for_nobody_whom_the_coordinator_has_not_heard_of)
{
    open_jobs();
    wait_as_rank_1(70, false);
    refuse_rank_1(70);
    ck_assert_uint_eq(n_refused, 0);
    ck_assert_int_eq(waiting.state, MEMBER_WAITING);
    close_jobs();
}
END_TEST

START_TEST(a_coordinator_that_tells_no_attempt_means_who_waits)
{
    open_jobs();
    wait_as_rank_1(70, true);
    refuse_rank_1(0);
    ck_assert_uint_eq(n_refused, 1);
    close_jobs();
}
END_TEST

START_TEST(the_coordinator_tells_which_attempt_it_refuses_at_once)
{
    open_jobs();
    join_as_rank_1(1, 70); /* rank 1 of a job of 1 */
    ck_assert_uint_eq(refused_attempt(), 70);
    close_jobs();
}
END_TEST

START_TEST(the_coordinator_tells_which_attempt_it_refuses_after_a_while)
{
    open_jobs();
    join_as_rank_1(2, 70);
    ck_assert_uint_eq(far.out.end - far.out.begin, 0);
    jobs_drain(&jobs);
    ck_assert_uint_eq(refused_attempt(), 70);
    close_jobs();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_refusal_ends_the_attempt_that_it_is_for,
        a_refusal_that_comes_late_ends_no_later_attempt,
        a_refusal_is_for_nobody_whom_the_coordinator_has_not_heard_of,
        a_coordinator_that_tells_no_attempt_means_who_waits,
        the_coordinator_tells_which_attempt_it_refuses_at_once,
        the_coordinator_tells_which_attempt_it_refuses_after_a_while,
    };
    return run_suite("rendezvous", tests, sizeof tests / sizeof *tests);
}
