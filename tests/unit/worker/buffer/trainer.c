/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer.h"

#include <dirent.h>
#include <string.h>

#include <gradd/types.h>

struct bench bench;
static int n_fds;

static int count_fds(void)
{
    int n = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory))
        n++;
    closedir(directory);
    return n;
}

void bench_setup(void)
{
    const char *text = "";
    driver_load(); /* for its counts */
    const struct cuda_table *cuda = cuda_table_open(CUDA_OPEN_LOAD, &text);
    ck_assert_msg(cuda != NULL, "%s", text);
    n_fds = count_fds();
    memset(&bench, 0, sizeof bench);
    bench.loop = loop_new();
    bench.chores = chores_new(bench.loop);
    bench.devices = cuda_device_table_new(cuda, bench.chores);
    bench.imports = (struct cuda_import_table){.chores = bench.chores, .devices = bench.devices};
    bench.quota.limit_bytes = 1 << 20;
    region_table_init(&bench.regions, bench.chores, &bench.quota);
    bench.regions.imports = &bench.imports;
    queue_table_init(&bench.queues, bench.chores, bench.devices);
}

void bench_teardown(void)
{
    CUcontext ignored;
    queue_table_deinit(&bench.queues, false);
    region_table_deinit(&bench.regions);
    chores_free(bench.chores);
    for (const struct cuda_device *d = cuda_device_first(bench.devices); d; d = d->next) {
        ck_assert_uint_eq(d->n_imports, 0);
        ck_assert_uint_eq(d->import_bytes, 0);
        ck_assert_uint_eq(d->n_event_queues + d->n_flag_queues, 0);
    }
    ck_assert_ptr_null(bench.imports.by_handle);
    ck_assert_uint_eq(cu.count("cuIpcOpenMemHandle_v2") - bench.n_bad_handles,
                      cu.count("cuIpcCloseMemHandle"));
    ck_assert_uint_eq(cu.count("cuMemAddressReserve"), cu.count("cuMemAddressFree"));
    while (cu.cuCtxPopCurrent_v2(&ignored) == CUDA_SUCCESS && ignored)
        continue; /* of use_device() */
    cuda_device_table_free(bench.devices);
    loop_free(bench.loop);
    ck_assert_int_le(count_fds(), n_fds);
}

const uint8_t *gpu(uint8_t number)
{
    static uint8_t uuid[CUDA_UUID_BYTES] = {0xfa, 0x4e, 0xfa, 0x4e, 0, 0, 0x40, 0, 0x80};
    uuid[15] = number;
    return uuid;
}

void bench_on_region(void *data, uint32_t id, int status, const char *text)
{
    (void)data;
    (void)id;
    bench.status = status;
    bench.n_opened++;
    snprintf(bench.text, sizeof bench.text, "%s", text);
}

void bench_on_closed(void *data, uint32_t id)
{
    (void)data;
    (void)id;
    bench.n_closed++;
}

void bench_on_queue(void *data, uint32_t id, int status, const char *text, const uint8_t *events,
                    uint32_t slots)
{
    bench_on_region(data, id, status, text);
    if (events)
        memcpy(bench.events, events, (size_t)slots * 64);
}

int await_opened(unsigned n_before)
{
    while (bench.n_opened == n_before)
        loop_step(bench.loop, true);
    return bench.status;
}

int open_handle(uint32_t id, uint64_t bytes, const void *handle)
{
    unsigned before = bench.n_opened;
    const struct region_device device = {.uuid = gpu(0), .handle = handle};
    region_open_device(&bench.regions, id, bytes, &device, bench_on_region, NULL);
    return await_opened(before);
}

CUdeviceptr pin(uint32_t id, uint64_t offset, uint64_t bytes, struct region **out_region)
{
    const char *text = "";
    uint8_t *p = region_pin(&bench.regions, id, offset, bytes, out_region, &text);
    ck_assert_msg(p != NULL, "%s", text);
    return (CUdeviceptr)(uintptr_t)p;
}

struct cuda_device *use_device(void)
{
    struct cuda_device *device = cuda_device_first(bench.devices);
    OK(device->cuda->ctx_set(device->context));
    return device;
}

void fill(CUdeviceptr p, unsigned char value, size_t bytes)
{
    const struct cuda_device *device = use_device();
    OK(device->cuda->set8_async(p, value, bytes, device->stream));
    OK(device->cuda->stream_synchronize(device->stream));
}

unsigned char first_byte(CUdeviceptr p)
{
    const unsigned char *view = cu.view((const void *)(uintptr_t)p, 1);
    ck_assert_ptr_nonnull(view);
    return *view;
}
