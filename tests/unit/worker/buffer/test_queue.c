/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queues in both orders, between two processes: nothing is launched before its input, no stream
 * goes on before its result, and nobody is left waiting when ops fail or a side goes.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <gradd/types.h>

#include "envelope.pb-c.h"
#include "trainer.h"

enum { SLOTS = 3, BYTES = 4 << 20, PAGE = 4096, EVENT = 1, FLAG = 2, FINISHED = 8 };

static int order; /* of the trainer that is started next */

/* ------------------------------------------------------------------ the trainer */

struct trainer {
    CUstream stream;
    CUdeviceptr in, out;
    CUevent ours[SLOTS], theirs[SLOTS];
    CUdeviceptr words;
    int gate[2];
};

static void share_memory(int fd, CUdeviceptr *out_p)
{
    CUipcMemHandle handle;
    OK(cu.cuMemAlloc_v2(out_p, BYTES));
    OK(cu.cuMemsetD8_v2(*out_p, 255, BYTES));
    OK(cu.cuCtxSynchronize());
    OK(cu.cuIpcGetMemHandle(&handle, *out_p));
    put(fd, &handle, sizeof handle);
}

static void share_events(int fd, struct trainer *t)
{
    CUipcEventHandle handle;
    for (int i = 0; i < SLOTS; i++) {
        OK(cu.cuEventCreate(&t->ours[i], CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
        OK(cu.cuIpcGetEventHandle(&handle, t->ours[i]));
        put(fd, &handle, sizeof handle);
    }
    for (int i = 0; i < SLOTS; i++) {
        take(fd, &handle, sizeof handle);
        OK(cu.cuIpcOpenEventHandle(&t->theirs[i], handle));
    }
}

static int sealed_page(int seals)
{
    int page = memfd_create("gradd-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    HOLDS(page >= 0 && ftruncate(page, PAGE) == 0);
    HOLDS(!seals || fcntl(page, F_ADD_SEALS, seals) == 0);
    return page;
}

static void share_words(int fd, struct trainer *t)
{
    int page = sealed_page(F_SEAL_SHRINK);
    void *words = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0);
    HOLDS(words != MAP_FAILED);
    OK(cu.cuMemHostRegister_v2(words, PAGE,
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    OK(cu.cuMemHostGetDevicePointer_v2(&t->words, words, 0));
    put_fd(fd, page);
    close(page);
}

static void wait_at_gate(void *data)
{
    char byte;
    HOLDS(read(*(int *)data, &byte, 1) == 1);
}

/* A slow producer, then its mark. */
static void produce(struct trainer *t, uint64_t ticket)
{
    OK(cu.cuLaunchHostFunc(t->stream, wait_at_gate, &t->gate[0]));
    OK(cu.cuMemsetD8Async(t->in, (unsigned char)ticket, BYTES, t->stream));
    if (order == EVENT)
        OK(cu.cuEventRecord(t->ours[ticket % SLOTS], t->stream));
    else
        OK(cu.cuStreamWriteValue64_v2(t->stream, t->words, ticket, 0));
}

static void await_result(struct trainer *t, uint64_t ticket)
{
    if (order == EVENT)
        OK(cu.cuStreamWaitEvent(t->stream, t->theirs[ticket % SLOTS], 0));
    else
        OK(cu.cuStreamWaitValue64_v2(t->stream, t->words + 8 * (FINISHED + ticket % SLOTS), ticket,
                                     CU_STREAM_WAIT_VALUE_GEQ));
}

static void open_trainer(int fd, struct trainer *t)
{
    driver_open(0);
    HOLDS(pipe(t->gate) == 0);
    OK(cu.cuStreamCreateWithPriority(&t->stream, CU_STREAM_NON_BLOCKING, 0));
    share_memory(fd, &t->in);
    share_memory(fd, &t->out);
    if (order == EVENT)
        share_events(fd, t);
    else
        share_words(fd, t);
}

static void close_trainer(int fd, struct trainer *t)
{
    char done;
    take(fd, &done, 1);
    OK(cu.cuMemFree_v2(t->in));
    OK(cu.cuMemFree_v2(t->out));
}

/* Each ticket is submitted, launched by the worker, and waited for before its input is there. */
static void train(int fd)
{
    struct trainer t;
    unsigned char byte;
    open_trainer(fd, &t);
    for (uint64_t ticket = 1; ticket <= 3 * SLOTS; ticket++) {
        uint64_t enqueued;
        produce(&t, ticket);
        put(fd, &ticket, sizeof ticket);
        take(fd, &enqueued, sizeof enqueued);
        HOLDS(enqueued == ticket);
        await_result(&t, ticket);
        HOLDS(write(t.gate[1], "", 1) == 1);
        OK(cu.cuMemcpyDtoHAsync_v2(&byte, t.out + BYTES - 1, 1, t.stream));
        OK(cu.cuStreamSynchronize(t.stream));
        HOLDS(byte == ticket);
    }
    put(fd, "", 1);
    close_trainer(fd, &t);
}

/* Waits for the tickets that it is told, without submitting anything. */
static void wait_for_tickets(int fd)
{
    struct trainer t;
    uint64_t ticket;
    open_trainer(fd, &t);
    for (take(fd, &ticket, sizeof ticket); ticket; take(fd, &ticket, sizeof ticket)) {
        await_result(&t, ticket);
        put(fd, "", 1);
        OK(cu.cuStreamSynchronize(t.stream));
        put(fd, "", 1);
    }
    close_trainer(fd, &t);
}

/* ------------------------------------------------------------------ the worker */

static CUdeviceptr in, out;
static struct region *regions[2];

static void open_memory(struct peer peer, uint32_t id, CUdeviceptr *out_p)
{
    CUipcMemHandle handle;
    take(peer.fd, &handle, sizeof handle);
    ck_assert_msg(open_handle(id, BYTES, &handle) == GRADD_OK, "%s", bench.text);
    *out_p = pin(id, 0, BYTES, &regions[id - 1]);
}

static void request_queue(struct queue_request *request)
{
    unsigned before = bench.n_opened;
    queue_open(&bench.queues, request, bench_on_queue, NULL);
    await_opened(before);
}

static void open_queue(struct peer peer)
{
    uint8_t events[SLOTS * 64];
    struct queue_request request = {.id = 1, .slots = SLOTS, .uuid = gpu(0), .take_fd = -1};
    if (order == EVENT) {
        take(peer.fd, events, sizeof events);
        request.events = events;
        request.order = PB__QUEUE_ORDER__ORDER_EVENT;
    } else {
        request.take_fd = take_fd(peer.fd);
        request.order = PB__QUEUE_ORDER__ORDER_FLAG;
    }
    request_queue(&request);
    ck_assert_msg(bench.status == GRADD_OK, "%s", bench.text);
    if (order == EVENT)
        put(peer.fd, bench.events, sizeof events);
}

static struct queue *pin_queue(void)
{
    const char *text = "";
    struct queue *queue = queue_pin(&bench.queues, 1, &text);
    ck_assert_msg(queue != NULL, "%s", text);
    return queue;
}

static struct peer start(int with_order, void (*run)(int fd))
{
    order = with_order;
    struct peer peer = peer_start(run);
    bench_setup();
    open_memory(peer, 1, &in);
    open_memory(peer, 2, &out);
    open_queue(peer);
    use_device();
    return peer;
}

/* As the worker does: memory stays until what was launched on it has ended. */
static void end(struct peer peer)
{
    for (const struct cuda_device *d = cuda_device_first(bench.devices); d; d = d->next)
        OK(d->cuda->stream_synchronize(d->stream));
    region_unpin(regions[0]);
    region_unpin(regions[1]);
    bench_teardown();
    put(peer.fd, "", 1);
    peer_end(peer);
}

static void launch(struct queue *queue, uint64_t ticket)
{
    const struct cuda_device *device = queue_device(queue);
    OK(queue_wait_inputs(queue, ticket));
    OK(device->cuda->copy_async(out, in, BYTES, device->stream));
    OK(queue_mark_results(queue, ticket, 1, 1));
}

static void expect_byte(struct peer peer)
{
    char byte;
    take(peer.fd, &byte, 1);
}

static void check_order(int with_order)
{
    struct peer peer = start(with_order, train);
    uint64_t ticket = 0, created = cu.count("event_creations"), imports = cu.count("imports");
    while (ticket < 3 * SLOTS) {
        take(peer.fd, &ticket, sizeof ticket);
        struct queue *queue = pin_queue();
        launch(queue, ticket);
        put(peer.fd, &ticket, sizeof ticket);
        queue_unpin(queue);
    }
    expect_byte(peer);
    ck_assert_uint_eq(cu.count("event_creations"), created);
    ck_assert_uint_eq(cu.count("imports"), imports);
    ck_assert_uint_eq(cu.count("host_synchronisations"), 0);
    end(peer);
}

START_TEST(events_order_both_streams)
{
    check_order(EVENT);
}
END_TEST

START_TEST(flags_order_both_streams)
{
    check_order(FLAG);
}
END_TEST

START_TEST(delays_at_every_step_change_nothing_with_events)
{
    setenv("GRADD_FAKE_CUDA_DELAY_US", "3000", 1);
    check_order(EVENT);
}
END_TEST

START_TEST(delays_at_every_step_change_nothing_with_flags)
{
    setenv("GRADD_FAKE_CUDA_DELAY_US", "3000", 1);
    check_order(FLAG);
}
END_TEST

/* ------------------------------------------------------------------ ops that end otherwise */

static void expect_wait(struct peer peer, uint64_t ticket)
{
    char byte;
    put(peer.fd, &ticket, sizeof ticket);
    take(peer.fd, &byte, 1);
}

START_TEST(skipped_ops_leave_no_stream_waiting)
{
    const uint64_t none = 0;
    struct peer peer = start(FLAG, wait_for_tickets);
    struct queue *queue = pin_queue();
    expect_wait(peer, 1);
    queue_skip(queue, 1, 1, 1);
    expect_byte(peer);
    /* Some of a ticket's ops are launched: the word comes when the others have ended, too. */
    expect_wait(peer, 2);
    OK(queue_mark_results(queue, 2, 2, 3));
    queue_skip(queue, 2, 1, 3);
    expect_byte(peer);
    expect_wait(peer, 3);
    queue_skip(queue, 3, 1, 2);
    OK(queue_mark_results(queue, 3, 1, 2));
    expect_byte(peer);
    expect_wait(peer, 4);
    queue_skip(queue, 4, 1, 2);
    queue_skip(queue, 4, 1, 2);
    expect_byte(peer);
    queue_unpin(queue);
    put(peer.fd, &none, sizeof none);
    end(peer);
}
END_TEST

static void park(int fd)
{
    struct trainer t;
    open_trainer(fd, &t);
    put(fd, "", 1);
    close_trainer(fd, &t);
}

/* The worker's stream waits for a ticket that the trainer never produces. */
static struct queue *wait_for_nothing(void)
{
    struct queue *queue = pin_queue();
    const struct cuda_device *device = queue_device(queue);
    OK(queue_wait_inputs(queue, 1));
    GIVES(CUDA_ERROR_NOT_READY, device->cuda->stream_query(device->stream));
    return queue;
}

static void drain(struct queue *queue)
{
    const struct cuda_device *device = queue_device(queue);
    OK(device->cuda->stream_synchronize(device->stream));
    queue_unpin(queue);
}

/* Who has ended the communicators lets it go on, and knows that the input was not there. */
START_TEST(a_wait_for_a_lost_trainer_ends_by_poison_alone)
{
    struct peer peer = start(FLAG, park);
    expect_byte(peer);
    struct queue *queue = wait_for_nothing();
    const struct cuda_device *device = queue_device(queue);
    ck_assert(!queue_is_unsure(queue, 1));
    queue_table_deinit(&bench.queues, true);
    ck_assert(queue_is_unsure(queue, 1));
    GIVES(CUDA_ERROR_NOT_READY, device->cuda->stream_query(device->stream));
    queue_poison(queue);
    drain(queue);
    end(peer);
}
END_TEST

START_TEST(a_queue_that_is_closed_in_order_is_sure_of_its_inputs)
{
    struct peer peer = start(FLAG, park);
    expect_byte(peer);
    struct queue *queue = wait_for_nothing();
    ck_assert(queue_close(&bench.queues, 1));
    ck_assert(!queue_close(&bench.queues, 1));
    ck_assert(!queue_is_unsure(queue, 1));
    queue_poison(queue);
    ck_assert(queue_is_unsure(queue, 1));
    drain(queue);
    end(peer);
}
END_TEST

START_TEST(words_stay_until_a_late_write_has_come_to_them)
{
    setenv("GRADD_FAKE_CUDA_DELAY_US", "30000", 1);
    struct peer peer = start(FLAG, park);
    expect_byte(peer);
    struct queue *queue = pin_queue();
    const struct cuda_device *device = queue_device(queue);
    OK(queue_mark_results(queue, 1, 1, 2));
    queue_skip(queue, 1, 1, 2); /* the stream writes the word */
    queue_table_deinit(&bench.queues, true);
    queue_unpin(queue);
    while (cu.count("cuMemHostUnregister") == 0)
        loop_step(bench.loop, false);
    OK(device->cuda->stream_synchronize(device->stream));
    end(peer);
}
END_TEST

START_TEST(a_pin_outlives_the_table)
{
    struct peer peer = start(EVENT, park);
    expect_byte(peer);
    const char *text = "";
    struct queue *queue = pin_queue();
    queue_table_deinit(&bench.queues, false);
    ck_assert_ptr_null(queue_pin(&bench.queues, 1, &text));
    launch(queue, 1);
    ck_assert_uint_eq(cu.count("cuEventDestroy_v2"), 0);
    queue_unpin(queue);
    while (cu.count("cuEventDestroy_v2") < 2 * SLOTS)
        loop_step(bench.loop, false);
    end(peer);
}
END_TEST

/* ------------------------------------------------------------------ refusals */

static void refused(struct queue_request request, int status, const char *why)
{
    request_queue(&request);
    ck_assert_int_eq(bench.status, status);
    ck_assert_msg(strstr(bench.text, why) != NULL, "%s", bench.text);
}

START_TEST(what_is_no_queue_is_refused)
{
    static const uint8_t garbage[QUEUE_SLOTS_MAX * 64] = {1};
    const int by_event = PB__QUEUE_ORDER__ORDER_EVENT, by_flag = PB__QUEUE_ORDER__ORDER_FLAG;
    const struct queue_request event = {1, 2, gpu(0), by_event, garbage, -1};
    struct queue_request r;
    bench_setup();
    refused(event, GRADD_ERR_INVALID, "the trainer's event can not be opened");
    r = event, r.id = 0;
    refused(r, GRADD_ERR_INVALID, "no queue id");
    r = event, r.slots = 0;
    refused(r, GRADD_ERR_INVALID, "1 to 256 slots");
    r = event, r.slots = QUEUE_SLOTS_MAX + 1;
    refused(r, GRADD_ERR_INVALID, "1 to 256 slots");
    r = event, r.events = NULL;
    refused(r, GRADD_ERR_INVALID, "one event per slot");
    r = event, r.order = PB__QUEUE_ORDER__ORDER_AUTO;
    refused(r, GRADD_ERR_INVALID, "by events or by flags");
    r = event, r.order = by_flag;
    refused(r, GRADD_ERR_INVALID, "flag order takes a memfd");
    r.take_fd = sealed_page(0);
    refused(r, GRADD_ERR_INVALID, "sealed");
    r.take_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    refused(r, GRADD_ERR_INVALID, "sealed");
    r.uuid = gpu(9);
    r.take_fd = sealed_page(F_SEAL_SHRINK);
    refused(r, GRADD_ERR_INVALID, "no such GPU");
    bench.queues.devices = NULL;
    r.take_fd = sealed_page(F_SEAL_SHRINK);
    refused(r, GRADD_ERR_UNSUPPORTED, "no device memory");
    bench_teardown();
}
END_TEST

START_TEST(a_gpu_without_events_or_flags_says_so)
{
    static const uint8_t garbage[64];
    struct queue_request r = {1, 1, gpu(0), PB__QUEUE_ORDER__ORDER_EVENT, garbage, -1};
    setenv("GRADD_FAKE_CUDA_IPC_EVENTS", "0", 1);
    setenv("GRADD_FAKE_CUDA_WITHOUT", "cuStreamWaitValue64_v2", 1);
    bench_setup();
    refused(r, GRADD_ERR_UNSUPPORTED, "no interprocess events");
    r.order = PB__QUEUE_ORDER__ORDER_FLAG;
    r.take_fd = sealed_page(F_SEAL_SHRINK);
    refused(r, GRADD_ERR_UNSUPPORTED, "can not wait for words");
    bench_teardown();
}
END_TEST

START_TEST(the_owner_may_go_while_its_queue_opens)
{
    struct queue_request r = {1, 1, gpu(0), PB__QUEUE_ORDER__ORDER_FLAG, NULL, -1};
    bench_setup();
    r.take_fd = sealed_page(F_SEAL_SHRINK);
    queue_open(&bench.queues, &r, bench_on_queue, NULL);
    queue_table_deinit(&bench.queues, false); /* it waits for the device */
    r.take_fd = sealed_page(F_SEAL_SHRINK);
    request_queue(&r);
    ck_assert_int_eq(bench.status, GRADD_OK);
    r.id = 2;
    r.take_fd = sealed_page(F_SEAL_SHRINK);
    queue_open(&bench.queues, &r, bench_on_queue, NULL);
    bench_teardown(); /* it is opened meanwhile */
    ck_assert_uint_eq(bench.n_opened, 1);
    ck_assert_uint_eq(cu.count("cuMemHostRegister_v2"), cu.count("cuMemHostUnregister"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("queue");
    TCase *cases = tcase_create("queue");
    tcase_set_timeout(cases, 30);
    const TTest *const tests[] = {
        events_order_both_streams,
        flags_order_both_streams,
        delays_at_every_step_change_nothing_with_events,
        delays_at_every_step_change_nothing_with_flags,
        skipped_ops_leave_no_stream_waiting,
        a_wait_for_a_lost_trainer_ends_by_poison_alone,
        a_queue_that_is_closed_in_order_is_sure_of_its_inputs,
        words_stay_until_a_late_write_has_come_to_them,
        a_pin_outlives_the_table,
        what_is_no_queue_is_refused,
        a_gpu_without_events_or_flags_says_so,
        the_owner_may_go_while_its_queue_opens,
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tcase_add_test(cases, tests[i]);
    suite_add_tcase(suite, cases);
    return run_fake_suite(suite);
}
