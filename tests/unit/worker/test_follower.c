/* SPDX-License-Identifier: Apache-2.0 */
/* When a node's requests travel: together, where its ranks submit together; at once, where not. */
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../proto/run_suite.h"
#include "base/loop.h"
#include "worker/epoch.h"
#include "worker/follower.h"

enum { SIZE = 3, LOCAL = 2, OPS = 100, TURNS = 3 }; /* rank 0 is on the coordinator's node */

static struct epoch_setup setup;
static struct layout layout;
static struct epoch epoch;
static struct member members[LOCAL];
static struct request requests[OPS];
static int n_requests;
static int coordinator; /* the other end */

static void open_follower(void)
{
    int ends[2];
    setup.loop = loop_new();
    n_requests = 0;
    epoch = (struct epoch){.setup = &setup, .size = SIZE, .n_added = LOCAL, .layout = &layout};
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    epoch.follower = follower_new(&epoch);
    ck_assert_ptr_nonnull(epoch.follower);
    ck_assert_int_eq(follower_attach(epoch.follower, ends[0]), 0);
    coordinator = ends[1];
}

static void submit(int i)
{
    const struct signature signature = {
        .kind = GRADD_BARRIER, .prescale = 1, .postscale = 1, .root = -1};
    const char *text = "";
    members[i] = (struct member){.epoch = &epoch, .rank = 1 + (uint32_t)i};
    struct request *request = &requests[n_requests++];
    *request = (struct request){.member = &members[i]};
    ck_assert_int_eq(
        follower_submit(epoch.follower, &members[i], 0, "t", &signature, request, &text), 0);
    follower_flush(epoch.follower);
}

/* How many requests have come at the coordinator by now. */
static int n_arrived(void)
{
    struct wire_in in;
    struct wire_frame frame;
    int n = 0;
    wire_in_init(&in);
    wire_in_read(&in, coordinator);
    while (wire_in_next(&in, &frame) == 1) {
        ck_assert_int_eq(frame.envelope->body_case, PB__ENVELOPE__BODY_REMOTE_SUBMIT_BATCH);
        n += (int)frame.envelope->remote_submit_batch->n_submits;
    }
    wire_in_deinit(&in);
    return n;
}

static int turns_until_it_arrives(void)
{
    int turns = 0;
    while (n_arrived() == 0 && turns++ < TURNS)
        loop_step(setup.loop, false);
    return turns;
}

static void close_follower(void)
{
    follower_fail_all(epoch.follower, GRADD_ERR_SHUTDOWN, "");
    follower_free(epoch.follower);
    loop_free(setup.loop);
    close(coordinator);
}

START_TEST(ranks_that_submit_in_one_turn_share_a_message)
{
    open_follower();
    submit(0);
    ck_assert_int_eq(n_arrived(), 0);
    submit(1);
    ck_assert_int_eq(n_arrived(), 2);
    close_follower();
}
END_TEST

START_TEST(a_rank_that_submits_alone_waits_for_nobody)
{
    open_follower();
    for (int i = 0; i < OPS; i++) {
        submit(0);
        ck_assert_int_lt(turns_until_it_arrives(), TURNS);
    }
    close_follower();
}
END_TEST

/* Nobody else is there to be waited for. */
START_TEST(the_last_rank_of_a_node_is_sent_at_once)
{
    open_follower();
    epoch.n_gone = 1;
    submit(0);
    ck_assert_int_eq(n_arrived(), 1);
    close_follower();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        ranks_that_submit_in_one_turn_share_a_message,
        a_rank_that_submits_alone_waits_for_nobody,
        the_last_rank_of_a_node_is_sent_at_once,
    };
    return run_suite("follower", tests, sizeof tests / sizeof *tests);
}
