/* SPDX-License-Identifier: Apache-2.0 */
/* Memory and events between two processes of the fake driver. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "fake_driver.h"

enum { BYTES = 8 << 20, SHARED_EVENT = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING };

static const unsigned lazy = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;

/* Exporter: sends a handle, and frees the memory when told to. */
static void export_memory(int fd)
{
    driver_open(0);
    CUdeviceptr p;
    CUipcMemHandle handle, inner;
    char go;
    OK(cu.cuMemAlloc_v2(&p, BYTES));
    OK(cu.cuMemsetD32_v2(p, 0x3f800000, BYTES / 4));
    OK(cu.cuCtxSynchronize());
    OK(cu.cuIpcGetMemHandle(&handle, p));
    OK(cu.cuIpcGetMemHandle(&inner, p + 4096));
    HOLDS(memcmp(&handle, &inner, sizeof handle) == 0);
    put(fd, &handle, sizeof handle);
    take(fd, &go, 1);
    OK(cu.cuMemFree_v2(p));
    put(fd, &go, 1);
    take(fd, &go, 1);
}

static float first_float(CUdeviceptr p)
{
    float value;
    OK(cu.cuMemcpyDtoH_v2(&value, p, sizeof value));
    return value;
}

START_TEST(imported_memory_is_the_exporters_memory)
{
    struct peer peer = peer_start(export_memory);
    driver_open(0);
    CUipcMemHandle handle;
    CUdeviceptr p, again, base;
    size_t bytes;
    take(peer.fd, &handle, sizeof handle);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcOpenMemHandle_v2(&p, handle, 0));
    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, lazy));
    ck_assert(first_float(p) == 1.0f);
    OK(cu.cuMemGetAddressRange_v2(&base, &bytes, p + 100));
    ck_assert(base == p && bytes == BYTES);
    OK(cu.cuIpcOpenMemHandle_v2(&again, handle, lazy));
    ck_assert(again == p);
    OK(cu.cuIpcCloseMemHandle(p));
    ck_assert(first_float(p) == 1.0f);
    OK(cu.cuIpcCloseMemHandle(p));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcCloseMemHandle(p));
    ck_assert_ptr_null(cu.view((void *)(uintptr_t)p, 4));
    ck_assert_uint_eq(cu.count("imports"), 3);
    put(peer.fd, "", 1);
    take(peer.fd, &(char){0}, 1);
    put(peer.fd, "", 1);
    peer_end(peer);
}
END_TEST

START_TEST(memory_freed_while_it_is_imported_becomes_nan)
{
    struct peer peer = peer_start(export_memory);
    driver_open(0);
    CUipcMemHandle handle;
    CUdeviceptr p;
    take(peer.fd, &handle, sizeof handle);
    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, lazy));
    put(peer.fd, "", 1);
    take(peer.fd, &(char){0}, 1);
    ck_assert(isnan(first_float(p)));
    put(peer.fd, "", 1);
    peer_end(peer);
}
END_TEST

START_TEST(memory_that_was_freed_cannot_be_imported)
{
    struct peer peer = peer_start(export_memory);
    driver_open(0);
    CUipcMemHandle handle;
    CUdeviceptr p;
    take(peer.fd, &handle, sizeof handle);
    put(peer.fd, "", 1);
    take(peer.fd, &(char){0}, 1);
    GIVES(CUDA_ERROR_MAP_FAILED, cu.cuIpcOpenMemHandle_v2(&p, handle, lazy));
    put(peer.fd, "", 1);
    peer_end(peer);
}
END_TEST

START_TEST(memory_of_a_killed_process_stays_with_who_has_it_open)
{
    struct peer peer = peer_start(export_memory);
    driver_open(0);
    CUipcMemHandle handle;
    CUdeviceptr p, again;
    take(peer.fd, &handle, sizeof handle);
    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, lazy));
    kill(peer.pid, SIGKILL);
    waitpid(peer.pid, NULL, 0);
    ck_assert(first_float(p) == 1.0f);
    OK(cu.cuIpcCloseMemHandle(p));
    GIVES(CUDA_ERROR_MAP_FAILED, cu.cuIpcOpenMemHandle_v2(&again, handle, lazy));
}
END_TEST

START_TEST(a_process_cannot_open_its_own_handles)
{
    driver_open(0);
    CUdeviceptr p, opened;
    CUevent e, opened_event;
    CUipcMemHandle handle;
    CUipcEventHandle event_handle;
    OK(cu.cuMemAlloc_v2(&p, 100));
    OK(cu.cuIpcGetMemHandle(&handle, p));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuIpcOpenMemHandle_v2(&opened, handle, lazy));
    OK(cu.cuEventCreate(&e, SHARED_EVENT));
    OK(cu.cuIpcGetEventHandle(&event_handle, e));
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu.cuIpcOpenEventHandle(&opened_event, event_handle));
}
END_TEST

/* Exporter: two small allocations of one block, the handle of the second. */
static void export_small(int fd)
{
    driver_open(0);
    CUdeviceptr first, second;
    CUipcMemHandle handle;
    char go;
    OK(cu.cuMemAlloc_v2(&first, 4096));
    OK(cu.cuMemAlloc_v2(&second, 4096));
    HOLDS(second - first < 2 << 20);
    OK(cu.cuMemsetD8_v2(second, 7, 4096));
    OK(cu.cuCtxSynchronize());
    OK(cu.cuIpcGetMemHandle(&handle, second));
    put(fd, &handle, sizeof handle);
    take(fd, &go, 1);
    OK(cu.cuMemFree_v2(second)); /* the first keeps the block */
    put(fd, &go, 1);
    take(fd, &go, 1);
}

START_TEST(a_handle_covers_its_allocation_and_not_the_neighbours)
{
    struct peer peer = peer_start(export_small);
    driver_open(0);
    CUipcMemHandle handle;
    CUdeviceptr p, block;
    size_t block_bytes;
    char bytes[2];
    take(peer.fd, &handle, sizeof handle);
    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, lazy));
    OK(cu.cuMemGetAddressRange_v2(&block, &block_bytes, p));
    ck_assert_uint_lt(block, p);
    ck_assert_uint_eq(block_bytes, 2 << 20);
    OK(cu.cuMemcpyDtoH_v2(bytes, p + 4095, 1));
    ck_assert_int_eq(bytes[0], 7);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoH_v2(bytes, p + 4095, 2));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoH_v2(bytes, p - 65536, 1));
    OK(cu.cuIpcCloseMemHandle(p));
    put(peer.fd, "", 1);
    take(peer.fd, bytes, 1);
    GIVES(CUDA_ERROR_MAP_FAILED, cu.cuIpcOpenMemHandle_v2(&p, handle, lazy));
    put(peer.fd, "", 1);
    peer_end(peer);
}
END_TEST

/* Owner of an event and a flag word that its stream waits for before the record. */
static void own_event(int fd)
{
    driver_open(0);
    CUevent e;
    CUstream s;
    CUdeviceptr word;
    CUipcEventHandle handle;
    char order;
    OK(cu.cuEventCreate(&e, SHARED_EVENT));
    OK(cu.cuIpcGetEventHandle(&handle, e));
    OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    OK(cu.cuMemAlloc_v2(&word, 8));
    OK(cu.cuMemsetD8_v2(word, 0, 8));
    OK(cu.cuCtxSynchronize());
    put(fd, &handle, sizeof handle);
    for (;;) {
        take(fd, &order, 1);
        if (order == 'r') { /* a record that is not reached */
            OK(cu.cuStreamWaitValue64_v2(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
            OK(cu.cuEventRecord(e, s));
        } else if (order == 'g') {
            CUstream other;
            OK(cu.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
            OK(cu.cuStreamWriteValue64_v2(other, word, 1, 0));
            OK(cu.cuStreamSynchronize(s));
        } else if (order == 'd') {
            OK(cu.cuEventDestroy_v2(e));
        } else {
            return;
        }
        put(fd, &order, 1);
    }
}

static void tell(struct peer peer, char order)
{
    char answer;
    put(peer.fd, &order, 1);
    take(peer.fd, &answer, 1);
}

static struct peer open_event(CUevent *out)
{
    struct peer peer = peer_start(own_event);
    CUipcEventHandle handle;
    driver_open(0);
    take(peer.fd, &handle, sizeof handle);
    OK(cu.cuIpcOpenEventHandle(out, handle));
    return peer;
}

START_TEST(a_stream_waits_for_another_processs_record)
{
    CUevent e;
    struct peer peer = open_event(&e);
    CUstream s;
    OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    OK(cu.cuEventQuery(e));
    OK(cu.cuStreamWaitEvent(s, e, 0));
    OK(cu.cuStreamSynchronize(s));
    tell(peer, 'r');
    GIVES(CUDA_ERROR_NOT_READY, cu.cuEventQuery(e));
    OK(cu.cuStreamWaitEvent(s, e, 0));
    GIVES(CUDA_ERROR_NOT_READY, cu.cuStreamQuery(s));
    tell(peer, 'g');
    OK(cu.cuStreamSynchronize(s));
    OK(cu.cuEventQuery(e));
    put(peer.fd, "q", 1);
    peer_end(peer);
}
END_TEST

START_TEST(a_wait_before_the_record_waits_for_nothing)
{
    CUevent e;
    struct peer peer = open_event(&e);
    CUstream s;
    OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamWaitEvent(s, e, 0));
    tell(peer, 'r');
    OK(cu.cuStreamSynchronize(s));
    tell(peer, 'g');
    put(peer.fd, "q", 1);
    peer_end(peer);
}
END_TEST

static void use_destroyed_event(void)
{
    CUevent e;
    struct peer peer = open_event(&e);
    tell(peer, 'd');
    cu.cuEventQuery(e);
}

START_TEST(an_event_is_not_used_after_its_owner_destroyed_it)
{
    dies(use_destroyed_event, SIGABRT, "fake libcuda: an event of process");
}
END_TEST

/* Wait for a record of a process that is killed before it is reached. */
static CUresult wait_for_the_dead(const char *choice)
{
    setenv("GRADD_FAKE_CUDA_DEAD", choice, 1);
    CUevent e;
    struct peer peer = open_event(&e);
    CUstream s;
    OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    tell(peer, 'r');
    OK(cu.cuStreamWaitEvent(s, e, 0));
    kill(peer.pid, SIGKILL);
    waitpid(peer.pid, NULL, 0);
    return strcmp(choice, "hang") == 0 ? cu.cuStreamQuery(s) : cu.cuStreamSynchronize(s);
}

START_TEST(records_of_a_killed_process_hang_complete_or_fail)
{
    const char *const choices[] = {"hang", "complete", "error"};
    const CUresult results[] = {CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUDA_ERROR_LAUNCH_FAILED};
    GIVES(results[_i], wait_for_the_dead(choices[_i]));
}
END_TEST

/* Exporter that ends in good order with its memory in use. */
static void export_and_exit(int fd)
{
    driver_open(0);
    CUdeviceptr p;
    CUipcMemHandle handle;
    OK(cu.cuMemAlloc_v2(&p, BYTES));
    OK(cu.cuIpcGetMemHandle(&handle, p));
    put(fd, &handle, sizeof handle);
    take(fd, &handle, 1);
    exit(0);
}

START_TEST(a_process_that_ends_takes_its_files_with_it)
{
    struct peer peer = peer_start(export_and_exit);
    driver_open(0);
    CUipcMemHandle handle;
    CUdeviceptr p;
    char path[256];
    take(peer.fd, &handle, sizeof handle);
    snprintf(path, sizeof path, "%s/m%d.1", getenv("GRADD_FAKE_CUDA_DIR"), peer.pid);
    ck_assert_int_eq(access(path, F_OK), 0);
    put(peer.fd, "", 1);
    peer_end(peer);
    ck_assert_int_ne(access(path, F_OK), 0);
    GIVES(CUDA_ERROR_MAP_FAILED, cu.cuIpcOpenMemHandle_v2(&p, handle, lazy));
}
END_TEST

/* Exporter of memory made by cuMemCreate(): sends the descriptor and is gone. */
static void export_physical(int fd)
{
    driver_open(1);
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 1}};
    CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle, retained;
    CUdeviceptr p;
    int exported;
    OK(cu.cuMemCreate(&handle, BYTES, &properties, 0));
    OK(cu.cuMemAddressReserve(&p, 2 * BYTES, 0, 0, 0));
    OK(cu.cuMemMap(p, BYTES, 0, handle, 0));
    OK(cu.cuMemSetAccess(p, BYTES, &access, 1));
    OK(cu.cuMemRelease(handle));
    OK(cu.cuMemsetD8_v2(p, 9, BYTES));
    OK(cu.cuCtxSynchronize());
    OK(cu.cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)(p + 5)));
    OK(cu.cuMemExportToShareableHandle(&exported, retained,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    put_fd(fd, exported);
}

START_TEST(physical_memory_outlives_its_exporter)
{
    struct peer peer = peer_start(export_physical);
    driver_open(1);
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p;
    unsigned char byte;
    int fd = take_fd(peer.fd);
    peer_end(peer);
    OK(cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    OK(cu.cuMemAddressReserve(&p, BYTES, 0, 0, 0));
    OK(cu.cuMemMap(p, BYTES, 0, handle, 0));
    OK(cu.cuMemRelease(handle));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemcpyDtoH_v2(&byte, p, 1));
    OK(cu.cuMemSetAccess(p, BYTES, &access, 1));
    OK(cu.cuMemcpyDtoH_v2(&byte, p + BYTES - 1, 1));
    ck_assert_int_eq(byte, 9);
    ck_assert_int_eq(cu.pointer_device((void *)(uintptr_t)p), 1);
    OK(cu.cuMemUnmap(p, BYTES));
    OK(cu.cuMemAddressFree(p, BYTES));
}
END_TEST

static Suite *suite(void)
{
    const TTest *const tests[] = {
        imported_memory_is_the_exporters_memory,
        memory_freed_while_it_is_imported_becomes_nan,
        memory_that_was_freed_cannot_be_imported,
        memory_of_a_killed_process_stays_with_who_has_it_open,
        a_process_that_ends_takes_its_files_with_it,
        a_process_cannot_open_its_own_handles,
        a_handle_covers_its_allocation_and_not_the_neighbours,
        a_stream_waits_for_another_processs_record,
        a_wait_before_the_record_waits_for_nothing,
        an_event_is_not_used_after_its_owner_destroyed_it,
        physical_memory_outlives_its_exporter,
    };
    Suite *fakes = suite_create("fake_ipc");
    TCase *tcase = tcase_create("fake_ipc");
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tcase_add_test(tcase, tests[i]);
    tcase_add_loop_test(tcase, records_of_a_killed_process_hang_complete_or_fail, 0, 3);
    suite_add_tcase(fakes, tcase);
    return fakes;
}

int main(void)
{
    return run_fake_suite(suite());
}
