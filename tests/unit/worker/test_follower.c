/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node that follows, alone: when its requests travel (together, where its ranks submit together;
 * at once, where not), and what it does not take from a coordinator, which this test plays.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../proto/run_suite.h"
#include "base/loop.h"
#include "worker/epoch.h"
#include "worker/exec.h"
#include "worker/follower.h"

enum { SIZE = 3, LOCAL = 2, OPS = 100, TURNS = 3 }; /* rank 0 is on the coordinator's node */

static struct epoch_setup setup;
static uint32_t node_of[SIZE] = {0, 1, 1};
static struct layout layout = {.node_rank = 1, .n_nodes = 2, .size = SIZE, .node_of = node_of};
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

/* ------------------------------------------------------------------ lies */

/* Nothing runs: what is not refused stays with the follower. */
static void open_follower_that_waits(void)
{
    static const struct exec_source source;
    static const struct exec_ops ops;
    open_follower();
    epoch.exec = exec_new(&source, &ops, NULL);
    ck_assert_ptr_nonnull(epoch.exec);
    epoch.is_retired = true; /* nobody asks for the link */
}

static void close_follower_that_waits(void)
{
    close_follower();
    exec_free(epoch.exec);
}

/* Rank 1 submits. */
static struct request *submit_as(const struct signature *signature, struct backend_part part,
                                 uint64_t bytes)
{
    const char *text = "";
    struct request *request = &requests[n_requests++];
    members[0] = (struct member){.epoch = &epoch, .rank = 1};
    *request = (struct request){.member = &members[0], .part = part, .bytes = bytes};
    ck_assert_int_eq(
        follower_submit(epoch.follower, &members[0], 0, "t", signature, request, &text), 0);
    return request;
}

/* The coordinator says so; true: the follower has hung up. */
static bool is_refused(Pb__Envelope__BodyCase body_case, void *body)
{
    struct wire_out out;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    uint8_t rest[4096];
    ssize_t n;
    envelope.body_case = body_case;
    envelope.execute_batch = body;
    wire_out_init(&out, WIRE_FRAME_MAX);
    ck_assert_int_eq(wire_out_push(&out, &envelope, NULL, 0), 0);
    ck_assert_int_eq(wire_out_flush(&out, coordinator), 0);
    wire_out_deinit(&out);
    for (int i = 0; i < TURNS; i++)
        loop_step(setup.loop, false);
    while ((n = recv(coordinator, rest, sizeof rest, MSG_DONTWAIT)) > 0)
        ;
    return n == 0;
}

/* Rank 1's request runs with nothing of the others. */
static bool runs_as(Pb__Execute *op, Pb__ExecutePart *parts, struct request *request)
{
    Pb__ExecutePart *pointers[SIZE] = {&parts[0], &parts[1], &parts[2]};
    Pb__ExecuteBatch batch = PB__EXECUTE_BATCH__INIT;
    parts[1].request = request->remote_id;
    op->parts = pointers;
    op->n_parts = SIZE;
    batch.seq = 1;
    batch.ops = &op;
    batch.n_ops = 1;
    return !is_refused(PB__ENVELOPE__BODY_EXECUTE_BATCH, &batch);
}

START_TEST(an_empty_name_fails_its_op_and_nothing_else)
{
    const struct signature signature = {.kind = GRADD_BARRIER, .root = -1};
    const char *text = "";
    struct member member = {.epoch = &epoch, .rank = 1};
    struct request request = {.member = &member};
    open_follower();
    ck_assert_int_eq(follower_submit(epoch.follower, &member, 0, "", &signature, &request, &text),
                     GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "1 to 255 bytes"));
    ck_assert_int_eq(n_arrived(), 0);
    close_follower();
}
END_TEST

/* The output of a reduce-scatter is smaller than its input. */
START_TEST(a_result_is_taken_for_an_all_reduce_only)
{
    static const enum gradd_kind kinds[] = {GRADD_REDUCE_SCATTER, GRADD_ALLREDUCE};
    for (size_t i = 0; i < 2; i++) {
        const uint64_t counts[SIZE] = {2, 2, 2};
        const float sums[6] = {1, 2, 3, 4, 5, 6};
        float in[6] = {0}, *out = calloc(kinds[i] == GRADD_ALLREDUCE ? 6 : 2, sizeof *out);
        const struct signature signature = {.kind = kinds[i],
                                            .dtype = GRADD_F32,
                                            .count = 6,
                                            .counts = counts,
                                            .n_counts = SIZE,
                                            .group = ""};
        const struct backend_part part = {.in.base = (uint8_t *)in, .out.base = (uint8_t *)out};
        Pb__RemoteResult result = PB__REMOTE_RESULT__INIT;
        open_follower_that_waits();
        result.request = submit_as(&signature, part, sizeof in)->remote_id;
        result.rank = 1;
        result.data = (ProtobufCBinaryData){sizeof sums, (uint8_t *)sums};
        const bool is_right = kinds[i] == GRADD_ALLREDUCE;
        ck_assert(is_refused(PB__ENVELOPE__BODY_REMOTE_RESULT, &result) == !is_right);
        ck_assert_uint_eq(members[0].stats.ops_done, is_right);
        ck_assert_uint_eq(members[0].stats.ops_failed, !is_right);
        ck_assert(out[1] == (is_right ? 2 : 0));
        close_follower_that_waits();
        free(out);
    }
}
END_TEST

START_TEST(an_all_to_all_gives_what_the_rank_has_said)
{
    struct {
        uint64_t n_counts, counts[SIZE], said[SIZE];
        bool is_right;
    } cases[] = {
        {SIZE, {1, 2, 3}, {1, 2, 3}, true},
        {SIZE, {1, 2, 3}, {3, 2, 1}, false},
        {2, {2, 4}, {2, 4, 0}, false}, /* of a smaller set */
        {SIZE, {1, 2, 4}, {1, 2, 4}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t none[SIZE] = {0}, *counts = malloc(cases[i].n_counts * sizeof *counts);
        memcpy(counts, cases[i].counts, cases[i].n_counts * sizeof *counts);
        const struct signature signature = {.kind = GRADD_ALLTOALL,
                                            .dtype = GRADD_F32,
                                            .count = 6,
                                            .out_capacity = 6,
                                            .counts = counts,
                                            .n_counts = cases[i].n_counts,
                                            .group = ""};
        const struct backend_part part = {.counts = counts};
        Pb__ExecutePart parts[SIZE];
        Pb__Execute op = PB__EXECUTE__INIT;
        open_follower_that_waits();
        struct request *request = submit_as(&signature, part, 6 * sizeof(float));
        for (int k = 0; k < SIZE; k++) {
            parts[k] = (Pb__ExecutePart)PB__EXECUTE_PART__INIT;
            parts[k].counts = k == 1 ? cases[i].said : none;
            parts[k].n_counts = SIZE;
        }
        parts[1].count = 6;
        op.kind = GRADD_ALLTOALL;
        op.dtype = GRADD_F32;
        op.count = 6;
        ck_assert(runs_as(&op, parts, request) == cases[i].is_right);
        ck_assert_uint_eq(members[0].stats.ops_failed, !cases[i].is_right);
        close_follower_that_waits();
        free(counts);
    }
}
END_TEST

/* The addresses of device memory mean something else on the host. */
START_TEST(device_memory_runs_as_such)
{
    for (int is_device = 0; is_device < 2; is_device++) {
        const struct signature signature = {.kind = GRADD_ALLREDUCE,
                                            .dtype = GRADD_F32,
                                            .count = 6,
                                            .is_device = true,
                                            .group = ""};
        Pb__ExecutePart parts[SIZE];
        Pb__Execute op = PB__EXECUTE__INIT;
        open_follower_that_waits();
        struct request *request = submit_as(&signature, (struct backend_part){0}, 24);
        for (int k = 0; k < SIZE; k++)
            parts[k] = (Pb__ExecutePart)PB__EXECUTE_PART__INIT;
        op.kind = GRADD_ALLREDUCE;
        op.dtype = GRADD_F32;
        op.count = 6;
        op.is_device = is_device;
        ck_assert(runs_as(&op, parts, request) == is_device);
        close_follower_that_waits();
    }
}
END_TEST

START_TEST(a_refusal_that_is_none_ends_no_op_well)
{
    static const uint32_t codes[] = {0, 0x80000000, 0xffffffff};
    const struct signature signature = {.kind = GRADD_BARRIER, .group = ""};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        uint32_t rank = 1;
        Pb__RemoteFailure failure = PB__REMOTE_FAILURE__INIT;
        open_follower_that_waits();
        struct request *request = submit_as(&signature, (struct backend_part){0}, 0);
        failure.requests = &request->remote_id;
        failure.ranks = &rank;
        failure.n_requests = failure.n_ranks = 1;
        failure.code = codes[i];
        ck_assert(is_refused(PB__ENVELOPE__BODY_REMOTE_FAILURE, &failure));
        ck_assert_uint_eq(members[0].stats.ops_done, 0);
        close_follower_that_waits();
    }
}
END_TEST

/* ------------------------------------------------------------------ together */

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
        an_empty_name_fails_its_op_and_nothing_else,
        a_result_is_taken_for_an_all_reduce_only,
        an_all_to_all_gives_what_the_rank_has_said,
        device_memory_runs_as_such,
        a_refusal_that_is_none_ends_no_op_well,
    };
    return run_suite("follower", tests, sizeof tests / sizeof *tests);
}
