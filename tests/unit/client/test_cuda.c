/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory that a worker takes, on the fake driver. The test plays the worker: it imports
 * nothing, but sees every message, and writes the words of the flag order as the worker's stream
 * would.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda.h"
#include "fake_node.h"
#include "run_suite.h"

enum { BYTES = 4 << 20, COUNT = 1000, FINISHED_WORD = 8 };

static struct fake_node node;
static const struct cuda_table *cuda;
static _Atomic uint64_t *words; /* of the queue */
static uint32_t queue_id;

static void ok(CUresult rc)
{
    ck_assert_int_eq(rc, CUDA_SUCCESS);
}

static void join_with(uint32_t order)
{
    const char *text = "";
    cuda = cuda_table_open(CUDA_OPEN_LOAD, &text);
    ck_assert_msg(cuda != NULL, "%s", text);
    CUcontext context;
    ok(cuda->primary_retain(&context, 0));
    ok(cuda->ctx_set(context));
    fake_open(&node);
    node.has_device_path = true;
    node.device_order = order;
    fake_join(&node, 4000, (uint64_t)1 << 33);
}

static void join(void)
{
    join_with(PB__QUEUE_ORDER__ORDER_FLAG);
}

static void leave(void)
{
    fake_hang_up(&node.daemon);
    fake_hang_up(&node.worker);
    gradd_shutdown(node.g);
    if (words)
        munmap((void *)words, 4096);
    words = NULL;
    fake_close(&node);
    node.has_device_path = false;
}

/* ------------------------------------------------------------------ calls that wait for answers */

static struct submission {
    struct gradd_op ops[2];
    size_t n;
    gradd_handle handle;
    char error[512];
    pthread_t thread;
} submission;

static void *submit_thread(void *arg)
{
    struct submission *s = arg;
    s->handle = gradd_submit(node.g, s->ops, s->n);
    snprintf(s->error, sizeof s->error, "%s", gradd_error());
    return NULL;
}

static struct gradd_op all_reduce(CUdeviceptr in, CUdeviceptr out)
{
    return (struct gradd_op){
        .struct_size = sizeof(struct gradd_op),
        .kind = GRADD_ALLREDUCE,
        .dtype = GRADD_F32,
        .redop = GRADD_SUM,
        .name = "x",
        .in = (void *)(uintptr_t)in,
        .out = (void *)(uintptr_t)out,
        .count = COUNT,
    };
}

static void start(CUdeviceptr in, CUdeviceptr out)
{
    submission = (struct submission){.n = 1};
    submission.ops[0] = all_reduce(in, out);
    ck_assert_int_eq(pthread_create(&submission.thread, NULL, submit_thread, &submission), 0);
}

static gradd_handle end(void)
{
    ck_assert_int_eq(pthread_join(submission.thread, NULL), 0);
    ck_assert_msg(submission.handle > 0, "%s", submission.error);
    return submission.handle;
}

/* The worker takes a region. Its id. */
static uint32_t take_register(Pb__RegionKind kind, uint64_t bytes)
{
    const Pb__Register *message =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_REGISTER, NULL)->register_;
    ck_assert_int_eq(message->kind, kind);
    ck_assert_uint_eq(message->bytes, bytes);
    ck_assert_uint_eq(message->device.len, CUDA_UUID_BYTES);
    uint32_t region = message->region;
    if (kind == PB__REGION_KIND__CUDA_IPC) {
        ck_assert_uint_eq(message->handle.len, CUDA_HANDLE_BYTES);
        fake_answer_region(&node, region, GRADD_OK, "");
    }
    return region;
}

static void take_queue(void)
{
    int fd;
    const Pb__OpenQueue *message =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_OPEN_QUEUE, &fd)->open_queue;
    ck_assert_int_eq(message->order, PB__QUEUE_ORDER__ORDER_FLAG);
    ck_assert_uint_eq(message->slots, CUDA_SLOTS);
    queue_id = message->queue;
    if (words)
        munmap((void *)words, 4096);
    words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne((void *)words, MAP_FAILED);
    close(fd);
    fake_answer_queue(&node, queue_id, GRADD_OK, "");
}

struct seen {
    uint64_t id, ticket, in_offset, out_offset;
    uint32_t in, out, queue;
};

static struct seen take_submit(void)
{
    const Pb__SubmitBatch *batch =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_SUBMIT_BATCH, NULL)->submit_batch;
    ck_assert_uint_eq(batch->n_submits, 1);
    const Pb__Submit *submit = batch->submits[0];
    ck_assert(submit->is_device);
    ck_assert_uint_eq(submit->ready, submit->count);
    return (struct seen){
        .id = submit->id,
        .ticket = submit->ticket,
        .queue = submit->queue,
        .in = submit->in ? submit->in->region : 0,
        .in_offset = submit->in ? submit->in->offset : 0,
        .out = submit->out ? submit->out->region : 0,
        .out_offset = submit->out ? submit->out->offset : 0,
    };
}

/* What the worker's stream and the worker do for an op that went well. */
static void finish(const struct seen *op)
{
    atomic_store(&words[FINISHED_WORD + op->ticket % CUDA_SLOTS], op->ticket);
    fake_enqueued(&node, op->id);
    fake_complete(&node, op->id, GRADD_OK, "");
}

static void expect_end(gradd_handle handle)
{
    ck_assert_msg(gradd_wait(node.g, handle, 10) == GRADD_OK, "%s", gradd_error());
}

static uint64_t fake_count(const char *name)
{
    uint64_t (*count)(const char *name);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *symbol = library ? dlsym(library, "fake_cuda_count") : NULL;
    ck_assert_ptr_nonnull(symbol);
    memcpy(&count, &symbol, sizeof count);
    dlclose(library);
    return count(name);
}

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr at;
    ok(cuda->mem_alloc(&at, bytes));
    return at;
}

/* Physical memory at consecutive addresses. */
static CUdeviceptr map_chunks(unsigned n, size_t bytes, int handle_types)
{
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = handle_types,
                                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    const CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr base;
    ok(cuda->vmm_reserve(&base, 2 * n * bytes, 0, 0, 0));
    for (unsigned i = 0; i < n; i++) {
        CUmemGenericAllocationHandle handle;
        ok(cuda->vmm_create(&handle, bytes, &properties, 0));
        ok(cuda->vmm_map(base + i * bytes, bytes, 0, handle, 0));
        ok(cuda->vmm_access(base + i * bytes, bytes, &access, 1));
        ok(cuda->vmm_release(handle));
    }
    return base;
}

/* The first op on new memory of cuMemAlloc(), done. Its region. */
static uint32_t first_op(CUdeviceptr at)
{
    start(at, at);
    uint32_t region = take_register(PB__REGION_KIND__CUDA_IPC, BYTES);
    take_queue();
    struct seen op = take_submit();
    ck_assert_uint_eq(op.in, region);
    ck_assert_uint_eq(op.out, region);
    finish(&op);
    expect_end(end());
    return region;
}

/* ------------------------------------------------------------------ registrations */

START_TEST(an_allocation_is_registered_once_and_named_by_offset)
{
    join();
    CUdeviceptr at = allocate(BYTES);
    uint32_t region = first_op(at);
    start(at + 4096, at + 65536);
    struct seen op = take_submit();
    ck_assert_uint_eq(op.in, region);
    ck_assert_uint_eq(op.in_offset, 4096);
    ck_assert_uint_eq(op.out, region);
    ck_assert_uint_eq(op.out_offset, 65536);
    ck_assert_uint_eq(op.ticket, 2);
    finish(&op);
    expect_end(end());
    leave();
}
END_TEST

START_TEST(memory_that_was_freed_and_came_back_is_registered_anew)
{
    join();
    CUdeviceptr at = allocate(BYTES), again;
    uint32_t region = first_op(at);
    ok(cuda->mem_free(at));
    again = allocate(BYTES);
    ck_assert_uint_eq(again, at); /* else this test shows nothing */
    start(again, again);
    /* The stale one goes first, by a message that nobody waits for. */
    ck_assert_uint_eq(
        fake_expect(&node.worker, PB__ENVELOPE__BODY_UNREGISTER, NULL)->unregister->region, region);
    uint32_t fresh = take_register(PB__REGION_KIND__CUDA_IPC, BYTES);
    ck_assert_uint_ne(fresh, region);
    struct seen op = take_submit();
    ck_assert_uint_eq(op.in, fresh);
    finish(&op);
    expect_end(end());
    leave();
}
END_TEST

START_TEST(a_tensor_over_several_chunks_brings_a_descriptor_of_each)
{
    enum { CHUNKS = 6, CHUNK = 2 << 20 };
    join();
    CUdeviceptr base = map_chunks(CHUNKS, CHUNK, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    submission = (struct submission){.n = 1};
    submission.ops[0] = all_reduce(base, base);
    submission.ops[0].count = (CHUNKS * CHUNK) / sizeof(float);
    ck_assert_int_eq(pthread_create(&submission.thread, NULL, submit_thread, &submission), 0);
    uint32_t region = take_register(PB__REGION_KIND__CUDA_VMM, CHUNKS * CHUNK);
    unsigned n_chunks = 0;
    while (n_chunks < CHUNKS) {
        struct wire_frame frame;
        fake_next(&node.worker, &frame);
        ck_assert_int_eq(frame.envelope->body_case, PB__ENVELOPE__BODY_REGISTER_CHUNKS);
        ck_assert_uint_eq(frame.envelope->register_chunks->n_bytes, frame.n_fds);
        for (unsigned i = 0; i < frame.n_fds; i++)
            ck_assert_uint_eq(frame.envelope->register_chunks->bytes[i], CHUNK);
        n_chunks += frame.n_fds;
        wire_frame_close_fds(&frame);
    }
    ck_assert_uint_eq(n_chunks, CHUNKS);
    fake_answer_region(&node, region, GRADD_OK, "");
    take_queue();
    struct seen op = take_submit();
    finish(&op);
    expect_end(end());

    /* A part of it is known already, as long as each chunk is the one that it was. */
    start(base + CHUNK, base + CHUNK);
    op = take_submit();
    ck_assert_uint_eq(op.in, region);
    ck_assert_uint_eq(op.in_offset, CHUNK);
    finish(&op);
    expect_end(end());
    leave();
}
END_TEST

/* An op on this tensor goes through device memory of the library. Its handle; the worker is done.
 */
static gradd_handle bounce_op(CUdeviceptr at)
{
    start(at, at);
    struct wire_frame frame;
    const Pb__Register *message =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_REGISTER, NULL)->register_;
    ck_assert_int_eq(message->kind, PB__REGION_KIND__CUDA_VMM);
    uint32_t bounce = message->region;
    fake_next(&node.worker, &frame);
    ck_assert_int_eq(frame.envelope->body_case, PB__ENVELOPE__BODY_REGISTER_CHUNKS);
    wire_frame_close_fds(&frame);
    fake_answer_region(&node, bounce, GRADD_OK, "");
    take_queue();
    struct seen op = take_submit();
    ck_assert_uint_eq(op.in, bounce);
    ck_assert_uint_eq(op.out, bounce);
    ck_assert_uint_eq(op.in_offset, op.out_offset);
    ck_assert_uint_eq(op.in_offset % sizeof(float), 0);
    finish(&op);
    return end();
}

START_TEST(what_can_not_be_shared_is_copied_by_the_stream)
{
    join();
    expect_end(bounce_op(map_chunks(1, BYTES, CU_MEM_HANDLE_TYPE_NONE)));
    leave();
}
END_TEST

START_TEST(elements_at_odd_addresses_are_copied_to_where_kernels_can_load_them)
{
    join();
    expect_end(bounce_op(allocate(BYTES) + 2));
    leave();
}
END_TEST

START_TEST(the_registration_that_was_used_longest_ago_makes_room)
{
    join();
    CUdeviceptr first = allocate(BYTES);
    uint32_t oldest = first_op(first);
    for (unsigned i = 1; i <= CUDA_REGIONS_MAX; i++) {
        CUdeviceptr at = allocate(4096);
        start(at, at);
        if (i == CUDA_REGIONS_MAX)
            ck_assert_uint_eq(
                fake_expect(&node.worker, PB__ENVELOPE__BODY_UNREGISTER, NULL)->unregister->region,
                oldest);
        uint32_t region = take_register(PB__REGION_KIND__CUDA_IPC, 4096);
        struct seen op = take_submit();
        ck_assert_uint_eq(op.in, region);
        finish(&op);
        expect_end(end());
    }
    leave();
}
END_TEST

START_TEST(forgetting_waits_for_the_workers_answer)
{
    join();
    CUdeviceptr at = allocate(BYTES);
    uint32_t region = first_op(at);
    fake_answer_region(&node, region, GRADD_OK, "");
    ck_assert_int_eq(gradd_forget(node.g, (void *)(uintptr_t)(at + 100)), GRADD_OK);
    ck_assert_uint_eq(
        fake_expect(&node.worker, PB__ENVELOPE__BODY_UNREGISTER, NULL)->unregister->region, region);
    ck_assert_int_eq(gradd_forget(node.g, (void *)(uintptr_t)at), GRADD_OK);
    leave();
}
END_TEST

/* ------------------------------------------------------------------ queues */

static CUstream new_stream(void)
{
    CUstream stream;
    ok(cuda->stream_create(&stream, CU_STREAM_NON_BLOCKING, 0));
    return stream;
}

/* An op on a tensor that is registered; the worker has seen it. */
static gradd_handle submit(CUdeviceptr at, struct seen *out_op)
{
    start(at, at);
    *out_op = take_submit();
    return end();
}

/* The same, and the worker has put it into its stream: this one waits for it. */
static gradd_handle launch(CUdeviceptr at, CUstream stream, struct seen *out_op)
{
    gradd_handle handle = submit(at, out_op);
    fake_enqueued(&node, out_op->id);
    ck_assert_int_eq(gradd_wait_stream(node.g, handle, stream, 10), GRADD_OK);
    return handle;
}

START_TEST(a_refused_order_gives_way_to_the_other)
{
    join_with(PB__QUEUE_ORDER__ORDER_AUTO);
    CUdeviceptr at = allocate(BYTES);
    start(at, at);
    take_register(PB__REGION_KIND__CUDA_IPC, BYTES);
    const Pb__OpenQueue *message =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_OPEN_QUEUE, NULL)->open_queue;
    ck_assert_int_eq(message->order, PB__QUEUE_ORDER__ORDER_EVENT);
    ck_assert_uint_eq(message->n_events, CUDA_SLOTS);
    fake_answer_queue(&node, message->queue, GRADD_ERR_UNSUPPORTED, "no common /dev/shm");
    take_queue();
    struct seen op = take_submit();
    finish(&op);
    expect_end(end());
    leave();
}
END_TEST

START_TEST(both_orders_refused_is_the_ops_error)
{
    join_with(PB__QUEUE_ORDER__ORDER_AUTO);
    CUdeviceptr at = allocate(BYTES);
    start(at, at);
    take_register(PB__REGION_KIND__CUDA_IPC, BYTES);
    const Pb__OpenQueue *message =
        fake_expect(&node.worker, PB__ENVELOPE__BODY_OPEN_QUEUE, NULL)->open_queue;
    fake_answer_queue(&node, message->queue, GRADD_ERR_UNSUPPORTED, "no common /dev/shm");
    int fd;
    message = fake_expect(&node.worker, PB__ENVELOPE__BODY_OPEN_QUEUE, &fd)->open_queue;
    close(fd);
    fake_answer_queue(&node, message->queue, GRADD_ERR_UNSUPPORTED, "no words either");
    pthread_join(submission.thread, NULL);
    ck_assert_int_eq(submission.handle, GRADD_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(submission.error, "events: no common /dev/shm"));
    ck_assert_ptr_nonnull(strstr(submission.error, "flags: no words either"));
    leave();
}
END_TEST

START_TEST(a_stream_waits_for_the_word_and_the_host_for_enqueued_only)
{
    join();
    CUstream stream = new_stream();
    CUdeviceptr at = allocate(BYTES);
    first_op(at);
    struct seen op;
    gradd_handle handle = submit(at, &op);
    ck_assert_int_eq(gradd_wait_stream(node.g, handle, stream, 0), GRADD_PENDING);
    fake_enqueued(&node, op.id);
    ck_assert_int_eq(gradd_wait_stream(node.g, handle, stream, 10), GRADD_OK);
    ck_assert_int_eq(cuda->stream_query(stream), CUDA_ERROR_NOT_READY);
    ck_assert_int_eq(gradd_test(node.g, handle), GRADD_PENDING);
    atomic_store(&words[FINISHED_WORD + op.ticket % CUDA_SLOTS], op.ticket);
    while (cuda->stream_query(stream) == CUDA_ERROR_NOT_READY)
        sched_yield();
    fake_complete(&node, op.id, GRADD_OK, "");
    expect_end(handle);
    leave();
}
END_TEST

START_TEST(a_stream_goes_on_when_the_worker_hangs_up)
{
    join();
    CUstream stream = new_stream();
    CUdeviceptr at = allocate(BYTES);
    first_op(at);
    struct seen op;
    gradd_handle handle = launch(at, stream, &op);
    fake_hang_up(&node.worker);
    /* Nobody is inside the library: its watchdog has to do it. */
    while (cuda->stream_query(stream) == CUDA_ERROR_NOT_READY)
        sched_yield();
    /* A write of the worker's stream that was on its way comes after: waits to come pass as well.
     */
    atomic_store(&words[FINISHED_WORD + op.ticket % CUDA_SLOTS], op.ticket);
    while (atomic_load(&words[FINISHED_WORD + op.ticket % CUDA_SLOTS]) != INT64_MAX)
        sched_yield();
    fake_fail_epoch(&node.daemon, GRADD_ERR_RANK_LOST, "job job: the worker was killed");
    ck_assert_int_eq(gradd_wait(node.g, handle, 10), GRADD_ERR_RANK_LOST);
    leave();
}
END_TEST

START_TEST(words_stay_until_slow_streams_have_come_past_them)
{
    setenv("GRADD_FAKE_CUDA_DELAY_US", "30000", 1);
    join();
    CUstream stream = new_stream();
    CUdeviceptr at = allocate(BYTES);
    first_op(at);
    for (int i = 0; i < 4; i++) {
        struct seen op;
        gradd_handle handle = launch(at, stream, &op);
        finish(&op);
        expect_end(handle);
    }
    leave();
    ok(cuda->stream_synchronize(stream));
    ok(cuda->stream_synchronize(NULL));
}
END_TEST

static void *function_of_driver(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *symbol = library ? dlsym(library, name) : NULL;
    ck_assert_ptr_nonnull(symbol);
    dlclose(library);
    return symbol;
}

START_TEST(waiting_for_an_op_spoils_no_capture_of_another_stream)
{
    CUresult (*begin)(CUstream s, int mode), (*finish_capture)(CUstream s, void **out);
    join();
    void *symbol = function_of_driver("cuStreamBeginCapture_v2"), *graph;
    memcpy(&begin, &symbol, sizeof begin);
    symbol = function_of_driver("cuStreamEndCapture");
    memcpy(&finish_capture, &symbol, sizeof finish_capture);
    CUstream stream = new_stream();
    gradd_handle handle = bounce_op(map_chunks(1, BYTES, CU_MEM_HANDLE_TYPE_NONE));
    ok(begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    expect_end(handle); /* which asks an event */
    ok(finish_capture(stream, &graph));
    free(graph); /* the fake's has nothing inside */
    leave();
}
END_TEST

struct own_stream {
    CUdeviceptr at;
    gradd_handle handle;
    pthread_t thread;
    pthread_barrier_t end;
};

static void *submit_on_own_stream(void *arg)
{
    struct own_stream *own = arg;
    struct gradd_op op = all_reduce(own->at, own->at);
    op.stream = (void *)(uintptr_t)CU_STREAM_PER_THREAD;
    own->handle = gradd_submit(node.g, &op, 1);
    pthread_barrier_wait(&own->end);
    return NULL;
}

START_TEST(the_per_thread_streams_of_two_threads_are_two_streams)
{
    join();
    CUdeviceptr at = allocate(BYTES);
    first_op(at);
    struct own_stream threads[2];
    struct seen ops[2];
    for (int i = 0; i < 2; i++) {
        threads[i].at = at;
        pthread_barrier_init(&threads[i].end, NULL, 2);
        ck_assert_int_eq(
            pthread_create(&threads[i].thread, NULL, submit_on_own_stream, &threads[i]), 0);
        take_queue();
        ops[i] = take_submit();
        ck_assert_uint_eq(ops[i].queue, queue_id);
        ck_assert_uint_eq(ops[i].ticket, 1);
        finish(&ops[i]);
    }
    ck_assert_uint_ne(ops[0].queue, ops[1].queue);
    for (int i = 0; i < 2; i++) {
        pthread_barrier_wait(&threads[i].end);
        pthread_join(threads[i].thread, NULL);
        pthread_barrier_destroy(&threads[i].end);
        expect_end(threads[i].handle);
    }
    leave();
}
END_TEST

START_TEST(a_full_ring_is_followed_by_another_and_slots_are_used_again)
{
    join();
    CUdeviceptr at = allocate(BYTES);
    first_op(at); /* ticket 1 */
    struct seen ops[CUDA_SLOTS];
    gradd_handle handles[CUDA_SLOTS];
    uint32_t first_queue = queue_id;
    /* Its slot is free again: the ring takes as many as it has slots. */
    for (unsigned i = 0; i < CUDA_SLOTS; i++) {
        handles[i] = submit(at, &ops[i]);
        ck_assert_uint_eq(ops[i].queue, first_queue);
        ck_assert_uint_eq(ops[i].ticket, i + 2);
    }
    _Atomic uint64_t *first_words = words;
    words = NULL;
    start(at, at);
    take_queue();
    struct seen beyond = take_submit();
    gradd_handle last = end();
    ck_assert_uint_ne(beyond.queue, first_queue);
    ck_assert_uint_eq(beyond.ticket, 1);
    finish(&beyond);
    expect_end(last);

    /* Launched, and its wait issued: the slot is free though the op runs on. */
    munmap((void *)words, 4096);
    words = first_words;
    fake_enqueued(&node, ops[0].id);
    ck_assert_int_eq(gradd_wait_stream(node.g, handles[0], NULL, 10), GRADD_OK);
    start(at, at);
    struct seen op = take_submit();
    ck_assert_uint_eq(op.queue, first_queue);
    ck_assert_uint_eq(op.ticket, CUDA_SLOTS + 2);
    gradd_handle handle = end();
    for (unsigned i = 0; i < CUDA_SLOTS; i++)
        finish(&ops[i]);
    for (unsigned i = 0; i < CUDA_SLOTS; i++)
        expect_end(handles[i]);
    finish(&op);
    expect_end(handle);
    leave();
}
END_TEST

/* ------------------------------------------------------------------ steady state */

START_TEST(a_step_makes_nothing_and_waits_for_nothing)
{
    join();
    CUstream stream = new_stream();
    CUdeviceptr at = allocate(BYTES);
    first_op(at);
    static const char *const counted[] = {"event_creations",   "imports",
                                          "allocations",       "host_synchronisations",
                                          "cuIpcGetMemHandle", "cuMemHostRegister_v2"};
    enum { N_COUNTED = sizeof counted / sizeof *counted };
    uint64_t before[N_COUNTED];
    for (unsigned i = 0; i < N_COUNTED; i++)
        before[i] = fake_count(counted[i]);
    for (unsigned i = 0; i < 3 * CUDA_SLOTS; i++) {
        struct seen op;
        gradd_handle handle = launch(at, stream, &op);
        finish(&op);
        expect_end(handle);
    }
    for (unsigned i = 0; i < N_COUNTED; i++)
        ck_assert_msg(fake_count(counted[i]) == before[i], "%s: %llu more", counted[i],
                      (unsigned long long)(fake_count(counted[i]) - before[i]));
    leave();
}
END_TEST

int main(void)
{
    const TTest *tests[] = {
        an_allocation_is_registered_once_and_named_by_offset,
        memory_that_was_freed_and_came_back_is_registered_anew,
        a_tensor_over_several_chunks_brings_a_descriptor_of_each,
        what_can_not_be_shared_is_copied_by_the_stream,
        elements_at_odd_addresses_are_copied_to_where_kernels_can_load_them,
        the_registration_that_was_used_longest_ago_makes_room,
        forgetting_waits_for_the_workers_answer,
        a_refused_order_gives_way_to_the_other,
        both_orders_refused_is_the_ops_error,
        a_stream_waits_for_the_word_and_the_host_for_enqueued_only,
        a_stream_goes_on_when_the_worker_hangs_up,
        words_stay_until_slow_streams_have_come_past_them,
        waiting_for_an_op_spoils_no_capture_of_another_stream,
        the_per_thread_streams_of_two_threads_are_two_streams,
        a_full_ring_is_followed_by_another_and_slots_are_used_again,
        a_step_makes_nothing_and_waits_for_nothing,
    };
    return run_suite("client/cuda", tests, sizeof tests / sizeof *tests);
}
