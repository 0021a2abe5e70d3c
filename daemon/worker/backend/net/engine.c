/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/net/engine_internal.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "worker/reduce/reduce.h"

enum {
    PROGRAMS_MAX = 16, /* schedules held at once */
    /* Per pass over the lanes, so that all of them and both directions have theirs. */
    RECEIVES_PER_TURN = 4,
    PASSES_PER_TURN = 64,
};

/* ------------------------------------------------------------------ failures */

static void fail(struct engine *engine, int status, uint32_t node, const char *text)
{
    if (engine->failure.status != GRADD_OK)
        return;
    engine->failure.status = status;
    engine->failure.node = node;
    snprintf(engine->failure.text, sizeof engine->failure.text, "%s", text);
}

static void fail_memory(struct engine *engine)
{
    fail(engine, GRADD_ERR_NO_MEMORY, engine->view.node_rank,
         "the worker has no memory for the chunks of a collective");
}

static void fail_lane(struct engine *engine, const struct lane *lane, int error, const char *text)
{
    char sentence[256];
    if (error == -EBADMSG)
        snprintf(sentence, sizeof sentence, "node %u %s", lane->node, text);
    else if (error == -EPIPE)
        snprintf(sentence, sizeof sentence, "node %u closed its data connection", lane->node);
    else
        snprintf(sentence, sizeof sentence, "data connection to node %u: %s", lane->node,
                 strerror(-error));
    fail(engine, GRADD_ERR_RANK_LOST, lane->node, sentence);
}

const struct engine_failure *engine_failure(const struct engine *engine)
{
    return &engine->failure;
}

/* ------------------------------------------------------------------ programs */

static void program_free(struct program *program)
{
    if (!program)
        return;
    schedule_deinit(&program->schedule);
    free(program->sums);
    free(program->pointers);
    free(program);
}

static int program_reserve(struct program *program, const struct backend_batch *batch)
{
    size_t n_pointers = 0;
    for (size_t i = 0; i < batch->n_ops; i++)
        n_pointers += 2 * (size_t)batch->ops[i]->n_ranks;
    if (n_pointers > program->pointer_capacity) {
        const void **pointers = realloc(program->pointers, n_pointers * sizeof *pointers);
        if (!pointers)
            return -ENOMEM;
        program->pointers = pointers;
        program->pointer_capacity = (uint32_t)n_pointers;
    }
    if (batch->n_ops > program->sum_capacity) {
        struct sum *sums = realloc(program->sums, batch->n_ops * sizeof *sums);
        if (!sums)
            return -ENOMEM;
        program->sums = sums;
        program->sum_capacity = (uint32_t)batch->n_ops;
    }
    return 0;
}

static int program_load(struct engine *engine, struct program *program, struct backend_batch *batch)
{
    const void **pointers;
    uint32_t n_most = 0;
    if (program_reserve(program, batch) < 0)
        return -ENOMEM;
    pointers = program->pointers;
    for (size_t i = 0; i < batch->n_ops; i++) {
        const struct backend_op *op = batch->ops[i];
        sum_init(&program->sums[i], op, engine->view.node_rank, engine->view.wire, pointers);
        pointers += 2 * op->n_ranks;
        if (op->n_ranks > n_most)
            n_most = op->n_ranks;
    }
    if (sum_scratch_reserve(&engine->work.scratch, n_most + engine->view.n_nodes + 2) < 0)
        return -ENOMEM;
    program->batch = batch;
    program->n_complete = program->n_done = program->n_opened = 0;
    return schedule_build(&program->schedule, &engine->view, batch->ops, (uint32_t)batch->n_ops);
}

static int run_local(struct engine *engine, const struct program *program)
{
    struct strip_list *strips = &engine->strips;
    strip_list_clear(strips);
    for (uint32_t i = 0; i < program->schedule.n_local; i++)
        if (strip_list_add(strips, program->batch->ops[program->schedule.local[i]]) < 0)
            return -ENOMEM;
    strip_list_seal(strips);
    for (uint64_t piece = 0; piece < strips->n_pieces; piece++)
        strip_list_run_piece(strips, piece);
    return 0;
}

static void queue_messages(struct engine *engine, struct program *program)
{
    struct schedule *s = &program->schedule;
    for (uint32_t i = 0; i < s->n_cells; i++) {
        const struct schedule_cell *cell = &s->cells[i];
        for (uint32_t j = 0; j < cell->n_in + cell->n_out; j++) {
            struct schedule_message *message = &s->messages[cell->first_message + j];
            struct lane *lane = &engine->lanes[message->node * NET_STREAMS_MAX + message->stream];
            message->program = program;
            if (j < cell->n_in)
                lane_queue_in(lane, message);
            else
                lane_queue_out(lane, message);
        }
    }
}

static bool has_all_links(const struct engine *engine, const struct schedule *schedule)
{
    for (uint32_t i = 0; i < schedule->n_messages; i++) {
        const struct schedule_message *message = &schedule->messages[i];
        if (!engine->lanes[message->node * NET_STREAMS_MAX + message->stream].link)
            return false;
    }
    return true;
}

bool engine_is_idle(const struct engine *engine)
{
    return engine->first == NULL;
}

bool engine_has_room(const struct engine *engine)
{
    return engine->n_programs < PROGRAMS_MAX;
}

int engine_start(struct engine *engine, struct backend_batch *batch)
{
    struct program *program = engine->spare;
    if (program)
        engine->spare = program->next;
    else
        program = calloc(1, sizeof *program);
    if (!program)
        return -ENOMEM;
    int result = program_load(engine, program, batch);
    if (result == 0 && program->schedule.n_local > 0)
        result = run_local(engine, program);
    if (result == 0 && !has_all_links(engine, &program->schedule))
        result = -ENOTCONN;
    if (result < 0) {
        program->next = engine->spare;
        engine->spare = program;
        return result;
    }
    program->first_cell = engine->next_cell;
    engine->next_cell += program->schedule.n_cells;
    program->next = NULL;
    *engine->last = program;
    engine->last = &program->next;
    engine->n_programs++;
    queue_messages(engine, program);
    return 0;
}

static void pop_program(struct engine *engine)
{
    struct program *program = engine->first;
    if (!(engine->first = program->next))
        engine->last = &engine->first;
    engine->n_programs--;
}

struct backend_batch *engine_take_done(struct engine *engine)
{
    struct program *program = engine->first;
    if (!program || program->n_complete < program->schedule.n_cells)
        return NULL;
    pop_program(engine);
    program->next = engine->spare;
    engine->spare = program;
    return program->batch;
}

struct backend_batch *engine_take_unfinished(struct engine *engine)
{
    struct program *program = engine->first;
    if (!program)
        return NULL;
    pop_program(engine);
    for (uint32_t i = 0; i < engine->n_used; i++)
        lane_clear(engine->used[i]);
    for (uint32_t i = 0; i < program->schedule.n_cells; i++)
        cell_release(&engine->work, program, &program->schedule.cells[i]);
    struct backend_batch *batch = program->batch;
    program_free(program);
    return batch;
}

/* ------------------------------------------------------------------ cells */

static void end_cell(struct engine *engine, struct program *program, struct schedule_cell *cell)
{
    if (cell->n_in_left > 0 || cell->n_out_left > 0)
        return;
    if (!cell_end(&engine->work, program, cell)) {
        fail_memory(engine);
        return;
    }
    program->n_complete++;
}

/* Open cells that the window reaches; those that exchange nothing end at once. */
static void open_cells(struct engine *engine, struct program *program)
{
    const struct schedule *s = &program->schedule;
    while (program->n_opened < s->n_cells &&
           program->first_cell + program->n_opened < engine->window_end) {
        struct schedule_cell *cell = &s->cells[program->n_opened++];
        end_cell(engine, program, cell);
    }
}

/* True when the window has moved. */
static bool advance(struct engine *engine)
{
    const uint64_t before = engine->window_end;
    for (struct program *program = engine->first; program; program = program->next) {
        const struct schedule *s = &program->schedule;
        while (program->n_done < s->n_cells && s->cells[program->n_done].is_complete)
            program->n_done++;
        if (program->n_done < s->n_cells) {
            engine->window_end = program->first_cell + program->n_done + SCHEDULE_WINDOW;
            break;
        }
    }
    for (struct program *program = engine->first; program; program = program->next)
        open_cells(engine, program);
    return engine->window_end != before;
}

/* ------------------------------------------------------------------ lanes */

/* How many messages from the first on are ready to go. */
static unsigned ready_to_send(struct engine *engine, const struct lane *lane)
{
    struct schedule_message *message = lane->out.first;
    unsigned n = 0;
    for (bool is_ready; n < LANE_SENDS_MAX && engine_is_open(engine, message); n++) {
        if (!cell_prepare_send(&engine->work, message, &is_ready))
            fail_memory(engine);
        if (!is_ready || engine->failure.status != GRADD_OK)
            break;
        message = message->next;
    }
    return n;
}

static bool send_some(struct engine *engine, struct lane *lane)
{
    struct schedule_message *message;
    unsigned n = lane->out.is_blocked ? 0 : ready_to_send(engine, lane);
    if (n == 0 || engine->failure.status != GRADD_OK)
        return false;
    int result = lane_send(lane, n);
    if (result < 0)
        fail_lane(engine, lane, result, "");
    while (result == LANE_DONE && (message = lane_take_sent(lane))) {
        struct schedule_cell *cell = message_cell(message);
        cell->n_out_left--;
        end_cell(engine, message->program, cell);
    }
    return result > LANE_BLOCKED;
}

static bool receive_some(struct engine *engine, struct lane *lane)
{
    bool has_moved = false;
    for (unsigned n = 0; n < RECEIVES_PER_TURN && !lane->in.is_blocked;) {
        struct schedule_message *message = lane->in.first;
        char text[200];
        if (!engine_is_open(engine, message) || engine->failure.status != GRADD_OK)
            break;
        if (!cell_prepare_receive(&engine->work, message)) {
            fail_memory(engine);
            break;
        }
        int result = lane_receive(lane, text, sizeof text);
        if (result < 0) {
            fail_lane(engine, lane, result, text);
            break;
        }
        has_moved |= result != LANE_BLOCKED;
        if (result == LANE_DONE) {
            cell_on_received(&engine->work, message);
            end_cell(engine, message->program, message_cell(message));
            n++;
        }
    }
    return has_moved;
}

/*
 * A TLS handshake makes sending wait for input. Receiving may have taken that input in the
 * meantime: what waits for it would wait for ever.
 */
static bool send_after_input(struct engine *engine, struct lane *lane)
{
    if (!lane->out.is_blocked || lane->out.blocked_on != POLLIN)
        return false;
    lane->out.is_blocked = false;
    return send_some(engine, lane);
}

static bool has_done(const struct engine *engine)
{
    return engine->first && engine->first->n_complete == engine->first->schedule.n_cells;
}

bool engine_turn(struct engine *engine)
{
    advance(engine);
    for (unsigned pass = 0; pass < PASSES_PER_TURN; pass++) {
        bool has_moved = false;
        for (uint32_t i = 0; i < engine->n_used && engine->failure.status == GRADD_OK; i++) {
            has_moved |= send_some(engine, engine->used[i]);
            has_moved |= receive_some(engine, engine->used[i]);
            has_moved |= send_after_input(engine, engine->used[i]);
        }
        has_moved |= advance(engine);
        if (engine->failure.status != GRADD_OK || has_done(engine))
            return true;
        if (!has_moved)
            return false;
    }
    return true;
}

/* ------------------------------------------------------------------ life */

static void free_links(const struct net_setup *setup)
{
    for (uint32_t i = 0; i < setup->n_nodes * NET_STREAMS_MAX; i++)
        if (setup->links[i])
            setup->links[i]->ops->free(setup->links[i]);
}

/* 0, or -ENOMEM and nothing taken. */
static int take_links(struct engine *engine, const struct net_setup *setup)
{
    const uint32_t n_lanes = setup->n_nodes * NET_STREAMS_MAX;
    engine->lanes = calloc(n_lanes, sizeof *engine->lanes);
    engine->used = calloc(n_lanes, sizeof(*engine->used));
    engine->poll_fds = calloc(n_lanes + 1, sizeof *engine->poll_fds);
    engine->polled = calloc(n_lanes, sizeof(*engine->polled));
    if (!engine->lanes || !engine->used || !engine->poll_fds || !engine->polled)
        return -ENOMEM;
    for (uint32_t i = 0; i < n_lanes; i++) {
        struct link *link = setup->links[i];
        lane_init(&engine->lanes[i], link, i / NET_STREAMS_MAX, i % NET_STREAMS_MAX);
        if (link)
            engine->used[engine->n_used++] = &engine->lanes[i];
    }
    return 0;
}

struct engine *engine_new(const struct net_setup *setup)
{
    struct engine *engine = calloc(1, sizeof *engine);
    if (!engine) {
        free_links(setup);
        return NULL;
    }
    engine->view = (struct schedule_view){.n_nodes = setup->n_nodes,
                                          .node_rank = setup->node_rank,
                                          .n_streams = setup->ring_streams,
                                          .wire = setup->wire};
    engine->work.node_rank = setup->node_rank;
    engine->work.wire = setup->wire;
    engine->last = &engine->first;
    strip_list_init(&engine->strips);
    if (take_links(engine, setup) < 0) {
        free_links(setup);
        engine_free(engine);
        return NULL;
    }
    return engine;
}

void engine_free(struct engine *engine)
{
    if (!engine)
        return;
    while (engine_take_unfinished(engine))
        ;
    while (engine->spare) {
        struct program *program = engine->spare;
        engine->spare = program->next;
        program_free(program);
    }
    for (uint32_t i = 0; i < engine->n_used; i++)
        lane_deinit(engine->used[i]);
    strip_list_deinit(&engine->strips);
    sum_scratch_deinit(&engine->work.scratch);
    buffer_pool_deinit(&engine->work.pool);
    free(engine->lanes);
    free(engine->used);
    free(engine->poll_fds);
    free(engine->polled);
    free(engine);
}

size_t engine_stats(const struct engine *engine, struct net_link_stats *out, size_t capacity)
{
    size_t n = 0;
    for (uint32_t i = 0; i < engine->n_used; i++) {
        const struct lane *lane = engine->used[i];
        if (n == 0 || out[n - 1].node != lane->node) {
            if (n == capacity)
                break;
            out[n++] = (struct net_link_stats){.node = lane->node};
        }
        struct net_link_stats *stats = &out[n - 1];
        stats->n_streams++;
        stats->sent_bytes += atomic_load_explicit(&lane->sent_bytes, memory_order_relaxed);
        stats->received_bytes += atomic_load_explicit(&lane->received_bytes, memory_order_relaxed);
        double busy_s = (double)lane_busy_ns(lane) / 1e9;
        if (busy_s > stats->busy_s) /* the streams share the work at the same time */
            stats->busy_s = busy_s;
    }
    return n;
}
