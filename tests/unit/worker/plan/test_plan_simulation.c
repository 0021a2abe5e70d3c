/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random schedules against the plan, from a printed seed (GRADD_TEST_SEED repeats one): ranks
 * submit the same program in orders of their own, sometimes lie, leave or stop. Whatever happens:
 * every accepted request comes out exactly once, ready ops hold one matching request of every rank,
 * and without lies everything becomes ready.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <check.h>

#include "../../../support/random.h"
#include "../../proto/run_suite.h"
#include "worker/plan/plan.h"

enum { RANKS_MAX = 6, OPS_MAX = 24, ROUNDS = 2, N_RUNS = 4000 };

/* Like ck_assert(), without check's write to a pipe each time: this runs millions of times. */
#define require(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            ck_abort_msg("line %d: %s", __LINE__, #condition);                                     \
    } while (0)

struct request {
    unsigned rank, op, round;
    unsigned n_out; /* how often it came out of plan_next() */
    bool is_refused;
    bool is_lie;
};

struct program {
    unsigned n_ranks, n_ops;
    struct signature ops[OPS_MAX];
    char names[OPS_MAX][16];
    char groups[OPS_MAX][16];
};

/* Some ops stand alone, some in groups of two to four. */
static void make_program(struct program *program)
{
    program->n_ranks = 1 + random_below(RANKS_MAX);
    program->n_ops = 1 + random_below(OPS_MAX);
    for (unsigned i = 0; i < program->n_ops;) {
        unsigned n = random_below(4) ? 1 : 2 + random_below(3);
        if (n > program->n_ops - i)
            n = program->n_ops - i;
        for (unsigned k = 0; k < n; k++) {
            struct signature *s = &program->ops[i + k];
            sprintf(program->names[i + k], "t%u", i + k);
            program->groups[i + k][0] = '\0';
            if (n > 1)
                sprintf(program->groups[i + k], "g%u", i);
            *s = (struct signature){
                .kind = random_below(2) ? GRADD_ALLREDUCE : GRADD_ALLGATHER,
                .dtype = GRADD_F32,
                .count = random_below(100),
                .prescale = 1,
                .postscale = 1,
                .group = program->groups[i + k],
                .group_size = n > 1 ? n : 0,
            };
        }
        i += n;
    }
}

static void shuffle(unsigned *order, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        order[i] = i;
    for (unsigned i = n; i > 1; i--) {
        unsigned k = random_below(i), swap = order[i - 1];
        order[i - 1] = order[k];
        order[k] = swap;
    }
}

struct simulation {
    struct program program;
    struct plan *plan;
    struct request requests[ROUNDS][RANKS_MAX][OPS_MAX];
    unsigned order[RANKS_MAX][OPS_MAX];
    unsigned at[RANKS_MAX], round[RANKS_MAX]; /* where each rank is in its order */
    unsigned n_pending[RANKS_MAX];            /* accepted and not out */
    unsigned n_ready, n_failed;
    unsigned last_group_op; /* to check that groups come out side by side */
    unsigned group_left;
    char group[16];
};

/* Ops of a group come out side by side. */
static void check_group(struct simulation *sim, const struct request *request)
{
    const struct signature *s = &sim->program.ops[request->op];
    if (sim->group_left > 0) {
        require(strcmp(s->group, sim->group) == 0);
        sim->group_left--;
    } else if (s->group_size > 0) {
        snprintf(sim->group, sizeof sim->group, "%s", s->group);
        sim->group_left = s->group_size - 1;
    }
}

static void take_decisions(struct simulation *sim)
{
    struct plan_op *op;
    while ((op = plan_next(sim->plan))) {
        if (op->status == GRADD_OK) {
            sim->n_ready++;
            check_group(sim, op->parts[0].request);
        } else {
            sim->n_failed++;
            require(op->text[0]);
        }
        const struct request *first = NULL;
        for (unsigned r = 0; r < op->n_ranks; r++) {
            struct request *request = op->parts[r].request;
            if (op->status == GRADD_OK)
                require(request);
            if (!request)
                continue;
            require(request->rank == r);
            require(++request->n_out == 1);
            require(!request->is_refused);
            if (op->status == GRADD_OK) {
                first = first ? first : request;
                require(request->op == first->op);
                require(request->round == first->round);
                require(request->is_lie == first->is_lie); /* they may lie alike */
            }
            sim->n_pending[r]--;
        }
        plan_op_done(sim->plan, op);
    }
    require(sim->group_left == 0);
}

static void submit(struct simulation *sim, unsigned rank, unsigned op, bool lies, uint64_t now)
{
    const struct program *program = &sim->program;
    struct signature s = program->ops[op];
    struct request *request = &sim->requests[sim->round[rank]][rank][op];
    *request = (struct request){.rank = rank, .op = op, .round = sim->round[rank]};
    if (lies && random_below(20) == 0) {
        s.dtype = GRADD_I32;
        request->is_lie = true;
    }
    const char *text = "";
    int rc = plan_submit(sim->plan, rank, 0, program->names[op], &s, request, now, &text);
    request->is_refused = rc != 0;
    if (rc == 0)
        sim->n_pending[rank]++;
    else
        require(text[0]);
}

/*
 * The rank submits its next op or group; in a later round only once the round before is over for
 * it. A group goes with its first op in the rank's order; its other ops are passed over.
 */
static bool step(struct simulation *sim, unsigned rank, bool lies, uint64_t now)
{
    const struct program *program = &sim->program;
    if (sim->at[rank] == program->n_ops) {
        if (sim->n_pending[rank] > 0 || sim->round[rank] + 1 == ROUNDS)
            return false;
        sim->round[rank]++;
        sim->at[rank] = 0;
        shuffle(sim->order[rank], program->n_ops);
    }
    unsigned op = sim->order[rank][sim->at[rank]++];
    if (!program->groups[op][0]) {
        submit(sim, rank, op, lies, now);
    } else if (op == (unsigned)atoi(program->groups[op] + 1)) {
        for (unsigned i = 0; i < program->ops[op].group_size; i++)
            submit(sim, rank, op + i, lies, now);
    }
    return true;
}

static void open_simulation(struct simulation *sim)
{
    const struct plan_limits limits = {.max_entries = 10000, .op_timeout_ns = 50};
    memset(sim, 0, sizeof *sim);
    make_program(&sim->program);
    sim->plan = plan_new("job s", sim->program.n_ranks, &limits);
    for (unsigned r = 0; r < sim->program.n_ranks; r++)
        shuffle(sim->order[r], sim->program.n_ops);
}

static void expect_all_out(const struct simulation *sim)
{
    for (unsigned round = 0; round < ROUNDS; round++)
        for (unsigned r = 0; r < sim->program.n_ranks; r++)
            for (unsigned i = 0; i < sim->program.n_ops; i++) {
                const struct request *request = &sim->requests[round][r][i];
                require(request->n_out + request->is_refused <= 1);
            }
    for (unsigned r = 0; r < sim->program.n_ranks; r++)
        ck_assert_uint_eq(sim->n_pending[r], 0);
}

static struct simulation sim;

static void ignore_stall(void *data, const struct plan_stall *stall)
{
    (void)data;
    (void)stall;
}

START_TEST(honest_ranks_in_any_order_get_everything)
{
    for (int run = 0; run < N_RUNS; run++) {
        open_simulation(&sim);
        unsigned n_idle = 0;
        while (n_idle < 200) {
            n_idle = step(&sim, random_below(sim.program.n_ranks), false, 0) ? 0 : n_idle + 1;
            take_decisions(&sim);
        }
        ck_assert_uint_eq(sim.n_ready, ROUNDS * sim.program.n_ops);
        ck_assert_uint_eq(sim.n_failed, 0);
        ck_assert_uint_eq(plan_n_waiting(sim.plan), 0);
        expect_all_out(&sim);
        plan_free(sim.plan);
    }
}
END_TEST

START_TEST(lies_and_lateness_end_every_request_once)
{
    for (int run = 0; run < N_RUNS; run++) {
        open_simulation(&sim);
        uint64_t now = 0;
        unsigned n_idle = 0;
        while (n_idle < 200) {
            n_idle = step(&sim, random_below(sim.program.n_ranks), true, now) ? 0 : n_idle + 1;
            if (random_below(10) == 0)
                plan_check(sim.plan, now += random_below(40), ignore_stall, NULL);
            take_decisions(&sim);
        }
        plan_check(sim.plan, now + 100, ignore_stall, NULL);
        take_decisions(&sim);
        expect_all_out(&sim);
        plan_free(sim.plan);
    }
}
END_TEST

START_TEST(leaving_and_failing_end_every_request_once)
{
    for (int run = 0; run < N_RUNS; run++) {
        open_simulation(&sim);
        unsigned left = random_below(sim.program.n_ranks), when = random_below(60);
        for (unsigned i = 0; i < 120; i++) {
            unsigned rank = random_below(sim.program.n_ranks);
            if (i == when)
                plan_rank_left(sim.plan, left, GRADD_ERR_RANK_LOST, "it has left");
            if (i > when && rank == left)
                continue;
            step(&sim, rank, random_below(2), 0);
            if (random_below(3))
                take_decisions(&sim);
        }
        plan_fail_all(sim.plan, GRADD_ERR_RANK_LOST, "the epoch is over");
        take_decisions(&sim);
        ck_assert_uint_eq(plan_n_waiting(sim.plan), 0);
        expect_all_out(&sim);
        plan_free(sim.plan);
    }
}
END_TEST

int main(void)
{
    const char *given = getenv("GRADD_TEST_SEED");
    random_state = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL) * 2654435761u | 1;
    printf("GRADD_TEST_SEED=%llu\n", (unsigned long long)random_state);
    fflush(stdout);
    const TTest *const tests[] = {
        honest_ranks_in_any_order_get_everything,
        lies_and_lateness_end_every_request_once,
        leaving_and_failing_end_every_request_once,
    };
    return run_suite("plan_simulation", tests, sizeof tests / sizeof *tests);
}
