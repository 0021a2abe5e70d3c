/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/net/cell.h"

#include <stdlib.h>
#include <string.h>

enum { NODES_MAX = 256 };

/* ------------------------------------------------------------------ buffers */

struct buffer *buffer_take(struct buffer_pool *pool)
{
    struct buffer *buffer = pool->free;
    if (buffer)
        pool->free = buffer->next;
    else if ((buffer = aligned_alloc(64, sizeof *buffer)))
        memset(buffer->bytes, 0, sizeof buffer->bytes); /* padding tells nothing */
    return buffer;
}

void buffer_give(struct buffer_pool *pool, struct buffer *buffer)
{
    if (!buffer)
        return;
    buffer->next = pool->free;
    pool->free = buffer;
}

void buffer_pool_deinit(struct buffer_pool *pool)
{
    while (pool->free) {
        struct buffer *buffer = pool->free;
        pool->free = buffer->next;
        free(buffer);
    }
}

/* ------------------------------------------------------------------ pieces */

typedef void piece_fn(struct work *work, const struct program *program,
                      const struct schedule_piece *piece, uint8_t *wire);

static void for_pieces(struct work *work, const struct program *program,
                       const struct schedule_pieces *pieces, uint8_t *memory, piece_fn *fn)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < pieces->n; i++) {
        const struct schedule_piece *piece = &program->schedule.pieces[pieces->first + i];
        at = schedule_align(at);
        fn(work, program, piece, memory + at);
        at += (uint32_t)piece->count * program->sums[piece->op].wire_size;
    }
}

static void local_piece(struct work *work, const struct program *program,
                        const struct schedule_piece *piece, uint8_t *wire)
{
    sum_local(&program->sums[piece->op], &work->scratch, piece->begin, piece->count, wire);
}

static void add_piece(struct work *work, const struct program *program,
                      const struct schedule_piece *piece, uint8_t *wire)
{
    sum_add(&program->sums[piece->op], &work->scratch, piece->begin, piece->count, wire);
}

static void finish_piece(struct work *work, const struct program *program,
                         const struct schedule_piece *piece, uint8_t *wire)
{
    sum_finish(&program->sums[piece->op], &work->scratch, piece->begin, piece->count, wire);
}

static void store_piece(struct work *work, const struct program *program,
                        const struct schedule_piece *piece, uint8_t *wire)
{
    sum_store(&program->sums[piece->op], piece->at, piece->count, wire);
}

/* NULL: the rank has no input. */
static uint8_t *source_of(const struct program *program, const struct schedule_piece *piece)
{
    const struct sum *sum = &program->sums[piece->op];
    uint8_t *base = sum->op->parts[piece->from].in.base;
    return base ? base + piece->begin * sum->size : NULL;
}

static void load_piece(struct work *work, const struct program *program,
                       const struct schedule_piece *piece, uint8_t *wire)
{
    const uint8_t *source = source_of(program, piece);
    const size_t bytes = piece->count * program->sums[piece->op].size;
    if (source)
        memcpy(wire, source, bytes);
    else
        memset(wire, 0, bytes);
}

/* Into one rank's output, or all local ones. Where it is already, nothing is copied. */
static void place_piece(struct work *work, const struct program *program,
                        const struct schedule_piece *piece, uint8_t *wire)
{
    const struct sum *sum = &program->sums[piece->op];
    if (piece->to == SCHEDULE_ALL) {
        store_piece(work, program, piece, wire);
        return;
    }
    uint8_t *base = sum->op->parts[piece->to].out.base;
    if (base && base + piece->at * sum->size != wire) /* they overlap if a trainer says so */
        memmove(base + piece->at * sum->size, wire, piece->count * sum->size);
}

/* ------------------------------------------------------------------ sending */

static bool take_memory(struct work *work, uint8_t **memory, struct buffer **buffer)
{
    *buffer = buffer_take(&work->pool);
    *memory = *buffer ? (*buffer)->bytes : NULL;
    return *memory != NULL;
}

/* The inputs that can travel from where they are: one rank's, unscaled. They are not stored over
 * before they are sent, because a cell ends after its sends. */
static uint8_t *sum_in_place(const struct program *program, const struct schedule_pieces *pieces)
{
    const struct schedule_piece *piece = &program->schedule.pieces[pieces->first];
    const struct sum *sum = &program->sums[piece->op];
    if (pieces->n != 1 || sum->form != SUM_PLAIN || sum->n_in != 1 || sum->prescale != 1 ||
        sum->op->nonfinite)
        return NULL;
    return (uint8_t *)sum->in[0] + piece->begin * sum->size;
}

/* The local sum of an exchange, once for all who receive it. */
static bool make_own(struct work *work, const struct program *program, struct schedule_cell *cell)
{
    if (cell->memory || (cell->memory = sum_in_place(program, &cell->own)))
        return true;
    if (!take_memory(work, &cell->memory, &cell->buffer))
        return false;
    for_pieces(work, program, &cell->own, cell->memory, local_piece);
    return true;
}

static bool make_copy(struct work *work, const struct program *program,
                      struct schedule_message *message)
{
    const struct schedule_pieces *pieces = &message->pieces;
    if (pieces->n == 1)
        message->memory = source_of(program, &program->schedule.pieces[pieces->first]);
    if (message->memory)
        return true;
    if (!take_memory(work, &message->memory, &message->buffer))
        return false;
    for_pieces(work, program, pieces, message->memory, load_piece);
    return true;
}

static bool make_scattered(struct work *work, const struct program *program,
                           struct schedule_message *message)
{
    if ((message->memory = sum_in_place(program, &message->pieces)))
        return true;
    if (!take_memory(work, &message->memory, &message->buffer))
        return false;
    for_pieces(work, program, &message->pieces, message->memory, local_piece);
    return true;
}

bool cell_prepare_send(struct work *work, struct schedule_message *message, bool *out_is_ready)
{
    const struct program *program = message->program;
    struct schedule_cell *cell = message_cell(message);
    *out_is_ready = true;
    if (message->memory)
        return true;
    if (cell->is_relay) {
        *out_is_ready = cell->n_in_left == 0;
        message->memory = program->schedule.messages[cell->first_message].memory;
        if (!*out_is_ready)
            message->memory = NULL;
        return true;
    }
    switch (cell->action) {
    case SCHEDULE_COPY:
        return make_copy(work, program, message);
    case SCHEDULE_SCATTER:
        return make_scattered(work, program, message);
    default:
        if (!make_own(work, program, cell))
            return false;
        message->memory = cell->memory;
        return true;
    }
}

/* ------------------------------------------------------------------ receiving */

/* Where a result can be received without a copy. */
static uint8_t *receive_in_place(const struct program *program,
                                 const struct schedule_message *message)
{
    const struct schedule_cell *cell = message_cell(message);
    const struct schedule_piece *piece = &program->schedule.pieces[message->pieces.first];
    const struct sum *sum = &program->sums[piece->op];
    if ((cell->action != SCHEDULE_COPY && cell->action != SCHEDULE_STORE) ||
        message->pieces.n != 1 || sum->form != SUM_PLAIN)
        return NULL;
    uint8_t *base = piece->to != SCHEDULE_ALL ? sum->op->parts[piece->to].out.base
                    : sum->n_out > 0          ? sum->out[0]
                                              : NULL;
    return base ? base + piece->at * sum->size : NULL;
}

bool cell_prepare_receive(struct work *work, struct schedule_message *message)
{
    if (message->memory || (message->memory = receive_in_place(message->program, message)))
        return true;
    return take_memory(work, &message->memory, &message->buffer);
}

void cell_on_received(struct work *work, struct schedule_message *message)
{
    static piece_fn *const fns[] = {
        [SCHEDULE_ADD] = add_piece,     [SCHEDULE_FINISH] = finish_piece,
        [SCHEDULE_STORE] = store_piece, [SCHEDULE_COPY] = place_piece,
        [SCHEDULE_SCATTER] = NULL,
    };
    struct schedule_cell *cell = message_cell(message);
    if (fns[cell->action])
        for_pieces(work, message->program, &message->pieces, message->memory, fns[cell->action]);
    cell->n_in_left--;
}

/* ------------------------------------------------------------------ the end */

/* Add what all nodes have sent, and the own sum, in the order of nodes. */
static void combine(struct work *work, const struct program *program, struct schedule_cell *cell)
{
    const struct schedule_message *in = &program->schedule.messages[cell->first_message];
    uint8_t *wires[NODES_MAX];
    const void *shifted[NODES_MAX];
    uint32_t n = 0, at = 0;
    for (uint32_t i = 0; i < cell->n_in && in[i].node < work->node_rank; i++)
        wires[n++] = in[i].memory;
    wires[n++] = cell->memory;
    for (uint32_t i = n - 1; i < cell->n_in; i++)
        wires[n++] = in[i].memory;
    for (uint32_t i = 0; i < cell->own.n; i++) {
        const struct schedule_piece *piece = &program->schedule.pieces[cell->own.first + i];
        const struct sum *sum = &program->sums[piece->op];
        at = schedule_align(at);
        for (uint32_t j = 0; j < n; j++)
            shifted[j] = wires[j] + at;
        at += (uint32_t)piece->count * sum->wire_size;
        if (piece->to == SCHEDULE_ALL) {
            sum_combine(sum, &work->scratch, shifted, n, piece->at, piece->count, sum->out,
                        sum->n_out);
        } else {
            void *out = sum->op->parts[piece->to].out.base;
            sum_combine(sum, &work->scratch, shifted, n, piece->at, piece->count, &out,
                        out != NULL);
        }
    }
}

static void copy_own(struct work *work, const struct program *program,
                     const struct schedule_cell *cell)
{
    for (uint32_t i = 0; i < cell->own.n; i++) {
        const struct schedule_piece *piece = &program->schedule.pieces[cell->own.first + i];
        uint8_t *source = source_of(program, piece);
        if (source)
            place_piece(work, program, piece, source);
    }
}

void cell_release(struct work *work, struct program *program, struct schedule_cell *cell)
{
    struct schedule_message *messages = &program->schedule.messages[cell->first_message];
    for (uint32_t i = 0; i < cell->n_in + cell->n_out; i++) {
        buffer_give(&work->pool, messages[i].buffer);
        messages[i].buffer = NULL;
    }
    buffer_give(&work->pool, cell->buffer);
    cell->buffer = NULL;
}

bool cell_end(struct work *work, struct program *program, struct schedule_cell *cell)
{
    const bool is_combined =
        cell->own.n > 0 && (cell->action == SCHEDULE_EXCHANGE || cell->action == SCHEDULE_SCATTER);
    if (is_combined) {
        if (!make_own(work, program, cell))
            return false;
        combine(work, program, cell);
    } else if (cell->action == SCHEDULE_COPY) {
        copy_own(work, program, cell);
    }
    cell_release(work, program, cell);
    cell->is_complete = true;
    return true;
}
