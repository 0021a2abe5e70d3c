/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ordinary memory, from outside: the test plays a worker that doubles what it finds in the ring,
 * knowing nothing of the library but the protocol.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_node.h"
#include "run_suite.h"

enum { MAX_REGIONS = 8 };

static struct fake_node node;
static struct {
    uint8_t *base;
    uint64_t bytes;
} regions[MAX_REGIONS];

static void join(void)
{
    fake_open(&node);
    fake_join(&node, 100, (uint64_t)1 << 33);
    for (uint32_t id = 1; id < MAX_REGIONS; id++)
        fake_answer_region(&node, id, GRADD_OK, "");
}

static void leave(void)
{
    fake_hang_up(&node.daemon);
    gradd_shutdown(node.g);
    for (int id = 0; id < MAX_REGIONS; id++)
        if (regions[id].base)
            munmap(regions[id].base, regions[id].bytes);
    memset(regions, 0, sizeof regions);
    fake_close(&node);
}

static void take_register(void)
{
    int fd;
    const Pb__Register *message =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_REGISTER, &fd)->register_;
    ck_assert_uint_lt(message->region, MAX_REGIONS);
    void *base = mmap(NULL, message->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(base, MAP_FAILED);
    regions[message->region].base = base;
    regions[message->region].bytes = message->bytes;
    close(fd);
}

struct tensor {
    uint64_t id, count, ready, done;
    uint64_t offset, ring_elements;
    uint32_t region;
};

static struct tensor take_submit(void)
{
    const Pb__Submit *s =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_SUBMIT_BATCH, NULL)->submit_batch->submits[0];
    ck_assert_uint_eq(s->in->region, s->out->region);
    ck_assert_uint_eq(s->in->offset, s->out->offset);
    ck_assert_uint_eq(s->in->ring_bytes, s->out->ring_bytes);
    struct tensor t = {.id = s->id,
                       .count = s->count,
                       .ready = s->ready,
                       .region = s->in->region,
                       .offset = s->in->offset};
    t.ring_elements = s->in->ring_bytes ? s->in->ring_bytes / 4 : s->count;
    ck_assert_uint_le(t.offset + 4 * t.ring_elements, regions[t.region].bytes);
    return t;
}

static void double_elements(struct tensor *t, uint64_t until)
{
    int32_t *ring = (int32_t *)(regions[t->region].base + t->offset);
    for (; t->done < until; t->done++)
        ring[t->done % t->ring_elements] *= 2;
}

struct call {
    int32_t *in, *out;
    uint64_t count;
    int status;
};

static void *blocking_call(void *arg)
{
    struct call *call = arg;
    call->status =
        gradd_allreduce(node.g, "t", call->in, call->out, call->count, GRADD_I32, GRADD_SUM);
    return NULL;
}

static struct call make_call(uint64_t count)
{
    struct call call = {.in = malloc(count * 4), .out = calloc(count, 4), .count = count};
    for (uint64_t i = 0; i < count; i++)
        call.in[i] = (int32_t)i;
    return call;
}

static void check_call(struct call *call)
{
    uint64_t n_wrong = 0;
    for (uint64_t i = 0; i < call->count; i++)
        n_wrong += call->out[i] != 2 * (int32_t)i || call->in[i] != (int32_t)i;
    ck_assert_uint_eq(n_wrong, 0);
    free(call->in);
    free(call->out);
}

/* step: how many elements the worker finishes at a time, at most. */
static void run_blocking(uint64_t count, uint64_t step)
{
    join();
    struct call call = make_call(count);
    pthread_t thread;
    pthread_create(&thread, NULL, blocking_call, &call);
    take_register();
    struct tensor t = take_submit();
    ck_assert_uint_lt(t.ring_elements, count);
    while (t.done < count) {
        while (t.ready == t.done) {
            const Pb__FeedBatch *feeds =
                fake_expect(&node.worker, PB__ENVELOPE__BODY_FEED_BATCH, NULL)->feed_batch;
            ck_assert_uint_eq(feeds->feeds[0]->id, t.id);
            ck_assert_uint_gt(feeds->feeds[0]->ready, t.ready);
            t.ready = feeds->feeds[0]->ready;
            ck_assert_uint_le(t.ready, t.done + t.ring_elements);
        }
        double_elements(&t, t.ready - t.done > step ? t.done + step : t.ready);
        if (t.done < count)
            fake_progress(&node, t.id, t.done);
    }
    fake_complete(&node, t.id, GRADD_OK, "");
    pthread_join(thread, NULL);
    ck_assert_int_eq(call.status, GRADD_OK);
    check_call(&call);
    leave();
}

START_TEST(a_large_tensor_passes_a_small_ring)
{
    run_blocking((8 << 20) / 4 + 3, UINT64_MAX);
    run_blocking((8 << 20) / 4 + 3, 100001);
}
END_TEST

START_TEST(a_small_tensor_is_sent_whole_and_its_stage_is_used_again)
{
    join();
    for (int round = 0; round < 3; round++) {
        struct call call = make_call(1000);
        gradd_handle handle =
            gradd_allreduce_async(node.g, "t", call.in, call.out, 1000, GRADD_I32, GRADD_SUM);
        ck_assert_msg(handle > 0, "%s", gradd_error());
        if (round == 0)
            take_register();
        struct tensor t = take_submit();
        ck_assert_uint_eq(t.ready, 1000);
        ck_assert_uint_eq(t.ring_elements, 1000);
        double_elements(&t, 1000);
        fake_complete(&node, t.id, GRADD_OK, "");
        ck_assert_int_eq(gradd_wait(node.g, handle, -1), GRADD_OK);
        check_call(&call);
    }
    leave();
}
END_TEST

START_TEST(an_async_tensor_is_copied_whole_before_submit_returns)
{
    enum { COUNT = (9 << 20) / 4 };
    join();
    struct call call = make_call(COUNT);
    gradd_handle handle =
        gradd_allreduce_async(node.g, "t", call.in, call.out, COUNT, GRADD_I32, GRADD_SUM);
    ck_assert_msg(handle > 0, "%s", gradd_error());
    take_register();
    struct tensor t = take_submit();
    ck_assert_uint_eq(t.ring_elements, COUNT);
    while (t.ready < COUNT)
        t.ready = fake_expect(&node.worker, PB__ENVELOPE__BODY_FEED_BATCH, NULL)
                      ->feed_batch->feeds[0]
                      ->ready;
    double_elements(&t, COUNT);
    fake_complete(&node, t.id, GRADD_OK, "");
    ck_assert_int_eq(gradd_wait(node.g, handle, -1), GRADD_OK);
    check_call(&call);
    leave();
}
END_TEST

START_TEST(a_failed_op_leaves_the_input_alone)
{
    join();
    struct call call = make_call(1000);
    gradd_handle handle =
        gradd_allreduce_async(node.g, "t", call.in, call.out, 1000, GRADD_I32, GRADD_SUM);
    take_register();
    struct tensor t = take_submit();
    double_elements(&t, 1000);
    fake_complete(&node, t.id, GRADD_ERR_TIMEOUT, "late");
    ck_assert_int_eq(gradd_wait(node.g, handle, -1), GRADD_ERR_TIMEOUT);
    for (int i = 0; i < 1000; i++)
        ck_assert_int_eq(call.in[i], i);
    free(call.in);
    free(call.out);
    leave();
}
END_TEST

START_TEST(progress_beyond_what_was_fed_ends_the_epoch)
{
    join();
    struct call call = make_call((8 << 20) / 4);
    pthread_t thread;
    pthread_create(&thread, NULL, blocking_call, &call);
    take_register();
    struct tensor t = take_submit();
    fake_progress(&node, t.id, t.count);
    pthread_join(thread, NULL);
    ck_assert_int_eq(call.status, GRADD_ERR_PROTOCOL);
    free(call.in);
    free(call.out);
    leave();
}
END_TEST

START_TEST(a_refused_stage_is_reported_and_nothing_is_submitted)
{
    fake_open(&node);
    fake_join(&node, 100, (uint64_t)1 << 33);
    fake_answer_region(&node, 1, GRADD_ERR_NO_MEMORY, "job job: quota");
    int32_t x = 1;
    ck_assert_int_eq(gradd_allreduce(node.g, "t", &x, &x, 1, GRADD_I32, GRADD_SUM),
                     GRADD_ERR_NO_MEMORY);
    ck_assert_str_eq(gradd_error(), "job job: quota");
    int fd;
    fake_expect(&node.worker, PB__ENVELOPE__BODY_REGISTER, &fd);
    close(fd);
    fake_expect_nothing(&node.worker);
    leave();
}
END_TEST

int main(void)
{
    const TTest *tests[] = {
        a_large_tensor_passes_a_small_ring,
        a_small_tensor_is_sent_whole_and_its_stage_is_used_again,
        an_async_tensor_is_copied_whole_before_submit_returns,
        a_failed_op_leaves_the_input_alone,
        progress_beyond_what_was_fed_ends_the_epoch,
        a_refused_stage_is_reported_and_nothing_is_submitted,
    };
    return run_suite("client/ring", tests, sizeof tests / sizeof *tests);
}
