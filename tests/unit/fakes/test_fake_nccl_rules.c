/* SPDX-License-Identifier: Apache-2.0 */
/* Each rule of NCCL that the fake enforces, broken on purpose. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nccl.h"

#define REDUCE(comm)                                                                               \
    nccl->all_reduce(self->data, self->data, 10, ncclFloat32, ncclSum, comm, self->stream)

struct setup {
    struct rank *rank;
    float *data;
    CUstream stream;
    ncclComm_t comm;
};

static struct setup join(struct rank *rank, int blocking)
{
    rank_join(rank, blocking);
    return (struct setup){rank, floats_new(10, 1, 0), rank->stream, rank->comm};
}

/* ---- Threads ---- */

struct issue {
    struct setup setup;
    ncclComm_t comm;
    pthread_barrier_t *barrier;
};

static void *issue(void *data)
{
    const struct issue *issue = data;
    const struct setup *self = &issue->setup;

    pthread_barrier_wait(issue->barrier);
    for (int i = 0; i < 50; i++)
        REDUCE(issue->comm);
    return NULL;
}

static void two_threads(struct rank *rank)
{
    struct setup self = join(rank, 1);
    pthread_barrier_t barrier;
    pthread_t thread;
    ncclComm_t other;

    pthread_barrier_init(&barrier, NULL, 2);
    NOK(nccl->comm_init(&other, 1, rank->other_id, 0, NULL));
    struct issue a = {self, self.comm, &barrier}, b = {self, other, &barrier};
    HOLDS(pthread_create(&thread, NULL, issue, &a) == 0);
    issue(&b);
    pthread_join(thread, NULL);
}

START_TEST(two_threads_at_once_on_one_device)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_SLOW", "ncclAllReduce:5");
    ranks_die(1, two_threads, "two threads at once on device 0: ncclAllReduce while another is in");
}
END_TEST

static void *issue_one(void *data)
{
    const struct setup *self = data;

    REDUCE(self->comm);
    return NULL;
}

static void thread_beside_group(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;
    pthread_t thread;

    NOK(nccl->group_start());
    NOK(REDUCE(self->comm));
    HOLDS(pthread_create(&thread, NULL, issue_one, self) == 0);
    pthread_join(thread, NULL);
}

START_TEST(a_thread_beside_anothers_open_group)
{
    ranks_die(1, thread_beside_group, "two threads at once on device 0");
}
END_TEST

/* ---- The same on all ranks ---- */

static void other_order(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;

    if (rank->rank == 0) {
        nccl->all_reduce(self->data, self->data, 10, ncclFloat32, ncclSum, self->comm,
                         self->stream);
        nccl->broadcast(self->data, self->data, 10, ncclFloat32, 0, self->comm, self->stream);
    } else {
        nccl->broadcast(self->data, self->data, 10, ncclFloat32, 0, self->comm, self->stream);
        nccl->all_reduce(self->data, self->data, 10, ncclFloat32, ncclSum, self->comm,
                         self->stream);
    }
    cu.cuStreamSynchronize(self->stream);
}

START_TEST(another_order_on_another_rank)
{
    ranks_die(2, other_order, "collective 1 of a communicator differs: rank ");
}
END_TEST

static void other_count(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;

    nccl->all_reduce(self->data, self->data, rank->rank == 0 ? 10 : 9, ncclFloat32, ncclSum,
                     self->comm, self->stream);
    cu.cuStreamSynchronize(self->stream);
}

START_TEST(another_count_on_another_rank)
{
    ranks_die(2, other_count, "ncclAllReduce(count 9, type 7, operator 0, root 0)");
}
END_TEST

static void other_message(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;

    if (rank->rank == 0)
        nccl->send(self->data, 10, ncclFloat32, 1, self->comm, self->stream);
    else
        nccl->recv(self->data, 9, ncclFloat32, 0, self->comm, self->stream);
    cu.cuStreamSynchronize(self->stream);
}

START_TEST(a_message_of_another_size_than_is_received)
{
    ranks_die(2, other_message, "rank 0 sends 40 bytes, rank 1 receives 36");
}
END_TEST

static void twice(struct rank *rank)
{
    rank_open(rank, 0);
    nccl->comm_init(&rank->comm, 2, rank->id, 0, NULL);
}

START_TEST(one_rank_comes_twice)
{
    ranks_die(2, twice, "rank 0 of one unique id came twice");
}
END_TEST

static void other_size(struct rank *rank)
{
    rank_open(rank, 0);
    nccl->comm_init(&rank->comm, 2 + rank->rank, rank->id, rank->rank, NULL);
}

START_TEST(ranks_that_disagree_on_their_number)
{
    ranks_die(2, other_size, "wants a communicator of ");
}
END_TEST

/* ---- States ---- */

static void use_after_error(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;

    NGIVES(ncclSystemError, REDUCE(self->comm));
    REDUCE(self->comm);
}

START_TEST(use_after_an_error)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_FAIL", "ncclAllReduce:1:2");
    ranks_die(1, use_after_error,
              "has failed with 2, which the caller knows: it may only be abort");
}
END_TEST

static void destroy_after_error(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;
    ncclResult_t state = ncclSuccess;

    NOK(REDUCE(self->comm));
    while (state == ncclSuccess)
        NOK(nccl->comm_async_error(self->comm, &state));
    nccl->comm_destroy(self->comm);
}

START_TEST(destroying_after_an_asynchronous_error)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_ASYNC", "1");
    ranks_die(1, destroy_after_error, "ncclCommDestroy: the communicator has failed with 6");
}
END_TEST

static void group_error(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;

    NOK(nccl->group_start());
    NOK(REDUCE(self->comm));
    NGIVES(ncclInternalError, nccl->group_end());
    REDUCE(self->comm);
}

START_TEST(use_after_an_error_of_its_group)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_FAIL", "ncclGroupEnd:1:3");
    ranks_die(1, group_error, "has failed with 3");
}
END_TEST

static void too_early(struct rank *rank)
{
    ncclConfig_t config = config_of(0);

    rank_open(rank, 0);
    struct setup self_ = {rank, floats_new(10, 1, 0), rank->stream, NULL}, *self = &self_;
    NGIVES(ncclInProgress, nccl->comm_init(&self->comm, 1, rank->id, 0, &config));
    REDUCE(self->comm);
}

START_TEST(use_before_a_communicator_is_made)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_INIT_MS", "1000");
    ranks_die(1, too_early, "in progress (being made)");
}
END_TEST

static void not_polled(struct rank *rank)
{
    struct setup self_ = join(rank, 0), *self = &self_;

    NGIVES(ncclInProgress, REDUCE(self->comm));
    REDUCE(self->comm);
}

START_TEST(use_while_a_launch_is_in_progress)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_LAUNCH_MS", "1000");
    ranks_die(1, not_polled, "in progress (launching)");
}
END_TEST

/* Not a death but a wrong result, as with the real one: the copy runs before the sum. */
static void copy_too_early(struct rank *rank)
{
    struct setup self_ = join(rank, 0), *self = &self_;
    float *copy = floats_new(10, 0, 0);

    NGIVES(ncclInProgress, REDUCE(self->comm));
    OK(cu.cuMemcpyAsync((CUdeviceptr)(uintptr_t)copy, (CUdeviceptr)(uintptr_t)self->data, 40,
                        self->stream));
    NOK(rank_poll(self->comm));
    HOLDS(floats_of(rank, copy, 10)[0] == 1);
    HOLDS(floats_of(rank, self->data, 10)[0] == 2);
    NOK(nccl->comm_abort(self->comm));
}

START_TEST(work_that_is_pushed_while_a_launch_is_in_progress_comes_first)
{
    ranks_set(-1, "GRADD_FAKE_NCCL_LAUNCH_MS", "50");
    ranks_succeed(2, copy_too_early);
}
END_TEST

static void use_after_destroy(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;

    NOK(nccl->comm_destroy(self->comm));
    REDUCE(self->comm);
}

START_TEST(use_after_destroy_)
{
    ranks_die(1, use_after_destroy, "ncclAllReduce: the communicator was ended by ncclCommDestroy");
}
END_TEST

static void abort_twice(struct rank *rank)
{
    struct setup self = join(rank, 1);

    NOK(nccl->comm_abort(self.comm));
    nccl->comm_abort(self.comm);
}

START_TEST(aborting_twice)
{
    ranks_die(1, abort_twice, "ncclCommAbort: the communicator was ended by ncclCommAbort");
}
END_TEST

static void use_after_finalize(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;

    NOK(nccl->comm_finalize(self->comm));
    REDUCE(self->comm);
}

START_TEST(use_after_finalize_)
{
    ranks_die(1, use_after_finalize, "ncclAllReduce: the communicator is finalized");
}
END_TEST

static void finalize_after_revoke(struct rank *rank)
{
    struct setup self = join(rank, 1);

    NOK(nccl->comm_revoke(self.comm, 0));
    nccl->comm_finalize(self.comm);
}

START_TEST(finalizing_after_revoke)
{
    ranks_die(1, finalize_after_revoke, "ncclCommFinalize: the communicator is revoked");
}
END_TEST

/* ---- Groups ---- */

static void collective_then_init(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;
    ncclComm_t other;

    NOK(nccl->group_start());
    NOK(REDUCE(self->comm));
    nccl->comm_init(&other, 1, rank->other_id, 0, NULL);
}

START_TEST(a_communicator_in_a_group_of_collectives)
{
    ranks_die(1, collective_then_init, "ncclCommInitRankConfig in a group that has collectives");
}
END_TEST

static void init_then_collective(struct rank *rank)
{
    struct setup self_ = join(rank, 1), *self = &self_;
    ncclComm_t other;

    NOK(nccl->group_start());
    NOK(nccl->comm_init(&other, 1, rank->other_id, 0, NULL));
    REDUCE(self->comm);
}

START_TEST(a_collective_in_a_group_that_makes_communicators)
{
    ranks_die(1, init_then_collective, "ncclAllReduce in a group that makes communicators");
}
END_TEST

static void end_without_start(struct rank *rank)
{
    rank_open(rank, 0);
    nccl->group_end();
}

START_TEST(a_group_that_ends_without_a_start)
{
    ranks_die(1, end_without_start, "ncclGroupEnd without ncclGroupStart");
}
END_TEST

static void two_ranks_ungrouped(struct rank *rank)
{
    ncclComm_t comms[2];
    CUcontext context;

    rank_open(rank, 0);
    struct setup self_ = {rank, floats_new(10, 1, 0), rank->stream, NULL}, *self = &self_;
    NOK(nccl->group_start());
    NOK(nccl->comm_init(&comms[0], 2, rank->id, 0, NULL));
    OK(cu.cuDevicePrimaryCtxRetain(&context, 1));
    OK(cu.cuCtxSetCurrent(context));
    NOK(nccl->comm_init(&comms[1], 2, rank->id, 1, NULL));
    NOK(nccl->group_end());
    NOK(REDUCE(comms[0]));
    REDUCE(comms[1]);
}

START_TEST(one_thread_for_several_ranks_without_a_group)
{
    ranks_die(1, two_ranks_ungrouped,
              "one thread issues for several ranks of a communicator outside a group");
}
END_TEST

/* ---- Operators and memory ---- */

static ncclRedOp_t make_op(ncclComm_t comm)
{
    float factor = 2;
    ncclRedOp_t op;

    NOK(nccl->premul_sum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, comm));
    return op;
}

static void destroyed_op(struct rank *rank)
{
    struct setup self = join(rank, 1);
    const ncclRedOp_t op = make_op(self.comm);

    NOK(nccl->redop_destroy(op, self.comm));
    nccl->all_reduce(self.data, self.data, 10, ncclFloat32, op, self.comm, self.stream);
}

START_TEST(an_operator_that_was_destroyed)
{
    ranks_die(1, destroyed_op, "has been destroyed");
}
END_TEST

static void foreign_op(struct rank *rank)
{
    struct setup self = join(rank, 1);
    ncclComm_t other;

    NOK(nccl->comm_init(&other, 1, rank->other_id, 0, NULL));
    nccl->all_reduce(self.data, self.data, 10, ncclFloat32, make_op(other), self.comm, self.stream);
}

START_TEST(an_operator_of_another_communicator)
{
    ranks_die(1, foreign_op, "is not of this communicator");
}
END_TEST

static void leaked_ops(struct rank *rank)
{
    struct setup self = join(rank, 1);

    for (int i = 0; i < 65; i++)
        make_op(self.comm);
}

START_TEST(operators_that_nobody_destroys)
{
    ranks_die(1, leaked_ops, "they are to be destroyed");
}
END_TEST

static void host_memory(struct rank *rank)
{
    struct setup self = join(rank, 1);
    static float data[10];

    nccl->all_reduce(data, self.data, 10, ncclFloat32, ncclSum, self.comm, self.stream);
}

START_TEST(memory_of_the_host)
{
    ranks_die(1, host_memory, "is not memory of the communicator's device 0");
}
END_TEST

static void foreign_stream(struct rank *rank)
{
    struct setup self = join(rank, 1);
    CUcontext context;
    CUstream stream;

    OK(cu.cuDevicePrimaryCtxRetain(&context, 1));
    OK(cu.cuCtxSetCurrent(context));
    OK(cu.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
    nccl->all_reduce(self.data, self.data, 10, ncclFloat32, ncclSum, self.comm, stream);
}

START_TEST(a_stream_of_another_device)
{
    ranks_die(1, foreign_stream, "the stream is not of the communicator's device 0");
}
END_TEST

static Suite *suite(void)
{
    const TTest *const tests[] = {
        two_threads_at_once_on_one_device,
        a_thread_beside_anothers_open_group,
        another_order_on_another_rank,
        another_count_on_another_rank,
        a_message_of_another_size_than_is_received,
        one_rank_comes_twice,
        ranks_that_disagree_on_their_number,
        use_after_an_error,
        destroying_after_an_asynchronous_error,
        use_after_an_error_of_its_group,
        use_before_a_communicator_is_made,
        use_while_a_launch_is_in_progress,
        work_that_is_pushed_while_a_launch_is_in_progress_comes_first,
        use_after_destroy_,
        aborting_twice,
        use_after_finalize_,
        finalizing_after_revoke,
        a_communicator_in_a_group_of_collectives,
        a_collective_in_a_group_that_makes_communicators,
        a_group_that_ends_without_a_start,
        one_thread_for_several_ranks_without_a_group,
        an_operator_that_was_destroyed,
        an_operator_of_another_communicator,
        operators_that_nobody_destroys,
        memory_of_the_host,
        a_stream_of_another_device,
    };
    Suite *fakes = suite_create("fake_nccl_rules");
    TCase *tcase = tcase_create("fake_nccl_rules");
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tcase_add_test(tcase, tests[i]);
    suite_add_tcase(fakes, tcase);
    return fakes;
}

int main(void)
{
    setenv("GRADD_FAKE_CUDA_DEVICES", "4", 1);
    return run_fake_suite(suite());
}
