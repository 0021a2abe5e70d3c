/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order that a queue carries: the worker's stream waits for the trainer's, and the trainer's
 * for results; in flag order also what ends without them, so that no stream waits for ever.
 */
#include "worker/buffer/queue_internal.h"

struct cuda_device *queue_device(const struct queue *queue)
{
    return queue->device;
}

/* In flag order the word tells what the trainer's stream has produced; events tell nothing once
 * their process is gone. Before what waits can go on, so that who sees it done sees this too. */
void queue_set_unsure(struct queue *queue)
{
    uint64_t from = queue->words ? (uint64_t)atomic_load(&queue->words[0]) + 1 : 0;
    uint64_t known = UINT64_MAX;
    atomic_compare_exchange_strong(&queue->unsure_from, &known, from);
}

void queue_poison(struct queue *queue)
{
    if (!queue->words)
        return;
    queue_set_unsure(queue);
    atomic_store_explicit(&queue->words[0], INT64_MAX, memory_order_release);
}

bool queue_is_unsure(const struct queue *queue, uint64_t ticket)
{
    return ticket >= atomic_load(&queue->unsure_from);
}

static struct queue_slot *slot_of(struct queue *queue, uint64_t ticket)
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
    const uint64_t word = QUEUE_FINISHED_WORD + ticket % queue->n_slots;
    return device->cuda->stream_write_value(device->stream,
                                            queue->words_on_device + word * sizeof(int64_t), ticket,
                                            CU_STREAM_WRITE_VALUE_DEFAULT);
}

/* Count ops of a ticket. True: these were the last ones; *out_launched: how many of all were
 * launched. */
static bool count_ended(struct queue *queue, uint64_t ticket, uint32_t n_ops, bool is_launched,
                        uint32_t n_ticket_ops, uint32_t *out_launched)
{
    struct queue_slot *slot = slot_of(queue, ticket);
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
    atomic_store_explicit(&queue->words[QUEUE_FINISHED_WORD + ticket % queue->n_slots],
                          (int64_t)ticket, memory_order_release);
}
