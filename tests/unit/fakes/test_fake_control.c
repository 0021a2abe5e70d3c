/* SPDX-License-Identifier: Apache-2.0 */
/* What is set from outside: devices, errors, missing functions, counters; contexts; processes. */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "cuda_table.h"
#include "fake_driver.h"

static CUuuid uuid_of(CUdevice device)
{
    CUuuid uuid;
    OK(cu.cuDeviceGetUuid_v2(&uuid, device));
    return uuid;
}

START_TEST(visible_devices_hide_and_reorder)
{
    setenv("GRADD_FAKE_CUDA_DEVICES", "4", 1);
    setenv("CUDA_VISIBLE_DEVICES", "3,GPU-fa4efa4e-0000-4000-8000-000000000001,9,0", 1);
    driver_load();
    int n;
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGetCount(&n));
    ck_assert_int_eq(n, 2); /* the list ends at the first that is none */
    ck_assert_int_eq(uuid_of(0).bytes[15], 3);
    ck_assert_int_eq(uuid_of(1).bytes[15], 1);
    ck_assert_int_eq(cu.physical_device(1), 1);
}
END_TEST

START_TEST(without_visible_devices_there_is_no_driver)
{
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    driver_load();
    GIVES(CUDA_ERROR_NO_DEVICE, cu.cuInit(0));
}
END_TEST

static void send_uuid(int fd)
{
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    driver_open(0);
    CUuuid uuid = uuid_of(0);
    put(fd, &uuid, sizeof uuid);
}

START_TEST(a_device_has_the_same_uuid_in_every_process)
{
    struct peer peer = peer_start(send_uuid);
    driver_open(0);
    CUuuid theirs, ours = uuid_of(1);
    take(peer.fd, &theirs, sizeof theirs);
    ck_assert(memcmp(&theirs, &ours, sizeof ours) == 0);
    peer_end(peer);
}
END_TEST

START_TEST(calls_need_init_and_a_context)
{
    driver_load();
    int n;
    CUdeviceptr p;
    CUcontext context;
    unsigned flags;
    GIVES(CUDA_ERROR_NOT_INITIALIZED, cu.cuDeviceGetCount(&n));
    OK(cu.cuInit(0));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemAlloc_v2(&p, 8));
    OK(cu.cuDevicePrimaryCtxGetState(1, &flags, &n));
    ck_assert_int_eq(n, 0);
    OK(cu.cuDevicePrimaryCtxRetain(&context, 1));
    OK(cu.cuDevicePrimaryCtxGetState(1, &flags, &n));
    ck_assert_int_eq(n, 1);
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuMemAlloc_v2(&p, 8));
    OK(cu.cuCtxPushCurrent_v2(context));
    OK(cu.cuMemAlloc_v2(&p, 8));
    OK(cu.cuCtxGetDevice(&n));
    ck_assert_int_eq(n, 1);
    OK(cu.cuCtxPopCurrent_v2(&context));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuCtxGetDevice(&n));
    OK(cu.cuDevicePrimaryCtxRelease_v2(1));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuDevicePrimaryCtxRelease_v2(1));
}
END_TEST

START_TEST(a_forked_child_has_no_driver)
{
    driver_open(0);
    pid_t pid = fork();
    int status;
    CUdeviceptr p;
    if (pid == 0)
        _exit(cu.cuMemAlloc_v2(&p, 8) == CUDA_ERROR_NOT_INITIALIZED &&
                      cu.cuInit(0) == CUDA_ERROR_NOT_INITIALIZED
                  ? 0
                  : 1);
    ck_assert(waitpid(pid, &status, 0) == pid && status == 0);
}
END_TEST

START_TEST(the_chosen_call_fails)
{
    setenv("GRADD_FAKE_CUDA_FAIL",
           "other-program/cuMemAlloc:*:999,cuMemAlloc:2:2,cuEventCreate:3+:1,cuMemAlloc_v2:4:46",
           1);
    driver_open(0);
    static const CUresult allocs[] = {0, 2, 0, 46, 0}, events[] = {0, 0, 1, 1, 1};
    CUdeviceptr p;
    CUevent e;
    for (int i = 0; i < 5; i++) {
        GIVES(allocs[i], cu.cuMemAlloc_v2(&p, 8));
        GIVES(events[i], cu.cuEventCreate(&e, 0));
    }
}
END_TEST

static void write_failures(const char *items)
{
    char path[256], text[1024] = {0};
    snprintf(path, sizeof path, "%s/fail", getenv("GRADD_FAKE_CUDA_DIR"));
    snprintf(text, sizeof text, "%s", items);
    FILE *file = fopen(path, "r+");
    HOLDS(file != NULL && fwrite(text, sizeof text, 1, file) == 1);
    fclose(file);
}

START_TEST(errors_can_be_switched_on_and_off_in_a_running_process)
{
    driver_open(0);
    size_t left, total;
    CUdeviceptr p;
    OK(cu.cuMemGetInfo_v2(&left, &total));
    write_failures("cuMemGetInfo:*:46\ncuMemAlloc:*:2");
    GIVES(46, cu.cuMemGetInfo_v2(&left, &total));
    GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, 8));
    write_failures("");
    OK(cu.cuMemGetInfo_v2(&left, &total));
}
END_TEST

START_TEST(an_injected_fault_stays)
{
    setenv("GRADD_FAKE_CUDA_FAIL", "cuMemGetInfo:2:719", 1);
    driver_open(0);
    size_t left, total;
    CUdeviceptr p;
    OK(cu.cuMemGetInfo_v2(&left, &total));
    GIVES(CUDA_ERROR_LAUNCH_FAILED, cu.cuMemGetInfo_v2(&left, &total));
    GIVES(CUDA_ERROR_LAUNCH_FAILED, cu.cuMemAlloc_v2(&p, 8));
}
END_TEST

static void call_that_hangs(int fd)
{
    setenv("GRADD_FAKE_CUDA_FAIL", "cuMemGetInfo:1:hang", 1);
    driver_open(0);
    size_t left, total;
    put(fd, "", 1);
    cu.cuMemGetInfo_v2(&left, &total);
    put(fd, "", 1);
}

START_TEST(a_call_can_hang)
{
    struct peer peer = peer_start(call_that_hangs);
    char byte;
    take(peer.fd, &byte, 1);
    kill(peer.pid, SIGKILL);
    int status;
    ck_assert(waitpid(peer.pid, &status, 0) == peer.pid && WIFSIGNALED(status));
    ck_assert_int_eq(read(peer.fd, &byte, 1), 0);
}
END_TEST

START_TEST(a_call_can_be_slow)
{
    setenv("GRADD_FAKE_CUDA_SLOW", "cuMemGetInfo:30", 1);
    driver_open(0);
    struct timespec before, after;
    size_t left, total;
    clock_gettime(CLOCK_MONOTONIC, &before);
    OK(cu.cuMemGetInfo_v2(&left, &total));
    clock_gettime(CLOCK_MONOTONIC, &after);
    ck_assert((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000 >=
              29);
}
END_TEST

START_TEST(a_missing_function_is_found_by_nobody)
{
    setenv("GRADD_FAKE_CUDA_WITHOUT", "cuStreamWaitValue64_v2,cuMemCreate", 1);
    driver_open(0);
    void *found;
    int status, value;
    ck_assert_ptr_null(cu.cuStreamWaitValue64_v2);
    ck_assert_ptr_null(dlsym(cu.library, "cuMemCreate"));
    ck_assert_ptr_nonnull(dlsym(cu.library, "cuMemRelease"));
    GIVES(CUDA_ERROR_NOT_FOUND,
          cu.cuGetProcAddress_v2("cuStreamWaitValue64", &found, 13000, 0, &status));
    ck_assert(found == NULL && status == 1);
    OK(cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0));
    ck_assert_int_eq(value, 0);
    OK(cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    ck_assert_int_eq(value, 0);
}
END_TEST

START_TEST(functions_are_found_by_their_names_without_suffix)
{
    driver_load();
    void *found;
    int status;
    OK(cu.cuGetProcAddress_v2("cuMemAlloc", &found, 13000, 0, &status));
    ck_assert(found == *(void **)&cu.cuMemAlloc_v2 && status == 0);
    OK(cu.cuGetProcAddress_v2("cuMemAllocAsync", &found, 13000, 0, NULL));
    ck_assert(found == *(void **)&cu.cuMemAllocAsync);
}
END_TEST

START_TEST(the_products_table_finds_all_that_it_needs)
{
    const char *text = NULL;
    const struct cuda_table *cuda = cuda_table_open(CUDA_OPEN_LOAD, &text);
    ck_assert_msg(cuda != NULL, "%s", text);
    ck_assert(cuda->has_vmm && cuda->has_flags && cuda->version == 13000);
}
END_TEST

/* The value of a line of the counters' file of a process. */
static long count_in_file(pid_t pid, const char *name)
{
    char path[256], line[128], word[64];
    long value = -1, read;
    snprintf(path, sizeof path, "%s/counts.%d", getenv("GRADD_FAKE_CUDA_DIR"), pid);
    FILE *file = fopen(path, "r");
    HOLDS(file != NULL);
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "%63s %ld", word, &read) == 2 && strcmp(word, name) == 0)
            value = read;
    fclose(file);
    return value;
}

static void make_events(int fd)
{
    driver_open(0);
    CUevent e;
    for (int i = 0; i < 3; i++)
        OK(cu.cuEventCreate(&e, 0));
    HOLDS(cu.count("cuEventCreate") == 3 && cu.count("event_creations") == 3);
    put(fd, "", 1);
    pause();
}

START_TEST(counters_can_be_read_while_a_process_lives_and_after_it_was_killed)
{
    struct peer peer = peer_start(make_events);
    take(peer.fd, &(char){0}, 1);
    ck_assert_int_eq(count_in_file(peer.pid, "cuEventCreate"), 3);
    kill(peer.pid, SIGKILL);
    waitpid(peer.pid, NULL, 0);
    driver_open(0);
    ck_assert_int_eq(count_in_file(peer.pid, "cuEventCreate"), 3);
    ck_assert_int_eq(count_in_file(peer.pid, "cuMemAlloc_v2"), 0);
}
END_TEST

static void hold_memory(int fd)
{
    driver_open(0);
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, 8));
    put(fd, "", 1);
    pause();
}

static bool has_file(const char *format, pid_t pid)
{
    char name[64], path[256];
    struct stat stat_of;
    snprintf(name, sizeof name, format, pid);
    snprintf(path, sizeof path, "%s/%s", getenv("GRADD_FAKE_CUDA_DIR"), name);
    return stat(path, &stat_of) == 0;
}

START_TEST(the_next_process_removes_what_a_killed_one_left)
{
    struct peer killed = peer_start(hold_memory), alive = peer_start(hold_memory);
    take(killed.fd, &(char){0}, 1);
    take(alive.fd, &(char){0}, 1);
    kill(killed.pid, SIGKILL);
    waitpid(killed.pid, NULL, 0);
    ck_assert(has_file("p%d", killed.pid) && has_file("m%d.1", killed.pid));
    driver_open(0);
    ck_assert(!has_file("p%d", killed.pid) && !has_file("m%d.1", killed.pid));
    ck_assert(has_file("p%d", alive.pid) && has_file("m%d.1", alive.pid));
    kill(alive.pid, SIGKILL);
    waitpid(alive.pid, NULL, 0);
}
END_TEST

START_TEST(an_exclusive_device_has_one_process)
{
    setenv("GRADD_FAKE_CUDA_COMPUTE_MODE", "3", 1);
    struct peer peer = peer_start(hold_memory);
    take(peer.fd, &(char){0}, 1);
    driver_load();
    CUcontext context;
    OK(cu.cuInit(0));
    GIVES(46, cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cu.cuDevicePrimaryCtxRetain(&context, 1));
    kill(peer.pid, SIGKILL);
    waitpid(peer.pid, NULL, 0);
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
}
END_TEST

START_TEST(errors_have_names)
{
    driver_load();
    const char *text;
    OK(cu.cuGetErrorName(CUDA_ERROR_ILLEGAL_ADDRESS, &text));
    ck_assert_str_eq(text, "CUDA_ERROR_ILLEGAL_ADDRESS");
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuGetErrorString(12345, &text));
}
END_TEST

static Suite *suite(void)
{
    const TTest *const tests[] = {
        visible_devices_hide_and_reorder,
        without_visible_devices_there_is_no_driver,
        a_device_has_the_same_uuid_in_every_process,
        calls_need_init_and_a_context,
        a_forked_child_has_no_driver,
        the_chosen_call_fails,
        errors_can_be_switched_on_and_off_in_a_running_process,
        an_injected_fault_stays,
        a_call_can_hang,
        a_call_can_be_slow,
        a_missing_function_is_found_by_nobody,
        functions_are_found_by_their_names_without_suffix,
        the_products_table_finds_all_that_it_needs,
        counters_can_be_read_while_a_process_lives_and_after_it_was_killed,
        the_next_process_removes_what_a_killed_one_left,
        an_exclusive_device_has_one_process,
        errors_have_names,
    };
    Suite *fakes = suite_create("fake_control");
    TCase *tcase = tcase_create("fake_control");
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tcase_add_test(tcase, tests[i]);
    suite_add_tcase(fakes, tcase);
    return fakes;
}

int main(void)
{
    return run_fake_suite(suite());
}
