/* SPDX-License-Identifier: Apache-2.0 */
/* Who may join, when an epoch begins, what remains of one that failed; by hand and at random. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "control/membership.h"
#include "gradd/types.h"
#include "run_suite.h"

static struct membership m;
static struct fault fault;
static struct member members[8];

static void setup(void)
{
    membership_init(&m, 1000, "train7");
    memset(members, 0, sizeof members);
    for (int i = 0; i < 8; i++)
        members[i].pid = 100 + i;
    memset(&fault, 0, sizeof fault);
}

static void teardown(void)
{
    membership_deinit(&m);
}

static int join(unsigned i, uint32_t rank, uint32_t size)
{
    members[i].rank = rank;
    members[i].size = size;
    return membership_join(&m, &members[i], &fault);
}

static void begin_next(void)
{
    ck_assert_int_eq(membership_begin(&m, membership_next_epoch(&m), NULL), 0);
}

/* Epoch with members 0 .. size-1 as its ranks. */
static void begin(uint32_t size)
{
    for (uint32_t i = 0; i < size; i++)
        ck_assert_int_eq(join(i, i, size), 0);
    ck_assert(membership_is_ready(&m));
    begin_next();
}

static void assert_says(const char *words)
{
    ck_assert_msg(strstr(fault.text, words), "\"%s\" lacks \"%s\"", fault.text, words);
}

START_TEST(names_ranks_and_sizes_are_checked)
{
    char name[300];
    memset(name, 'n', sizeof name);
    name[255] = '\0';
    ck_assert_int_eq(membership_check_join(name, 0, 1, &fault), 0);
    ck_assert_int_eq(membership_check_join("train 7", 4095, 4096, &fault), 0);
    name[255] = 'n';
    name[256] = '\0';
    ck_assert_int_eq(membership_check_join(name, 0, 1, &fault), GRADD_ERR_INVALID);
    assert_says("this one 256");
    static const char *const bad[] = {"", "a/b", "a\n", "a\x7f", "\xc3\xa4"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        ck_assert_int_eq(membership_check_join(bad[i], 0, 1, &fault), GRADD_ERR_INVALID);
    ck_assert_int_eq(membership_check_join("a", 0, 0, &fault), GRADD_ERR_INVALID);
    ck_assert_int_eq(membership_check_join("a", 0, 4097, &fault), GRADD_ERR_INVALID);
    ck_assert_int_eq(membership_check_join("a", 3, 3, &fault), GRADD_ERR_INVALID);
    assert_says("job a: rank 3 is not below the size 3");
}
END_TEST

START_TEST(an_epoch_begins_when_the_last_rank_joins)
{
    ck_assert_int_eq(m.state, JOB_LINGERING);
    ck_assert_int_eq(join(0, 1, 2), 0);
    ck_assert_int_eq(m.state, JOB_GATHERING);
    ck_assert(!membership_is_ready(&m));
    ck_assert_int_eq(join(1, 0, 2), 0);
    ck_assert(membership_is_ready(&m));
    begin_next();
    ck_assert_int_eq(m.state, JOB_RUNNING);
    ck_assert_uint_eq(m.epoch, 1);
    ck_assert_int_eq(members[0].state, MEMBER_ACTIVE);
    ck_assert_ptr_eq(membership_find(&m, 1, 1), &members[0]);
    ck_assert_ptr_null(membership_find(&m, 0, 1));
    ck_assert_ptr_null(membership_find(&m, 1, 2));
    ck_assert(!membership_is_ready(&m));
}
END_TEST

START_TEST(a_rank_that_waits_is_not_joined_twice)
{
    ck_assert_int_eq(join(0, 1, 4), 0);
    ck_assert_int_eq(join(1, 1, 4), GRADD_ERR_DUPLICATE);
    assert_says("job train7: rank 1 (pid 101)");
    assert_says("pid 100 waits");
    ck_assert_int_eq(members[1].state, MEMBER_NONE);
    ck_assert_uint_eq(m.gathering.n, 1);
}
END_TEST

START_TEST(a_rank_that_runs_is_not_joined_twice)
{
    begin(2);
    ck_assert_int_eq(join(5, 1, 2), GRADD_ERR_DUPLICATE);
    assert_says("pid 101 holds this rank in epoch 1");
    ck_assert_int_eq(m.state, JOB_RUNNING);
}
END_TEST

START_TEST(another_size_names_both_sides)
{
    ck_assert_int_eq(join(0, 0, 4), 0);
    ck_assert_int_eq(join(1, 2, 4), 0);
    ck_assert_int_eq(join(2, 1, 3), GRADD_ERR_DISAGREE);
    assert_says("rank 1 (pid 102) says the job has 3 ranks, ranks 0, 2 said 4");
}
END_TEST

START_TEST(the_next_epoch_waits_for_everybody_to_leave)
{
    begin(2);
    membership_remove(&m, &members[0]);
    ck_assert_int_eq(m.state, JOB_RUNNING);
    ck_assert_int_eq(join(0, 0, 2), 0);
    /* Another size is another matter for the next epoch than for the running one. */
    ck_assert_int_eq(join(5, 1, 2), GRADD_ERR_DUPLICATE);
    membership_remove(&m, &members[1]);
    ck_assert_int_eq(m.state, JOB_GATHERING);
    ck_assert_int_eq(join(1, 1, 2), 0);
    ck_assert(membership_is_ready(&m));
    begin_next();
    ck_assert_uint_eq(m.epoch, 2);
}
END_TEST

START_TEST(whole_gathering_waits_while_an_old_rank_is_active)
{
    begin(3);
    membership_remove(&m, &members[0]);
    membership_remove(&m, &members[1]);
    ck_assert_int_eq(join(0, 0, 2), 0);
    ck_assert_int_eq(join(1, 1, 2), 0);
    ck_assert(!membership_is_ready(&m));
    char text[64];
    membership_describe_active(&m, text, sizeof text);
    ck_assert_str_eq(text, "rank 2");
    membership_remove(&m, &members[2]);
    ck_assert(membership_is_ready(&m));
}
END_TEST

START_TEST(a_failed_epoch_holds_nobody_up)
{
    begin(2);
    membership_fail(&m, "job train7: rank 1 was killed");
    ck_assert_int_eq(m.state, JOB_FAILED);
    ck_assert_str_eq(m.last_error, "job train7: rank 1 was killed");
    ck_assert_int_eq(members[0].state, MEMBER_STALE);
    /* New processes take the ranks while the old ones have not even left. */
    ck_assert_int_eq(join(2, 0, 2), 0);
    ck_assert_int_eq(m.state, JOB_GATHERING);
    ck_assert_int_eq(join(3, 1, 2), 0);
    ck_assert(membership_is_ready(&m));
    begin_next();
    ck_assert_int_eq(members[0].state, MEMBER_NONE);
    ck_assert_int_eq(m.state, JOB_RUNNING);
    ck_assert_str_eq(m.last_error, "");
}
END_TEST

START_TEST(a_failure_is_kept_until_an_epoch_begins)
{
    begin(1);
    membership_fail(&m, "first");
    membership_fail(&m, "second");
    ck_assert_str_eq(m.last_error, "first");
    membership_remove(&m, &members[0]);
    ck_assert_int_eq(m.state, JOB_FAILED);
    ck_assert_int_eq(join(0, 0, 2), 0);
    membership_remove(&m, &members[0]);
    ck_assert_int_eq(m.state, JOB_FAILED);
}
END_TEST

START_TEST(who_stops_waiting_frees_the_slot_and_the_size)
{
    ck_assert_int_eq(join(0, 0, 4), 0);
    membership_remove(&m, &members[0]);
    ck_assert_int_eq(m.state, JOB_LINGERING);
    ck_assert_int_eq(join(1, 0, 2), 0);
    membership_dismiss(&m);
    ck_assert_int_eq(members[1].state, MEMBER_NONE);
    ck_assert_int_eq(m.state, JOB_LINGERING);
}
END_TEST

START_TEST(missing_ranks_are_told_as_ranges)
{
    char text[64];
    ck_assert_int_eq(join(0, 1, 8), 0);
    ck_assert_int_eq(join(1, 4, 8), 0);
    membership_describe_missing(&m, text, sizeof text);
    ck_assert_str_eq(text, "ranks 0, 2-3, 5-7");
    membership_dismiss(&m);
    membership_describe_missing(&m, text, sizeof text);
    ck_assert_str_eq(text, "");
    ck_assert_int_eq(join(0, 0, 4096), 0);
    membership_describe_missing(&m, text, sizeof text);
    ck_assert_str_eq(text, "ranks 1-4095");
}
END_TEST

START_TEST(a_long_list_of_missing_ranks_is_cut)
{
    static struct member many[MEMBERSHIP_SIZE_MAX];
    for (uint32_t rank = 0; rank < MEMBERSHIP_SIZE_MAX; rank += 2) {
        many[rank] = (struct member){.rank = rank, .size = MEMBERSHIP_SIZE_MAX};
        ck_assert_int_eq(membership_join(&m, &many[rank], &fault), 0);
    }
    char text[300];
    membership_describe_missing(&m, text, sizeof text);
    ck_assert_int_eq(strncmp(text, "ranks 1, 3, 5, ", 15), 0);
    ck_assert_str_eq(text + strlen(text) - strlen("…"), "…");
}
END_TEST

/* ------------------------------------------------------------------ several nodes */

/* Links are only compared. */
static struct peer_link *const link_b = (struct peer_link *)1;

START_TEST(ranks_of_other_nodes_are_told_by_their_node)
{
    members[0].origin = link_b;
    members[0].node = "b";
    ck_assert_int_eq(join(0, 1, 2), 0);
    ck_assert_int_eq(join(1, 1, 2), GRADD_ERR_DUPLICATE);
    assert_says("rank 1 (pid 101) joins, but pid 100 of node b waits");
    ck_assert_int_eq(join(1, 0, 2), 0);
    begin_next();
    members[2].origin = link_b;
    members[2].node = "b";
    ck_assert_int_eq(join(2, 1, 2), GRADD_ERR_DUPLICATE);
    assert_says("rank 1 (node b, pid 102) joins, but pid 100 of node b holds this rank in epoch 1");
}
END_TEST

START_TEST(a_rank_may_move_before_its_leave_from_another_node_is_known)
{
    members[1].origin = link_b;
    members[1].node = "b";
    begin(2);
    /* Rank 1 goes on here, rank 0 there. */
    ck_assert_int_eq(join(2, 1, 2), 0);
    members[3].origin = link_b;
    members[3].node = "b";
    ck_assert_int_eq(join(3, 0, 2), 0);
    ck_assert(!membership_is_ready(&m));
    membership_remove(&m, &members[0]);
    membership_remove(&m, &members[1]);
    ck_assert(membership_is_ready(&m));
}
END_TEST

START_TEST(ranks_of_one_gathering_name_one_coordinator)
{
    members[0].coordinator = link_b;
    ck_assert_int_eq(join(0, 0, 2), 0);
    members[1].coordinator = (struct peer_link *)&members[7]; /* neither is this node */
    ck_assert_int_eq(join(1, 1, 2), GRADD_ERR_DISAGREE);
    assert_says("rank 1 (pid 101) names another address of a coordinator than rank 0");
    members[1].coordinator = NULL;
    ck_assert_int_eq(join(1, 1, 2), GRADD_ERR_DISAGREE);
    assert_says("rank 1 (pid 101) names this node as its coordinator, rank 0 named another node");
    members[1].coordinator = link_b;
    ck_assert_int_eq(join(1, 1, 2), 0);
    /* The other daemon says when, even if all ranks are on this node. */
    ck_assert(!membership_is_ready(&m));
    membership_move(&m, NULL);
    ck_assert_ptr_null(members[0].coordinator);
    ck_assert(membership_is_ready(&m));
}
END_TEST

START_TEST(an_epochs_number_is_above_all_that_its_nodes_know)
{
    members[0].last_epoch = 41;
    ck_assert_int_eq(join(0, 0, 2), 0);
    ck_assert_int_eq(join(1, 1, 2), 0);
    ck_assert_uint_eq(membership_next_epoch(&m), 42);
    begin_next();
    ck_assert_uint_eq(m.epoch, 42);
    ck_assert_uint_eq(membership_next_epoch(&m), 43);
}
END_TEST

START_TEST(a_number_after_which_no_epoch_can_come_is_refused)
{
    members[0].last_epoch = UINT64_MAX;
    ck_assert_int_eq(join(0, 0, 2), GRADD_ERR_INVALID);
    assert_says("out of range");
    ck_assert_uint_eq(m.gathering.n, 0);
}
END_TEST

START_TEST(a_nodes_part_of_an_epoch_begins_without_those_that_are_not_meant)
{
    static const bool takes[4] = {[1] = true, [3] = true};
    for (unsigned i = 0; i < 3; i++)
        members[i].coordinator = link_b;
    ck_assert_int_eq(join(0, 1, 4), 0);
    ck_assert_int_eq(join(1, 2, 4), 0);
    ck_assert_int_eq(membership_begin(&m, 7, takes), 0);
    ck_assert_uint_eq(m.epoch, 7);
    ck_assert_uint_eq(m.running.size, 4);
    ck_assert_uint_eq(m.running.n, 1);
    ck_assert_int_eq(members[0].state, MEMBER_ACTIVE);
    ck_assert_int_eq(members[1].state, MEMBER_WAITING);
    ck_assert_uint_eq(m.gathering.n, 1);
    ck_assert_int_eq(m.state, JOB_RUNNING);
    membership_remove(&m, &members[0]);
    ck_assert_int_eq(m.state, JOB_GATHERING);
    membership_remove(&m, &members[1]);
    ck_assert_uint_eq(m.gathering.size, 0);
}
END_TEST

/* ------------------------------------------------------------------ at random */

static void assert_whole(void)
{
    unsigned n_waiting = 0, n_running = 0;
    for (unsigned i = 0; i < 8; i++) {
        const struct member *member = &members[i];
        switch (member->state) {
        case MEMBER_NONE:
            ck_assert_ptr_null(member->membership);
            break;
        case MEMBER_WAITING:
            ck_assert_ptr_eq(m.gathering.of_rank[member->rank], member);
            n_waiting++;
            break;
        case MEMBER_ACTIVE:
        case MEMBER_STALE:
            ck_assert_int_eq(m.has_failed, member->state == MEMBER_STALE);
            ck_assert_ptr_eq(m.running.of_rank[member->rank], member);
            n_running++;
            break;
        }
    }
    ck_assert_uint_eq(m.gathering.n, n_waiting);
    ck_assert_uint_eq(m.running.n, n_running);
    ck_assert(m.gathering.n > 0 || m.gathering.size == 0);
    ck_assert_int_eq(m.state == JOB_RUNNING, n_running > 0 && !m.has_failed);
}

static void step(unsigned i)
{
    struct member *member = &members[i];
    bool was_alive = m.running.n > 0 && !m.has_failed;
    switch (rand() % 6) {
    case 0:
    case 1:
    case 2:
        if (member->state == MEMBER_STALE)
            membership_remove(&m, member);
        if (member->state == MEMBER_NONE) {
            uint32_t size = rand() % 8 ? 2 : 3;
            join(i, (uint32_t)rand() % size, size);
        }
        break;
    case 3:
        membership_remove(&m, member);
        break;
    case 4:
        if (rand() % 4 == 0)
            membership_fail(&m, "lost");
        break;
    case 5:
        if (rand() % 8 == 0)
            membership_dismiss(&m);
        break;
    }
    if (membership_is_ready(&m)) {
        ck_assert(!was_alive || m.running.n == 0 || m.has_failed);
        begin_next();
    }
}

START_TEST(random_histories_keep_the_invariant)
{
    const char *given = getenv("GRADD_TEST_SEED");
    unsigned seed = given ? (unsigned)strtoul(given, NULL, 10) : (unsigned)time(NULL);
    printf("membership: GRADD_TEST_SEED=%u\n", seed);
    fflush(stdout);
    srand(seed);
    for (int i = 0; i < 200000; i++) {
        step((unsigned)rand() % 8);
        assert_whole();
    }
    ck_assert_uint_gt(m.epoch, 100);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        names_ranks_and_sizes_are_checked,
        an_epoch_begins_when_the_last_rank_joins,
        a_rank_that_waits_is_not_joined_twice,
        a_rank_that_runs_is_not_joined_twice,
        another_size_names_both_sides,
        the_next_epoch_waits_for_everybody_to_leave,
        whole_gathering_waits_while_an_old_rank_is_active,
        a_failed_epoch_holds_nobody_up,
        a_failure_is_kept_until_an_epoch_begins,
        who_stops_waiting_frees_the_slot_and_the_size,
        missing_ranks_are_told_as_ranges,
        a_long_list_of_missing_ranks_is_cut,
        ranks_of_other_nodes_are_told_by_their_node,
        a_rank_may_move_before_its_leave_from_another_node_is_known,
        ranks_of_one_gathering_name_one_coordinator,
        an_epochs_number_is_above_all_that_its_nodes_know,
        a_number_after_which_no_epoch_can_come_is_refused,
        a_nodes_part_of_an_epoch_begins_without_those_that_are_not_meant,
        random_histories_keep_the_invariant,
    };
    return run_suite_with("membership", tests, sizeof tests / sizeof *tests, setup, teardown, 30);
}
