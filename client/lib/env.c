/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank discovery: a table of launchers, inner ones before outer ones (torchrun inside srun leaves
 * Slurm's variables behind, which then describe the node and not the process).
 *
 * Invariant: one launcher is taken whole or refused in words; numbers of two are never mixed.
 */
#include "env.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, N_NUMBERS };

struct launcher {
    const char *source;
    const char *names[N_NUMBERS];
    const char *size_fallback; /* another name of the size, or NULL */
    const char *needs;         /* considered only when this variable is set, or NULL: always */
};

static const struct launcher launchers[] = {
    {
        .source = "GRADD_*",
        .names = {"GRADD_RANK", "GRADD_WORLD_SIZE", "GRADD_LOCAL_RANK", "GRADD_LOCAL_SIZE"},
    },
    {
        .source = "torchrun",
        .names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    },
    {
        .source = "HOROVOD_*",
        .names = {"HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"},
    },
    {
        .source = "OMPI_COMM_WORLD_*",
        .names = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                  "OMPI_COMM_WORLD_LOCAL_SIZE"},
    },
    {
        .source = "PMI_*",
        .names = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
        /* srun's PMI sets PMI_RANK too, but no local rank: Slurm's own variables have it. */
        .needs = "MPI_LOCALRANKID",
    },
    {
        .source = "Slurm",
        /* SLURM_STEP_TASKS_PER_NODE is a list over nodes, so the local size stays unknown. */
        .names = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL},
        .size_fallback = "SLURM_NTASKS",
        .needs = "SLURM_STEP_ID",
    },
};

struct reader {
    env_lookup *lookup;
    void *arg;
    char *sentence;
    size_t sentence_bytes;
};

__attribute__((format(printf, 2, 3))) static int refuse(const struct reader *r, const char *format,
                                                        ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->sentence, r->sentence_bytes, format, arguments);
    va_end(arguments);
    return -1;
}

static const char *look(const struct reader *r, const char *name)
{
    const char *value = name ? r->lookup(r->arg, name) : NULL;
    return value && *value ? value : NULL;
}

static int parse(const struct reader *r, const char *name, const char *value, int32_t *out)
{
    char *end;
    errno = 0;
    long number = strtol(value, &end, 10);
    if (errno || *end || number < 0 || number > INT32_MAX)
        return refuse(r, "%s=%s is no rank or count (a number from 0 to %d)", name, value,
                      INT32_MAX);
    *out = (int32_t)number;
    return 0;
}

int identity_check(const struct identity *id, const char *const names[4], char *out_sentence,
                   size_t sentence_bytes)
{
    const struct reader r = {.sentence = out_sentence, .sentence_bytes = sentence_bytes};
    if (id->size < 1)
        return refuse(&r, "%s=%d: a job has at least one rank", names[SIZE], id->size);
    if (id->rank < 0 || id->rank >= id->size)
        return refuse(&r, "%s=%d does not fit %s=%d: ranks count from 0", names[RANK], id->rank,
                      names[SIZE], id->size);
    if (id->local_rank < 0 || id->local_rank >= id->size)
        return refuse(&r, "%s=%d does not fit %s=%d", names[LOCAL_RANK], id->local_rank,
                      names[SIZE], id->size);
    if (id->local_size < 0 || id->local_size > id->size)
        return refuse(&r, "%s=%d does not fit %s=%d", names[LOCAL_SIZE], id->local_size,
                      names[SIZE], id->size);
    if (id->local_size > 0 && id->local_rank >= id->local_size)
        return refuse(&r, "%s=%d does not fit %s=%d", names[LOCAL_RANK], id->local_rank,
                      names[LOCAL_SIZE], id->local_size);
    return 0;
}

/* Read the launcher's numbers; the caller has seen its rank or its size. */
static int take(const struct reader *r, const struct launcher *from, struct identity *out)
{
    const char *names[N_NUMBERS];
    memcpy(names, from->names, sizeof names);
    if (!look(r, names[SIZE]) && look(r, from->size_fallback))
        names[SIZE] = from->size_fallback;
    int32_t numbers[N_NUMBERS] = {0};
    for (unsigned i = 0; i < N_NUMBERS; i++) {
        const char *value = look(r, names[i]);
        if (value && parse(r, names[i], value, &numbers[i]) < 0)
            return -1;
        if (value || i == LOCAL_SIZE)
            continue;
        if (i == LOCAL_RANK)
            return refuse(r,
                          "%s=%d is set but %s is not: that names a node, not a process; launch "
                          "through torchrun or gradrun, or set GRADD_RANK, GRADD_WORLD_SIZE and "
                          "GRADD_LOCAL_RANK",
                          names[RANK], numbers[RANK], names[LOCAL_RANK]);
        unsigned other = i == RANK ? SIZE : RANK;
        return refuse(r, "%s=%s is set but %s is not: set both or neither", names[other],
                      look(r, names[other]), names[i]);
    }
    *out = (struct identity){
        .rank = numbers[RANK],
        .size = numbers[SIZE],
        .local_rank = numbers[LOCAL_RANK],
        .local_size = numbers[LOCAL_SIZE],
        .source = from->source,
    };
    if (!names[LOCAL_SIZE])
        names[LOCAL_SIZE] = "local size";
    return identity_check(out, names, r->sentence, r->sentence_bytes);
}

static int find_numbers(const struct reader *r, struct identity *out)
{
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
        const struct launcher *from = &launchers[i];
        if (from->needs && !look(r, from->needs))
            continue;
        if (look(r, from->names[RANK]) || look(r, from->names[SIZE]))
            return take(r, from, out);
    }
    if (look(r, "PMI_RANK"))
        return refuse(r,
                      "PMI_RANK=%s is set but MPI_LOCALRANKID is not: set GRADD_RANK, "
                      "GRADD_WORLD_SIZE and GRADD_LOCAL_RANK",
                      look(r, "PMI_RANK"));
    *out = (struct identity){.size = 1, .local_size = 1, .source = "none (world of one)"};
    return 0;
}

static int name_job(const struct reader *r, char out_job[ENV_JOB_BYTES])
{
    const char *given = look(r, "GRADD_JOB");
    const char *run = look(r, "TORCHELASTIC_RUN_ID");
    const char *restart = look(r, "TORCHELASTIC_RESTART_COUNT");
    const char *pmix = look(r, "PMIX_NAMESPACE");
    const char *slurm = look(r, "SLURM_JOB_ID");
    const char *step = look(r, "SLURM_STEP_ID");
    if (run && strcmp(run, "none") == 0)
        run = NULL; /* torchrun's default, which every such job of a user would share */

    int n;
    if (given)
        n = snprintf(out_job, ENV_JOB_BYTES, "%s", given);
    else if (run)
        n = snprintf(out_job, ENV_JOB_BYTES, "%s.%s", run, restart ? restart : "0");
    else if (slurm && step)
        n = snprintf(out_job, ENV_JOB_BYTES, "%s.%s%s%s", slurm, step, restart ? "." : "",
                     restart ? restart : "");
    else if (pmix)
        n = snprintf(out_job, ENV_JOB_BYTES, "%s", pmix);
    else
        n = snprintf(out_job, ENV_JOB_BYTES, "default");
    if (n >= ENV_JOB_BYTES)
        return refuse(r, "the job's name \"%.40s…\" has more than %d bytes", out_job,
                      ENV_JOB_BYTES - 1);
    return 0;
}

int env_job(env_lookup *lookup, void *arg, char out_job[ENV_JOB_BYTES], char *out_sentence,
            size_t sentence_bytes)
{
    const struct reader r = {lookup, arg, out_sentence, sentence_bytes};
    return name_job(&r, out_job);
}

/* Frameworks set MASTER_ADDR for one node as well, where nobody may listen for other nodes. */
static bool spans_nodes(const struct reader *r, const struct identity *id)
{
    const char *nodes = look(r, "SLURM_STEP_NUM_NODES");
    if (id->local_size > 0)
        return id->local_size < id->size;
    return id->size > 1 && look(r, "SLURM_STEP_ID") && nodes && strtol(nodes, NULL, 10) > 1;
}

int env_coordinator(env_lookup *lookup, void *arg, const struct identity *id,
                    char out_coordinator[ENV_COORDINATOR_BYTES], char *out_sentence,
                    size_t sentence_bytes)
{
    const struct reader r = {lookup, arg, out_sentence, sentence_bytes};
    const char *name = "GRADD_COORDINATOR", *value = look(&r, name);
    if (!value && spans_nodes(&r, id)) {
        name = "MASTER_ADDR";
        value = look(&r, name);
    }
    int n = snprintf(out_coordinator, ENV_COORDINATOR_BYTES, "%s", value ?: "");
    if (n >= ENV_COORDINATOR_BYTES)
        return refuse(&r, "%s=%.40s… has more than %d bytes", name, value,
                      ENV_COORDINATOR_BYTES - 1);
    return 0;
}

int env_identity(env_lookup *lookup, void *arg, struct identity *out, char *out_sentence,
                 size_t sentence_bytes)
{
    const struct reader r = {lookup, arg, out_sentence, sentence_bytes};
    struct identity found;
    if (find_numbers(&r, &found) < 0 || name_job(&r, found.job) < 0)
        return -1;
    *out = found;
    return 0;
}
