/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the fake driver, in one process. */
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake_driver.h"

enum { CHUNK = 2 << 20 };

static CUdeviceptr alloc(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

static uint64_t buffer_id(CUdeviceptr p)
{
    uint64_t id = 0;
    OK(cu.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
    return id;
}

static void read_device_pointer(void)
{
    driver_open(0);
    volatile char *p = (volatile char *)(uintptr_t)alloc(100);
    (void)*p;
}

START_TEST(the_cpu_cannot_read_a_device_pointer)
{
    dies(read_device_pointer, SIGSEGV, "");
}
END_TEST

START_TEST(the_view_is_the_memory)
{
    driver_open(0);
    CUdeviceptr p = alloc(4096);
    OK(cu.cuMemsetD32_v2(p, 0x01020304, 1024));
    OK(cu.cuCtxSynchronize());
    const unsigned *view = cu.view((void *)(uintptr_t)p, 4096);
    ck_assert(view != NULL && view[1023] == 0x01020304);
    ck_assert_ptr_null(cu.view((void *)(uintptr_t)p, 4097));
}
END_TEST

START_TEST(with_readable_set_the_pointer_is_the_memory)
{
    setenv("GRADD_FAKE_CUDA_READABLE", "1", 1);
    driver_open(0);
    CUdeviceptr p = alloc(4096);
    OK(cu.cuMemsetD8_v2(p, 5, 4096));
    OK(cu.cuCtxSynchronize());
    ck_assert_int_eq(*(char *)(uintptr_t)(p + 4095), 5);
}
END_TEST

START_TEST(new_memory_is_nan)
{
    driver_open(0);
    float value;
    OK(cu.cuMemcpyDtoH_v2(&value, alloc(4), 4));
    ck_assert(isnan(value));
}
END_TEST

START_TEST(a_reused_address_has_another_buffer_id)
{
    driver_open(0);
    CUdeviceptr first = alloc(4 * CHUNK);
    uint64_t id = buffer_id(first);
    OK(cu.cuMemFree_v2(first));
    CUdeviceptr second = alloc(4 * CHUNK);
    ck_assert(second == first && buffer_id(second) != id);
}
END_TEST

START_TEST(small_allocations_share_a_block_unless_told_otherwise)
{
    setenv("GRADD_FAKE_CUDA_SUBALLOCATE", _i ? "1" : "0", 1);
    driver_open(0);
    CUdeviceptr first = alloc(1000), second = alloc(1000);
    ck_assert_int_eq(first / CHUNK == second / CHUNK, _i);
    CUdeviceptr base;
    size_t bytes;
    OK(cu.cuMemGetAddressRange_v2(&base, &bytes, second + 999));
    ck_assert(base == second && bytes >= 1000 && bytes < CHUNK);
}
END_TEST

START_TEST(freed_twice_or_from_within_is_an_error)
{
    driver_open(0);
    CUdeviceptr p = alloc(1000);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(p + 8));
    OK(cu.cuMemFree_v2(p));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(p));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemsetD8_v2(p, 0, 1));
    GIVES(CUDA_ERROR_NOT_FOUND, cu.cuMemGetAddressRange_v2(NULL, NULL, p));
}
END_TEST

START_TEST(a_devices_memory_ends)
{
    setenv("GRADD_FAKE_CUDA_MEMORY_MIB", "16", 1);
    driver_open(0);
    CUdeviceptr p;
    size_t left, total;
    alloc(12 << 20);
    OK(cu.cuMemGetInfo_v2(&left, &total));
    ck_assert(total == 16 << 20 && left == 4 << 20);
    GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&p, 8 << 20));
}
END_TEST

static int is_legacy_capable(CUdeviceptr p)
{
    int capable;
    OK(cu.cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
    return capable;
}

START_TEST(managed_and_pool_memory_cannot_be_exported)
{
    driver_open(0);
    CUdeviceptr managed, pooled;
    CUipcMemHandle handle;
    void *pool;
    int is_managed;
    OK(cu.cuMemAllocManaged(&managed, 100, CU_MEM_ATTACH_GLOBAL));
    *(int *)(uintptr_t)managed = 1; /* the CPU may */
    OK(cu.cuMemAllocAsync(&pooled, 100, NULL));
    ck_assert_int_eq(is_legacy_capable(alloc(100)), 1);
    ck_assert_int_eq(is_legacy_capable(managed), 0);
    ck_assert_int_eq(is_legacy_capable(pooled), 0);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcGetMemHandle(&handle, managed));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcGetMemHandle(&handle, pooled));
    OK(cu.cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, managed));
    OK(cu.cuPointerGetAttribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pooled));
    ck_assert(is_managed && pool != NULL);
    OK(cu.cuMemFreeAsync(pooled, NULL));
    OK(cu.cuStreamSynchronize(NULL));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFreeAsync(pooled, NULL));
}
END_TEST

START_TEST(one_attribute_of_ordinary_memory_is_an_error_several_are_not)
{
    driver_open(0);
    int local = 0;
    unsigned type = 99;
    uint64_t id = 99;
    const int attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_BUFFER_ID};
    void *out[] = {&type, &id};
    CUdeviceptr p = (CUdeviceptr)(uintptr_t)&local;
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p));
    OK(cu.cuPointerGetAttributes(2, attributes, out, p));
    ck_assert(type == 0 && id == 0);
    OK(cu.cuPointerGetAttributes(2, attributes, out, alloc(8)));
    ck_assert(type == CU_MEMORYTYPE_DEVICE && id != 0);
}
END_TEST

START_TEST(host_memory_is_registered_once)
{
    driver_open(0);
    static _Alignas(4096) char page[8192];
    CUdeviceptr p;
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemHostGetDevicePointer_v2(&p, page, 0));
    ck_assert_ptr_null(cu.view(page, 1));
    OK(cu.cuMemHostRegister_v2(page, sizeof page, CU_MEMHOSTREGISTER_DEVICEMAP));
    GIVES(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cu.cuMemHostRegister_v2(page + 4096, 10, 0));
    OK(cu.cuMemHostGetDevicePointer_v2(&p, page + 100, 0));
    OK(cu.cuMemsetD8_v2(p, 3, 1));
    OK(cu.cuCtxSynchronize());
    ck_assert_int_eq(page[100], 3);
    ck_assert(cu.view(page, sizeof page) == page && cu.view(page, sizeof page + 1) == NULL);
    OK(cu.cuMemHostUnregister(page));
    GIVES(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cu.cuMemHostUnregister(page));
}
END_TEST

static CUmemGenericAllocationHandle create(size_t bytes, int handle_types)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = handle_types,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle;
    OK(cu.cuMemCreate(&handle, bytes, &properties, 0));
    return handle;
}

static const CUmemAccessDesc access_all = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                           CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

/* Two chunks side by side. */
static CUdeviceptr map_two(int handle_types)
{
    CUdeviceptr p;
    OK(cu.cuMemAddressReserve(&p, 4 * CHUNK, 0, 0, 0));
    for (unsigned i = 0; i < 2; i++) {
        CUmemGenericAllocationHandle handle = create(CHUNK, handle_types);
        OK(cu.cuMemMap(p + i * CHUNK, CHUNK, 0, handle, 0));
        OK(cu.cuMemRelease(handle));
    }
    return p;
}

START_TEST(mapped_chunks_are_one_piece_of_memory_once_accessible)
{
    driver_open(0);
    CUdeviceptr p = map_two(0), base;
    size_t bytes;
    CUmemAccessDesc access_other = access_all;
    access_other.location.id = 1;
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemsetD8_v2(p, 0, 2 * CHUNK));
    OK(cu.cuMemSetAccess(p, 2 * CHUNK, &access_other, 1));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemsetD8_v2(p, 0, 2 * CHUNK));
    OK(cu.cuMemSetAccess(p, 2 * CHUNK, &access_all, 1));
    OK(cu.cuMemsetD8_v2(p, 0, 2 * CHUNK));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemsetD8_v2(p, 0, 2 * CHUNK + 1));
    OK(cu.cuMemGetAddressRange_v2(&base, &bytes, p + CHUNK + 5));
    ck_assert(base == p + CHUNK && bytes == CHUNK);
    OK(cu.cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p + CHUNK));
    OK(cu.cuPointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p + CHUNK));
    ck_assert(base == p && bytes == 4 * CHUNK);
    OK(cu.cuCtxSynchronize());
}
END_TEST

START_TEST(memory_unmapped_before_its_copy_has_run_is_a_fault)
{
    driver_open(0);
    static _Alignas(4096) _Atomic uint64_t gate[512];
    CUdeviceptr p = map_two(0), q;
    OK(cu.cuMemSetAccess(p, CHUNK, &access_all, 1));
    OK(cu.cuMemAlloc_v2(&q, 64));
    OK(cu.cuMemHostRegister_v2(gate, sizeof gate, CU_MEMHOSTREGISTER_DEVICEMAP));
    OK(cu.cuStreamWaitValue64_v2(NULL, (CUdeviceptr)(uintptr_t)gate, 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(_i ? cu.cuMemcpyAsync(q, p, 64, NULL) : cu.cuMemsetD8Async(p, 0, 64, NULL));
    OK(cu.cuMemUnmap(p, CHUNK));
    gate[0] = 1;
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(NULL));
}
END_TEST

START_TEST(memory_mapped_anew_has_another_buffer_id)
{
    driver_open(0);
    CUdeviceptr p = map_two(0);
    uint64_t id = buffer_id(p);
    CUmemGenericAllocationHandle handle = create(CHUNK, 0);
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemMap(p, CHUNK, 0, handle, 0));
    OK(cu.cuMemUnmap(p, CHUNK));
    OK(cu.cuMemMap(p, CHUNK, 0, handle, 0));
    ck_assert(buffer_id(p) != id);
}
END_TEST

START_TEST(only_exportable_memory_is_exported)
{
    driver_open(0);
    int types = _i ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE, fd;
    CUdeviceptr p = map_two(types);
    CUmemGenericAllocationHandle handle;
    CUipcMemHandle legacy;
    uint64_t allowed;
    OK(cu.cuPointerGetAttribute(&allowed, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, p));
    ck_assert_int_eq((int)allowed, types);
    OK(cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)p));
    GIVES(
        _i ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE,
        cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    OK(cu.cuMemRelease(handle));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuIpcGetMemHandle(&legacy, p));
}
END_TEST

START_TEST(a_descriptor_of_something_else_is_not_imported)
{
    driver_open(0);
    CUmemGenericAllocationHandle handle;
    int fd = memfd_create("else", MFD_CLOEXEC);
    ck_assert(ftruncate(fd, 4 * CHUNK) == 0);
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
}
END_TEST

static void free_mapped_addresses(void)
{
    driver_open(0);
    cu.cuMemAddressFree(map_two(0), 4 * CHUNK);
}

START_TEST(addresses_are_not_freed_while_memory_is_mapped_there)
{
    dies(free_mapped_addresses, SIGABRT, "fake libcuda: addresses are freed while");
}
END_TEST

START_TEST(sizes_of_physical_memory_are_multiples_of_the_granularity)
{
    driver_open(0);
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p;
    size_t granularity;
    OK(cu.cuMemGetAllocationGranularity(&granularity, &properties,
                                        CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemCreate(&handle, granularity + 4096, &properties, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemAddressReserve(&p, granularity / 2, 0, 0, 0));
}
END_TEST

START_TEST(the_end_of_a_context_frees_its_memory)
{
    driver_open(0);
    CUdeviceptr p = alloc(100);
    CUcontext context;
    OK(cu.cuDevicePrimaryCtxRelease_v2(0));
    GIVES(CUDA_ERROR_CONTEXT_IS_DESTROYED, cu.cuMemFree_v2(p));
    OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(cu.cuCtxSetCurrent(context));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(p));
}
END_TEST

static Suite *suite(void)
{
    const TTest *const tests[] = {
        the_cpu_cannot_read_a_device_pointer,
        the_view_is_the_memory,
        with_readable_set_the_pointer_is_the_memory,
        new_memory_is_nan,
        a_reused_address_has_another_buffer_id,
        freed_twice_or_from_within_is_an_error,
        a_devices_memory_ends,
        managed_and_pool_memory_cannot_be_exported,
        one_attribute_of_ordinary_memory_is_an_error_several_are_not,
        host_memory_is_registered_once,
        mapped_chunks_are_one_piece_of_memory_once_accessible,
        memory_mapped_anew_has_another_buffer_id,
        a_descriptor_of_something_else_is_not_imported,
        addresses_are_not_freed_while_memory_is_mapped_there,
        sizes_of_physical_memory_are_multiples_of_the_granularity,
        the_end_of_a_context_frees_its_memory,
    };
    Suite *fakes = suite_create("fake_memory");
    TCase *tcase = tcase_create("fake_memory");
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tcase_add_test(tcase, tests[i]);
    tcase_add_loop_test(tcase, small_allocations_share_a_block_unless_told_otherwise, 0, 2);
    tcase_add_loop_test(tcase, only_exportable_memory_is_exported, 0, 2);
    tcase_add_loop_test(tcase, memory_unmapped_before_its_copy_has_run_is_a_fault, 0, 2);
    suite_add_tcase(fakes, tcase);
    return fakes;
}

int main(void)
{
    return run_fake_suite(suite());
}
