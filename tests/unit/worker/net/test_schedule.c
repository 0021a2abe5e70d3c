/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Schedules alone: both ends of every link mean the same messages in the same order, and nodes that
 * work on the cells of the window always come to the end.
 */
#include <stdlib.h>
#include <string.h>

#include <check.h>

#include "../../proto/run_suite.h"
#include "worker/backend/net/schedule.h"
#include "worker/plan/signature.h"

enum { NODES_MAX = 12, RANKS_MAX = 24, OPS_MAX = 12, STREAMS_MAX = 4 };

#define require(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            ck_abort_msg("line %d: %s", __LINE__, #condition);                                     \
    } while (0)

static unsigned seed;

static unsigned next_random(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

/* ------------------------------------------------------------------ random batches */

struct random_op {
    struct backend_op op;
    struct backend_part parts[RANKS_MAX];
    uint64_t counts[RANKS_MAX][RANKS_MAX];
};

static struct random_op pool[OPS_MAX];
static uint32_t n_nodes, n_streams;
static struct schedule schedules[NODES_MAX];

static uint64_t random_count(void)
{
    static const uint64_t counts[] = {0, 1, 100, 5000, 20000, 300000, 4000000};
    return counts[next_random() % 7] + next_random() % 3;
}

static void make_op(struct random_op *random)
{
    static const enum gradd_dtype dtypes[] = {GRADD_I8, GRADD_F16, GRADD_F32, GRADD_I64};
    struct backend_op *op = &random->op;
    memset(random, 0, sizeof *random);
    op->kind = (enum gradd_kind)(next_random() % 6);
    op->dtype = dtypes[next_random() % 4];
    op->redop = (enum gradd_redop)(next_random() % 5);
    op->parts = random->parts;
    op->counts = random->counts[0];
    uint32_t first = next_random() % n_nodes;
    op->n_ranks = 1 + next_random() % RANKS_MAX;
    op->root = next_random() % op->n_ranks;
    op->end = random_count();
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        random->parts[i].node = (first + i / (1 + next_random() % 3)) % n_nodes;
        random->parts[i].count = random_count() / op->n_ranks;
        random->parts[i].counts = random->counts[i];
        for (uint32_t j = 0; j < op->n_ranks; j++)
            random->counts[i][j] = random_count() / op->n_ranks / 4;
    }
}

static bool has_node(const struct backend_op *op, uint32_t node)
{
    for (uint32_t i = 0; i < op->n_ranks; i++)
        if (op->parts[i].node == node)
            return true;
    return false;
}

/* A node may or may not hear of ops that are not its own. */
static void build_all(uint32_t n_ops, int wire, bool hears_all)
{
    for (uint32_t node = 0; node < n_nodes; node++) {
        struct backend_op *ops[OPS_MAX];
        uint32_t n = 0;
        const struct schedule_view view = {
            .n_nodes = n_nodes, .node_rank = node, .n_streams = n_streams, .wire = wire};
        for (uint32_t i = 0; i < n_ops; i++)
            if (hears_all || has_node(&pool[i].op, node))
                ops[n++] = &pool[i].op;
        require(schedule_build(&schedules[node], &view, ops, n) == 0);
    }
}

/* ------------------------------------------------------------------ simulation */

/* What has been sent and not been received, per (from, to, stream), in order. */
struct pipe {
    struct {
        uint32_t digest, block, step, bytes;
    } * messages;
    uint32_t n, n_received, capacity;
};

static struct pipe pipes[NODES_MAX][NODES_MAX][STREAMS_MAX];

/* The next message of a lane, from `at` on; NULL: none. */
static struct schedule_message *next_message(struct schedule *s, uint32_t *at, uint32_t node,
                                             uint32_t stream, bool is_in)
{
    for (; *at < s->n_messages; ++*at) {
        struct schedule_message *message = &s->messages[*at];
        const struct schedule_cell *cell = &s->cells[message->cell];
        if (message->node == node && message->stream == stream &&
            (*at - cell->first_message < cell->n_in) == is_in)
            return message;
    }
    return NULL;
}

static uint32_t window_end(const struct schedule *s)
{
    uint32_t i = 0;
    while (i < s->n_cells && s->cells[i].n_in_left + s->cells[i].n_out_left == 0)
        i++;
    return i + SCHEDULE_WINDOW;
}

static bool send_next(uint32_t node, uint32_t to, uint32_t stream, uint32_t *at)
{
    struct schedule *s = &schedules[node];
    struct schedule_message *message = next_message(s, at, to, stream, false);
    struct pipe *pipe = &pipes[node][to][stream];
    if (!message || message->cell >= window_end(s))
        return false;
    struct schedule_cell *cell = &s->cells[message->cell];
    if (cell->is_relay && cell->n_in_left > 0)
        return false;
    if (pipe->n == pipe->capacity) {
        pipe->capacity = pipe->capacity ? 2 * pipe->capacity : 64;
        pipe->messages = realloc(pipe->messages, pipe->capacity * sizeof *pipe->messages);
        require(pipe->messages != NULL);
    }
    pipe->messages[pipe->n].digest = message->digest;
    pipe->messages[pipe->n].block = cell->block;
    pipe->messages[pipe->n].step = message->step;
    pipe->messages[pipe->n++].bytes = message->pieces.bytes;
    require(message->pieces.bytes > 0 && message->pieces.bytes <= SCHEDULE_CHUNK_BYTES);
    cell->n_out_left--;
    ++*at;
    return true;
}

static bool receive_next(uint32_t node, uint32_t from, uint32_t stream, uint32_t *at)
{
    struct schedule *s = &schedules[node];
    struct pipe *pipe = &pipes[from][node][stream];
    struct schedule_message *message = next_message(s, at, from, stream, true);
    if (pipe->n_received == pipe->n || !message || message->cell >= window_end(s))
        return false;
    struct schedule_cell *cell = &s->cells[message->cell];
    require(pipe->messages[pipe->n_received].digest == message->digest);
    require(pipe->messages[pipe->n_received].block == cell->block);
    require(pipe->messages[pipe->n_received].step == message->step);
    require(pipe->messages[pipe->n_received++].bytes == message->pieces.bytes);
    cell->n_in_left--;
    ++*at;
    return true;
}

/* Each node does as much as it can, in a random order of nodes; in the end nothing is left. */
static void simulate(void)
{
    static uint32_t at[2][NODES_MAX][NODES_MAX][STREAMS_MAX];
    memset(at, 0, sizeof at);
    bool has_moved = true;
    while (has_moved) {
        has_moved = false;
        const uint32_t first = next_random() % n_nodes;
        for (uint32_t i = 0; i < n_nodes; i++) {
            const uint32_t node = (first + i) % n_nodes;
            for (uint32_t other = 0; other < n_nodes; other++) {
                for (uint32_t s = 0; s < n_streams && other != node; s++) {
                    while (send_next(node, other, s, &at[0][node][other][s]))
                        has_moved = true;
                    while (receive_next(node, other, s, &at[1][node][other][s]))
                        has_moved = true;
                }
            }
        }
    }
    for (uint32_t a = 0; a < n_nodes; a++)
        require(window_end(&schedules[a]) == schedules[a].n_cells + SCHEDULE_WINDOW);
    for (uint32_t a = 0; a < n_nodes; a++) {
        for (uint32_t b = 0; b < n_nodes; b++) {
            for (uint32_t s = 0; s < STREAMS_MAX; s++) {
                require(pipes[a][b][s].n == pipes[a][b][s].n_received);
                pipes[a][b][s].n = pipes[a][b][s].n_received = 0;
            }
        }
    }
}

START_TEST(both_ends_agree_and_nobody_waits_for_ever)
{
    for (unsigned round = 0; round < 300; round++) {
        seed = round;
        n_nodes = 2 + next_random() % (NODES_MAX - 1);
        n_streams = 1 + next_random() % STREAMS_MAX;
        const uint32_t n_ops = 1 + next_random() % OPS_MAX;
        for (uint32_t i = 0; i < n_ops; i++)
            make_op(&pool[i]);
        build_all(n_ops, round % 3 == 0 ? GRADD_F16 : 0, round % 2);
        simulate();
    }
    for (uint32_t node = 0; node < NODES_MAX; node++)
        schedule_deinit(&schedules[node]);
    for (uint32_t i = 0; i < NODES_MAX * NODES_MAX * STREAMS_MAX; i++)
        free(pipes[i / STREAMS_MAX / NODES_MAX][i / STREAMS_MAX % NODES_MAX][i % STREAMS_MAX]
                 .messages);
}
END_TEST

/* ------------------------------------------------------------------ volumes */

static void allreduce_on(uint32_t n, uint64_t count)
{
    n_nodes = n;
    n_streams = 1;
    memset(&pool[0], 0, sizeof pool[0]);
    pool[0].op = (struct backend_op){
        .kind = GRADD_ALLREDUCE, .dtype = GRADD_F32, .n_ranks = n, .parts = pool[0].parts};
    pool[0].op.end = count;
    for (uint32_t i = 0; i < n; i++)
        pool[0].parts[i].node = i;
    build_all(1, 0, true);
}

static uint64_t sent_bytes(const struct schedule *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n_cells; i++)
        for (uint32_t j = 0; j < s->cells[i].n_out; j++)
            bytes += s->messages[s->cells[i].first_message + s->cells[i].n_in + j].pieces.bytes;
    return bytes;
}

START_TEST(a_ring_moves_the_least_that_is_possible)
{
    for (uint32_t n = 2; n <= 8; n++) {
        const uint64_t count = 1 << 20, least = 2 * (n - 1) * count * 4 / n;
        allreduce_on(n, count);
        for (uint32_t node = 0; node < n; node++) {
            ck_assert_uint_ge(sent_bytes(&schedules[node]) + 4096, least);
            ck_assert_uint_le(sent_bytes(&schedules[node]), least + 4096);
            schedule_deinit(&schedules[node]);
        }
    }
}
END_TEST

START_TEST(small_ops_share_a_message)
{
    n_nodes = 4;
    for (uint32_t i = 0; i < OPS_MAX; i++) {
        allreduce_on(4, 1000);
        pool[i] = pool[0];
        pool[i].op.parts = pool[i].parts;
    }
    build_all(OPS_MAX, 0, true);
    for (uint32_t node = 0; node < 4; node++) {
        ck_assert_uint_eq(schedules[node].n_cells, 1);
        ck_assert_uint_eq(schedules[node].n_messages, 6);
        schedule_deinit(&schedules[node]);
    }
}
END_TEST

START_TEST(ops_within_a_node_send_nothing)
{
    n_nodes = 3;
    n_streams = 1;
    make_op(&pool[0]);
    pool[0].op.kind = GRADD_ALLREDUCE;
    for (uint32_t i = 0; i < pool[0].op.n_ranks; i++)
        pool[0].parts[i].node = 1;
    build_all(1, 0, true);
    for (uint32_t node = 0; node < 3; node++) {
        ck_assert_uint_eq(schedules[node].n_cells, 0);
        ck_assert_uint_eq(schedules[node].n_local, node == 1);
        schedule_deinit(&schedules[node]);
    }
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        both_ends_agree_and_nobody_waits_for_ever,
        a_ring_moves_the_least_that_is_possible,
        small_ops_share_a_message,
        ops_within_a_node_send_nothing,
    };
    return run_suite("schedule", tests, sizeof tests / sizeof tests[0]);
}
