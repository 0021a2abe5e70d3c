/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank discovery as a table: variables in, identity or sentence out.
 */
#include <stdio.h>
#include <string.h>

#include "env.h"
#include "run_suite.h"

enum { MAX_VARIABLES = 12 };

struct row {
    const char *variables[MAX_VARIABLES]; /* NAME=VALUE */
    int rank, size, local_rank, local_size;
    const char *source, *job;
    const char *refusal; /* part of the sentence; NULL: accepted */
};

static const char *look(void *arg, const char *name)
{
    const struct row *row = arg;
    size_t length = strlen(name);
    for (unsigned i = 0; i < MAX_VARIABLES && row->variables[i]; i++)
        if (strncmp(row->variables[i], name, length) == 0 && row->variables[i][length] == '=')
            return row->variables[i] + length + 1;
    return NULL;
}

static const struct row rows[] = {
    {{0}, 0, 1, 0, 1, "none (world of one)", "default", NULL},
    {{"GRADD_RANK=3", "GRADD_WORLD_SIZE=8", "GRADD_LOCAL_RANK=1", "GRADD_LOCAL_SIZE=2",
      "GRADD_JOB=train7"},
     3,
     8,
     1,
     2,
     "GRADD_*",
     "train7",
     NULL},
    {{"RANK=1", "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "TORCHELASTIC_RUN_ID=abc",
      "TORCHELASTIC_RESTART_COUNT=2"},
     1,
     4,
     1,
     2,
     "torchrun",
     "abc.2",
     NULL},
    {{"RANK=1", "WORLD_SIZE=4", "LOCAL_RANK=1", "TORCHELASTIC_RUN_ID=none"},
     1,
     4,
     1,
     0,
     "torchrun",
     "default",
     NULL},
    {{"HOROVOD_RANK=1", "HOROVOD_SIZE=2", "HOROVOD_LOCAL_RANK=1", "HOROVOD_LOCAL_SIZE=2"},
     1,
     2,
     1,
     2,
     "HOROVOD_*",
     "default",
     NULL},
    {{"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_RANK=1",
      "OMPI_COMM_WORLD_LOCAL_SIZE=2", "PMIX_NAMESPACE=prte-7"},
     1,
     2,
     1,
     2,
     "OMPI_COMM_WORLD_*",
     "prte-7",
     NULL},
    {{"PMI_RANK=1", "PMI_SIZE=2", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=2"},
     1,
     2,
     1,
     2,
     "PMI_*",
     "default",
     NULL},
    {{"SLURM_STEP_ID=0", "SLURM_JOB_ID=77", "SLURM_PROCID=5", "SLURM_STEP_NUM_TASKS=6",
      "SLURM_NTASKS=12", "SLURM_LOCALID=2"},
     5,
     6,
     2,
     0,
     "Slurm",
     "77.0",
     NULL},
    {{"SLURM_STEP_ID=1", "SLURM_JOB_ID=77", "SLURM_PROCID=5", "SLURM_NTASKS=12", "SLURM_LOCALID=2"},
     5,
     12,
     2,
     0,
     "Slurm",
     "77.1",
     NULL},
    /* Only in a step: in the batch script these describe the allocation. */
    {{"SLURM_JOB_ID=77", "SLURM_PROCID=0", "SLURM_NTASKS=12", "SLURM_LOCALID=0"},
     0,
     1,
     0,
     1,
     "none (world of one)",
     "default",
     NULL},
    /* srun's PMI has no local rank; Slurm's own variables do. */
    {{"PMI_RANK=5", "PMI_SIZE=6", "SLURM_STEP_ID=0", "SLURM_JOB_ID=7", "SLURM_PROCID=5",
      "SLURM_STEP_NUM_TASKS=6", "SLURM_LOCALID=2"},
     5,
     6,
     2,
     0,
     "Slurm",
     "7.0",
     NULL},
    /* Inner before outer: srun started torchrun on each node. */
    {{"RANK=9", "WORLD_SIZE=16", "LOCAL_RANK=1", "SLURM_STEP_ID=0", "SLURM_JOB_ID=7",
      "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2", "SLURM_LOCALID=0"},
     9,
     16,
     1,
     0,
     "torchrun",
     "7.0",
     NULL},
    /* gradd's own before all, taken whole: no local size from elsewhere. */
    {{"GRADD_RANK=0", "GRADD_WORLD_SIZE=2", "GRADD_LOCAL_RANK=0", "RANK=1", "WORLD_SIZE=4",
      "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4"},
     0,
     2,
     0,
     0,
     "GRADD_*",
     "default",
     NULL},
    {{"GRADD_RANK=", "GRADD_WORLD_SIZE=", "RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1"},
     1,
     2,
     1,
     0,
     "torchrun",
     "default",
     NULL},

    {{"RANK=1", "WORLD_SIZE=4"}, .refusal = "RANK=1 is set but LOCAL_RANK is not"},
    {{"RANK=1", "LOCAL_RANK=1"}, .refusal = "RANK=1 is set but WORLD_SIZE is not"},
    {{"WORLD_SIZE=4"}, .refusal = "WORLD_SIZE=4 is set but RANK is not"},
    {{"GRADD_RANK=2", "GRADD_WORLD_SIZE=2", "GRADD_LOCAL_RANK=0"},
     .refusal = "GRADD_RANK=2 does not fit GRADD_WORLD_SIZE=2"},
    {{"GRADD_RANK=1", "GRADD_WORLD_SIZE=0", "GRADD_LOCAL_RANK=0"}, .refusal = "GRADD_WORLD_SIZE=0"},
    {{"GRADD_RANK=0", "GRADD_WORLD_SIZE=2", "GRADD_LOCAL_RANK=1", "GRADD_LOCAL_SIZE=1"},
     .refusal = "GRADD_LOCAL_RANK=1 does not fit GRADD_LOCAL_SIZE=1"},
    {{"GRADD_RANK=0", "GRADD_WORLD_SIZE=2", "GRADD_LOCAL_RANK=0", "GRADD_LOCAL_SIZE=3"},
     .refusal = "GRADD_LOCAL_SIZE=3 does not fit GRADD_WORLD_SIZE=2"},
    {{"GRADD_RANK=0", "GRADD_WORLD_SIZE=2", "GRADD_LOCAL_RANK=2"},
     .refusal = "GRADD_LOCAL_RANK=2 does not fit GRADD_WORLD_SIZE=2"},
    {{"GRADD_RANK=-1", "GRADD_WORLD_SIZE=2", "GRADD_LOCAL_RANK=0"}, .refusal = "GRADD_RANK=-1"},
    {{"GRADD_RANK=1x", "GRADD_WORLD_SIZE=2", "GRADD_LOCAL_RANK=0"}, .refusal = "GRADD_RANK=1x"},
    {{"GRADD_RANK=99999999999", "GRADD_WORLD_SIZE=2", "GRADD_LOCAL_RANK=0"},
     .refusal = "GRADD_RANK=99999999999"},
    {{"PMI_RANK=1", "PMI_SIZE=2"}, .refusal = "MPI_LOCALRANKID"},
};

START_TEST(identity_comes_from_one_launcher)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct row row = rows[i];
        struct identity id = {0};
        char sentence[512] = "";
        int rc = env_identity(look, &row, &id, sentence, sizeof sentence);
        const char *first = row.variables[0] ? row.variables[0] : "(nothing)";
        if (row.refusal) {
            ck_assert_msg(rc == -1, "row %zu (%s) was accepted", i, first);
            ck_assert_msg(strstr(sentence, row.refusal), "row %zu (%s): %s", i, first, sentence);
            continue;
        }
        ck_assert_msg(rc == 0, "row %zu (%s): %s", i, first, sentence);
        ck_assert_msg(id.rank == row.rank && id.size == row.size &&
                          id.local_rank == row.local_rank && id.local_size == row.local_size,
                      "row %zu (%s): rank %d of %d, local %d of %d", i, first, id.rank, id.size,
                      id.local_rank, id.local_size);
        ck_assert_str_eq(id.source, row.source);
        ck_assert_str_eq(id.job, row.job);
    }
}
END_TEST

START_TEST(an_overlong_job_is_refused)
{
    char variable[300] = "GRADD_JOB=";
    memset(variable + 10, 'j', ENV_JOB_BYTES);
    struct row row = {{variable}, .rank = 0};
    char job[ENV_JOB_BYTES], sentence[256] = "";
    ck_assert_int_eq(env_job(look, &row, job, sentence, sizeof sentence), -1);
    ck_assert_ptr_nonnull(strstr(sentence, "more than 255 bytes"));
    variable[10 + ENV_JOB_BYTES - 1] = 0;
    ck_assert_int_eq(env_job(look, &row, job, sentence, sizeof sentence), 0);
}
END_TEST

START_TEST(the_coordinator_is_named_only_where_there_are_several_nodes)
{
    static const struct {
        const char *variables[4];
        int size, local_size;
        const char *coordinator;
    } cases[] = {
        {{0}, 4, 2, ""},
        {{"GRADD_COORDINATOR=node0:7010"}, 4, 2, "node0:7010"},
        {{"GRADD_COORDINATOR=node0:7010"}, 4, 4, "node0:7010"},
        {{"GRADD_COORDINATOR=node0:7010", "MASTER_ADDR=other"}, 4, 0, "node0:7010"},
        {{"MASTER_ADDR=10.0.0.1"}, 4, 2, "10.0.0.1"},
        {{"MASTER_ADDR=10.0.0.1"}, 4, 4, ""},
        {{"MASTER_ADDR=10.0.0.1"}, 4, 0, ""},
        {{"MASTER_ADDR=10.0.0.1", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_NODES=2"}, 4, 0, "10.0.0.1"},
        {{"MASTER_ADDR=10.0.0.1", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_NODES=1"}, 4, 0, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct row row = {{0}, .rank = 0};
        memcpy(row.variables, cases[i].variables, sizeof cases[i].variables);
        struct identity id = {.size = cases[i].size, .local_size = cases[i].local_size};
        char coordinator[ENV_COORDINATOR_BYTES], sentence[256] = "";
        ck_assert_int_eq(env_coordinator(look, &row, &id, coordinator, sentence, sizeof sentence),
                         0);
        ck_assert_msg(strcmp(coordinator, cases[i].coordinator) == 0, "case %zu: \"%s\"", i,
                      coordinator);
    }
}
END_TEST

START_TEST(an_overlong_coordinator_is_refused)
{
    char variable[400] = "GRADD_COORDINATOR=";
    memset(variable + 18, 'h', ENV_COORDINATOR_BYTES);
    struct row row = {{variable}, .rank = 0};
    struct identity id = {.size = 2};
    char coordinator[ENV_COORDINATOR_BYTES], sentence[256] = "";
    ck_assert_int_eq(env_coordinator(look, &row, &id, coordinator, sentence, sizeof sentence), -1);
    ck_assert_ptr_nonnull(strstr(sentence, "more than 319 bytes"));
}
END_TEST

int main(void)
{
    const TTest *tests[] = {identity_comes_from_one_launcher, an_overlong_job_is_refused,
                            the_coordinator_is_named_only_where_there_are_several_nodes,
                            an_overlong_coordinator_is_refused};
    return run_suite("client/env", tests, sizeof tests / sizeof *tests);
}
