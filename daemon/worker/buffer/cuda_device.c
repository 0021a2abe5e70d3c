/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/buffer/cuda_device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradd/types.h>

#include "base/log.h"
#include "worker/buffer/nvml.h"
#include "worker/reduce/cuda_kernels.h"

/* Who waits for a device that is being opened. */
struct cuda_device_waiter {
    cuda_device_opened_fn *opened;
    void *data;
    struct cuda_device_waiter *next;
};

struct cuda_device_table {
    const struct cuda_table *cuda;
    struct chores *chores;
    struct cuda_device *first, **tail;
    unsigned n_devices;
    void (*on_open)(void *data); /* NULL: nobody asks */
    void *data;
};

struct cuda_device_table *cuda_device_table_new(const struct cuda_table *cuda,
                                                struct chores *chores)
{
    struct cuda_device_table *table = calloc(1, sizeof *table);
    if (!table)
        return NULL;
    table->cuda = cuda;
    table->chores = chores;
    table->tail = &table->first;
    return table;
}

void cuda_device_table_watch(struct cuda_device_table *table, void (*on_open)(void *data),
                             void *data)
{
    table->on_open = on_open;
    table->data = data;
}

/* Nothing else runs on the device any more; what fails now fails for good. */
static void close_device(struct cuda_device *device)
{
    const struct cuda_table *cuda = device->cuda;
    CUcontext ignored;
    if (!device->context)
        return;
    if (cuda->ctx_push(device->context) == CUDA_SUCCESS) {
        if (device->stream)
            cuda->stream_destroy(device->stream);
        if (device->kernels)
            cuda->module_unload(device->kernels);
        cuda->ctx_pop(&ignored);
    }
    cuda->primary_release(device->ordinal);
    device->context = NULL;
}

void cuda_device_table_free(struct cuda_device_table *table)
{
    if (!table)
        return;
    struct cuda_device *device;
    while ((device = table->first)) {
        struct cuda_device_waiter *waiter;
        table->first = device->next;
        while ((waiter = device->waiters)) {
            device->waiters = waiter->next;
            free(waiter);
        }
        close_device(device);
        free(device);
    }
    free(table);
}

struct cuda_device *cuda_device_first(struct cuda_device_table *table)
{
    return table->first;
}

static struct cuda_device *find(struct cuda_device_table *table, const uint8_t *uuid)
{
    struct cuda_device *device = table->first;
    while (device && memcmp(device->uuid, uuid, CUDA_UUID_BYTES) != 0)
        device = device->next;
    return device;
}

struct cuda_device *cuda_device_find(struct cuda_device_table *table, const uint8_t *uuid)
{
    struct cuda_device *device = find(table, uuid);
    return device && device->status == GRADD_OK ? device : NULL;
}

void cuda_uuid_format(const uint8_t *uuid, char *out_text)
{
    const uint8_t *u = uuid;
    snprintf(out_text, CUDA_UUID_TEXT_BYTES,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
             u[15]);
}

/* ------------------------------------------------------------------ opening, chores thread */

__attribute__((format(printf, 3, 4))) static void fail(struct cuda_device *device, int status,
                                                       const char *format, ...)
{
    va_list args;
    device->open_status = status;
    va_start(args, format);
    vsnprintf(device->text, sizeof device->text, format, args);
    va_end(args);
}

static int attribute(const struct cuda_device *device, int which)
{
    int value = 0;
    return device->cuda->device_attribute(&value, which, device->ordinal) == CUDA_SUCCESS ? value
                                                                                          : 0;
}

static void load_kernels(struct cuda_device *device)
{
    size_t bytes;
    const void *image = cuda_kernels_image(&bytes, NULL);
    CUresult rc = image ? device->cuda->module_load(&device->kernels, image) : CUDA_SUCCESS;
    if (rc == CUDA_SUCCESS)
        return;
    device->kernels = NULL;
    snprintf(
        device->kernels_text, sizeof device->kernels_text,
        "%s: gradd's kernels can not be loaded: %s (the driver must be as new as the nvcc that "
        "made them): use backend = host",
        device->uuid_text, cuda_table_error(device->cuda, rc));
    log_warning("cuda", "%s", device->kernels_text);
}

/* With the device's context current. */
static void set_up(struct cuda_device *device)
{
    const struct cuda_table *cuda = device->cuda;
    CUresult rc = cuda->stream_create(&device->stream, CU_STREAM_NON_BLOCKING, 0);
    if (rc != CUDA_SUCCESS) {
        device->stream = NULL;
        fail(device, GRADD_ERR_NO_MEMORY, "%s (%s): the worker can not make a stream: %s",
             device->uuid_text, device->name, cuda_table_error(cuda, rc));
        return;
    }
    load_kernels(device);
    device->has_ipc_events = attribute(device, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
    device->has_flags =
        cuda->has_flags && attribute(device, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
}

static const char *advice(int compute_mode)
{
    return compute_mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS
               ? "; in exclusive compute mode only MPS lets two processes in"
               : "";
}

/* The trainers' memory counts as well; what they take meanwhile makes this inexact. */
static void measure(struct cuda_device *device, uint64_t before_bytes)
{
    uint64_t after_bytes;
    if (nvml_used_bytes(device->uuid_text, &after_bytes) && after_bytes > before_bytes)
        device->context_bytes = after_bytes - before_bytes;
}

static void run_open(struct chore *chore)
{
    struct cuda_device *device = (struct cuda_device *)chore;
    const struct cuda_table *cuda = device->cuda;
    CUcontext ignored;
    uint64_t used_bytes;
    const bool is_known = nvml_used_bytes(device->uuid_text, &used_bytes);
    const int mode = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE);
    if (mode == CU_COMPUTEMODE_PROHIBITED) {
        fail(device, GRADD_ERR_UNAVAILABLE, "%s (%s): its compute mode is prohibited",
             device->uuid_text, device->name);
        return;
    }
    CUresult rc = cuda->primary_retain(&device->context, device->ordinal);
    if (rc == CUDA_SUCCESS) {
        rc = cuda->ctx_push(device->context);
        if (rc != CUDA_SUCCESS)
            cuda->primary_release(device->ordinal);
    }
    if (rc != CUDA_SUCCESS) {
        device->context = NULL;
        fail(device, rc == CUDA_ERROR_OUT_OF_MEMORY ? GRADD_ERR_NO_MEMORY : GRADD_ERR_UNAVAILABLE,
             "%s (%s): the worker can not make a context: %s%s", device->uuid_text, device->name,
             cuda_table_error(cuda, rc), advice(mode));
        return;
    }
    set_up(device);
    cuda->ctx_pop(&ignored);
    if (device->open_status != GRADD_OK)
        close_device(device);
    else if (is_known)
        measure(device, used_bytes);
}

/* ------------------------------------------------------------------ opening, loop */

static void tell_waiters(struct cuda_device *device)
{
    struct cuda_device_waiter *waiter;
    while ((waiter = device->waiters)) {
        device->waiters = waiter->next;
        waiter->opened(waiter->data, device);
        free(waiter);
    }
}

static void on_opened(struct chore *chore)
{
    struct cuda_device *device = (struct cuda_device *)chore;
    device->status = device->open_status;
    if (device->status == GRADD_OK)
        log_info("cuda", "%s (%s) is in use; kernels: %s", device->uuid_text, device->name,
                 device->kernels ? cuda_kernels_describe() : "none");
    else
        log_warning("cuda", "%s", device->text);
    tell_waiters(device);
    if (device->table->on_open)
        device->table->on_open(device->table->data);
}

/* The ordinal of the GPU in this process. False: there is none of that name. */
static bool find_ordinal(const struct cuda_table *cuda, const uint8_t *uuid, CUdevice *out_ordinal)
{
    int n = 0;
    CUuuid found;
    if (cuda->device_count(&n) != CUDA_SUCCESS)
        return false;
    for (int i = 0; i < n; i++)
        if (cuda->device_get(out_ordinal, i) == CUDA_SUCCESS &&
            cuda->device_uuid(&found, *out_ordinal) == CUDA_SUCCESS &&
            memcmp(found.bytes, uuid, CUDA_UUID_BYTES) == 0)
            return true;
    return false;
}

static struct cuda_device *add_device(struct cuda_device_table *table, const uint8_t *uuid)
{
    struct cuda_device *device = calloc(1, sizeof *device);
    if (!device)
        return NULL;
    device->cuda = table->cuda;
    device->table = table;
    memcpy(device->uuid, uuid, CUDA_UUID_BYTES);
    cuda_uuid_format(uuid, device->uuid_text);
    if (!find_ordinal(table->cuda, uuid, &device->ordinal)) {
        free(device);
        return NULL;
    }
    table->cuda->device_name(device->name, sizeof device->name - 1, device->ordinal);
    device->status = GRADD_ERR_UNAVAILABLE;
    device->index = table->n_devices++;
    *table->tail = device;
    table->tail = &device->next;
    return device;
}

/* A GPU that does not exist is told, not kept: names are the trainer's to choose. */
static void tell_unknown(const uint8_t *uuid, cuda_device_opened_fn *opened, void *data)
{
    struct cuda_device unknown = {.status = GRADD_ERR_INVALID};
    memcpy(unknown.uuid, uuid, CUDA_UUID_BYTES);
    cuda_uuid_format(uuid, unknown.uuid_text);
    snprintf(unknown.text, sizeof unknown.text,
             "%s: the worker sees no such GPU (CUDA_VISIBLE_DEVICES, or another machine's)",
             unknown.uuid_text);
    opened(data, &unknown);
}

void cuda_device_open(struct cuda_device_table *table, const uint8_t *uuid,
                      cuda_device_opened_fn *opened, void *data)
{
    struct cuda_device *device = find(table, uuid);
    if (!device && !(device = add_device(table, uuid))) {
        tell_unknown(uuid, opened, data);
        return;
    }
    if (device->status == GRADD_OK) {
        opened(data, device);
        return;
    }
    struct cuda_device_waiter *waiter = calloc(1, sizeof *waiter);
    if (!waiter) {
        opened(data, NULL);
        return;
    }
    *waiter = (struct cuda_device_waiter){opened, data, device->waiters};
    device->waiters = waiter;
    if (device->status == GRADD_PENDING)
        return;
    /* What failed before is tried again: memory may have been freed since. */
    device->status = GRADD_PENDING;
    device->open_status = GRADD_OK;
    device->chore = (struct chore){.run = run_open, .done = on_opened};
    chores_add(table->chores, &device->chore);
}

void cuda_device_forget_waiter(struct cuda_device_table *table, const void *data)
{
    for (struct cuda_device *device = table->first; device; device = device->next) {
        struct cuda_device_waiter **link = &device->waiters;
        while (*link) {
            struct cuda_device_waiter *waiter = *link;
            if (waiter->data == data) {
                *link = waiter->next;
                free(waiter);
            } else {
                link = &waiter->next;
            }
        }
    }
}
