/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/buffer/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gradd/types.h>

#include "envelope.pb-c.h"

enum {
    QUEUES_MAX = 1024, /* of a rank */
    HANDLE_BYTES = 64,
    PAGE_BYTES = 4096, /* of flag order */
    FINISHED_WORD = 8, /* word of slot 0; word 0 is `produced` */
};
_Static_assert(8 * (FINISHED_WORD + QUEUE_SLOTS_MAX) <= PAGE_BYTES, "every slot has a word");

enum queue_state {
    QUEUE_WAITING, /* for the device */
    QUEUE_OPENING,
    QUEUE_READY,
    QUEUE_CLOSED, /* out of the table; freed when nothing pins it */
};

/* One direction each: the trainer's stream marks, the worker's waits, and the other way round. */
struct slot {
    CUevent in, out; /* event order: the trainer's, ours */
    uint64_t ticket; /* in flag order: whose ops are counted */
    uint32_t n_ended, n_launched;
};

struct queue {
    struct chore chore; /* first */
    uint32_t id, n_slots;
    enum queue_state state;
    int order;
    unsigned n_pins;
    struct queue_table *table; /* not once closed */
    struct chores *chores;
    struct cuda_device_table *devices;
    struct cuda_device *device;
    uint8_t *handles; /* event order: the trainer's, while opening; then ours */
    int fd;           /* flag order, while opening */
    _Atomic int64_t *words;
    CUdeviceptr words_on_device;
    _Atomic uint64_t unsure_from; /* from this ticket on nobody knows what was produced */
    bool is_registered;
    _Atomic bool writes_late; /* the stream has a write that no op's end is behind */
    int open_status;
    char text[240];
    queue_opened_fn *opened;
    void *data;
    pthread_mutex_t mutex; /* guards ticket, n_ended, n_launched of the slots */
    UT_hash_handle hh;
    struct slot slots[];
};

void queue_table_init(struct queue_table *table, struct chores *chores,
                      struct cuda_device_table *devices)
{
    *table = (struct queue_table){.chores = chores, .devices = devices};
}

struct cuda_device *queue_device(const struct queue *queue)
{
    return queue->device;
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
        munmap((void *)queue->words, PAGE_BYTES);
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

/* In flag order the word tells what the trainer's stream has produced; events tell nothing once
 * their process is gone. Before what waits can go on, so that who sees it done sees this too. */
static void set_unsure(struct queue *queue)
{
    uint64_t from = queue->words ? (uint64_t)atomic_load(&queue->words[0]) + 1 : 0;
    uint64_t known = UINT64_MAX;
    atomic_compare_exchange_strong(&queue->unsure_from, &known, from);
}

void queue_poison(struct queue *queue)
{
    if (!queue->words)
        return;
    set_unsure(queue);
    atomic_store_explicit(&queue->words[0], INT64_MAX, memory_order_release);
}

bool queue_is_unsure(const struct queue *queue, uint64_t ticket)
{
    return ticket >= atomic_load(&queue->unsure_from);
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
            set_unsure(queue);
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

static bool open_slot(struct queue *queue, struct slot *slot, uint8_t *handle)
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
    void *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, queue->fd, 0);
    if (page == MAP_FAILED) {
        queue->open_status = GRADD_ERR_NO_MEMORY;
        snprintf(queue->text, sizeof queue->text, "the page of words can not be mapped: %s",
                 strerror(errno));
        return;
    }
    queue->words = page;
    CUresult rc = cuda->host_register(page, PAGE_BYTES,
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
           status.st_size >= PAGE_BYTES;
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

static struct slot *slot_of(struct queue *queue, uint64_t ticket)
{
    return &queue->slots[ticket % queue->n_slots];
}

CUresult queue_wait_inputs(struct queue *queue, uint64_t ticket)
{
    const struct cuda_device *device = queue->device;
    if (queue->order == PB__QUEUE_ORDER__ORDER_EVENT)
        return device->cuda->stream_wait_event(device->stream, slot_of(queue, ticket)->in, 0);
    return device->cuda->stream_wait_value(device->stream, queue->words_on_device, ticket,
                                           CU_STREAM_WAIT_VALUE_GEQ);
}

static CUresult write_word(struct queue *queue, uint64_t ticket)
{
    const struct cuda_device *device = queue->device;
    const uint64_t word = FINISHED_WORD + ticket % queue->n_slots;
    return device->cuda->stream_write_value(device->stream,
                                            queue->words_on_device + word * sizeof(int64_t), ticket,
                                            CU_STREAM_WRITE_VALUE_DEFAULT);
}

/* Count ops of a ticket. True: these were the last ones; *out_launched: how many of all were
 * launched. */
static bool count_ended(struct queue *queue, uint64_t ticket, uint32_t n_ops, bool is_launched,
                        uint32_t n_ticket_ops, uint32_t *out_launched)
{
    struct slot *slot = slot_of(queue, ticket);
    pthread_mutex_lock(&queue->mutex);
    if (slot->ticket != ticket) {
        slot->ticket = ticket;
        slot->n_ended = slot->n_launched = 0;
    }
    const uint32_t before = slot->n_ended;
    slot->n_ended += n_ops;
    slot->n_launched += is_launched ? n_ops : 0;
    *out_launched = slot->n_launched;
    bool is_last = before < n_ticket_ops && slot->n_ended >= n_ticket_ops;
    pthread_mutex_unlock(&queue->mutex);
    return is_last;
}

CUresult queue_mark_results(struct queue *queue, uint64_t ticket, uint32_t n_ops,
                            uint32_t n_ticket_ops)
{
    const struct cuda_device *device = queue->device;
    uint32_t n_launched;
    if (queue->order == PB__QUEUE_ORDER__ORDER_EVENT)
        return device->cuda->event_record(slot_of(queue, ticket)->out, device->stream);
    if (!count_ended(queue, ticket, n_ops, true, n_ticket_ops, &n_launched))
        return CUDA_SUCCESS;
    return write_word(queue, ticket);
}

void queue_skip(struct queue *queue, uint64_t ticket, uint32_t n_ops, uint32_t n_ticket_ops)
{
    uint32_t n_launched;
    CUcontext ignored;
    const struct cuda_device *device = queue->device;
    if (queue->order != PB__QUEUE_ORDER__ORDER_FLAG ||
        !count_ended(queue, ticket, n_ops, false, n_ticket_ops, &n_launched))
        return;
    /* Others of the ticket may still run: the word comes after them, unless the device is lost. */
    if (n_launched > 0 && device->cuda->ctx_push(device->context) == CUDA_SUCCESS) {
        CUresult rc = write_word(queue, ticket);
        atomic_store(&queue->writes_late, true);
        device->cuda->ctx_pop(&ignored);
        if (rc == CUDA_SUCCESS)
            return;
    }
    atomic_store_explicit(&queue->words[FINISHED_WORD + ticket % queue->n_slots], (int64_t)ticket,
                          memory_order_release);
}
