/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ops on registered memory: what is sent, and how each op ends.
 */
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "fake_node.h"
#include "run_suite.h"

static struct fake_node node;
static float *memory;

/* Joined, with memory of 4096 bytes as region 1. */
static void join_with_memory(void)
{
    fake_open(&node);
    fake_join(&node, 3, 1 << 30);
    fake_answer_region(&node, 1, GRADD_OK, "");
    memory = gradd_alloc(node.g, 4000);
    ck_assert_msg(memory, "%s", gradd_error());
    int fd;
    const Pb__Register *message =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_REGISTER, &fd)->register_;
    ck_assert_uint_eq(message->region, 1);
    ck_assert_uint_eq(message->bytes, 4096);
    close(fd);
}

static void leave(void)
{
    fake_hang_up(&node.daemon); /* nobody waits for Left then */
    gradd_shutdown(node.g);
    fake_close(&node);
}

static gradd_handle submit(const char *name)
{
    gradd_handle handle =
        gradd_allreduce_async(node.g, name, memory, memory + 100, 100, GRADD_F32, GRADD_AVG);
    ck_assert_msg(handle > 0, "%s", gradd_error());
    return handle;
}

static uint64_t take_submit(const char *name)
{
    const Pb__SubmitBatch *batch =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_SUBMIT_BATCH, NULL)->submit_batch;
    ck_assert_uint_eq(batch->n_submits, 1);
    ck_assert_str_eq(batch->submits[0]->name, name);
    return batch->submits[0]->id;
}

START_TEST(a_submit_names_region_and_offset)
{
    join_with_memory();
    gradd_handle handle = submit("w");
    const Pb__SubmitBatch *batch =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_SUBMIT_BATCH, NULL)->submit_batch;
    ck_assert_uint_eq(batch->epoch, 5);
    const Pb__Submit *s = batch->submits[0];
    ck_assert_int_eq((int64_t)s->id, handle);
    ck_assert_uint_eq(s->kind, GRADD_ALLREDUCE);
    ck_assert_uint_eq(s->dtype, GRADD_F32);
    ck_assert_uint_eq(s->redop, GRADD_AVG);
    ck_assert_uint_eq(s->count, 100);
    ck_assert_uint_eq(s->ready, 100);
    ck_assert_uint_eq(s->in->region, 1);
    ck_assert_uint_eq(s->in->offset, 0);
    ck_assert_uint_eq(s->in->ring_bytes, 0);
    ck_assert_uint_eq(s->out->region, 1);
    ck_assert_uint_eq(s->out->offset, 400);
    ck_assert(s->prescale == 1 && s->postscale == 1);
    ck_assert_str_eq(s->group, "");
    leave();
}
END_TEST

START_TEST(a_completion_ends_its_op_and_no_other)
{
    join_with_memory();
    gradd_handle a = submit("a"), b = submit("b");
    uint64_t id_a = take_submit("a");
    take_submit("b");
    ck_assert_int_eq(gradd_test(node.g, a), GRADD_PENDING);
    ck_assert_int_eq(gradd_wait(node.g, a, 0), GRADD_PENDING);
    fake_complete(&node, id_a, GRADD_OK, "");
    ck_assert_int_eq(gradd_test(node.g, b), GRADD_PENDING);
    ck_assert_int_eq(gradd_wait(node.g, a, -1), GRADD_OK);
    ck_assert_int_eq(gradd_test(node.g, a), GRADD_ERR_INVALID);
    ck_assert_int_eq(gradd_test(node.g, b), GRADD_PENDING);
    leave();
}
END_TEST

START_TEST(a_failed_op_has_the_workers_sentence_and_the_epoch_lives)
{
    join_with_memory();
    gradd_handle a = submit("a");
    fake_complete(&node, take_submit("a"), GRADD_ERR_DISAGREE, "job job: \"a\": both sides");
    ck_assert_int_eq(gradd_wait(node.g, a, -1), GRADD_ERR_DISAGREE);
    ck_assert_str_eq(gradd_error(), "job job: \"a\": both sides");
    ck_assert_int_eq(gradd_progress(node.g), GRADD_OK);
    submit("a");
    leave();
}
END_TEST

START_TEST(a_group_is_one_batch_and_ends_with_its_last_op)
{
    join_with_memory();
    struct gradd_op ops[2];
    for (int i = 0; i < 2; i++)
        ops[i] = (struct gradd_op){.struct_size = sizeof *ops,
                                   .kind = GRADD_ALLREDUCE,
                                   .dtype = GRADD_F32,
                                   .name = i ? "alpha" : "beta",
                                   .in = memory + i,
                                   .out = memory + i,
                                   .count = 1};
    gradd_handle handle = gradd_submit(node.g, ops, 2);
    const Pb__SubmitBatch *batch =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_SUBMIT_BATCH, NULL)->submit_batch;
    ck_assert_uint_eq(batch->n_submits, 2);
    uint64_t ids[2];
    for (int i = 0; i < 2; i++) {
        /* The same on every rank, in whatever order it lists its ops. */
        ck_assert_str_eq(batch->submits[i]->group, "alpha");
        ck_assert_uint_eq(batch->submits[i]->group_size, 2);
        ids[i] = batch->submits[i]->id;
    }
    ck_assert_uint_gt(ids[1], ids[0]);
    fake_complete(&node, ids[1], GRADD_OK, "");
    ck_assert_int_eq(gradd_test(node.g, handle), GRADD_PENDING);
    fake_complete(&node, ids[0], GRADD_ERR_TIMEOUT, "late");
    ck_assert_int_eq(gradd_wait(node.g, handle, -1), GRADD_ERR_TIMEOUT);
    ck_assert_str_eq(gradd_error(), "late");
    leave();
}
END_TEST

START_TEST(more_than_max_in_flight_is_refused_and_room_comes_back)
{
    join_with_memory();
    gradd_handle a = submit("a");
    submit("b");
    submit("c");
    ck_assert_int_eq(gradd_allreduce_async(node.g, "d", memory, memory, 1, GRADD_F32, GRADD_SUM),
                     GRADD_ERR_NO_MEMORY);
    ck_assert_ptr_nonnull(strstr(gradd_error(), "the job allows 3"));
    fake_complete(&node, take_submit("a"), GRADD_OK, "");
    ck_assert_int_eq(gradd_wait(node.g, a, -1), GRADD_OK);
    submit("d");
    leave();
}
END_TEST

START_TEST(a_buffer_beyond_its_region_is_refused_before_anything_is_sent)
{
    join_with_memory();
    ck_assert_int_eq(
        gradd_allreduce_async(node.g, "x", memory + 1000, memory + 1000, 25, GRADD_F32, 0),
        GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(gradd_error(), "beyond their gradd_alloc()"));
    fake_expect_nothing(&node.worker);
    leave();
}
END_TEST

START_TEST(memory_in_use_is_not_freed)
{
    join_with_memory();
    gradd_handle a = submit("a");
    ck_assert_int_eq(gradd_free(node.g, memory), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(gradd_error(), "in flight"));
    fake_complete(&node, take_submit("a"), GRADD_OK, "");
    ck_assert_int_eq(gradd_wait(node.g, a, -1), GRADD_OK);
    ck_assert_int_eq(gradd_free(node.g, memory), GRADD_OK);
    ck_assert_uint_eq(
        fake_expect(&node.worker, PB__ENVELOPE__BODY_UNREGISTER, NULL)->unregister->region, 1);
    leave();
}
END_TEST

START_TEST(a_refused_region_is_reported_in_the_workers_words)
{
    fake_open(&node);
    fake_join(&node, 3, 1 << 30);
    fake_answer_region(&node, 1, GRADD_ERR_NO_MEMORY, "job job: quota of 1 MiB is used up");
    ck_assert_ptr_null(gradd_alloc(node.g, 4000));
    ck_assert_str_eq(gradd_error(), "job job: quota of 1 MiB is used up");
    leave();
}
END_TEST

static void expect_epoch_over(gradd_handle handle, int status, const char *text)
{
    ck_assert_int_eq(gradd_wait(node.g, handle, -1), status);
    ck_assert_msg(strstr(gradd_error(), text), "%s", gradd_error());
    ck_assert_int_eq(gradd_allreduce(node.g, "z", memory, memory, 1, GRADD_F32, 0), status);
    ck_assert_msg(strstr(gradd_error(), text), "%s", gradd_error());
    ck_assert_ptr_null(gradd_alloc(node.g, 1));
    ck_assert_int_eq(gradd_progress(node.g), status);
    memory[0] = 1; /* regions stay mapped until shutdown */
}

START_TEST(epoch_failed_from_the_worker_ends_all)
{
    join_with_memory();
    gradd_handle a = submit("a");
    fake_fail_epoch(&node.worker, GRADD_ERR_RANK_LOST, "rank 1 was killed");
    expect_epoch_over(a, GRADD_ERR_RANK_LOST, "rank 1 was killed");
    leave();
}
END_TEST

START_TEST(after_the_daemons_verdict_the_worker_has_the_last_word)
{
    join_with_memory();
    gradd_handle a = submit("a"), b = submit("b");
    uint64_t id = take_submit("a");
    fake_fail_epoch(&node.daemon, GRADD_ERR_RANK_LOST, "rank 1 was killed");
    ck_assert_int_eq(gradd_test(node.g, a), GRADD_PENDING);
    fake_complete(&node, id, GRADD_OK, "");
    fake_fail_epoch(&node.worker, GRADD_ERR_RANK_LOST, "some rank was lost");
    ck_assert_int_eq(gradd_wait(node.g, a, -1), GRADD_OK);
    /* The cause is the daemon's to tell. */
    expect_epoch_over(b, GRADD_ERR_RANK_LOST, "rank 1 was killed");
    leave();
}
END_TEST

START_TEST(a_stopped_worker_does_not_hold_up_the_daemons_verdict)
{
    join_with_memory();
    gradd_handle a = submit("a");
    fake_fail_epoch(&node.daemon, GRADD_ERR_RANK_LOST, "rank 1 was killed");
    expect_epoch_over(a, GRADD_ERR_RANK_LOST, "rank 1 was killed");
    leave();
}
END_TEST

START_TEST(the_daemon_says_why_the_worker_ended)
{
    join_with_memory();
    gradd_handle a = submit("a");
    fake_hang_up(&node.worker);
    ck_assert_int_eq(gradd_test(node.g, a), GRADD_PENDING);
    fake_fail_epoch(&node.daemon, GRADD_ERR_RANK_LOST, "the worker (pid 9) got SIGKILL");
    expect_epoch_over(a, GRADD_ERR_RANK_LOST, "SIGKILL");
    leave();
}
END_TEST

START_TEST(a_worker_that_ends_without_a_word_ends_the_epoch)
{
    join_with_memory();
    gradd_handle a = submit("a");
    fake_hang_up(&node.daemon);
    fake_hang_up(&node.worker);
    expect_epoch_over(a, GRADD_ERR_RANK_LOST, "ended without a word");
    leave();
}
END_TEST

START_TEST(what_arrived_before_the_end_of_the_worker_counts)
{
    join_with_memory();
    gradd_handle a = submit("a"), b = submit("b");
    fake_complete(&node, take_submit("a"), GRADD_OK, "");
    fake_hang_up(&node.daemon);
    fake_hang_up(&node.worker);
    ck_assert_int_eq(gradd_wait(node.g, a, -1), GRADD_OK);
    expect_epoch_over(b, GRADD_ERR_RANK_LOST, "ended without a word");
    leave();
}
END_TEST

START_TEST(training_goes_on_without_the_daemon)
{
    join_with_memory();
    fake_hang_up(&node.daemon);
    ck_assert_int_eq(gradd_progress(node.g), GRADD_OK);
    gradd_handle a = submit("a");
    fake_complete(&node, take_submit("a"), GRADD_OK, "");
    ck_assert_int_eq(gradd_wait(node.g, a, -1), GRADD_OK);
    leave();
}
END_TEST

START_TEST(garbage_from_the_worker_ends_the_epoch)
{
    join_with_memory();
    gradd_handle a = submit("a");
    ck_assert_int_eq(write(node.worker.fd, "\1\0\0\0\0\0\0\7\0", 9), 9);
    expect_epoch_over(a, GRADD_ERR_PROTOCOL, "the worker sent not a gradd frame");
    leave();
}
END_TEST

START_TEST(completions_of_another_epoch_or_op_are_ignored)
{
    join_with_memory();
    gradd_handle a = submit("a");
    uint64_t id = take_submit("a");
    fake_complete(&node, id + 1, GRADD_OK, "");
    fake_complete(&node, 0, GRADD_OK, "");
    fake_complete(&node, UINT64_MAX, GRADD_OK, "");
    fake_fail_epoch(&node.worker, GRADD_ERR_RANK_LOST, "of this epoch");
    ck_assert_int_eq(gradd_wait(node.g, a, -1), GRADD_ERR_RANK_LOST);
    leave();
}
END_TEST

static void *wait_thread(void *arg)
{
    gradd_handle handle = *(gradd_handle *)arg;
    return (void *)(intptr_t)gradd_wait(node.g, handle, -1);
}

START_TEST(several_threads_wait_and_each_gets_its_own)
{
    join_with_memory();
    gradd_handle handles[3];
    uint64_t ids[3];
    pthread_t threads[3];
    const char *names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++) {
        handles[i] = submit(names[i]);
        ids[i] = take_submit(names[i]);
        pthread_create(&threads[i], NULL, wait_thread, &handles[i]);
    }
    for (int i = 2; i >= 0; i--) {
        void *status;
        fake_complete(&node, ids[i], GRADD_OK, "");
        pthread_join(threads[i], &status);
        ck_assert_int_eq((int)(intptr_t)status, GRADD_OK);
    }
    leave();
}
END_TEST

START_TEST(the_descriptor_tells_of_completions_and_of_failure)
{
    join_with_memory();
    struct pollfd poll_fd = {.fd = gradd_fd(node.g), .events = POLLIN};
    ck_assert_int_eq(gradd_fd(node.g), poll_fd.fd);
    gradd_handle a = submit("a"), b = submit("b");
    uint64_t id = take_submit("a");
    ck_assert_int_eq(gradd_progress(node.g), GRADD_OK);
    ck_assert_int_eq(poll(&poll_fd, 1, 0), 0);
    fake_complete(&node, id, GRADD_OK, "");
    ck_assert_int_eq(poll(&poll_fd, 1, 10000), 1);
    /* Another call takes the message from the socket; the news must not get lost. */
    ck_assert_int_eq(gradd_test(node.g, b), GRADD_PENDING);
    ck_assert_int_eq(poll(&poll_fd, 1, 0), 1);
    ck_assert_int_eq(gradd_progress(node.g), GRADD_OK);
    ck_assert_int_eq(gradd_test(node.g, a), GRADD_OK);
    ck_assert_int_eq(poll(&poll_fd, 1, 0), 0);
    fake_fail_epoch(&node.daemon, GRADD_ERR_RANK_LOST, "over");
    /* The loop comes back until the worker has spoken too, or its time is over. */
    do {
        ck_assert_int_eq(poll(&poll_fd, 1, 10000), 1);
    } while (gradd_progress(node.g) == GRADD_OK);
    ck_assert_int_eq(gradd_progress(node.g), GRADD_ERR_RANK_LOST);
    ck_assert_int_eq(poll(&poll_fd, 1, 0), 0);
    leave();
}
END_TEST

START_TEST(a_released_op_still_ends_and_gives_its_record_back)
{
    join_with_memory();
    for (int i = 0; i < 10; i++) {
        gradd_handle a = submit("a");
        ck_assert_int_eq(gradd_release(node.g, a), GRADD_OK);
        ck_assert_int_eq(gradd_wait(node.g, a, 0), GRADD_ERR_INVALID);
        fake_complete(&node, take_submit("a"), GRADD_OK, "");
        ck_assert_int_eq(gradd_progress(node.g), GRADD_OK);
        ck_assert_int_eq(gradd_test(node.g, a), GRADD_ERR_INVALID);
    }
    ck_assert_int_eq(gradd_free(node.g, memory), GRADD_OK);
    leave();
}
END_TEST

START_TEST(a_checked_op_tells_who_had_nan)
{
    join_with_memory();
    struct gradd_op op = {.struct_size = sizeof op,
                          .kind = GRADD_ALLREDUCE,
                          .dtype = GRADD_F32,
                          .name = "n",
                          .in = memory,
                          .out = memory,
                          .count = 4,
                          .check_finite = 1};
    gradd_handle handle = gradd_submit(node.g, &op, 1);
    const Pb__Submit *s =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_SUBMIT_BATCH, NULL)->submit_batch->submits[0];
    ck_assert(s->check_finite);
    int32_t rank = -1;
    uint64_t count = 0;
    ck_assert_int_eq(gradd_nonfinite(node.g, handle, 0, &rank, &count), GRADD_ERR_INVALID);
    Pb__Completion completion = PB__COMPLETION__INIT, *list[] = {&completion};
    completion.id = s->id;
    completion.nonfinite = 3;
    completion.nonfinite_rank = 1;
    Pb__CompletionBatch batch = PB__COMPLETION_BATCH__INIT;
    batch.epoch = 5;
    batch.n_completions = 1;
    batch.completions = list;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_COMPLETION_BATCH;
    envelope.completion_batch = &batch;
    fake_send(&node.worker, &envelope, -1);
    ck_assert_int_eq(gradd_progress(node.g), GRADD_OK);
    ck_assert_int_eq(gradd_nonfinite(node.g, handle, 0, &rank, &count), 1);
    ck_assert_int_eq(rank, 1);
    ck_assert_uint_eq(count, 3);
    leave();
}
END_TEST

START_TEST(uneven_parts_are_spelled_out_for_the_worker)
{
    join_with_memory();
    gradd_handle handle = gradd_reduce_scatter_async(node.g, "rs", memory, 5, memory + 100, NULL,
                                                     GRADD_F32, GRADD_SUM);
    ck_assert_int_gt(handle, 0);
    const Pb__Submit *s =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_SUBMIT_BATCH, NULL)->submit_batch->submits[0];
    ck_assert_uint_eq(s->n_counts, 2);
    ck_assert_uint_eq(s->counts[0], 3);
    ck_assert_uint_eq(s->counts[1], 2);
    leave();
}
END_TEST

int main(void)
{
    const TTest *tests[] = {
        a_submit_names_region_and_offset,
        a_completion_ends_its_op_and_no_other,
        a_failed_op_has_the_workers_sentence_and_the_epoch_lives,
        a_group_is_one_batch_and_ends_with_its_last_op,
        more_than_max_in_flight_is_refused_and_room_comes_back,
        a_buffer_beyond_its_region_is_refused_before_anything_is_sent,
        memory_in_use_is_not_freed,
        a_refused_region_is_reported_in_the_workers_words,
        epoch_failed_from_the_worker_ends_all,
        after_the_daemons_verdict_the_worker_has_the_last_word,
        a_stopped_worker_does_not_hold_up_the_daemons_verdict,
        the_daemon_says_why_the_worker_ended,
        a_worker_that_ends_without_a_word_ends_the_epoch,
        what_arrived_before_the_end_of_the_worker_counts,
        training_goes_on_without_the_daemon,
        garbage_from_the_worker_ends_the_epoch,
        completions_of_another_epoch_or_op_are_ignored,
        several_threads_wait_and_each_gets_its_own,
        the_descriptor_tells_of_completions_and_of_failure,
        a_released_op_still_ends_and_gives_its_record_back,
        a_checked_op_tells_who_had_nan,
        uneven_parts_are_spelled_out_for_the_worker,
    };
    return run_suite("client/channel", tests, sizeof tests / sizeof *tests);
}
