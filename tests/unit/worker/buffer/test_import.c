/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory of another process in regions: both kinds, what is refused, and when it is let go.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include <gradd/types.h>

#include "trainer.h"

enum { MIB = 1 << 20, CHUNK = 2 * MIB, N_CHUNKS = 3, BYTES = 4 * MIB, SMALL = 4096 };

/* ------------------------------------------------------------------ trainers */

/* Sends a handle; then, until it is told to end, says which byte is at the place that it is asked
 * for. */
static void serve(int fd, CUdeviceptr p)
{
    int64_t at;
    for (take(fd, &at, sizeof at); at >= 0; take(fd, &at, sizeof at)) {
        unsigned char byte;
        OK(cu.cuMemcpyDtoH_v2(&byte, p + (CUdeviceptr)at, 1));
        put(fd, &byte, 1);
    }
}

static unsigned char ask(struct peer peer, int64_t at)
{
    unsigned char byte;
    put(peer.fd, &at, sizeof at);
    take(peer.fd, &byte, 1);
    return byte;
}

static void dismiss(struct peer peer)
{
    int64_t end = -1;
    put(peer.fd, &end, sizeof end);
    peer_end(peer);
}

static void share_allocation(int fd)
{
    CUdeviceptr p;
    CUipcMemHandle handle;
    driver_open(0);
    OK(cu.cuMemAlloc_v2(&p, BYTES));
    OK(cu.cuMemsetD8_v2(p, 7, BYTES));
    OK(cu.cuCtxSynchronize());
    OK(cu.cuIpcGetMemHandle(&handle, p));
    put(fd, &handle, sizeof handle);
    serve(fd, p);
    OK(cu.cuMemFree_v2(p));
}

/* The second of two that lie in one block. */
static void share_small_allocation(int fd)
{
    CUdeviceptr first, p;
    CUipcMemHandle handle;
    driver_open(0);
    OK(cu.cuMemAlloc_v2(&first, SMALL));
    OK(cu.cuMemAlloc_v2(&p, SMALL));
    OK(cu.cuMemsetD8_v2(p, 7, SMALL));
    OK(cu.cuCtxSynchronize());
    OK(cu.cuIpcGetMemHandle(&handle, p));
    put(fd, &handle, sizeof handle);
    serve(fd, p);
}

/* Frees an allocation and has the next one at the same address. */
static void share_one_after_another(int fd)
{
    CUdeviceptr p, again;
    CUipcMemHandle handle;
    int64_t go;
    driver_open(0);
    for (int i = 0; i < 2; i++) {
        OK(cu.cuMemAlloc_v2(&again, BYTES));
        HOLDS(i == 0 || again == p);
        p = again;
        OK(cu.cuMemsetD8_v2(p, (unsigned char)(7 + i), BYTES));
        OK(cu.cuCtxSynchronize());
        OK(cu.cuIpcGetMemHandle(&handle, p));
        put(fd, &handle, sizeof handle);
        take(fd, &go, sizeof go);
        OK(cu.cuMemFree_v2(p));
        put(fd, &go, sizeof go);
    }
}

static const CUmemAllocationProp properties = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED,
    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
};

static void share_chunks(int fd)
{
    const CUmemAccessDesc access = {.location = properties.location,
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr p;
    CUmemGenericAllocationHandle chunk;
    driver_open(0);
    OK(cu.cuMemAddressReserve(&p, N_CHUNKS * CHUNK, 0, 0, 0));
    for (int i = 0; i < N_CHUNKS; i++) {
        int exported;
        OK(cu.cuMemCreate(&chunk, CHUNK, &properties, 0));
        OK(cu.cuMemMap(p + (CUdeviceptr)i * CHUNK, CHUNK, 0, chunk, 0));
        OK(cu.cuMemExportToShareableHandle(&exported, chunk,
                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        OK(cu.cuMemRelease(chunk));
        put_fd(fd, exported);
        close(exported);
    }
    OK(cu.cuMemSetAccess(p, N_CHUNKS * CHUNK, &access, 1));
    OK(cu.cuMemsetD8_v2(p, 7, N_CHUNKS * CHUNK));
    OK(cu.cuCtxSynchronize());
    serve(fd, p);
}

/* ------------------------------------------------------------------ whole allocations */

static struct peer start_sharing(void (*run)(int fd), CUipcMemHandle *out_handle)
{
    struct peer peer = peer_start(run);
    take(peer.fd, out_handle, sizeof *out_handle);
    bench_setup();
    return peer;
}

START_TEST(an_allocation_is_the_trainers)
{
    CUipcMemHandle handle;
    struct region *region;
    struct peer peer = start_sharing(share_allocation, &handle);
    ck_assert_int_eq(open_handle(1, BYTES, &handle), GRADD_OK);
    CUdeviceptr p = pin(1, 100, 8, &region);
    ck_assert_ptr_eq(region_device(region), cuda_device_first(bench.devices));
    ck_assert_uint_eq(first_byte(p), 7);
    fill(p, 42, 8);
    ck_assert_uint_eq(ask(peer, 99), 7);
    ck_assert_uint_eq(ask(peer, 100), 42);
    ck_assert_uint_eq(region_device(region)->n_imports, 1);
    ck_assert_uint_eq(region_device(region)->import_bytes, BYTES);
    ck_assert_uint_eq(region_device(region)->context_bytes, 48 * MIB); /* the fake NVML says so */
    ck_assert_uint_eq(bench.quota.used_bytes, 0);
    region_unpin(region);
    bench_teardown();
    dismiss(peer);
}
END_TEST

START_TEST(a_small_allocation_is_not_taken_for_the_block_that_it_lies_in)
{
    CUipcMemHandle handle;
    struct region *region;
    struct peer peer = start_sharing(share_small_allocation, &handle);
    ck_assert_int_eq(open_handle(1, SMALL, &handle), GRADD_OK);
    CUdeviceptr p = pin(1, 8, 8, &region);
    ck_assert_uint_eq(first_byte(p), 7);
    fill(p, 42, 8);
    ck_assert_uint_eq(ask(peer, 8), 42);
    region_unpin(region);
    bench_teardown(); /* which closes it by the address that opening gave */
    ck_assert_uint_eq(cu.count("cuIpcCloseMemHandle"), 1);
    dismiss(peer);
}
END_TEST

START_TEST(an_allocation_is_opened_once_and_closed_with_its_last_region)
{
    CUipcMemHandle handle;
    struct peer peer = start_sharing(share_allocation, &handle);
    const struct region_device device = {.uuid = gpu(0), .handle = (const uint8_t *)&handle};
    /* The second while the first one opens, the third when it is open. */
    region_open_device(&bench.regions, 1, BYTES, &device, bench_on_region, NULL);
    region_open_device(&bench.regions, 2, MIB, &device, bench_on_region, NULL);
    while (bench.n_opened < 2)
        loop_step(bench.loop, true);
    ck_assert_int_eq(open_handle(3, BYTES, &handle), GRADD_OK);
    ck_assert_uint_eq(cu.count("cuIpcOpenMemHandle_v2"), 1);
    region_close(&bench.regions, 1, bench_on_closed, NULL);
    region_close(&bench.regions, 2, bench_on_closed, NULL);
    ck_assert_uint_eq(bench.n_closed, 2);
    ck_assert_uint_eq(cu.count("cuIpcCloseMemHandle"), 0);
    region_close(&bench.regions, 3, bench_on_closed, NULL);
    ck_assert_uint_eq(bench.n_closed, 2);
    while (bench.n_closed < 3)
        loop_step(bench.loop, true);
    ck_assert_uint_eq(cu.count("cuIpcCloseMemHandle"), 1);
    /* Named again, it is opened again. */
    ck_assert_int_eq(open_handle(1, BYTES, &handle), GRADD_OK);
    ck_assert_uint_eq(cu.count("cuIpcOpenMemHandle_v2"), 2);
    bench_teardown();
    dismiss(peer);
}
END_TEST

START_TEST(an_address_used_again_is_another_allocation)
{
    CUipcMemHandle first, second;
    struct region *region;
    int64_t go = 0;
    struct peer peer = start_sharing(share_one_after_another, &first);
    ck_assert_int_eq(open_handle(1, BYTES, &first), GRADD_OK);
    region_close(&bench.regions, 1, bench_on_closed, NULL);
    while (bench.n_closed == 0)
        loop_step(bench.loop, true);
    put(peer.fd, &go, sizeof go);
    take(peer.fd, &go, sizeof go);
    take(peer.fd, &second, sizeof second);
    ck_assert_mem_ne(&first, &second, sizeof first);
    ck_assert_int_eq(open_handle(1, BYTES, &first), GRADD_ERR_INVALID);
    bench.n_bad_handles++;
    ck_assert_int_eq(open_handle(1, BYTES, &second), GRADD_OK);
    ck_assert_uint_eq(first_byte(pin(1, 0, 1, &region)), 8);
    region_unpin(region);
    bench_teardown();
    put(peer.fd, &go, sizeof go);
    take(peer.fd, &go, sizeof go);
    peer_end(peer);
}
END_TEST

START_TEST(a_pin_keeps_what_the_trainer_wants_back)
{
    CUipcMemHandle handle;
    struct region *region;
    struct peer peer = start_sharing(share_allocation, &handle);
    ck_assert_int_eq(open_handle(1, BYTES, &handle), GRADD_OK);
    CUdeviceptr p = pin(1, 0, BYTES, &region);
    region_close(&bench.regions, 1, bench_on_closed, NULL);
    fill(p, 9, 1);
    ck_assert_uint_eq(bench.n_closed, 0);
    region_unpin(region);
    while (bench.n_closed == 0)
        loop_step(bench.loop, true);
    ck_assert_uint_eq(cu.count("cuIpcCloseMemHandle"), 1);
    ck_assert_uint_eq(ask(peer, 0), 9);
    bench_teardown();
    dismiss(peer);
}
END_TEST

START_TEST(every_use_is_checked_against_the_size)
{
    CUipcMemHandle handle;
    struct region *region;
    const char *text = "";
    struct peer peer = start_sharing(share_allocation, &handle);
    ck_assert_int_eq(open_handle(1, BYTES + 1, &handle), GRADD_ERR_INVALID);
    ck_assert_msg(strstr(bench.text, "has 4194304 bytes") != NULL, "%s", bench.text);
    ck_assert_int_eq(open_handle(1, MIB, &handle), GRADD_OK);
    ck_assert_ptr_null(region_pin(&bench.regions, 1, MIB, 1, &region, &text));
    ck_assert_ptr_null(region_pin(&bench.regions, 1, UINT64_MAX, 2, &region, &text));
    ck_assert_ptr_nonnull(strstr(text, "beyond the end"));
    bench_teardown();
    dismiss(peer);
}
END_TEST

START_TEST(what_is_no_device_memory_is_refused)
{
    static const CUipcMemHandle garbage = {"nothing"};
    unsigned before;
    bench_setup();
    ck_assert_int_eq(open_handle(1, BYTES, &garbage), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(bench.text, "IPC handle can not be opened: CUDA_ERROR"));
    bench.n_bad_handles++;
    ck_assert_int_eq(open_handle(0, BYTES, &garbage), GRADD_ERR_INVALID);
    ck_assert_int_eq(open_handle(1, 0, &garbage), GRADD_ERR_INVALID);
    before = bench.n_opened;
    const struct region_device elsewhere = {.uuid = gpu(99), .handle = (const uint8_t *)&garbage};
    region_open_device(&bench.regions, 1, BYTES, &elsewhere, bench_on_region, NULL);
    ck_assert_int_eq(await_opened(before), GRADD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(bench.text, "GPU-fa4efa4e-0000-4000-8000-000000000063"));
    bench.regions.imports = NULL;
    ck_assert_int_eq(open_handle(1, BYTES, &garbage), GRADD_ERR_UNSUPPORTED);
    bench_teardown();
}
END_TEST

START_TEST(the_owner_may_go_while_its_memory_is_opened)
{
    CUipcMemHandle handle;
    struct peer peer = start_sharing(share_allocation, &handle);
    const struct region_device device = {.uuid = gpu(0), .handle = (const uint8_t *)&handle};
    region_open_device(&bench.regions, 1, BYTES, &device, bench_on_region, NULL);
    region_table_deinit(&bench.regions); /* it waits for the device */
    ck_assert_int_eq(open_handle(2, BYTES, &handle), GRADD_OK);
    region_close(&bench.regions, 2, NULL, NULL);
    region_open_device(&bench.regions, 1, BYTES, &device, bench_on_region, NULL);
    bench_teardown(); /* it is opened meanwhile */
    ck_assert_uint_eq(bench.n_opened, 1);
    dismiss(peer);
}
END_TEST

/* ------------------------------------------------------------------ chunks */

static struct peer start_chunks(int *fds)
{
    struct peer peer = peer_start(share_chunks);
    bench_setup();
    for (int i = 0; i < N_CHUNKS; i++)
        fds[i] = take_fd(peer.fd);
    return peer;
}

static void announce(uint64_t bytes, uint32_t n_chunks)
{
    const struct region_device device = {.uuid = gpu(0), .n_chunks = n_chunks};
    region_open_device(&bench.regions, 1, bytes, &device, bench_on_region, NULL);
}

static const uint64_t chunk_bytes[N_CHUNKS] = {CHUNK, CHUNK, CHUNK};

START_TEST(chunks_lie_one_after_another)
{
    int fds[N_CHUNKS], extra;
    struct region *region;
    struct peer peer = start_chunks(fds);
    announce(N_CHUNKS * CHUNK, N_CHUNKS);
    extra = dup(fds[0]);
    region_add_chunks(&bench.regions, 1, fds, chunk_bytes, 2); /* the device is not open yet */
    region_add_chunks(&bench.regions, 1, fds + 2, chunk_bytes, 1);
    region_add_chunks(&bench.regions, 1, &extra, chunk_bytes, 1); /* one too many */
    ck_assert_int_eq(await_opened(0), GRADD_OK);
    CUdeviceptr p = pin(1, 0, N_CHUNKS * CHUNK, &region);
    ck_assert_uint_eq(ask(peer, 0), 7);
    ck_assert_uint_eq(first_byte(p + N_CHUNKS * CHUNK - 1), 7);
    fill(p + CHUNK - 1, 42, 2);
    ck_assert_uint_eq(ask(peer, CHUNK - 2), 7);
    ck_assert_uint_eq(ask(peer, CHUNK - 1), 42);
    ck_assert_uint_eq(ask(peer, CHUNK), 42);
    /* No handle is kept: the memory goes with its last mapping. */
    ck_assert_uint_eq(cu.count("cuMemRelease"), N_CHUNKS);
    region_unpin(region);
    extra = open("/dev/null", O_RDONLY | O_CLOEXEC);
    region_add_chunks(&bench.regions, 1, &extra, chunk_bytes, 1);
    ck_assert_int_eq(extra, -1);
    ck_assert_uint_eq(first_byte(pin(1, 0, 1, &region)), 7);
    region_unpin(region);
    bench_teardown();
    dismiss(peer);
}
END_TEST

START_TEST(chunks_outlive_their_trainer)
{
    int fds[N_CHUNKS];
    struct region *region;
    struct peer peer = start_chunks(fds);
    announce(N_CHUNKS * CHUNK, N_CHUNKS);
    region_add_chunks(&bench.regions, 1, fds, chunk_bytes, N_CHUNKS);
    ck_assert_int_eq(await_opened(0), GRADD_OK);
    dismiss(peer);
    CUdeviceptr p = pin(1, 0, N_CHUNKS * CHUNK, &region);
    ck_assert_uint_eq(first_byte(p), 7);
    fill(p, 8, N_CHUNKS * CHUNK);
    region_unpin(region);
    bench_teardown();
}
END_TEST

START_TEST(chunks_that_are_not_as_announced_are_refused)
{
    static const struct {
        uint64_t bytes, first_bytes;
        uint32_t n_chunks;
        const char *why;
    } cases[] = {
        {N_CHUNKS * CHUNK + CHUNK, CHUNK, N_CHUNKS, "chunks have 6291456 bytes"},
        {2 * CHUNK, CHUNK, N_CHUNKS, "larger than the 4194304 bytes"},
        {N_CHUNKS * CHUNK, 0, N_CHUNKS, "larger than"},
        {N_CHUNKS * CHUNK, 4096, N_CHUNKS, "chunk can not be mapped"},
        {(uint64_t)1 << 50, CHUNK, N_CHUNKS, "more than the GPU has"},
        {N_CHUNKS * CHUNK, CHUNK, 0, "no chunks"},
        {N_CHUNKS * CHUNK, CHUNK, CUDA_CHUNKS_MAX + 1, "65536"},
    };
    int fds[N_CHUNKS];
    struct peer peer = start_chunks(fds);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int copies[N_CHUNKS];
        const uint64_t bytes[N_CHUNKS] = {cases[i].first_bytes, CHUNK, CHUNK};
        unsigned before = bench.n_opened;
        for (int c = 0; c < N_CHUNKS; c++)
            copies[c] = dup(fds[c]);
        announce(cases[i].bytes, cases[i].n_chunks);
        region_add_chunks(&bench.regions, 1, copies, bytes, N_CHUNKS);
        ck_assert_int_eq(await_opened(before), GRADD_ERR_INVALID);
        ck_assert_msg(strstr(bench.text, cases[i].why) != NULL, "%s", bench.text);
    }
    int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    unsigned before = bench.n_opened;
    announce(CHUNK, 1);
    region_add_chunks(&bench.regions, 1, &zero, chunk_bytes, 1);
    ck_assert_int_eq(await_opened(before), GRADD_ERR_INVALID);
    ck_assert_msg(strstr(bench.text, "descriptor can not be imported") != NULL, "%s", bench.text);
    for (int c = 0; c < N_CHUNKS; c++)
        close(fds[c]);
    bench_teardown();
    dismiss(peer);
}
END_TEST

START_TEST(a_region_may_go_between_its_chunks)
{
    int fds[N_CHUNKS];
    struct peer peer = start_chunks(fds);
    announce(N_CHUNKS * CHUNK, N_CHUNKS);
    region_add_chunks(&bench.regions, 1, fds, chunk_bytes, 1);
    while (cu.count("cuMemMap") == 0)
        loop_step(bench.loop, false);
    region_add_chunks(&bench.regions, 1, fds + 1, chunk_bytes, 1);
    region_close(&bench.regions, 1, bench_on_closed, NULL);
    while (bench.n_closed == 0)
        loop_step(bench.loop, true);
    region_add_chunks(&bench.regions, 1, fds + 2, chunk_bytes, 1);
    ck_assert_int_eq(fds[2], -1);
    ck_assert_uint_eq(bench.n_opened, 0);
    bench_teardown();
    dismiss(peer);
}
END_TEST

/* ------------------------------------------------------------------ drivers that lack something */

START_TEST(a_driver_without_virtual_memory_management_says_so)
{
    int fds[N_CHUNKS];
    struct peer peer = peer_start(share_chunks);
    setenv("GRADD_FAKE_CUDA_WITHOUT", "cuMemImportFromShareableHandle", 1);
    bench_setup();
    for (int i = 0; i < N_CHUNKS; i++)
        fds[i] = take_fd(peer.fd);
    announce(N_CHUNKS * CHUNK, N_CHUNKS);
    region_add_chunks(&bench.regions, 1, fds, chunk_bytes, N_CHUNKS);
    ck_assert_int_eq(await_opened(0), GRADD_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(bench.text, "cuMemCreate()"));
    bench_teardown();
    dismiss(peer);
}
END_TEST

START_TEST(a_context_that_can_not_be_made_is_tried_again)
{
    CUipcMemHandle handle;
    struct peer peer = peer_start(share_allocation);
    take(peer.fd, &handle, sizeof handle);
    setenv("GRADD_FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain:1:2", 1);
    bench_setup();
    ck_assert_int_eq(open_handle(1, BYTES, &handle), GRADD_ERR_NO_MEMORY);
    ck_assert_ptr_nonnull(strstr(bench.text, "can not make a context"));
    ck_assert_ptr_null(cuda_device_find(bench.devices, gpu(0)));
    ck_assert_int_eq(open_handle(1, BYTES, &handle), GRADD_OK);
    ck_assert_ptr_nonnull(cuda_device_find(bench.devices, gpu(0)));
    bench_teardown();
    dismiss(peer);
}
END_TEST

START_TEST(a_gpu_for_one_process_only_asks_for_mps)
{
    CUipcMemHandle handle;
    setenv("GRADD_FAKE_CUDA_COMPUTE_MODE", "3", 1);
    struct peer peer = start_sharing(share_allocation, &handle);
    ck_assert_int_eq(open_handle(1, BYTES, &handle), GRADD_ERR_UNAVAILABLE);
    ck_assert_msg(strstr(bench.text, "MPS") != NULL, "%s", bench.text);
    bench_teardown();
    dismiss(peer);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("import");
    TCase *cases = tcase_create("import");
    tcase_set_timeout(cases, 30);
    const TTest *const tests[] = {
        an_allocation_is_the_trainers,
        a_small_allocation_is_not_taken_for_the_block_that_it_lies_in,
        an_allocation_is_opened_once_and_closed_with_its_last_region,
        an_address_used_again_is_another_allocation,
        a_pin_keeps_what_the_trainer_wants_back,
        every_use_is_checked_against_the_size,
        what_is_no_device_memory_is_refused,
        the_owner_may_go_while_its_memory_is_opened,
        chunks_lie_one_after_another,
        chunks_outlive_their_trainer,
        chunks_that_are_not_as_announced_are_refused,
        a_region_may_go_between_its_chunks,
        a_driver_without_virtual_memory_management_says_so,
        a_context_that_can_not_be_made_is_tried_again,
        a_gpu_for_one_process_only_asks_for_mps,
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tcase_add_test(cases, tests[i]);
    suite_add_tcase(suite, cases);
    return run_fake_suite(suite);
}
