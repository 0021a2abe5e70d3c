/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The node that coordinates, alone, with a job of many ranks: this test plays the other node, which
 * all ranks but rank 0 are on, and rank 0's trainer. What runs here as one batch is what the other
 * node is told as one, and no batch outgrows a frame.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../proto/run_suite.h"
#include "worker/coordinator.h"
#include "worker/epoch.h"
#include "worker/mesh.h"

enum {
    BATCH_OPS_MAX = 256, /* as epoch_order.c has it */
    RANKS = 800,         /* 256 ops of so many ranks are more than a frame takes */
    OPS_MAX = 300,
    BATCHES_MAX = 16,
    TIMEOUT_S = 100,
};

struct batches {
    size_t n_ops[BATCHES_MAX];
    size_t n, n_ops_in_all;
};

static uint32_t n_ranks;
static struct loop *loop;
static struct chores *chores;
static struct region_quota quota;
static struct epoch_setup setup;
static struct epoch *epoch;
static int trainer, node; /* the other ends of rank 0's connection, and of the negotiation */
static struct wire_in trainer_in, node_in;
static uint64_t last_request;
static struct batches run_here, told; /* told: to the other node */
static size_t n_done, n_failed;       /* of rank 0's ops */
static size_t n_refused;              /* requests of the other node */
static char refusal[1024];

/* ------------------------------------------------------------------ doubles */

static void note_batch(struct batches *batches, size_t n_ops)
{
    ck_assert_msg(batches->n < BATCHES_MAX, "more than %d batches", BATCHES_MAX);
    batches->n_ops[batches->n++] = n_ops;
    batches->n_ops_in_all += n_ops;
}

/* Every batch ends at once, and well. */
static void run_batch(struct backend *backend, struct backend_batch *batch)
{
    (void)backend;
    note_batch(&run_here, batch->n_ops);
    for (size_t i = 0; i < batch->n_ops; i++)
        batch->ops[i]->status = GRADD_OK;
    batch->done(batch->data, batch);
}

static const struct backend_ops backend_double = {.name = "double", .run = run_batch};

static void on_link_lost(void *data, uint64_t number, uint32_t peer, const char *text)
{
    (void)data, (void)number;
    ck_abort_msg("the link to node %u is lost: %s", peer, text);
}

static void on_failed(void *data, uint64_t number, int status, const char *text)
{
    (void)data, (void)number;
    ck_abort_msg("the epoch has failed (%d): %s", status, text);
}

static void on_stall(void *data, uint64_t number, uint32_t n_stalled, const char *text)
{
    (void)data, (void)number, (void)n_stalled, (void)text;
}

static void on_over(void *data)
{
    (void)data;
}

/* ------------------------------------------------------------------ the scene */

static struct layout *make_layout(void)
{
    struct layout *layout = layout_alloc(1, 2, n_ranks);
    ck_assert_ptr_nonnull(layout);
    layout->ring_streams = 1;
    for (uint32_t rank = 1; rank < n_ranks; rank++)
        layout->node_of[rank] = 1;
    for (uint32_t i = 0; i < 2; i++)
        layout->nodes[i] = (struct layout_node){.name = "n", .address = "127.0.0.1", .port = 1};
    return layout;
}

/* Returns the worker's end. */
static int open_ends(int *out_other)
{
    int ends[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    *out_other = ends[1];
    return ends[0];
}

static void open_job(uint32_t size)
{
    n_ranks = size;
    loop = loop_new();
    chores = chores_new(loop);
    quota.limit_bytes = UINT64_MAX;
    last_request = n_done = n_failed = n_refused = 0;
    run_here = told = (struct batches){.n = 0};
    setup = (struct epoch_setup){
        .loop = loop,
        .chores = chores,
        .quota = &quota,
        .job = "t",
        .node = "n",
        .max_in_flight = OPS_MAX,
        .peer_dead_ns = UINT64_C(10000000000),
        .fusion_bytes = UINT64_MAX,
        .on_link_lost = on_link_lost,
        .on_failed = on_failed,
        .on_stall = on_stall,
        .on_over = on_over,
    };
    epoch = epoch_new(&setup, 1, n_ranks, 1, make_layout());
    ck_assert_ptr_nonnull(epoch);
    mesh_free(epoch->mesh); /* its connections are made here */
    epoch->mesh = NULL;
    const struct epoch_member who = {.rank = 0, .source = "test"};
    ck_assert_int_eq(epoch_add_member(epoch, &who, open_ends(&trainer)), 0);
    member_start(&epoch->members[epoch->n_members - 1]);
    ck_assert_int_eq(coordinator_attach(epoch->coordinator, 1, open_ends(&node)), 0);
    exec_set_backend(epoch->exec, &backend_double, (struct backend *)&run_here,
                     epoch->layout->node_of);
    wire_in_init(&trainer_in);
    wire_in_init(&node_in);
}

static void close_job(void)
{
    epoch_retire(epoch);
    ck_assert(epoch_is_idle(epoch));
    epoch_free(epoch);
    chores_free(chores);
    loop_free(loop);
    wire_in_deinit(&trainer_in);
    wire_in_deinit(&node_in);
    close(trainer);
    close(node);
}

static void take_completions(const Pb__CompletionBatch *batch)
{
    for (size_t i = 0; i < batch->n_completions; i++)
        *(batch->completions[i]->code == 0 ? &n_done : &n_failed) += 1;
}

static void take_from_coordinator(const Pb__Envelope *envelope)
{
    if (envelope->body_case == PB__ENVELOPE__BODY_EXECUTE_BATCH) {
        ck_assert_uint_eq(envelope->execute_batch->seq, told.n + 1);
        note_batch(&told, envelope->execute_batch->n_ops);
    } else {
        ck_assert_int_eq(envelope->body_case, PB__ENVELOPE__BODY_REMOTE_FAILURE);
        n_refused += envelope->remote_failure->n_requests;
        snprintf(refusal, sizeof refusal, "%s", envelope->remote_failure->text);
    }
}

static void turn(void)
{
    struct wire_frame frame;
    int rc;
    loop_step(loop, false);
    ck_assert_int_eq(wire_in_read(&trainer_in, trainer), 0);
    while ((rc = wire_in_next(&trainer_in, &frame)) == 1)
        if (frame.envelope->body_case == PB__ENVELOPE__BODY_COMPLETION_BATCH)
            take_completions(frame.envelope->completion_batch);
    ck_assert_int_eq(rc, 0);
    ck_assert_int_eq(wire_in_read(&node_in, node), 0);
    while ((rc = wire_in_next(&node_in, &frame)) == 1)
        take_from_coordinator(frame.envelope);
    ck_assert_msg(rc == 0, "the coordinator sent %s", node_in.error);
}

/* Rank 0's ops have ended, and the other node has heard of all its requests. */
static void turn_until(size_t n_ends, size_t n_heard)
{
    while (n_done + n_failed < n_ends || told.n_ops_in_all + n_refused / (n_ranks - 1) < n_heard)
        turn();
}

static void send_to_worker(int fd, Pb__Envelope__BodyCase body_case, void *body)
{
    struct wire_out out;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.submit_batch = body; /* the members of the union are all pointers */
    wire_out_init(&out, 4 * WIRE_FRAME_MAX);
    ck_assert_int_eq(wire_out_push(&out, &envelope, NULL, 0), 0);
    while (wire_out_flush(&out, fd) == 1)
        turn();
    wire_out_deinit(&out);
}

/* ------------------------------------------------------------------ ops */

struct op {
    enum gradd_kind kind;
    char name[32], group[32];
    uint32_t group_size;
    uint64_t *counts; /* all-to-all */
};

/* Barriers, in groups of so many; 0: none is in a group. */
static void make_barriers(struct op *ops, size_t n, uint32_t group_size)
{
    for (size_t i = 0; i < n; i++) {
        ops[i] = (struct op){.kind = GRADD_BARRIER, .group_size = group_size};
        snprintf(ops[i].name, sizeof ops[i].name, "op%03zu", i);
        if (group_size)
            snprintf(ops[i].group, sizeof ops[i].group, "group%zu", i / group_size);
    }
}

/* A frame takes only so many of an all-to-all. */
enum { FRAME_RANKS = 400 };

static void submit_on_node(const struct op *op, uint32_t first_rank)
{
    static Pb__RemoteSubmit submits[FRAME_RANKS];
    static Pb__RemoteSubmit *pointers[FRAME_RANKS];
    Pb__RemoteSubmitBatch batch = PB__REMOTE_SUBMIT_BATCH__INIT;
    for (uint32_t rank = first_rank; rank < n_ranks && batch.n_submits < FRAME_RANKS; rank++) {
        Pb__RemoteSubmit *submit = &submits[batch.n_submits];
        *submit = (Pb__RemoteSubmit)PB__REMOTE_SUBMIT__INIT;
        submit->rank = rank;
        submit->request = ++last_request;
        submit->name = (char *)op->name;
        submit->kind = op->kind;
        submit->group = (char *)op->group;
        submit->group_size = op->group_size;
        submit->counts = op->counts;
        submit->n_counts = op->counts ? n_ranks : 0;
        pointers[batch.n_submits++] = submit;
    }
    batch.submits = pointers;
    send_to_worker(node, PB__ENVELOPE__BODY_REMOTE_SUBMIT_BATCH, &batch);
}

/* Rank 0 submits all of them at once. */
static void submit_on_rank_0(struct op *ops, size_t n)
{
    static uint64_t last_id;
    static Pb__Submit submits[OPS_MAX];
    static Pb__Submit *pointers[OPS_MAX];
    Pb__SubmitBatch batch = PB__SUBMIT_BATCH__INIT;
    for (size_t i = 0; i < n; i++) {
        submits[i] = (Pb__Submit)PB__SUBMIT__INIT;
        submits[i].id = ++last_id;
        submits[i].name = ops[i].name;
        submits[i].kind = ops[i].kind;
        submits[i].group = ops[i].group;
        submits[i].group_size = ops[i].group_size;
        submits[i].counts = ops[i].counts;
        submits[i].n_counts = ops[i].counts ? n_ranks : 0;
        pointers[i] = &submits[i];
    }
    batch.epoch = 1;
    batch.submits = pointers;
    batch.n_submits = n;
    send_to_worker(trainer, PB__ENVELOPE__BODY_SUBMIT_BATCH, &batch);
}

/* The other ranks are ready for all of the ops, so that rank 0 makes them ready at once. */
static void submit_everywhere(struct op *ops, size_t n)
{
    const struct member *last = epoch_remote_member(epoch, n_ranks - 1, 1);
    for (size_t i = 0; i < n; i++)
        for (uint32_t rank = 1; rank < n_ranks; rank += FRAME_RANKS)
            submit_on_node(&ops[i], rank);
    while (last->stats.in_flight < n)
        turn();
    submit_on_rank_0(ops, n);
}

static void expect_told_as_run(size_t n_ops)
{
    ck_assert_uint_eq(n_failed, 0);
    ck_assert_uint_eq(told.n_ops_in_all, n_ops);
    ck_assert_uint_eq(told.n, run_here.n);
    for (size_t i = 0; i < told.n; i++)
        ck_assert_uint_eq(told.n_ops[i], run_here.n_ops[i]);
}

/* ------------------------------------------------------------------ tests */

START_TEST(a_batch_is_cut_before_it_outgrows_a_frame)
{
    static struct op ops[BATCH_OPS_MAX];
    open_job(RANKS);
    make_barriers(ops, BATCH_OPS_MAX, 0);
    submit_everywhere(ops, BATCH_OPS_MAX);
    turn_until(BATCH_OPS_MAX, BATCH_OPS_MAX);
    expect_told_as_run(BATCH_OPS_MAX);
    ck_assert_uint_eq(told.n, 2);
    ck_assert_uint_gt(told.n_ops[0], BATCH_OPS_MAX / 2); /* as much as there is room for */
    close_job();
}
END_TEST

START_TEST(a_group_is_not_cut_where_it_fits_into_the_next_batch)
{
    static struct op ops[OPS_MAX];
    open_job(RANKS);
    make_barriers(ops, OPS_MAX, OPS_MAX / 3);
    submit_everywhere(ops, OPS_MAX);
    turn_until(OPS_MAX, OPS_MAX);
    expect_told_as_run(OPS_MAX);
    ck_assert_uint_eq(told.n, 2);
    ck_assert_uint_eq(told.n_ops[0], OPS_MAX / 3 * 2);
    close_job();
}
END_TEST

START_TEST(a_group_that_no_frame_takes_runs_in_parts)
{
    static struct op ops[OPS_MAX];
    open_job(RANKS);
    make_barriers(ops, OPS_MAX, OPS_MAX);
    submit_everywhere(ops, OPS_MAX);
    turn_until(OPS_MAX, OPS_MAX);
    expect_told_as_run(OPS_MAX);
    ck_assert_uint_eq(told.n, 2);
    close_job();
}
END_TEST

/* It has a count for each pair of ranks. */
START_TEST(an_all_to_all_that_no_frame_takes_is_refused_and_nothing_else)
{
    static const struct {
        uint32_t n_ranks;
        bool fits;
    } cases[] = {{1000, true}, {1100, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct op op = {.kind = GRADD_ALLTOALL, .name = "shuffle"}, barrier;
        op.counts = calloc(cases[i].n_ranks, sizeof *op.counts);
        ck_assert_ptr_nonnull(op.counts);
        open_job(cases[i].n_ranks);
        submit_everywhere(&op, 1);
        turn_until(1, 1);
        ck_assert_uint_eq(n_done, cases[i].fits);
        ck_assert_uint_eq(n_refused, cases[i].fits ? 0 : n_ranks - 1);
        if (!cases[i].fits) {
            ck_assert_msg(strstr(refusal, "\"shuffle\"") && strstr(refusal, "of 1100 ranks"),
                          "the refusal is: %s", refusal);
        }
        make_barriers(&barrier, 1, 0);
        submit_everywhere(&barrier, 1);
        turn_until(2, 2);
        ck_assert_uint_eq(n_failed, !cases[i].fits);
        close_job();
        free(op.counts);
    }
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        a_batch_is_cut_before_it_outgrows_a_frame,
        a_group_is_not_cut_where_it_fits_into_the_next_batch,
        a_group_that_no_frame_takes_runs_in_parts,
        an_all_to_all_that_no_frame_takes_is_refused_and_nothing_else,
    };
    return run_suite_with("coordinator", tests, sizeof tests / sizeof *tests, NULL, NULL,
                          TIMEOUT_S);
}
