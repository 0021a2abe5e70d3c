/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, events and flag words of the fake driver, in one process. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake_driver.h"

static CUstream stream(unsigned flags)
{
    CUstream s;
    OK(cu.cuStreamCreate(&s, flags));
    return s;
}

static CUevent event(unsigned flags)
{
    CUevent e;
    OK(cu.cuEventCreate(&e, flags));
    return e;
}

/* A word that holds a stream back until it is written. */
static _Alignas(4096) _Atomic uint64_t gate[512];

static void hold(CUstream s)
{
    static bool is_registered;
    if (!is_registered)
        OK(cu.cuMemHostRegister_v2(gate, sizeof gate, CU_MEMHOSTREGISTER_DEVICEMAP));
    is_registered = true;
    OK(cu.cuStreamWaitValue64_v2(s, (CUdeviceptr)(uintptr_t)gate, 1, CU_STREAM_WAIT_VALUE_GEQ));
}

static void let_go(void)
{
    atomic_store(gate, 1);
}

static void append(void *data)
{
    static atomic_int at;
    ((int *)data)[0] = atomic_fetch_add(&at, 1);
}

static uint64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

START_TEST(items_run_in_order_whatever_the_delays)
{
    setenv("GRADD_FAKE_CUDA_DELAY_US", "2000", 1);
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    int order[20];
    uint64_t before = now_us();
    for (int i = 0; i < 20; i++)
        OK(i % 2 ? cu.cuLaunchHostFunc(s, append, &order[i])
                 : cu.stream_push(s, append, &order[i]));
    OK(cu.cuStreamSynchronize(s));
    for (int i = 0; i < 20; i++)
        ck_assert_int_eq(order[i], i);
    ck_assert_uint_ge(now_us() - before, 5000); /* their sum, for this seed, is above */
}
END_TEST

START_TEST(a_stream_waits_for_the_record_made_before_the_wait)
{
    driver_open(0);
    CUstream a = stream(CU_STREAM_NON_BLOCKING), b = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamSynchronize(a));
    OK(cu.cuStreamWaitEvent(b, e, 0)); /* the first record */
    hold(a);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamSynchronize(b));
    OK(cu.cuStreamWaitEvent(b, e, 0)); /* the second */
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(b));
    GIVES(CUDA_ERROR_NOT_READY, cu.cuEventQuery(e));
    let_go();
    OK(cu.cuStreamSynchronize(b));
}
END_TEST

START_TEST(records_on_two_streams_are_done_in_any_order)
{
    driver_open(0);
    CUstream a = stream(CU_STREAM_NON_BLOCKING), b = stream(CU_STREAM_NON_BLOCKING);
    CUstream waiting = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    hold(a);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamWaitEvent(waiting, e, 0));
    OK(cu.cuEventRecord(e, b));
    OK(cu.cuEventSynchronize(e)); /* the second record */
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(waiting));
    let_go();
    OK(cu.cuStreamSynchronize(waiting));
    OK(cu.cuEventQuery(e));
}
END_TEST

START_TEST(a_late_record_does_not_undo_a_newer_one)
{
    driver_open(0);
    CUstream a = stream(CU_STREAM_NON_BLOCKING), b = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    hold(a);
    OK(cu.cuEventRecord(e, a));
    for (int i = 0; i < 64; i++) /* the last has the first one's place */
        OK(cu.cuEventRecord(e, b));
    OK(cu.cuEventSynchronize(e));
    let_go();
    OK(cu.cuStreamSynchronize(a));
    OK(cu.cuEventQuery(e));
}
END_TEST

START_TEST(a_wait_outlives_its_event)
{
    driver_open(0);
    CUstream a = stream(CU_STREAM_NON_BLOCKING), b = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event(CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    hold(a);
    OK(cu.cuEventRecord(e, a));
    OK(cu.cuStreamWaitEvent(b, e, 0));
    OK(cu.cuEventDestroy_v2(e));
    CUevent next = event(CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    OK(cu.cuEventQuery(next)); /* the same slot, never recorded */
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(b));
    let_go();
    OK(cu.cuStreamSynchronize(b));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuEventQuery(e));
}
END_TEST

START_TEST(an_event_is_recorded_in_its_own_context)
{
    driver_open(0);
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    CUcontext other;
    OK(cu.cuDevicePrimaryCtxRetain(&other, 1));
    OK(cu.cuCtxPushCurrent_v2(other));
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuEventRecord(e, s));
    OK(cu.cuStreamWaitEvent(s, e, 0));
    ck_assert_int_eq(cu.stream_device(s), 1);
    OK(cu.cuCtxPopCurrent_v2(NULL));
}
END_TEST

START_TEST(interprocess_events_have_no_timing)
{
    driver_open(0);
    CUevent e;
    CUipcEventHandle handle;
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuEventCreate(&e, CU_EVENT_INTERPROCESS));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuIpcGetEventHandle(&handle, event(0)));
}
END_TEST

START_TEST(elapsed_time_needs_two_events_with_timing)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUevent from = event(0), to = event(0), untimed = event(CU_EVENT_DISABLE_TIMING);
    float ms;
    OK(cu.cuEventRecord(from, s));
    OK(cu.cuEventRecord(untimed, s));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuEventElapsedTime_v2(&ms, from, to));
    hold(s);
    OK(cu.cuEventRecord(to, s));
    GIVES(CUDA_ERROR_NOT_READY, cu.cuEventElapsedTime_v2(&ms, from, to));
    let_go();
    OK(cu.cuEventSynchronize(to));
    OK(cu.cuEventElapsedTime_v2(&ms, from, to));
    ck_assert(ms >= 0);
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuEventElapsedTime_v2(&ms, from, untimed));
}
END_TEST

START_TEST(the_default_stream_and_blocking_streams_wait_for_each_other)
{
    driver_open(0);
    CUstream blocking = stream(CU_STREAM_DEFAULT), free_stream = stream(CU_STREAM_NON_BLOCKING);
    int order[3];
    hold(blocking);
    OK(cu.stream_push(blocking, append, &order[0]));
    OK(cu.stream_push(NULL, append, &order[1]));
    OK(cu.stream_push(blocking, append, &order[2]));
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(NULL));
    OK(cu.cuStreamSynchronize(free_stream));
    let_go();
    OK(cu.cuStreamSynchronize(blocking));
    ck_assert(order[0] == 0 && order[1] == 1 && order[2] == 2);
}
END_TEST

static CUresult from_host_function;

static void call_driver(void *data)
{
    from_host_function = cu.cuStreamQuery(NULL);
}

START_TEST(a_host_function_must_not_call_the_driver)
{
    driver_open(0);
    OK(cu.cuLaunchHostFunc(NULL, call_driver, NULL));
    OK(cu.cuStreamSynchronize(NULL));
    ck_assert_int_eq(from_host_function, CUDA_ERROR_NOT_PERMITTED);
}
END_TEST

START_TEST(flag_words_are_device_or_registered_memory)
{
    driver_open(0);
    uint64_t word = 0;
    CUdeviceptr managed, device;
    OK(cu.cuMemAllocManaged(&managed, 8, CU_MEM_ATTACH_GLOBAL));
    OK(cu.cuMemAlloc_v2(&device, 64));
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu.cuStreamWriteValue64_v2(NULL, (CUdeviceptr)(uintptr_t)&word, 1, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuStreamWriteValue64_v2(NULL, managed, 1, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuStreamWriteValue64_v2(NULL, device + 4, 1, 0));
    OK(cu.cuStreamWriteValue32_v2(NULL, device + 4, 7, 0));
    OK(cu.cuStreamWaitValue32_v2(NULL, device + 4, 7, 1));
    OK(cu.cuStreamSynchronize(NULL));
}
END_TEST

START_TEST(waiting_for_a_value_compares_cyclically)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    hold(s);
    let_go();
    OK(cu.cuStreamSynchronize(s));
    CUdeviceptr word = (CUdeviceptr)(uintptr_t)&gate[1];
    atomic_store(&gate[1], 5);
    OK(cu.cuStreamWaitValue64_v2(s, word, UINT64_MAX - 5, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cu.cuStreamSynchronize(s));
    OK(cu.cuStreamWaitValue64_v2(s, word, 6, CU_STREAM_WAIT_VALUE_GEQ));
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(s));
    atomic_store(&gate[1], 7);
    OK(cu.cuStreamSynchronize(s));
}
END_TEST

START_TEST(a_fault_fails_every_later_call_and_ends_the_work)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    CUdeviceptr p;
    CUcontext context;
    int untouched = -1;
    hold(s);
    OK(cu.cuLaunchHostFunc(s, append, &untouched));
    OK(cu.cuEventRecord(e, s));
    cu.context_fail(s, CUDA_ERROR_ILLEGAL_ADDRESS);
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuStreamQuery(s));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuMemAlloc_v2(&p, 8));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuEventQuery(e));
    OK(cu.cuDevicePrimaryCtxRelease_v2(0));
    ck_assert_int_eq(untouched, -1);
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cu.cuCtxSetCurrent(context));
    OK(cu.cuMemAlloc_v2(&p, 8));
}
END_TEST

static void fail_context(void *data)
{
    cu.context_fail(data, CUDA_ERROR_LAUNCH_FAILED);
}

START_TEST(a_fault_ends_every_wait_of_the_host)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING), other = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    hold(s);
    OK(cu.cuEventRecord(e, s));
    OK(cu.stream_push(other, fail_context, other));
    GIVES(CUDA_ERROR_LAUNCH_FAILED, _i ? cu.cuEventSynchronize(e) : cu.cuStreamSynchronize(s));
}
END_TEST

START_TEST(a_captured_stream_refuses_what_a_capture_cannot_hold)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING), other = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    CUgraph graph;
    int status;
    OK(cu.cuEventRecord(e, other));
    OK(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cu.cuStreamIsCapturing(s, &status));
    ck_assert_int_eq(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuStreamSynchronize(s));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuStreamQuery(s));
    GIVES(905, cu.cuStreamWaitEvent(s, e, 0));
    GIVES(901, cu.cuStreamEndCapture(s, &graph));
    OK(cu.cuStreamIsCapturing(s, &status));
    ck_assert_int_eq(status, CU_STREAM_CAPTURE_STATUS_NONE);
}
END_TEST

START_TEST(a_call_that_may_wait_spoils_a_capture_unless_the_thread_is_relaxed)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    CUgraph graph;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    OK(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
    ck_assert_int_eq(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    OK(cu.cuEventQuery(e));
    OK(cu.cuThreadExchangeStreamCaptureMode(&mode));
    OK(cu.cuStreamEndCapture(s, &graph));
    OK(cu.cuGraphDestroy(graph));
    OK(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.cuEventQuery(e));
    GIVES(901, cu.cuStreamEndCapture(s, &graph));
    OK(cu.cuEventQuery(e));
}
END_TEST

START_TEST(the_default_stream_is_of_no_use_while_a_blocking_one_is_captured)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_DEFAULT);
    CUgraph graph;
    int status;
    OK(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cu.cuStreamIsCapturing(NULL, &status));
    OK(cu.cuStreamEndCapture(s, &graph));
    OK(cu.cuGraphDestroy(graph));
    OK(cu.cuStreamIsCapturing(NULL, &status));
}
END_TEST

static const CUstream own = (CUstream)(uintptr_t)CU_STREAM_PER_THREAD;

static void *use_own_stream(void *context)
{
    int order = -1;
    OK(cu.cuCtxSetCurrent(context));
    OK(cu.cuLaunchHostFunc(own, append, &order));
    OK(cu.cuStreamSynchronize(own));
    return NULL;
}

START_TEST(per_thread_streams_do_not_wait_for_each_other)
{
    driver_open(0);
    CUcontext context;
    pthread_t thread;
    OK(cu.cuCtxGetCurrent(&context));
    hold(own);
    ck_assert_int_eq(pthread_create(&thread, NULL, use_own_stream, context), 0);
    pthread_join(thread, NULL);
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(own));
    let_go();
    OK(cu.cuStreamSynchronize(own));
}
END_TEST

START_TEST(a_destroyed_stream_ends_its_work_and_is_no_handle)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    int order = -1;
    CUevent e = event(CU_EVENT_DISABLE_TIMING);
    hold(s);
    OK(cu.stream_push(s, append, &order));
    OK(cu.cuEventRecord(e, s));
    OK(cu.cuStreamDestroy_v2(s));
    GIVES(CUDA_ERROR_INVALID_HANDLE, cu.cuStreamQuery(s));
    let_go();
    OK(cu.cuEventSynchronize(e));
    ck_assert_int_eq(order, 0);
}
END_TEST

START_TEST(copies_to_pageable_memory_count_as_synchronisation)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr p;
    void *pinned;
    char pageable[64] = "of the caller";
    OK(cu.cuMemAlloc_v2(&p, 64));
    OK(cu.cuMemHostAlloc(&pinned, 64, 0));
    hold(s);
    OK(cu.cuMemcpyHtoDAsync_v2(p, pageable, 64, s));
    memset(pageable, 0, sizeof pageable); /* it was read before the call returned */
    OK(cu.cuMemcpyDtoHAsync_v2(pinned, p, 64, s));
    ck_assert_uint_eq(cu.count("host_synchronisations"), 0);
    let_go();
    OK(cu.cuMemcpyDtoHAsync_v2(pageable, p, 64, s));
    ck_assert_uint_eq(cu.count("host_synchronisations"), 1);
    ck_assert_str_eq(pageable, "of the caller");
    ck_assert_str_eq(pinned, "of the caller");
}
END_TEST

START_TEST(a_word_that_is_unregistered_under_a_waiting_stream_is_a_fault)
{
    driver_open(0);
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    hold(s);
    OK(cu.cuMemHostUnregister(gate));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(s));
}
END_TEST

START_TEST(freeing_memory_may_wait_for_the_device)
{
    setenv("GRADD_FAKE_CUDA_FREE_WAITS", "1", 1);
    driver_open(0);
    CUdeviceptr p;
    int order = -1;
    OK(cu.cuMemAlloc_v2(&p, 64));
    OK(cu.cuLaunchHostFunc(stream(CU_STREAM_NON_BLOCKING), append, &order));
    OK(cu.cuMemFree_v2(p));
    ck_assert_int_eq(order, 0);
    ck_assert_uint_eq(cu.count("implicit_synchronisations"), 1);
    ck_assert_uint_eq(cu.count("host_synchronisations"), 0);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        items_run_in_order_whatever_the_delays,
        a_stream_waits_for_the_record_made_before_the_wait,
        records_on_two_streams_are_done_in_any_order,
        a_late_record_does_not_undo_a_newer_one,
        a_wait_outlives_its_event,
        an_event_is_recorded_in_its_own_context,
        interprocess_events_have_no_timing,
        elapsed_time_needs_two_events_with_timing,
        the_default_stream_and_blocking_streams_wait_for_each_other,
        a_host_function_must_not_call_the_driver,
        flag_words_are_device_or_registered_memory,
        waiting_for_a_value_compares_cyclically,
        a_fault_fails_every_later_call_and_ends_the_work,
        a_captured_stream_refuses_what_a_capture_cannot_hold,
        a_call_that_may_wait_spoils_a_capture_unless_the_thread_is_relaxed,
        the_default_stream_is_of_no_use_while_a_blocking_one_is_captured,
        per_thread_streams_do_not_wait_for_each_other,
        a_destroyed_stream_ends_its_work_and_is_no_handle,
        copies_to_pageable_memory_count_as_synchronisation,
        a_word_that_is_unregistered_under_a_waiting_stream_is_a_fault,
        freeing_memory_may_wait_for_the_device,
    };
    Suite *fakes = suite_create("fake_stream");
    TCase *tcase = tcase_create("fake_stream");
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tcase_add_test(tcase, tests[i]);
    tcase_add_loop_test(tcase, a_fault_ends_every_wait_of_the_host, 0, 2);
    suite_add_tcase(fakes, tcase);
    return run_fake_suite(fakes);
}
