/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device backend with its submitter and communicators in one process, on the fake driver and
 * the fake NCCL: what they are told to do wrong, it survives or ends in words. Each test is a
 * process of its own, so the fakes read its environment.
 */
#include <check.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/loop.h"
#include "cuda_table.h"
#include "envelope.pb-c.h"
#include "worker/backend/nccl/nccl.h"
#include "worker/buffer/chores.h"
#include "worker/buffer/cuda_device.h"
#include "worker/buffer/queue.h"

enum { RANKS_MAX = 4, OPS_MAX = 200, COUNT = 300 };

static const uint64_t ms = 1000000;
static const uint32_t all_ranks[RANKS_MAX] = {0, 1, 2, 3};

/* ------------------------------------------------------------------ a worker's insides */

struct rig {
    struct loop *loop;
    struct chores *chores;
    const struct cuda_table *cuda;
    struct cuda_device_table *devices;
    struct submitter *submitter;
    struct backend *nccl;
    uint32_t n_ranks;
    struct cuda_device *device_of[RANKS_MAX];
    CUdeviceptr memory[RANKS_MAX]; /* OPS_MAX tensors each */
    struct queue_table queues;
    struct queue *queue; /* of rank 0; NULL: it marks nothing */
    size_t skew;         /* bytes that tensors begin later */
    void *(*view)(const void *p, size_t bytes);
    /* What happened. */
    int n_enqueued, n_done, n_failed, failed_status;
    bool is_broken;
    char failed_text[700];
};

struct round {
    struct backend_batch batch;
    struct backend_op ops[OPS_MAX], *pointers[OPS_MAX];
    struct backend_part parts[OPS_MAX][RANKS_MAX];
};

static void on_opened(void *data, struct cuda_device *device)
{
    ck_assert_ptr_nonnull(device);
    ck_assert_msg(device->status == GRADD_OK, "%s", device->text);
    *(struct cuda_device **)data = device;
}

static struct cuda_device *open_device(struct rig *rig, int ordinal)
{
    CUuuid uuid;
    CUdevice device;
    struct cuda_device *opened = NULL;
    ck_assert_int_eq(rig->cuda->device_get(&device, ordinal), CUDA_SUCCESS);
    ck_assert_int_eq(rig->cuda->device_uuid(&uuid, device), CUDA_SUCCESS);
    cuda_device_open(rig->devices, uuid.bytes, on_opened, &opened);
    while (!opened)
        loop_step(rig->loop, true);
    return opened;
}

static void on_failed(void *data, int status, const char *text, bool broken)
{
    struct rig *rig = data;
    rig->n_failed++;
    rig->failed_status = status;
    rig->is_broken = broken;
    snprintf(rig->failed_text, sizeof rig->failed_text, "%s", text);
}

static void open_library(struct rig *rig)
{
    const char *text = "";
    rig->cuda = cuda_table_open(CUDA_OPEN_LOAD, &text);
    ck_assert_msg(rig->cuda, "%s", text);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *symbol = dlsym(library, "fake_cuda_view");
    ck_assert_msg(symbol, "libcuda.so.1 is not the fake");
    memcpy(&rig->view, &symbol, sizeof rig->view);
}

/* Time limits: short where a test is about them; 0: longer than anything takes here. */
struct limits {
    uint64_t op_ns, create_ns, abort_ns;
};

static const struct limits patient = {0};

static void rig_init(struct rig *rig, const int *ordinals, uint32_t n_ranks,
                     const struct limits *limits)
{
    *rig = (struct rig){.loop = loop_new(), .n_ranks = n_ranks};
    open_library(rig);
    rig->chores = chores_new(rig->loop);
    rig->devices = cuda_device_table_new(rig->cuda, rig->chores);
    rig->submitter = submitter_new(rig->loop);
    const struct nccl_setup setup = {
        .loop = rig->loop,
        .submitter = rig->submitter,
        .job = "train7",
        .n_ranks = n_ranks,
        .traffic_class = -1,
        .op_timeout_ns = limits->op_ns,
        .create_timeout_ns = limits->create_ns ? limits->create_ns : 20000 * ms,
        .abort_timeout_ns = limits->abort_ns ? limits->abort_ns : 20000 * ms,
        .is_alone = true,
        .on_failed = on_failed,
        .data = rig,
    };
    rig->nccl = nccl_new(&setup);
    ck_assert_ptr_nonnull(rig->nccl);
    for (uint32_t rank = 0; rank < n_ranks; rank++) {
        struct cuda_device *device = open_device(rig, ordinals[rank]);
        rig->device_of[rank] = device;
        rig->cuda->ctx_set(device->context);
        ck_assert_int_eq(rig->cuda->mem_alloc(&rig->memory[rank], OPS_MAX * COUNT * sizeof(float)),
                         0);
        nccl_set_device(rig->nccl, rank, device);
    }
}

static void rig_deinit(struct rig *rig)
{
    backend_nccl.free(rig->nccl);
    submitter_free(rig->submitter);
    for (uint32_t rank = 0; rank < rig->n_ranks; rank++) {
        rig->cuda->ctx_set(rig->device_of[rank]->context);
        rig->cuda->mem_free(rig->memory[rank]);
    }
    chores_free(rig->chores);
    cuda_device_table_free(rig->devices);
    loop_free(rig->loop);
}

/* ------------------------------------------------------------------ ops */

static float *tensor(const struct rig *rig, uint32_t rank, size_t i)
{
    const CUdeviceptr at = rig->memory[rank] + i * COUNT * sizeof(float);
    return rig->view((const void *)(uintptr_t)at, COUNT * sizeof(float));
}

static void on_enqueued(void *data, struct backend_batch *batch)
{
    struct rig *rig = data;
    ck_assert_int_eq(rig->n_enqueued, rig->n_done);
    rig->n_enqueued++;
}

static void on_done(void *data, struct backend_batch *batch)
{
    struct rig *rig = data;
    rig->n_done++;
    ck_assert_int_eq(rig->n_enqueued, rig->n_done);
}

/* n sums in place: rank r brings r + 1 everywhere. */
static void start_sums(struct rig *rig, struct round *round, size_t n)
{
    *round = (struct round){0};
    for (size_t i = 0; i < n; i++) {
        for (uint32_t rank = 0; rank < rig->n_ranks; rank++) {
            float *values = tensor(rig, rank, i);
            for (int e = 0; e < COUNT; e++)
                values[e] = (float)(rank + 1);
            uint8_t *base =
                (uint8_t *)(uintptr_t)(rig->memory[rank] + i * COUNT * sizeof(float) + rig->skew);
            round->parts[i][rank] =
                (struct backend_part){.in.base = base, .out.base = base, .count = COUNT};
        }
        if (rig->queue) {
            round->parts[i][0].queue = rig->queue;
            round->parts[i][0].ticket = 1;
            round->parts[i][0].ticket_ops = (uint32_t)n;
        }
        round->ops[i] = (struct backend_op){
            .kind = GRADD_ALLREDUCE,
            .dtype = GRADD_F32,
            .prescale = 1,
            .postscale = 1,
            .n_ranks = rig->n_ranks,
            .is_device = true,
            .ranks = all_ranks,
            .parts = round->parts[i],
            .end = COUNT,
        };
        round->pointers[i] = &round->ops[i];
    }
    round->batch = (struct backend_batch){
        .ops = round->pointers, .n_ops = n, .enqueued = on_enqueued, .done = on_done, .data = rig};
    backend_nccl.run(rig->nccl, &round->batch);
}

static void await_done(struct rig *rig, int n)
{
    while (rig->n_done < n)
        loop_step(rig->loop, true);
}

static void await_failed(struct rig *rig)
{
    while (rig->n_failed == 0)
        loop_step(rig->loop, true);
}

static void check_sums(struct rig *rig, const struct round *round, size_t n)
{
    const float sum = (float)(rig->n_ranks * (rig->n_ranks + 1) / 2);
    for (size_t i = 0; i < n; i++) {
        ck_assert_msg(round->ops[i].status == GRADD_OK, "%s", round->ops[i].text);
        for (uint32_t rank = 0; rank < rig->n_ranks; rank++)
            for (int e = 0; e < COUNT; e++)
                ck_assert_float_eq(tensor(rig, rank, i)[e], sum);
    }
}

static struct rig rig;
static struct round first, second;
static const int shared[] = {0, 0, 0}, apart[] = {0, 1}, mixed[] = {0, 1, 0};

/* ------------------------------------------------------------------ what works */

START_TEST(sums_in_many_batches_on_every_layout)
{
    const int *const layouts[] = {shared, apart, mixed};
    rig_init(&rig, layouts[_i], _i == 1 ? 2 : 3, &patient);
    for (int n = 0; n < 20; n++) {
        start_sums(&rig, &first, 1 + (size_t)n % 7);
        await_done(&rig, n + 1);
        check_sums(&rig, &first, 1 + (size_t)n % 7);
    }
    ck_assert_int_eq(rig.n_failed, 0);
    rig_deinit(&rig);
}
END_TEST

START_TEST(a_batch_of_more_ops_than_one_nccl_group_takes)
{
    setenv("GRADD_FAKE_NCCL_IN_PROGRESS", "2", 1);
    rig_init(&rig, mixed, 3, &patient);
    start_sums(&rig, &first, OPS_MAX);
    await_done(&rig, 1);
    check_sums(&rig, &first, OPS_MAX);
    const struct comm *comm = nccl_comms(rig.nccl);
    ck_assert_uint_eq(comm->n_ops, OPS_MAX);
    ck_assert_str_eq(comm_state_name(comm), "ready");
    rig_deinit(&rig);
}
END_TEST

START_TEST(without_kernels_what_needs_none_still_works)
{
    setenv("GRADD_CUDA_KERNELS", "/nonexistent", 1);
    rig_init(&rig, _i ? apart : shared, _i ? 2 : 3, &patient);
    start_sums(&rig, &first, 2);
    await_done(&rig, 1);
    if (_i) {
        check_sums(&rig, &first, 2);
    } else {
        ck_assert_int_eq(first.ops[0].status, GRADD_ERR_UNSUPPORTED);
        ck_assert_ptr_nonnull(strstr(first.ops[0].text, "kernels"));
    }
    ck_assert_int_eq(rig.n_failed, 0);
    rig_deinit(&rig);
}
END_TEST

START_TEST(kernels_that_the_driver_does_not_take_are_told_by_the_ops_that_need_them)
{
    setenv("GRADD_FAKE_CUDA_FAIL", "cuModuleLoadData:1:209", 1);
    rig_init(&rig, shared, 3, &patient);
    start_sums(&rig, &first, 2);
    await_done(&rig, 1);
    ck_assert_int_eq(first.ops[0].status, GRADD_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(first.ops[0].text, "209"), "%s", first.ops[0].text);
    ck_assert_int_eq(rig.n_failed, 0);
    rig_deinit(&rig);
}
END_TEST

START_TEST(elements_at_odd_addresses_are_refused_before_they_cost_the_context)
{
    rig_init(&rig, _i ? apart : shared, _i ? 2 : 3, &patient);
    rig.skew = 2;
    start_sums(&rig, &first, 2);
    await_done(&rig, 1);
    ck_assert_int_eq(first.ops[1].status, GRADD_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(first.ops[1].text, "multiple of its element"));
    rig.skew = 0;
    start_sums(&rig, &first, 2);
    await_done(&rig, 2);
    check_sums(&rig, &first, 2);
    ck_assert_int_eq(rig.n_failed, 0);
    rig_deinit(&rig);
}
END_TEST

/* ------------------------------------------------------------------ what fails */

static void expect_end(int status)
{
    nccl_abort(rig.nccl, status, "the epoch is over");
    await_done(&rig, 1);
    ck_assert_int_ne(first.ops[0].status, GRADD_OK);
    ck_assert(first.ops[0].text[0]);
    /* What comes later is refused at once. */
    start_sums(&rig, &second, 1);
    await_done(&rig, 2);
    ck_assert_int_eq(second.ops[0].status, status);
    ck_assert_str_eq(second.ops[0].text, "the epoch is over");
    ck_assert_int_eq(rig.n_failed, 1);
    rig_deinit(&rig);
}

START_TEST(a_communicator_that_does_not_come_up_fails_the_epoch)
{
    setenv("GRADD_FAKE_NCCL_INIT_HANGS", "1", 1);
    rig_init(&rig, apart, 2, &(struct limits){.create_ns = 100 * ms});
    start_sums(&rig, &first, 1);
    await_failed(&rig);
    ck_assert_int_eq(rig.failed_status, GRADD_ERR_RANK_LOST);
    ck_assert_msg(strstr(rig.failed_text, "0.1 s"), "%s", rig.failed_text);
    expect_end(GRADD_ERR_RANK_LOST);
}
END_TEST

START_TEST(an_op_that_hangs_on_the_gpus_fails_at_its_deadline)
{
    setenv("GRADD_FAKE_NCCL_HANG_AT", "1", 1);
    rig_init(&rig, mixed, 3, &(struct limits){.op_ns = 150 * ms});
    start_sums(&rig, &first, 1);
    await_failed(&rig);
    ck_assert_int_eq(rig.failed_status, GRADD_ERR_TIMEOUT);
    ck_assert_msg(strstr(rig.failed_text, "op_timeout_s"), "%s", rig.failed_text);
    ck_assert_int_eq(rig.n_done, 0);
    expect_end(GRADD_ERR_TIMEOUT);
}
END_TEST

START_TEST(an_error_that_nccl_meets_by_itself_fails_the_epoch)
{
    setenv("GRADD_FAKE_NCCL_ASYNC", "1:6", 1);
    rig_init(&rig, apart, 2, &patient);
    start_sums(&rig, &first, 1);
    await_failed(&rig);
    ck_assert_int_eq(rig.failed_status, GRADD_ERR_RANK_LOST);
    ck_assert_msg(strstr(rig.failed_text, "(6)"), "%s", rig.failed_text);
    expect_end(GRADD_ERR_RANK_LOST);
}
END_TEST

START_TEST(a_call_that_nccl_refuses_fails_the_epoch)
{
    setenv("GRADD_FAKE_NCCL_FAIL", "ncclAllReduce:1:3", 1);
    rig_init(&rig, apart, 2, &patient);
    start_sums(&rig, &first, 1);
    await_failed(&rig);
    ck_assert_msg(strstr(rig.failed_text, "launch") && strstr(rig.failed_text, "(3)"), "%s",
                  rig.failed_text);
    expect_end(GRADD_ERR_RANK_LOST);
}
END_TEST

START_TEST(a_fault_on_the_gpu_loses_its_context)
{
    setenv("GRADD_FAKE_CUDA_FAIL", "cuLaunchKernel:1:719", 1);
    rig_init(&rig, shared, 3, &patient);
    start_sums(&rig, &first, 1);
    await_failed(&rig);
    ck_assert(rig.is_broken);
    ck_assert_msg(strstr(rig.failed_text, "GPU-") && strstr(rig.failed_text, "719"), "%s",
                  rig.failed_text);
    expect_end(GRADD_ERR_RANK_LOST);
}
END_TEST

START_TEST(an_abort_that_does_not_return_ends_the_process)
{
    setenv("GRADD_FAKE_NCCL_ABORT_HANGS", "1", 1);
    setenv("GRADD_FAKE_NCCL_HANG_AT", "1", 1);
    rig_init(&rig, apart, 2, &(struct limits){.abort_ns = 300 * ms});
    start_sums(&rig, &first, 1);
    while (rig.n_enqueued == 0)
        loop_step(rig.loop, true);
    nccl_abort(rig.nccl, GRADD_ERR_RANK_LOST, "the epoch is over");
    for (;;)
        loop_step(rig.loop, true);
}
END_TEST

static void on_queue(void *data, uint32_t id, int status, const char *text, const uint8_t *events,
                     uint32_t slots)
{
    ck_assert_msg(status == GRADD_OK, "%s", text);
    *(bool *)data = true;
}

/* Rank 0's stream orders by words, and has come nowhere yet. */
static void open_queue(void)
{
    const struct queue_request request = {
        .id = 1,
        .slots = 4,
        .uuid = rig.device_of[0]->uuid,
        .order = PB__QUEUE_ORDER__ORDER_FLAG,
        .take_fd = memfd_create("words", MFD_CLOEXEC | MFD_ALLOW_SEALING),
    };
    bool is_open = false;
    const char *text = "";
    ck_assert_int_eq(ftruncate(request.take_fd, 4096), 0);
    ck_assert_int_eq(fcntl(request.take_fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    queue_table_init(&rig.queues, rig.chores, rig.devices);
    queue_open(&rig.queues, &request, on_queue, &is_open);
    while (!is_open)
        loop_step(rig.loop, true);
    rig.queue = queue_pin(&rig.queues, 1, &text);
    ck_assert_msg(rig.queue, "%s", text);
}

START_TEST(an_abort_does_not_wait_for_a_trainer_that_is_lost)
{
    rig_init(&rig, apart, 2, &patient);
    open_queue();
    start_sums(&rig, &first, 1);
    while (rig.n_enqueued == 0)
        loop_step(rig.loop, true);
    nccl_abort(rig.nccl, GRADD_ERR_RANK_LOST, "the epoch is over");
    await_done(&rig, 1);
    ck_assert_int_eq(first.ops[0].status, GRADD_ERR_RANK_LOST);
    while (nccl_is_draining(rig.nccl))
        loop_step(rig.loop, true);
    queue_unpin(rig.queue);
    queue_table_deinit(&rig.queues, true);
    rig_deinit(&rig);
}
END_TEST

START_TEST(ranks_on_several_gpus_need_an_nccl_that_is_new_enough)
{
    setenv("GRADD_FAKE_NCCL_VERSION", "21703", 1);
    rig_init(&rig, apart, 2, &patient);
    start_sums(&rig, &first, 1);
    await_failed(&rig);
    ck_assert_msg(strstr(rig.failed_text, "NCCL 2.17.3 is too old"), "%s", rig.failed_text);
    expect_end(GRADD_ERR_RANK_LOST);
}
END_TEST

/* A folder for the fakes of all tests, also of those that end without a chance to tidy. */
static void remove_folder(const char *path)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", path);
    if (system(command) != 0)
        fprintf(stderr, "%s is left\n", path);
}

int main(void)
{
    char folder[] = "/tmp/gradd-fake-cuda-XXXXXX";
    if (!mkdtemp(folder))
        return EXIT_FAILURE;
    setenv("GRADD_FAKE_CUDA_DIR", folder, 1);
    Suite *suite = suite_create("nccl backend");
    TCase *tcase = tcase_create("fakes");
    tcase_set_timeout(tcase, 30);
    tcase_add_loop_test(tcase, sums_in_many_batches_on_every_layout, 0, 3);
    tcase_add_test(tcase, a_batch_of_more_ops_than_one_nccl_group_takes);
    tcase_add_loop_test(tcase, without_kernels_what_needs_none_still_works, 0, 2);
    tcase_add_test(tcase, kernels_that_the_driver_does_not_take_are_told_by_the_ops_that_need_them);
    tcase_add_loop_test(tcase, elements_at_odd_addresses_are_refused_before_they_cost_the_context,
                        0, 2);
    tcase_add_test(tcase, a_communicator_that_does_not_come_up_fails_the_epoch);
    tcase_add_test(tcase, an_op_that_hangs_on_the_gpus_fails_at_its_deadline);
    tcase_add_test(tcase, an_error_that_nccl_meets_by_itself_fails_the_epoch);
    tcase_add_test(tcase, a_call_that_nccl_refuses_fails_the_epoch);
    tcase_add_test(tcase, a_fault_on_the_gpu_loses_its_context);
    tcase_add_test(tcase, an_abort_does_not_wait_for_a_trainer_that_is_lost);
    tcase_add_exit_test(tcase, an_abort_that_does_not_return_ends_the_process, EXIT_FAILURE);
    tcase_add_test(tcase, ranks_on_several_gpus_need_an_nccl_that_is_new_enough);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    remove_folder(folder);
    return n_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
