/* SPDX-License-Identifier: Apache-2.0 */
/* What the fake NCCL computes, and how it fails when it is told to. */
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "fake_nccl.h"

enum { N = 70000 }; /* more than a slot of the shared memory holds */

/* ---- Results ---- */

static void reduce_everything(struct rank *self)
{
    const int n_ranks = self->n_ranks;
    const float first = (float)self->rank + 1;
    float sum = 0, product = 1;

    rank_join(self, 1);
    float *in = floats_new(N, first, 0), *out = floats_new(N, 0, 0);
    for (int i = 1; i <= n_ranks; i++) {
        sum += (float)i;
        product *= (float)i;
    }
    const float expected[] = {sum, product, (float)n_ranks, 1, sum / (float)n_ranks};
    for (int op = ncclSum; op <= ncclAvg; op++) {
        NOK(nccl->all_reduce(in, out, N, ncclFloat32, op, self->comm, self->stream));
        const float *got = floats_of(self, out, N);
        HOLDS(got[0] == expected[op] && got[N / 2] == expected[op] && got[N - 1] == expected[op]);
    }
    /* Only the root has the result, in place. */
    NOK(nccl->reduce(in, in, N, ncclFloat32, ncclSum, 1 % n_ranks, self->comm, self->stream));
    const float left = self->rank == 1 % n_ranks ? sum : first;
    HOLDS(floats_of(self, in, N)[N - 1] == left);
    NOK(nccl->comm_destroy(self->comm));
}

START_TEST(reductions_have_the_sum_product_max_min_and_mean)
{
    ranks_succeed(_i, reduce_everything);
}
END_TEST

static void move_everything(struct rank *self)
{
    const int n = self->n_ranks, rank = self->rank;

    rank_join(self, 1);
    float *all = floats_new((size_t)n * N, -1, 0), *one = floats_new(N, (float)rank, 0);
    NOK(nccl->all_gather(one, all, N, ncclFloat32, self->comm, self->stream));
    const float *got = floats_of(self, all, (size_t)n * N);
    for (int i = 0; i < n; i++)
        HOLDS(got[i * N] == (float)i && got[i * N + N - 1] == (float)i);

    /* In place: a rank's share of the sum comes where its own part was. */
    NOK(nccl->reduce_scatter(all, all + rank * N, N, ncclFloat32, ncclSum, self->comm,
                             self->stream));
    got = floats_of(self, all, (size_t)n * N);
    HOLDS(got[rank * N] == (float)(n * rank) && got[rank * N + N - 1] == (float)(n * rank));

    NOK(nccl->broadcast(one, one, N, ncclFloat32, n - 1, self->comm, self->stream));
    HOLDS(floats_of(self, one, N)[N - 1] == (float)(n - 1));

    float *from = floats_new((size_t)n * N, (float)(1000 * rank), 0),
          *to = floats_new((size_t)n * N, 0, 0);
    for (int i = 0; i < n; i++) /* part i is for rank i */
        ((float *)cu.view(from, 4))[i * N + N - 1] = (float)(1000 * rank + i);
    if (nccl->all_to_all) {
        NOK(nccl->all_to_all(from, to, N, ncclFloat32, self->comm, self->stream));
        got = floats_of(self, to, (size_t)n * N);
        for (int i = 0; i < n; i++)
            HOLDS(got[i * N] == (float)(1000 * i) &&
                  got[i * N + N - 1] == (float)(1000 * i + rank));
    }
    NOK(nccl->group_start());
    for (int i = 0; i < n; i++) {
        NOK(nccl->send(from + i * N, N, ncclFloat32, i, self->comm, self->stream));
        NOK(nccl->recv(to + ((i + 1) % n) * N, N, ncclFloat32, (i + 1) % n, self->comm,
                       self->stream));
    }
    NOK(nccl->group_end());
    got = floats_of(self, to, (size_t)n * N);
    for (int i = 0; i < n; i++)
        HOLDS(got[i * N] == (float)(1000 * i) && got[i * N + N - 1] == (float)(1000 * i + rank));
    NOK(nccl->comm_destroy(self->comm));
}

START_TEST(data_comes_where_it_belongs)
{
    ranks_succeed(_i, move_everything);
}
END_TEST

static void multiply_before(struct rank *self)
{
    float factor = 0.5f;
    double wide = 0.5;
    ncclRedOp_t op;

    rank_join(self, 1);
    float *p = floats_new(100, (float)(2 * self->rank), 0);
    NOK(nccl->premul_sum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, self->comm));
    factor = 100; /* it was read */
    NOK(nccl->all_reduce(p, p, 100, ncclFloat32, op, self->comm, self->stream));
    NOK(nccl->redop_destroy(op, self->comm)); /* while it may still run */
    HOLDS(floats_of(self, p, 100)[99] == 1);
    NGIVES(ncclInvalidArgument, nccl->redop_destroy(ncclSum, self->comm));
    NOK(nccl->premul_sum(&op, &wide, ncclFloat64, ncclScalarHostImmediate, self->comm));
    NGIVES(ncclInvalidArgument,
           nccl->all_reduce(p, p, 100, ncclFloat32, op, self->comm, self->stream));
    NOK(nccl->comm_destroy(self->comm));
}

START_TEST(operators_with_a_factor_may_be_destroyed_when_their_last_call_returned)
{
    ranks_succeed(2, multiply_before);
}
END_TEST

/* Two ranks in one process, by one thread. */
static void two_devices(struct rank *self)
{
    ncclComm_t comms[2];
    CUstream streams[2];
    float *p[2];
    ncclConfig_t config = config_of(0);
    CUcontext contexts[2];

    driver_load();
    OK(cu.cuInit(0));
    nccl = nccl_table_open(NULL);
    NOK(nccl->group_start());
    for (int i = 0; i < 2; i++) {
        OK(cu.cuDevicePrimaryCtxRetain(&contexts[i], i));
        OK(cu.cuCtxSetCurrent(contexts[i]));
        OK(cu.cuStreamCreateWithPriority(&streams[i], CU_STREAM_NON_BLOCKING, 0));
        p[i] = floats_new(N, (float)(i + 1), 0);
        NOK(nccl->comm_init(&comms[i], 2, self->id, i, &config));
    }
    NGIVES(ncclInProgress, nccl->group_end());
    NOK(rank_poll(comms[0]));
    NOK(rank_poll(comms[1]));
    for (int round = 0; round < 3; round++) {
        NOK(nccl->group_start());
        for (int i = 0; i < 2; i++)
            NOK(nccl->all_reduce(p[i], p[i], N, ncclFloat32, ncclSum, comms[i], streams[i]));
        /* The first launch connects. */
        NGIVES(round == 0 ? ncclInProgress : ncclSuccess, nccl->group_end());
        NOK(rank_poll(comms[0]));
        NOK(rank_poll(comms[1]));
    }
    for (int i = 0; i < 2; i++) {
        OK(cu.cuCtxSetCurrent(contexts[i]));
        self->stream = streams[i];
        HOLDS(floats_of(self, p[i], N)[N - 1] == 12);
        NOK(nccl->comm_abort(comms[i]));
    }
}

START_TEST(one_thread_launches_for_two_devices_in_a_group)
{
    ranks_succeed(1, two_devices);
}
END_TEST

/* ---- Refusals ---- */

static void duplicate_gpu(struct rank *self)
{
    ncclConfig_t config = config_of(0);

    rank_open(self, 0);
    NGIVES(ncclInProgress,
           nccl->comm_init(&self->comm, self->n_ranks, self->id, self->rank, &config));
    NGIVES(ncclInvalidUsage, rank_poll(self->comm));
    HOLDS(strstr(nccl->last_error(NULL), "Duplicate GPU detected : rank ") != NULL);
    NOK(nccl->comm_abort(self->comm));
}

START_TEST(two_ranks_on_one_gpu_are_refused)
{
    ranks_succeed(2, duplicate_gpu);
}
END_TEST

static void same_gpu_elsewhere(struct rank *self)
{
    rank_open(self, 0);
    NOK(nccl->comm_init(&self->comm, self->n_ranks, self->id, self->rank, NULL));
    float *p = floats_new(10, 1, 0);
    NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    HOLDS(floats_of(self, p, 10)[9] == 2);
    NOK(nccl->comm_destroy(self->comm));
}

START_TEST(two_host_ids_make_two_gpus_of_one)
{
    ranks_set(0, "NCCL_HOSTID", "a");
    ranks_set(1, "NCCL_HOSTID", "b");
    ranks_succeed(2, same_gpu_elsewhere);
}
END_TEST

static void wrong_arguments(struct rank *self)
{
    ncclConfig_t config = config_of(1);
    ncclUniqueId id = {{0}};

    rank_open(self, 0);
    config.magic = 0;
    NGIVES(ncclInvalidArgument, nccl->comm_init(&self->comm, 1, self->id, 0, &config));
    config = config_of(1);
    config.size = 16;
    NGIVES(ncclInvalidArgument, nccl->comm_init(&self->comm, 1, self->id, 0, &config));
    config = config_of(1);
    config.maxCTAs = 0;
    NGIVES(ncclInvalidArgument, nccl->comm_init(&self->comm, 1, self->id, 0, &config));
    config = config_of(1);
    NGIVES(ncclInvalidArgument, nccl->comm_init(&self->comm, 2, self->id, 2, &config));
    NOK(nccl->comm_init(&self->comm, 1, self->id, 0, &config));
    float *p = floats_new(10, 1, 0);
    NGIVES(ncclInvalidArgument, nccl->all_reduce(p, p, 10, 5, ncclSum, self->comm, self->stream));
    NGIVES(ncclInvalidArgument,
           nccl->broadcast(p, p, 10, ncclFloat32, 1, self->comm, self->stream));
    NGIVES(ncclInvalidArgument,
           nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, NULL, self->stream));
    /* A group with such a call launches nothing. */
    NOK(nccl->group_start());
    NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    NGIVES(ncclInvalidArgument, nccl->all_reduce(p, p, 10, 5, ncclSum, self->comm, self->stream));
    NGIVES(ncclInvalidArgument, nccl->group_end());
    NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    HOLDS(floats_of(self, p, 10)[0] == 1);
    NOK(nccl->comm_destroy(self->comm));
    NGIVES(ncclSystemError, nccl->comm_init(&self->comm, 1, id, 0, &config));
}

START_TEST(wrong_arguments_are_errors_that_leave_the_communicator_usable)
{
    ranks_succeed(1, wrong_arguments);
}
END_TEST

/* ---- Failures on demand ---- */

static void fail_third_call(struct rank *self)
{
    rank_join(self, 1);
    float *p = floats_new(10, 1, 0);
    for (int i = 0; i < 2; i++)
        NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    NGIVES(ncclInternalError,
           nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    HOLDS(strstr(nccl->last_error(NULL), "injected") != NULL);
    NOK(nccl->comm_abort(self->comm));
}

START_TEST(a_call_fails_when_it_shall)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_FAIL", "ncclBroadcast:1:2,ncclAllReduce:3:3");
    ranks_succeed(1, fail_third_call);
}
END_TEST

static void hang_until_abort(struct rank *self)
{
    ncclResult_t state;

    rank_join(self, 1);
    float *p = floats_new(10, 1, 0);
    NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    HOLDS(floats_of(self, p, 10)[0] == 2);
    NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    NOK(nccl->comm_async_error(self->comm, &state));
    HOLDS(state == ncclSuccess); /* nobody is told */
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(self->stream));
    NOK(nccl->comm_abort(self->comm));
    HOLDS(floats_of(self, p, 10)[0] == 2);
}

START_TEST(an_operation_hangs_on_all_ranks_until_each_aborts)
{
    ranks_set(1, "GRADD_FAKE_NCCL_HANG_AT", "2");
    ranks_succeed(2, hang_until_abort);
}
END_TEST

static void async_error(struct rank *self)
{
    ncclResult_t state = ncclSuccess;

    rank_join(self, 1);
    float *p = floats_new(10, 1, 0);
    NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    while (state == ncclSuccess)
        NOK(nccl->comm_async_error(self->comm, &state));
    HOLDS(state == (self->rank == 0 ? ncclSystemError : ncclRemoteError));
    NOK(nccl->comm_abort(self->comm));
    OK(cu.cuStreamSynchronize(self->stream));
}

/* The second rank hears of the first one's abort, since it is on another machine. */
START_TEST(an_asynchronous_error_comes_up_and_an_abort_is_heard_on_other_machines)
{
    ranks_set(0, "GRADD_FAKE_NCCL_ASYNC", "1:2");
    ranks_set(0, "NCCL_HOSTID", "a");
    ranks_set(1, "NCCL_HOSTID", "b");
    ranks_succeed(2, async_error);
}
END_TEST

static void killed_peer(struct rank *self)
{
    ncclResult_t state = ncclSuccess;

    rank_join(self, 1);
    if (self->rank == 1)
        raise(SIGKILL);
    float *p = floats_new(10, 1, 0);
    NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    while (state == ncclSuccess)
        NOK(nccl->comm_async_error(self->comm, &state));
    NGIVES(ncclRemoteError, state);
    NOK(nccl->comm_abort(self->comm));
}

START_TEST(a_rank_that_was_killed_on_another_machine_is_an_error)
{
    ranks_set(0, "NCCL_HOSTID", "a");
    ranks_set(1, "NCCL_HOSTID", "b");
    struct outcomes outcomes = ranks_start(2, killed_peer);
    ranks_wait(&outcomes);
    ck_assert_msg(outcomes.ranks[0].status == 0, "%s", outcomes.text);
    ck_assert(WIFSIGNALED(outcomes.ranks[1].status));
}
END_TEST

static void init_that_hangs(struct rank *self)
{
    ncclConfig_t config = config_of(0);
    ncclResult_t state;

    rank_open(self, self->rank);
    NGIVES(ncclInProgress,
           nccl->comm_init(&self->comm, self->n_ranks, self->id, self->rank, &config));
    for (int i = 0; i < 20; i++) {
        NOK(nccl->comm_async_error(self->comm, &state));
        NGIVES(ncclInProgress, state);
        usleep(1000);
    }
    NOK(nccl->comm_abort(self->comm));
}

START_TEST(a_communicator_that_never_comes_up_can_be_aborted)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_INIT_HANGS", "1");
    ranks_succeed(1, init_that_hangs);
}
END_TEST

static void abort_that_hangs(struct rank *self)
{
    rank_join(self, 1);
    put(self->fd, "a", 1);
    nccl->comm_abort(self->comm);
    put(self->fd, "b", 1);
}

START_TEST(an_abort_does_not_return_when_it_shall_not)
{
    char byte;

    ranks_set(-1, "GRADD_FAKE_NCCL_ABORT_HANGS", "1");
    struct outcomes outcomes = ranks_start(1, abort_that_hangs);
    take(outcomes.ranks[0].fd, &byte, 1);
    ck_assert_int_eq(poll(&(struct pollfd){outcomes.ranks[0].fd, POLLIN, 0}, 1, 200), 0);
    kill(outcomes.ranks[0].pid, SIGKILL);
    ranks_wait(&outcomes);
}
END_TEST

static void revoke_comm(struct rank *self)
{
    rank_join(self, 1);
    float *p = floats_new(10, 1, 0);
    if (self->rank == 0)
        NOK(nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    NGIVES(ncclInvalidArgument, nccl->comm_revoke(self->comm, 1));
    NOK(nccl->comm_revoke(self->comm, 0));
    OK(cu.cuStreamSynchronize(self->stream));
    NOK(nccl->comm_destroy(self->comm));
}

START_TEST(revoking_stops_what_runs_and_leaves_the_rest_to_destroy)
{
    ranks_succeed(2, revoke_comm);
}
END_TEST

static void finalize(struct rank *self)
{
    rank_join(self, 0);
    float *p = floats_new(10, 1, 0);
    NGIVES(ncclInProgress,
           nccl->all_reduce(p, p, 10, ncclFloat32, ncclSum, self->comm, self->stream));
    NOK(rank_poll(self->comm));
    NGIVES(ncclInProgress, nccl->comm_finalize(self->comm));
    NOK(rank_poll(self->comm));
    /* All that was issued has run. */
    HOLDS(((const float *)cu.view(p, 4))[0] == 2);
    NOK(nccl->comm_destroy(self->comm));
}

START_TEST(finalizing_waits_for_what_was_issued)
{
    ranks_set(0, "GRADD_FAKE_CUDA_DELAY_US", "20000");
    ranks_succeed(2, finalize);
}
END_TEST

/* ---- Versions ---- */

static void look_at_version(struct rank *self)
{
    char text[400];

    rank_open(self, 0);
    nccl_table_describe_version(nccl, text, sizeof(text));
    HOLDS(strcmp(text, "2.28.9") == 0);
    nccl_table_describe_missing(nccl, text, sizeof(text));
    HOLDS(strcmp(text, "") == 0);
}

START_TEST(it_is_a_recent_version)
{
    ranks_succeed(1, look_at_version);
}
END_TEST

static void look_at_old_version(struct rank *self)
{
    char text[600];

    rank_open(self, 0);
    nccl_table_describe_version(nccl, text, sizeof(text));
    HOLDS(strcmp(text, "2.18.5") == 0);
    nccl_table_describe_missing(nccl, text, sizeof(text));
    HOLDS(strstr(text, "ncclCommRevoke") && strstr(text, "ncclAlltoAll"));
}

START_TEST(an_old_one_lacks_what_came_later)
{
    ranks_succeed(1, look_at_old_version);
}
END_TEST

static void look_at_too_old_version(struct rank *self)
{
    const char *why = "";

    driver_load();
    HOLDS(nccl_table_open(&why) == NULL);
    HOLDS(strcmp(why, "NCCL 2.17.1 is too old: 2.18 or later is needed") == 0);
}

START_TEST(one_that_is_too_old_is_refused)
{
    /* ncclGetUniqueId() of the test itself is not asked for its version. */
    ranks_set(0, "GRADD_FAKE_NCCL_VERSION", "21701");
    ranks_succeed(1, look_at_too_old_version);
}
END_TEST

static Suite *suite(bool is_old)
{
    const TTest *const tests[] = {
        operators_with_a_factor_may_be_destroyed_when_their_last_call_returned,
        one_thread_launches_for_two_devices_in_a_group,
        two_ranks_on_one_gpu_are_refused,
        two_host_ids_make_two_gpus_of_one,
        wrong_arguments_are_errors_that_leave_the_communicator_usable,
        a_call_fails_when_it_shall,
        an_operation_hangs_on_all_ranks_until_each_aborts,
        an_asynchronous_error_comes_up_and_an_abort_is_heard_on_other_machines,
        a_rank_that_was_killed_on_another_machine_is_an_error,
        a_communicator_that_never_comes_up_can_be_aborted,
        an_abort_does_not_return_when_it_shall_not,
        revoking_stops_what_runs_and_leaves_the_rest_to_destroy,
        finalizing_waits_for_what_was_issued,
        it_is_a_recent_version,
    };
    Suite *fakes = suite_create("fake_nccl");
    TCase *tcase = tcase_create("fake_nccl");
    tcase_add_loop_test(tcase, data_comes_where_it_belongs, 1, is_old ? 3 : RANKS_MAX + 1);
    if (is_old) {
        tcase_add_test(tcase, an_old_one_lacks_what_came_later);
        tcase_add_test(tcase, one_that_is_too_old_is_refused);
    } else {
        tcase_add_loop_test(tcase, reductions_have_the_sum_product_max_min_and_mean, 1,
                            RANKS_MAX + 1);
        for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
            tcase_add_test(tcase, tests[i]);
    }
    suite_add_tcase(fakes, tcase);
    return fakes;
}

/* "old": the library in LD_LIBRARY_PATH is the one of nccl_2_18. */
int main(int argc, char **argv)
{
    setenv("GRADD_FAKE_CUDA_DEVICES", "4", 1);
    return run_fake_suite(suite(argc > 1 && strcmp(argv[1], "old") == 0));
}
