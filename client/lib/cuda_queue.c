/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queues: what orders a stream of the trainer and the worker's stream of the same GPU.
 *
 * Invariants: inputs are marked as ready before the submission is sent, in the order of tickets; a
 * slot is taken again only when all ops of its old ticket are launched and the trainer has issued
 * its wait (or will never), or all have ended. Nothing is made per op: a queue's events live as
 * long as the context. A stream has a second queue when its first is full; a queue that is idle may
 * be given to another stream, because events belong to no stream.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

enum {
    PAGE_BYTES = 4096,
    PRODUCED_WORD = 0,
    FINISHED_WORD = 8, /* the first of CUDA_SLOTS */
};

/* ------------------------------------------------------------------ slots */

struct cuda_slot *cuda_queue_slot(struct cuda_queue *queue, uint64_t ticket)
{
    struct cuda_slot *slot = &queue->slots[ticket % CUDA_SLOTS];
    return slot->ticket == ticket ? slot : NULL;
}

static bool is_free(const struct cuda_slot *slot)
{
    return slot->n_running == 0 || (slot->n_unlaunched == 0 && slot->needs_no_wait);
}

static bool has_room(const void *arg)
{
    const struct cuda_queue *queue = arg;
    return is_free(&queue->slots[(queue->ticket + 1) % CUDA_SLOTS]);
}

/* Has its stream marked all inputs? In flag order a mark that comes late would undo those of the
 * next stream. */
static bool has_marked_all(const struct cuda_queue *queue)
{
    if (queue->order == PB__QUEUE_ORDER__ORDER_EVENT)
        return true;
    const _Atomic uint64_t *words =
        (const _Atomic uint64_t *)(const void *)queue->page->region->base;
    return atomic_load(&words[PRODUCED_WORD]) >= queue->ticket;
}

static bool is_idle(const struct cuda_queue *queue)
{
    for (unsigned i = 0; i < CUDA_SLOTS; i++)
        if (queue->slots[i].n_running > 0)
            return false;
    return has_marked_all(queue);
}

/* ------------------------------------------------------------------ opening: what is ours */

static int make_events(struct cuda *cuda, struct cuda_queue *queue)
{
    const struct cuda_table *table = cuda->table;
    for (; queue->n_ready < CUDA_SLOTS; queue->n_ready++) {
        CUipcEventHandle handle;
        CUresult rc = table->event_create(&queue->ready[queue->n_ready],
                                          CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
        if (rc != CUDA_SUCCESS)
            return cuda_failure(cuda, rc, "an interprocess event");
        rc = table->ipc_get_event(&handle, queue->ready[queue->n_ready]);
        if (rc != CUDA_SUCCESS) {
            table->event_destroy(queue->ready[queue->n_ready]);
            return cuda_failure(cuda, rc, "an event's IPC handle");
        }
        memcpy(queue->handles[queue->n_ready], handle.reserved, CUDA_HANDLE_BYTES);
    }
    return 0;
}

static int open_events(struct cuda *cuda, struct cuda_queue *queue)
{
    for (; queue->n_finished < CUDA_SLOTS; queue->n_finished++) {
        CUipcEventHandle handle;
        memcpy(handle.reserved, queue->handles[queue->n_finished], CUDA_HANDLE_BYTES);
        CUresult rc = cuda->table->ipc_open_event(&queue->finished[queue->n_finished], handle);
        if (rc != CUDA_SUCCESS)
            return cuda_failure(cuda, rc, "the worker's event");
    }
    return 0;
}

static void drop_events(struct cuda *cuda, struct cuda_queue *queue)
{
    while (queue->n_ready > 0)
        cuda->table->event_destroy(queue->ready[--queue->n_ready]);
    while (queue->n_finished > 0)
        cuda->table->event_destroy(queue->finished[--queue->n_finished]);
}

/* ------------------------------------------------------------------ opening: the worker's word */

static bool is_answered(const void *arg)
{
    return ((const struct cuda_queue *)arg)->is_answered;
}

void cuda_queue_replied(struct gradd *g, const Pb__QueueReply *reply)
{
    struct cuda_queue *queue = NULL;
    for (unsigned i = 0; g->cuda && i < g->cuda->n_queues; i++)
        if (g->cuda->queues[i]->id == reply->queue)
            queue = g->cuda->queues[i];
    if (!queue || queue->is_answered)
        return;
    queue->is_answered = true;
    g->has_ended = true; /* its thread may be asleep */
    queue->status = error_status_from_wire(reply->code);
    snprintf(queue->text, sizeof queue->text, "%s", reply->text);
    if (queue->status != GRADD_OK || queue->order != PB__QUEUE_ORDER__ORDER_EVENT)
        return;
    bool is_whole = reply->n_events == CUDA_SLOTS;
    for (unsigned i = 0; is_whole && i < CUDA_SLOTS; i++) {
        is_whole = reply->events[i].len == CUDA_HANDLE_BYTES;
        if (is_whole)
            memcpy(queue->handles[i], reply->events[i].data, CUDA_HANDLE_BYTES);
    }
    if (!is_whole) {
        queue->status = GRADD_ERR_PROTOCOL;
        snprintf(queue->text, sizeof queue->text, "the worker sent other events than were asked");
    }
}

/* Ask, and wait for the answer without the lock. 0 or a status. */
static int ask_worker(struct gradd *g, struct cuda_queue *queue, int fd)
{
    ProtobufCBinaryData events[CUDA_SLOTS];
    Pb__OpenQueue message = PB__OPEN_QUEUE__INIT;
    message.queue = queue->id;
    message.device = (ProtobufCBinaryData){CUDA_UUID_BYTES, queue->gpu->uuid};
    message.slots = CUDA_SLOTS;
    message.order = queue->order;
    if (queue->order == PB__QUEUE_ORDER__ORDER_EVENT) {
        for (unsigned i = 0; i < CUDA_SLOTS; i++)
            events[i] = (ProtobufCBinaryData){CUDA_HANDLE_BYTES, queue->handles[i]};
        message.events = events;
        message.n_events = CUDA_SLOTS;
    }
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_OPEN_QUEUE;
    envelope.open_queue = &message;
    queue->is_answered = g->failure; /* nobody would answer */
    if (channel_push(g, &envelope, &fd, fd >= 0 ? 1 : 0) < 0)
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory for a stream's queue");
    channel_flush(g);
    channel_wait(g, is_answered, queue, WAIT_FOREVER);
    if (g->failure)
        return context_check(g);
    return queue->status == GRADD_OK
               ? 0
               : error_set(queue->status, "%s",
                           queue->text[0] ? queue->text : "the worker refused without a reason");
}

static void tell_closed(struct gradd *g, const struct cuda_queue *queue)
{
    Pb__CloseQueue message = PB__CLOSE_QUEUE__INIT;
    message.queue = queue->id;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_CLOSE_QUEUE;
    envelope.close_queue = &message;
    channel_push(g, &envelope, NULL, 0);
    channel_flush(g);
}

static int open_by_events(struct gradd *g, struct cuda_queue *queue)
{
    struct cuda *cuda = g->cuda;
    if (!queue->gpu->has_events)
        return error_set(GRADD_ERR_UNSUPPORTED, "GPU %d has no interprocess events",
                         queue->gpu->ordinal);
    int rc = cuda_enter(cuda, queue->gpu);
    if (rc < 0)
        return rc;
    rc = make_events(cuda, queue);
    cuda_leave(cuda);
    bool is_asked = rc == 0;
    if (rc == 0)
        rc = ask_worker(g, queue, -1);
    bool is_taken = is_asked && rc == 0;
    int entered = cuda_enter(cuda, queue->gpu);
    if (rc == 0)
        rc = entered;
    if (rc == 0)
        rc = open_events(cuda, queue);
    if (rc < 0 && is_taken)
        tell_closed(g, queue);
    if (rc < 0 && entered == 0)
        drop_events(cuda, queue);
    if (entered == 0)
        cuda_leave(cuda);
    return rc;
}

static int open_by_flags(struct gradd *g, struct cuda_queue *queue)
{
    int fd = -1;
    if (!queue->gpu->has_flags)
        return error_set(GRADD_ERR_UNSUPPORTED,
                         "GPU %d or its driver has no 64-bit stream memory operations",
                         queue->gpu->ordinal);
    int rc = cuda_page_new(g, queue->gpu, PAGE_BYTES, FINISHED_WORD, CUDA_SLOTS, &fd, &queue->page);
    if (rc < 0)
        return rc;
    rc = ask_worker(g, queue, fd);
    close(fd);
    return rc;
}

static int open_by(struct gradd *g, struct cuda_queue *queue, Pb__QueueOrder order)
{
    queue->id = ++g->cuda->next_queue;
    queue->order = order;
    return order == PB__QUEUE_ORDER__ORDER_FLAG ? open_by_flags(g, queue)
                                                : open_by_events(g, queue);
}

/* The one order, or the other. The record is in the list: the answer finds it there. */
static int open_queue(struct gradd *g, struct cuda_queue *queue)
{
    static const char *const names[] = {
        [PB__QUEUE_ORDER__ORDER_EVENT] = "events", [PB__QUEUE_ORDER__ORDER_FLAG] = "flags"};
    char why[ERROR_TEXT_BYTES], why_too[ERROR_TEXT_BYTES];
    Pb__QueueOrder first = queue->gpu->order;
    if (first == PB__QUEUE_ORDER__ORDER_AUTO)
        first = g->device_order == PB__QUEUE_ORDER__ORDER_FLAG ? PB__QUEUE_ORDER__ORDER_FLAG
                                                               : PB__QUEUE_ORDER__ORDER_EVENT;
    Pb__QueueOrder second = first == PB__QUEUE_ORDER__ORDER_FLAG ? PB__QUEUE_ORDER__ORDER_EVENT
                                                                 : PB__QUEUE_ORDER__ORDER_FLAG;
    int rc = open_by(g, queue, first);
    if (rc < 0 && !g->failure) {
        snprintf(why, sizeof why, "%s", gradd_error());
        rc = open_by(g, queue, second);
        snprintf(why_too, sizeof why_too, "%s", gradd_error());
        if (rc < 0 && !g->failure)
            rc = error_set(rc,
                           "job %s, rank %d, GPU %d: no order between streams of two processes: "
                           "%s: %s; %s: %s",
                           g->identity.job, g->identity.rank, queue->gpu->ordinal, names[first],
                           why, names[second], why_too);
    }
    if (rc == 0)
        queue->gpu->order = queue->order;
    return rc;
}

static bool is_of(const struct cuda_queue *queue, CUstream stream)
{
    return queue->stream == stream && queue->thread == cuda_thread_of(stream);
}

static void give_to(struct cuda_queue *queue, CUstream stream)
{
    queue->stream = stream;
    queue->thread = cuda_thread_of(stream);
}

static void remove_queue(struct cuda *cuda, struct cuda_queue *queue)
{
    for (unsigned i = 0; i < cuda->n_queues; i++) {
        if (cuda->queues[i] != queue)
            continue;
        cuda->queues[i] = cuda->queues[--cuda->n_queues];
        free(queue);
        return;
    }
}

static int add_queue(struct gradd *g, struct cuda_gpu *gpu, CUstream stream)
{
    struct cuda *cuda = g->cuda;
    struct cuda_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    queue->gpu = gpu;
    give_to(queue, stream);
    cuda->queues[cuda->n_queues++] = queue;
    int rc = open_queue(g, queue);
    if (rc < 0)
        remove_queue(cuda, queue);
    else
        queue->is_open = true;
    return rc;
}

/* ------------------------------------------------------------------ getting one */

struct choice {
    struct cuda_queue *with_room;
    struct cuda_queue *full;  /* of the stream, the one that was used longest ago */
    struct cuda_queue *spare; /* of another stream, idle, used longest ago */
    unsigned n_of_stream;
};

static bool is_older(const struct cuda_queue *a, const struct cuda_queue *b)
{
    return !b || a->last_use < b->last_use;
}

static struct choice choose(const struct cuda *cuda, const struct cuda_gpu *gpu, CUstream stream)
{
    struct choice choice = {0};
    for (unsigned i = 0; i < cuda->n_queues; i++) {
        struct cuda_queue *queue = cuda->queues[i];
        if (!queue->is_open || queue->gpu != gpu)
            continue;
        if (!is_of(queue, stream)) {
            if (is_older(queue, choice.spare) && is_idle(queue))
                choice.spare = queue;
            continue;
        }
        choice.n_of_stream++;
        if (has_room(queue)) {
            choice.with_room = queue;
            return choice;
        }
        if (is_older(queue, choice.full))
            choice.full = queue;
    }
    return choice;
}

int cuda_queue_get(struct gradd *g, struct cuda_gpu *gpu, CUstream stream, struct cuda_queue **out)
{
    struct cuda *cuda = g->cuda;
    for (;;) {
        int rc = context_check(g);
        if (rc < 0)
            return rc;
        struct choice choice = choose(cuda, gpu, stream);
        if (choice.with_room) {
            *out = choice.with_room;
            return 0;
        }
        if (choice.n_of_stream >= CUDA_STREAM_QUEUES ||
            (cuda->n_queues == CUDA_QUEUES_MAX && !choice.spare && choice.full)) {
            channel_wait(g, has_room, choice.full, WAIT_FOREVER);
        } else if (cuda->n_queues < CUDA_QUEUES_MAX) {
            rc = add_queue(g, gpu, stream);
        } else if (choice.spare) {
            give_to(choice.spare, stream);
        } else {
            rc = error_set(GRADD_ERR_NO_MEMORY,
                           "job %s, rank %d: ops of %d streams are in flight: wait for some first",
                           g->identity.job, g->identity.rank, CUDA_QUEUES_MAX);
        }
        if (rc < 0)
            return rc;
    }
}

/* ------------------------------------------------------------------ using it */

int cuda_queue_submit(struct cuda *cuda, struct cuda_queue *queue, uint32_t n_ops,
                      uint64_t *out_ticket)
{
    uint64_t ticket = queue->ticket + 1;
    unsigned slot = ticket % CUDA_SLOTS;
    CUresult rc;
    if (queue->order == PB__QUEUE_ORDER__ORDER_EVENT)
        rc = cuda->table->event_record(queue->ready[slot], queue->stream);
    else
        rc = cuda->table->stream_write_value(queue->stream, queue->page->device + PRODUCED_WORD * 8,
                                             ticket, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (rc != CUDA_SUCCESS)
        return cuda_failure(cuda, rc, "marking a stream's inputs as ready");
    if (queue->order == PB__QUEUE_ORDER__ORDER_FLAG)
        cuda_use_note(cuda, queue->gpu, queue->stream);
    queue->ticket = ticket;
    queue->last_use = ++cuda->n_uses;
    queue->slots[slot] =
        (struct cuda_slot){.ticket = ticket, .n_running = n_ops, .n_unlaunched = n_ops};
    *out_ticket = ticket;
    return 0;
}

CUresult cuda_queue_wait(struct cuda *cuda, const struct cuda_queue *queue, uint64_t ticket,
                         CUstream stream)
{
    unsigned slot = ticket % CUDA_SLOTS;
    if (queue->order == PB__QUEUE_ORDER__ORDER_EVENT)
        return cuda->table->stream_wait_event(stream, queue->finished[slot], 0);
    CUresult rc = cuda->table->stream_wait_value(
        stream, queue->page->device + (FINISHED_WORD + slot) * 8, ticket, CU_STREAM_WAIT_VALUE_GEQ);
    if (rc == CUDA_SUCCESS)
        cuda_use_note(cuda, queue->gpu, stream);
    return rc;
}

void cuda_queues_stop(struct cuda *cuda)
{
    for (unsigned i = 0; i < cuda->n_queues; i++) {
        struct cuda_queue *queue = cuda->queues[i];
        if (cuda_enter(cuda, queue->gpu) < 0)
            continue;
        drop_events(cuda, queue);
        cuda_leave(cuda);
    }
}
