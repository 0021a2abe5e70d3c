/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of queues: the table, what OpenQueue asks for, events and words while the driver has
 * them.
 */
#include "worker/buffer/queue_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gradd/types.h>

enum {
    QUEUES_MAX = 1024, /* of a rank */
    HANDLE_BYTES = 64,
};

void queue_table_init(struct queue_table *table, struct chores *chores,
                      struct cuda_device_table *devices)
{
    *table = (struct queue_table){.chores = chores, .devices = devices};
}

/* ------------------------------------------------------------------ closing */

/* Chores thread, or a queue that has come to nothing: with the device's context current. */
static void release_driver(struct queue *queue)
{
    const struct cuda_table *cuda = queue->device->cuda;
    for (uint32_t i = 0; i < queue->n_slots; i++) {
        if (queue->slots[i].in)
            cuda->event_destroy(queue->slots[i].in);
        if (queue->slots[i].out)
            cuda->event_destroy(queue->slots[i].out);
        queue->slots[i].in = queue->slots[i].out = NULL;
    }
    if (queue->is_registered)
        cuda->host_unregister((void *)queue->words);
    queue->is_registered = false;
}

static void queue_free(struct queue *queue)
{
    if (queue->words)
        munmap((void *)queue->words, QUEUE_PAGE_BYTES);
    if (queue->fd >= 0)
        close(queue->fd);
    pthread_mutex_destroy(&queue->mutex);
    free(queue->handles);
    free(queue);
}

static void run_close(struct chore *chore)
{
    struct queue *queue = (struct queue *)chore;
    CUcontext ignored;
    if (queue->device->cuda->ctx_push(queue->device->context) != CUDA_SUCCESS)
        return; /* the context is gone, and its events with it */
    /* Undoing a registration may wait for the device, but need not. */
    if (atomic_load(&queue->writes_late))
        queue->device->cuda->stream_synchronize(queue->device->stream);
    release_driver(queue);
    queue->device->cuda->ctx_pop(&ignored);
}

static void on_closed(struct chore *chore)
{
    queue_free((struct queue *)chore);
}

static void free_if_unused(struct queue *queue)
{
    if (queue->state != QUEUE_CLOSED || queue->n_pins > 0)
        return;
    queue->chore = (struct chore){.run = run_close, .done = on_closed};
    chores_add(queue->chores, &queue->chore);
}

static uint32_t *count_of(struct queue *queue)
{
    return queue->order == PB__QUEUE_ORDER__ORDER_FLAG ? &queue->device->n_flag_queues
                                                       : &queue->device->n_event_queues;
}

static void close_queue(struct queue *queue)
{
    enum queue_state state = queue->state;
    HASH_DEL(queue->table->by_id, queue);
    queue->state = QUEUE_CLOSED;
    queue->table = NULL;
    queue->opened = NULL;
    if (state == QUEUE_WAITING) {
        cuda_device_forget_waiter(queue->devices, queue);
        queue_free(queue);
    } else if (state == QUEUE_READY) {
        --*count_of(queue);
        free_if_unused(queue);
    } /* else on_opened() goes on from here */
}

bool queue_close(struct queue_table *table, uint32_t id)
{
    struct queue *queue;
    HASH_FIND(hh, table->by_id, &id, sizeof id, queue);
    if (queue)
        close_queue(queue);
    return queue;
}

void queue_table_deinit(struct queue_table *table, bool is_lost)
{
    struct queue *queue, *next;
    HASH_ITER(hh, table->by_id, queue, next)
    {
        if (is_lost && queue->state == QUEUE_READY)
            queue_set_unsure(queue);
        close_queue(queue);
    }
}

/* ------------------------------------------------------------------ opening, chores thread */

static void fail(struct queue *queue, const char *what, CUresult rc)
{
    queue->open_status = rc == CUDA_ERROR_OUT_OF_MEMORY ? GRADD_ERR_NO_MEMORY : GRADD_ERR_INVALID;
    snprintf(queue->text, sizeof queue->text, "%s: %s", what,
             cuda_table_error(queue->device->cuda, rc));
}

static bool open_slot(struct queue *queue, struct queue_slot *slot, uint8_t *handle)
{
    const struct cuda_table *cuda = queue->device->cuda;
    CUipcEventHandle event;
    memcpy(event.reserved, handle, HANDLE_BYTES);
    CUresult rc = cuda->ipc_open_event(&slot->in, event);
    if (rc != CUDA_SUCCESS) {
        slot->in = NULL;
        fail(queue,
             "the trainer's event can not be opened (both processes must see the same /dev/shm)",
             rc);
        return false;
    }
    rc = cuda->event_create(&slot->out, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
    if (rc != CUDA_SUCCESS)
        slot->out = NULL;
    else
        rc = cuda->ipc_get_event(&event, slot->out);
    if (rc != CUDA_SUCCESS) {
        fail(queue, "an event for the trainer can not be made", rc);
        return false;
    }
    memcpy(handle, event.reserved, HANDLE_BYTES);
    return true;
}

static void open_events(struct queue *queue)
{
    for (uint32_t i = 0; i < queue->n_slots; i++)
        if (!open_slot(queue, &queue->slots[i], queue->handles + (size_t)i * HANDLE_BYTES))
            return;
}

static void open_words(struct queue *queue)
{
    const struct cuda_table *cuda = queue->device->cuda;
    void *page = mmap(NULL, QUEUE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, queue->fd, 0);
    if (page == MAP_FAILED) {
        queue->open_status = GRADD_ERR_NO_MEMORY;
        snprintf(queue->text, sizeof queue->text, "the page of words can not be mapped: %s",
                 strerror(errno));
        return;
    }
    queue->words = page;
    CUresult rc = cuda->host_register(page, QUEUE_PAGE_BYTES,
                                      CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (rc != CUDA_SUCCESS) {
        fail(queue, "the page of words can not be registered", rc);
        return;
    }
    queue->is_registered = true;
    rc = cuda->host_device_pointer(&queue->words_on_device, page, 0);
    if (rc != CUDA_SUCCESS)
        fail(queue, "the GPU has no address for the page of words", rc);
}

static void run_open(struct chore *chore)
{
    struct queue *queue = (struct queue *)chore;
    const struct cuda_table *cuda = queue->device->cuda;
    CUcontext ignored;
    CUresult rc = cuda->ctx_push(queue->device->context);
    if (rc != CUDA_SUCCESS) {
        fail(queue, "the worker's context is not usable", rc);
        return;
    }
    if (queue->order == PB__QUEUE_ORDER__ORDER_EVENT)
        open_events(queue);
    else
        open_words(queue);
    if (queue->open_status != GRADD_OK)
        release_driver(queue);
    cuda->ctx_pop(&ignored);
}

/* ------------------------------------------------------------------ opening, loop */

/* Out of the table, then told and freed. */
static void refuse(struct queue *queue, int status, const char *why)
{
    char text[400];
    queue_opened_fn *opened = queue->opened;
    void *data = queue->data;
    uint32_t id = queue->id;
    snprintf(text, sizeof text, "queue %u: %s", id, why);
    HASH_DEL(queue->table->by_id, queue);
    queue_free(queue);
    opened(data, id, status, text, NULL, 0);
}

static void on_opened(struct chore *chore)
{
    struct queue *queue = (struct queue *)chore;
    if (queue->fd >= 0)
        close(queue->fd);
    queue->fd = -1;
    if (queue->state == QUEUE_CLOSED) {
        free_if_unused(queue);
    } else if (queue->open_status != GRADD_OK) {
        refuse(queue, queue->open_status, queue->text);
    } else {
        queue->state = QUEUE_READY;
        ++*count_of(queue);
        queue->opened(queue->data, queue->id, GRADD_OK, "", queue->handles,
                      queue->handles ? queue->n_slots : 0);
    }
}

static void on_device(void *data, struct cuda_device *device)
{
    struct queue *queue = data;
    const char *wrong = NULL;
    if (!device || device->status != GRADD_OK) {
        refuse(queue, device ? device->status : GRADD_ERR_NO_MEMORY,
               device ? device->text : "the worker has no memory");
        return;
    }
    if (queue->order == PB__QUEUE_ORDER__ORDER_EVENT && !device->has_ipc_events)
        wrong = "the GPU has no interprocess events";
    if (queue->order == PB__QUEUE_ORDER__ORDER_FLAG && !device->has_flags)
        wrong = "the GPU's streams can not wait for words in memory";
    if (wrong) {
        refuse(queue, GRADD_ERR_UNSUPPORTED, wrong);
        return;
    }
    queue->device = device;
    queue->state = QUEUE_OPENING;
    queue->chore = (struct chore){.run = run_open, .done = on_opened};
    chores_add(queue->chores, &queue->chore);
}

/* Without F_SEAL_SHRINK the trainer could truncate the page and kill the worker with SIGBUS. */
static bool is_sealed_page(int fd)
{
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &status) == 0 &&
           status.st_size >= QUEUE_PAGE_BYTES;
}

static const char *check_request(const struct queue_table *table,
                                 const struct queue_request *request)
{
    struct queue *queue;
    HASH_FIND(hh, table->by_id, &request->id, sizeof request->id, queue);
    if (request->id == 0 || queue)
        return queue ? "the id is in use" : "0 is no queue id";
    if (HASH_COUNT(table->by_id) == QUEUES_MAX)
        return "the rank has too many queues";
    if (request->slots == 0 || request->slots > QUEUE_SLOTS_MAX)
        return "a queue has 1 to 256 slots";
    if (request->order == PB__QUEUE_ORDER__ORDER_EVENT)
        return request->events ? NULL : "event order takes one event per slot";
    if (request->order == PB__QUEUE_ORDER__ORDER_FLAG)
        return request->take_fd >= 0 && is_sealed_page(request->take_fd)
                   ? NULL
                   : "flag order takes a memfd of 4096 bytes, sealed against shrinking";
    return "the order must be by events or by flags";
}

static struct queue *queue_new(struct queue_table *table, const struct queue_request *request)
{
    struct queue *queue = calloc(1, sizeof *queue + request->slots * sizeof *queue->slots);
    if (!queue)
        return NULL;
    queue->id = request->id;
    queue->n_slots = request->slots;
    queue->order = request->order;
    queue->table = table;
    queue->chores = table->chores;
    queue->devices = table->devices;
    queue->fd = request->take_fd;
    atomic_store(&queue->unsure_from, UINT64_MAX);
    if (request->order == PB__QUEUE_ORDER__ORDER_EVENT) {
        const size_t bytes = (size_t)request->slots * HANDLE_BYTES;
        queue->handles = malloc(bytes);
        if (!queue->handles) {
            free(queue);
            return NULL;
        }
        memcpy(queue->handles, request->events, bytes);
    }
    pthread_mutex_init(&queue->mutex, NULL);
    return queue;
}

void queue_open(struct queue_table *table, const struct queue_request *request,
                queue_opened_fn *opened, void *data)
{
    char text[200];
    int status = GRADD_ERR_INVALID;
    const char *wrong = check_request(table, request);
    if (!wrong && !table->devices) {
        status = GRADD_ERR_UNSUPPORTED;
        wrong = "this job's workers take no device memory";
    }
    struct queue *queue = wrong ? NULL : queue_new(table, request);
    if (!wrong && !queue) {
        status = GRADD_ERR_NO_MEMORY;
        wrong = "the worker has no memory";
    }
    if (wrong) {
        if (request->take_fd >= 0)
            close(request->take_fd);
        snprintf(text, sizeof text, "queue %u: %s", request->id, wrong);
        opened(data, request->id, status, text, NULL, 0);
        return;
    }
    queue->opened = opened;
    queue->data = data;
    HASH_ADD(hh, table->by_id, id, sizeof queue->id, queue);
    cuda_device_open(table->devices, request->uuid, on_device, queue);
}

/* ------------------------------------------------------------------ use */

struct queue *queue_pin(struct queue_table *table, uint32_t id, const char **out_text)
{
    struct queue *queue;
    HASH_FIND(hh, table->by_id, &id, sizeof id, queue);
    if (!queue || queue->state != QUEUE_READY) {
        *out_text = "names a queue that is not open";
        return NULL;
    }
    queue->n_pins++;
    return queue;
}

void queue_unpin(struct queue *queue)
{
    if (!queue)
        return;
    queue->n_pins--;
    free_if_unused(queue);
}
