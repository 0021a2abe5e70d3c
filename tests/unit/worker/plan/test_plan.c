/* SPDX-License-Identifier: Apache-2.0 */
/* The plan's decisions, one behaviour each. test_plan_simulation.c tortures it at random. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "worker/plan/plan.h"

static struct plan *plan;
static const char *refused; /* sentence of the last refusal */
static const uint64_t second = 1000000000;

static void open_plan(uint32_t n_ranks, uint64_t warn_s, uint64_t timeout_s)
{
    const struct plan_limits limits = {
        .max_entries = 100,
        .stall_warn_ns = warn_s * second,
        .op_timeout_ns = timeout_s * second,
    };
    plan = plan_new("job t", n_ranks, &limits);
    ck_assert_ptr_nonnull(plan);
}

static struct signature sum_of(uint64_t count)
{
    return (struct signature){.kind = GRADD_ALLREDUCE,
                              .dtype = GRADD_F32,
                              .redop = GRADD_SUM,
                              .count = count,
                              .prescale = 1,
                              .postscale = 1,
                              .group = ""};
}

/* A request is told apart by its address: any distinct non-NULL pointer will do. */
static int submit_at(uint32_t rank, const char *name, struct signature s, void *request,
                     uint64_t now_ns)
{
    refused = "";
    return plan_submit(plan, rank, 0, name, &s, request, now_ns, &refused);
}

static int submit(uint32_t rank, const char *name, struct signature s)
{
    static char requests[64];
    return submit_at(rank, name, s, &requests[rank], 0);
}

static void expect_text(const char *text, const char *part)
{
    ck_assert_msg(strstr(text, part), "\"%s\" does not say \"%s\"", text, part);
}

static void expect_ready(const char *name)
{
    struct plan_op *op = plan_next(plan);
    ck_assert_ptr_nonnull(op);
    ck_assert_str_eq(op->name, name);
    ck_assert_int_eq(op->status, GRADD_OK);
    plan_op_done(plan, op);
}

/* The next decision is a failure of that op; returns its sentence. */
static const char *expect_failed(const char *name, int status)
{
    static char text[700];
    struct plan_op *op = plan_next(plan);
    ck_assert_ptr_nonnull(op);
    ck_assert_str_eq(op->name, name);
    ck_assert_int_eq(op->status, status);
    snprintf(text, sizeof text, "%s", op->text);
    plan_op_done(plan, op);
    return text;
}

static void expect_nothing(void)
{
    ck_assert_ptr_null(plan_next(plan));
}

START_TEST(ready_waits_for_every_rank)
{
    open_plan(3, 0, 0);
    ck_assert_int_eq(submit(2, "a", sum_of(4)), 0);
    ck_assert_int_eq(submit(0, "a", sum_of(4)), 0);
    expect_nothing();
    ck_assert_uint_eq(plan_n_waiting(plan), 1);
    ck_assert_int_eq(submit(1, "a", sum_of(4)), 0);
    expect_ready("a");
    expect_nothing();
    ck_assert_uint_eq(plan_n_waiting(plan), 0);
    plan_free(plan);
}
END_TEST

START_TEST(order_of_submission_may_differ_between_ranks)
{
    open_plan(2, 0, 0);
    submit(0, "a", sum_of(1));
    submit(0, "b", sum_of(2));
    submit(1, "b", sum_of(2));
    submit(1, "a", sum_of(1));
    expect_ready("b");
    expect_ready("a");
    plan_free(plan);
}
END_TEST

START_TEST(name_is_free_again_once_its_op_has_ended)
{
    open_plan(2, 0, 0);
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(submit(0, "a", sum_of(1)), 0);
        ck_assert_int_eq(submit(0, "a", sum_of(1)), GRADD_ERR_DUPLICATE);
        expect_text(refused, "rank 0");
        ck_assert_int_eq(submit(1, "a", sum_of(1)), 0);
        struct plan_op *op = plan_next(plan);
        ck_assert_int_eq(submit(1, "a", sum_of(1)), GRADD_ERR_DUPLICATE);
        plan_op_done(plan, op);
    }
    expect_nothing();
    plan_free(plan);
}
END_TEST

START_TEST(disagreement_fails_on_all_ranks_and_names_both_sides)
{
    open_plan(3, 0, 0);
    plan_describe_rank(plan, 1, "rank 1 (node b, pid 7)");
    submit(0, "w", sum_of(4));
    ck_assert_int_eq(submit(1, "w", sum_of(5)), GRADD_ERR_DISAGREE);
    expect_text(refused, "job t: \"w\": rank 1 (node b, pid 7) submitted float32[5]");
    expect_text(refused, "rank 0 submitted float32[4]");
    expect_text(expect_failed("w", GRADD_ERR_DISAGREE), "float32[5]");
    /* Rank 0 goes on with the next "w" before rank 2 has submitted the first. */
    ck_assert_int_eq(submit(0, "w", sum_of(4)), 0);
    ck_assert_int_eq(submit(2, "w", sum_of(4)), GRADD_ERR_DISAGREE);
    expect_text(refused, "float32[5]");
    expect_nothing();
    ck_assert_int_eq(submit(1, "w", sum_of(4)), 0);
    ck_assert_int_eq(submit(2, "w", sum_of(4)), 0);
    expect_ready("w");
    expect_nothing();
    plan_free(plan);
}
END_TEST

START_TEST(each_part_of_a_signature_must_agree)
{
    const uint64_t counts_a[] = {1, 3}, counts_b[] = {3, 1};
    struct signature base = sum_of(4), other[8];
    for (int i = 0; i < 8; i++)
        other[i] = base;
    other[0].dtype = GRADD_I32;
    other[1].redop = GRADD_MAX;
    other[2].prescale = 0.5;
    other[3].kind = GRADD_ALLGATHER;
    other[4].postscale = 2;
    const char *words[] = {"int32", "max", "prescale", "all-gather", "postscale"};
    open_plan(2, 0, 0);
    for (int i = 0; i < 5; i++) {
        submit(0, "a", base);
        ck_assert_int_eq(submit(1, "a", other[i]), GRADD_ERR_DISAGREE);
        expect_text(refused, words[i]);
        expect_failed("a", GRADD_ERR_DISAGREE);
    }
    struct signature scatter = base, root = base;
    scatter.kind = GRADD_REDUCE_SCATTER;
    scatter.counts = counts_a;
    scatter.n_counts = 2;
    submit(0, "s", scatter);
    scatter.counts = counts_b;
    ck_assert_int_eq(submit(1, "s", scatter), GRADD_ERR_DISAGREE);
    expect_text(refused, "[3,1]");
    expect_text(refused, "[1,3]");
    expect_failed("s", GRADD_ERR_DISAGREE);
    root.kind = GRADD_BROADCAST;
    submit(0, "r", root);
    root.root = 1;
    ck_assert_int_eq(submit(1, "r", root), GRADD_ERR_DISAGREE);
    expect_text(refused, "root 1");
    expect_failed("r", GRADD_ERR_DISAGREE);
    plan_free(plan);
}
END_TEST

START_TEST(shapes_must_agree_where_both_are_known)
{
    const uint64_t flat[] = {2, 6}, deep[] = {2, 2, 3}, longer[] = {5, 6};
    struct signature a = sum_of(12), b = a;
    open_plan(2, 0, 0);
    a.dims = flat;
    a.n_dims = 2;
    submit(0, "a", a);
    submit(1, "a", b); /* no shape */
    expect_ready("a");
    b.dims = deep;
    b.n_dims = 3;
    submit(0, "a", a);
    ck_assert_int_eq(submit(1, "a", b), GRADD_ERR_DISAGREE);
    expect_text(refused, "float32[2,2,3]");
    expect_text(refused, "float32[2,6]");
    expect_failed("a", GRADD_ERR_DISAGREE);
    a.kind = b.kind = GRADD_ALLGATHER; /* the first dimension may differ, the others not */
    b.dims = longer;
    b.n_dims = 2;
    b.count = 30;
    submit(0, "g", a);
    ck_assert_int_eq(submit(1, "g", b), 0);
    expect_ready("g");
    b.dims = deep;
    b.n_dims = 3;
    submit(0, "g", a);
    ck_assert_int_eq(submit(1, "g", b), GRADD_ERR_DISAGREE);
    expect_failed("g", GRADD_ERR_DISAGREE);
    plan_free(plan);
}
END_TEST

START_TEST(all_gather_counts_may_differ)
{
    struct signature s = sum_of(4);
    s.kind = GRADD_ALLGATHER;
    open_plan(2, 0, 0);
    submit(0, "a", s);
    s.count = 9;
    ck_assert_int_eq(submit(1, "a", s), 0);
    struct plan_op *op = plan_next(plan);
    ck_assert_uint_eq(op->parts[0].count, 4);
    ck_assert_uint_eq(op->parts[1].count, 9);
    plan_op_done(plan, op);
    plan_free(plan);
}
END_TEST

static struct signature in_group(uint64_t count, uint32_t size)
{
    struct signature s = sum_of(count);
    s.group = "g";
    s.group_size = size;
    return s;
}

START_TEST(group_comes_out_together)
{
    open_plan(2, 0, 0);
    submit(0, "a", in_group(4, 2));
    submit(1, "b", in_group(5, 2)); /* in another order */
    expect_nothing();
    submit(1, "a", in_group(4, 2));
    expect_nothing();
    submit(0, "b", in_group(5, 2));
    expect_ready("a");
    expect_ready("b");
    expect_nothing();
    plan_free(plan);
}
END_TEST

START_TEST(group_fails_as_one)
{
    open_plan(2, 0, 0);
    submit(0, "a", in_group(4, 2));
    submit(0, "b", in_group(4, 2));
    submit(1, "a", in_group(4, 2));
    /* Accepted: what a group comes to is told through plan_next(). */
    ck_assert_int_eq(submit(1, "b", in_group(5, 2)), 0);
    for (int rank = 0; rank < 2; rank++) {
        expect_text(expect_failed("a", GRADD_ERR_DISAGREE), "\"b\"");
        expect_text(expect_failed("b", GRADD_ERR_DISAGREE), "float32[5]");
    }
    expect_nothing();
    /* The group's name is free again. */
    for (uint32_t rank = 0; rank < 2; rank++) {
        submit(rank, "a", in_group(4, 2));
        submit(rank, "b", in_group(4, 2));
    }
    expect_ready("a");
    expect_ready("b");
    plan_free(plan);
}
END_TEST

START_TEST(groups_of_other_sizes_or_names_disagree)
{
    open_plan(2, 0, 0);
    submit(0, "a", in_group(4, 2));
    submit(0, "b", in_group(4, 2));
    submit(1, "a", in_group(4, 1));
    expect_text(expect_failed("a", GRADD_ERR_DISAGREE), "group of 1 op, rank 0 of 2");
    expect_failed("b", GRADD_ERR_DISAGREE);
    expect_failed("a", GRADD_ERR_DISAGREE);
    submit(0, "a", in_group(4, 2));
    submit(0, "b", in_group(4, 2));
    submit(1, "a", in_group(4, 2));
    submit(1, "c", in_group(4, 2));
    expect_text(expect_failed("a", GRADD_ERR_DISAGREE), "\"c\" as op 1, rank 0 \"b\"");
    plan_free(plan);
}
END_TEST

START_TEST(interrupted_or_impossible_group_is_refused)
{
    struct signature bad = in_group(4, 2);
    open_plan(2, 0, 0);
    submit(0, "a", in_group(4, 2));
    ck_assert_int_eq(
        submit(0, "other",
               (struct signature){.kind = GRADD_BARRIER, .group = "h", .group_size = 1}),
        GRADD_ERR_INVALID);
    expect_text(refused, "only 1 of the 2 ops of group \"g\"");
    bad.redop = 99;
    ck_assert_int_eq(submit(0, "b", bad), 0);
    expect_text(expect_failed("a", GRADD_ERR_INVALID), "unknown reduction operator");
    expect_failed("b", GRADD_ERR_INVALID);
    expect_nothing();
    ck_assert_uint_eq(plan_n_waiting(plan), 0);
    /* An unfinished group ends with the epoch. */
    submit(1, "a", in_group(4, 2));
    plan_fail_all(plan, GRADD_ERR_RANK_LOST, "over");
    expect_text(expect_failed("a", GRADD_ERR_RANK_LOST), "over");
    plan_free(plan);
}
END_TEST

/* Others choose how many there are. */
START_TEST(group_with_more_dimensions_than_fit_is_refused)
{
    const uint64_t dims[10 * PLAN_DIMS_MAX] = {0};
    struct signature flat = in_group(4, 2), deep = in_group(4, 2);
    open_plan(2, 0, 0);
    deep.dims = dims;
    deep.n_dims = sizeof dims / sizeof *dims;
    submit(0, "a", deep);
    ck_assert_int_eq(submit(0, "b", flat), 0);
    expect_text(expect_failed("a", GRADD_ERR_INVALID), "too many dimensions");
    expect_failed("b", GRADD_ERR_INVALID);
    plan_free(plan);
}
END_TEST

static void on_stall(void *data, const struct plan_stall *stall)
{
    char *text = data;
    sprintf(text + strlen(text), "%s:%d:%u/%u;", stall->name, stall->is_new, stall->n_missing,
            stall->n_missing ? stall->missing[0] : 99);
}

START_TEST(stall_is_reported_once_and_names_who_is_missing)
{
    char text[200] = "";
    open_plan(2, 10, 0);
    ck_assert_uint_eq(plan_check(plan, 0, on_stall, text), 0);
    submit_at(1, "a", sum_of(1), plan, 5 * second);
    ck_assert_uint_eq(plan_check(plan, 6 * second, on_stall, text), 15 * second);
    ck_assert_str_eq(text, "");
    plan_check(plan, 15 * second, on_stall, text);
    plan_check(plan, 16 * second, on_stall, text);
    ck_assert_str_eq(text, "a:1:1/0;a:0:1/0;");
    submit(0, "a", sum_of(1));
    expect_ready("a");
    plan_free(plan);
}
END_TEST

START_TEST(timeout_fails_the_op_and_names_who_did_not_come)
{
    char text[200] = "";
    open_plan(2, 0, 3);
    submit_at(1, "a", sum_of(1), plan, 0);
    plan_check(plan, 2 * second, on_stall, text);
    expect_nothing();
    plan_check(plan, 3 * second, on_stall, text);
    expect_text(expect_failed("a", GRADD_ERR_TIMEOUT), "rank 0");
    ck_assert_int_eq(submit(0, "a", sum_of(1)), GRADD_ERR_TIMEOUT);
    submit(0, "a", sum_of(1));
    submit(1, "a", sum_of(1));
    expect_ready("a");
    plan_free(plan);
}
END_TEST

START_TEST(rank_that_left_fails_what_needs_it)
{
    open_plan(2, 0, 0);
    submit(0, "before", sum_of(1));
    submit(1, "both", sum_of(1));
    submit(0, "both", sum_of(1));
    plan_rank_left(plan, 1, GRADD_ERR_RANK_LOST, "rank 1 has left");
    expect_ready("both");
    expect_text(expect_failed("before", GRADD_ERR_RANK_LOST), "rank 1 has left");
    ck_assert_int_eq(submit(0, "after", sum_of(1)), GRADD_ERR_RANK_LOST);
    expect_text(refused, "rank 1 has left");
    plan_free(plan);
}
END_TEST

START_TEST(fail_all_spares_what_every_rank_has_submitted)
{
    open_plan(2, 0, 0);
    submit(0, "both", sum_of(1));
    submit(1, "both", sum_of(1));
    submit(0, "half", sum_of(1));
    plan_fail_all(plan, GRADD_ERR_RANK_LOST, "rank 1 is lost");
    expect_ready("both");
    expect_failed("half", GRADD_ERR_RANK_LOST);
    ck_assert_int_eq(submit(0, "later", sum_of(1)), GRADD_ERR_RANK_LOST);
    plan_free(plan);
}
END_TEST

static struct signature set_of(const uint64_t *ranks, size_t n)
{
    return (struct signature){.kind = GRADD_SET_ADD, .counts = ranks, .n_counts = n, .group = ""};
}

static uint32_t add_set(const uint64_t *ranks, size_t n, uint32_t n_world)
{
    for (uint32_t r = 0; r < n_world; r++)
        ck_assert_int_eq(submit(r, "set", set_of(ranks, n)), 0);
    struct plan_op *op = plan_next(plan);
    ck_assert_int_eq(op->status, GRADD_OK);
    uint32_t id = (uint32_t)op->result;
    plan_op_done(plan, op);
    return id;
}

START_TEST(process_set_runs_among_its_ranks)
{
    const uint64_t ranks[] = {0, 2};
    struct signature s = sum_of(1);
    open_plan(3, 0, 0);
    uint32_t id = add_set(ranks, 2, 3);
    ck_assert_uint_gt(id, 0);
    ck_assert_int_eq(plan_submit(plan, 1, id, "a", &s, plan, 0, &refused), GRADD_ERR_INVALID);
    expect_text(refused, "not in process set");
    ck_assert_int_eq(plan_submit(plan, 2, id, "a", &s, plan, 0, &refused), 0);
    ck_assert_int_eq(submit(2, "a", s), 0); /* the same name in another set is another op */
    ck_assert_int_eq(plan_submit(plan, 0, id, "a", &s, plan, 0, &refused), 0);
    struct plan_op *op = plan_next(plan);
    ck_assert_uint_eq(op->set, id);
    ck_assert_uint_eq(op->n_ranks, 2);
    ck_assert_uint_eq(op->ranks[1], 2);
    plan_op_done(plan, op);
    expect_nothing();
    /* The same set again is refused, by name of the one that exists. */
    for (uint32_t r = 0; r < 3; r++)
        submit(r, "set", set_of(ranks, 2));
    expect_text(expect_failed("set", GRADD_ERR_DUPLICATE), "process set 1");
    plan_free(plan);
}
END_TEST

START_TEST(removed_process_set_fails_its_waiting_ops)
{
    const uint64_t ranks[] = {0, 1};
    struct signature s = sum_of(1), away = {.kind = GRADD_SET_REMOVE, .group = ""};
    open_plan(2, 0, 0);
    /* The world itself counts as a set of all ranks: use a strict subset. */
    ck_assert_int_eq(submit(0, "set", set_of(ranks, 2)), 0);
    ck_assert_int_eq(submit(1, "set", set_of(ranks, 2)), 0);
    expect_text(expect_failed("set", GRADD_ERR_DUPLICATE), "process set 0");
    uint32_t id = add_set(ranks, 1, 2);
    away.root = (int32_t)id;
    ck_assert_int_eq(plan_submit(plan, 0, id, "a", &s, plan, 0, &refused), 0);
    expect_ready("a"); /* a set of one rank */
    submit(0, "away", away);
    submit(1, "away", away);
    expect_ready("away");
    ck_assert_int_eq(plan_submit(plan, 0, id, "a", &s, plan, 0, &refused), GRADD_ERR_INVALID);
    submit(0, "away", away);
    submit(1, "away", away);
    expect_failed("away", GRADD_ERR_INVALID);
    plan_free(plan);
}
END_TEST

START_TEST(joined_rank_is_not_waited_for)
{
    const struct signature join = {.kind = GRADD_JOIN, .group = ""};
    open_plan(3, 0, 0);
    submit(0, "a", sum_of(1));
    submit(1, "a", sum_of(1));
    submit(2, "join", join);
    struct plan_op *op = plan_next(plan);
    ck_assert_str_eq(op->name, "a");
    ck_assert_uint_eq(op->n_joined, 1);
    ck_assert_ptr_null(op->parts[2].request);
    plan_op_done(plan, op);
    struct signature gather = sum_of(1);
    gather.kind = GRADD_ALLGATHER;
    submit(0, "g", gather);
    submit(1, "g", gather);
    expect_text(expect_failed("g", GRADD_ERR_INVALID), "joined");
    submit(0, "join", join);
    submit(1, "join", join);
    op = plan_next(plan);
    ck_assert_str_eq(op->name, "join");
    ck_assert_uint_eq(op->result, 1);
    plan_op_done(plan, op);
    /* Afterwards everybody is waited for again, and nobody is owed an old failure. */
    submit(0, "g", gather);
    submit(1, "g", gather);
    expect_nothing();
    ck_assert_int_eq(submit(2, "g", gather), 0);
    expect_ready("g");
    plan_free(plan);
}
END_TEST

START_TEST(joining_rank_is_owed_no_old_failure)
{
    const struct signature join = {.kind = GRADD_JOIN, .group = ""};
    open_plan(3, 0, 0);
    submit(0, "a", sum_of(4));
    ck_assert_int_eq(submit(1, "a", sum_of(5)), GRADD_ERR_DISAGREE);
    expect_failed("a", GRADD_ERR_DISAGREE);
    submit(2, "join", join); /* without having submitted "a" */
    submit(0, "join", join);
    submit(1, "join", join);
    expect_ready("join");
    for (uint32_t rank = 0; rank < 3; rank++)
        ck_assert_int_eq(submit(rank, "a", sum_of(4)), 0);
    expect_ready("a");
    expect_nothing();
    plan_free(plan);
}
END_TEST

START_TEST(bad_requests_are_refused_in_words)
{
    struct signature s = sum_of(4);
    open_plan(2, 0, 0);
    ck_assert_int_eq(submit(0, "", s), GRADD_ERR_INVALID);
    s.dtype = 3;
    ck_assert_int_eq(submit(0, "a", s), GRADD_ERR_INVALID);
    s = sum_of(4);
    s.redop = 99;
    ck_assert_int_eq(submit(0, "a", s), GRADD_ERR_INVALID);
    s = sum_of(UINT64_MAX / 2);
    ck_assert_int_eq(submit(0, "a", s), GRADD_ERR_INVALID);
    s = sum_of(4);
    s.kind = 77;
    ck_assert_int_eq(submit(0, "a", s), GRADD_ERR_INVALID);
    s.kind = GRADD_BROADCAST;
    s.root = 2;
    ck_assert_int_eq(submit(0, "a", s), GRADD_ERR_INVALID);
    expect_text(refused, "root 2");
    s = sum_of(4);
    ck_assert_int_eq(plan_submit(plan, 0, 7, "a", &s, plan, 0, &refused), GRADD_ERR_INVALID);
    expect_text(refused, "process set 7");
    expect_nothing();
    plan_free(plan);
}
END_TEST

START_TEST(number_of_waiting_ops_is_bounded)
{
    char name[16];
    open_plan(2, 0, 0);
    for (int i = 0; i < 100; i++) {
        sprintf(name, "n%d", i);
        ck_assert_int_eq(submit(0, name, sum_of(1)), 0);
    }
    ck_assert_int_eq(submit(0, "more", sum_of(1)), GRADD_ERR_NO_MEMORY);
    ck_assert_int_eq(submit(1, "n0", sum_of(1)), 0);
    expect_ready("n0");
    ck_assert_int_eq(submit(0, "more", sum_of(1)), 0);
    plan_free(plan);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        ready_waits_for_every_rank,
        order_of_submission_may_differ_between_ranks,
        name_is_free_again_once_its_op_has_ended,
        disagreement_fails_on_all_ranks_and_names_both_sides,
        each_part_of_a_signature_must_agree,
        shapes_must_agree_where_both_are_known,
        all_gather_counts_may_differ,
        group_comes_out_together,
        group_fails_as_one,
        groups_of_other_sizes_or_names_disagree,
        interrupted_or_impossible_group_is_refused,
        group_with_more_dimensions_than_fit_is_refused,
        stall_is_reported_once_and_names_who_is_missing,
        timeout_fails_the_op_and_names_who_did_not_come,
        rank_that_left_fails_what_needs_it,
        fail_all_spares_what_every_rank_has_submitted,
        process_set_runs_among_its_ranks,
        removed_process_set_fails_its_waiting_ops,
        joined_rank_is_not_waited_for,
        joining_rank_is_owed_no_old_failure,
        bad_requests_are_refused_in_words,
        number_of_waiting_ops_is_bounded,
    };
    return run_suite("plan", tests, sizeof tests / sizeof *tests);
}
