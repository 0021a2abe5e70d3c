/* SPDX-License-Identifier: Apache-2.0 */
#include "ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "program.h"

/* All ranks of a job on one host. */
static struct place place_alone(unsigned i, unsigned n)
{
    return (struct place){.rank = i, .local_rank = i, .local_size = n, .cross_size = 1};
}

int ranks_init(struct ranks *ranks, unsigned n, const struct place *places,
               const struct ranks_output *output, char *error, size_t bytes)
{
    *ranks = (struct ranks){.n = n};
    ranks->list = calloc(n, sizeof *ranks->list);
    ranks->groups = calloc(n, sizeof *ranks->groups);
    if (!ranks->list || !ranks->groups) {
        ranks->n = 0;
        ranks_deinit(ranks);
        snprintf(error, bytes, "out of memory for %u ranks", n);
        return -ENOMEM;
    }
    for (unsigned i = 0; i < n; i++) {
        struct rank *rank = &ranks->list[i];
        rank->place = places ? places[i] : place_alone(i, n);
        rank->out.fd = rank->err.fd = -1;
    }
    int rc = output->dir ? rank_logs_open(output->dir, n, &ranks->logs, error, bytes) : 0;
    if (rc < 0)
        ranks_deinit(ranks);
    return rc;
}

void ranks_deinit(struct ranks *ranks)
{
    for (unsigned i = 0; i < ranks->n; i++) {
        stream_deinit(&ranks->list[i].out);
        stream_deinit(&ranks->list[i].err);
    }
    rank_logs_free(ranks->logs, ranks->n);
    free(ranks->list);
    free(ranks->groups);
    *ranks = (struct ranks){0};
}

static void close_pair(int pair[2])
{
    for (int i = 0; i < 2; i++)
        if (pair[i] >= 0)
            close(pair[i]);
}

/* The pipes, then the process. Both pipes' reading ends go to the rank's streams. */
static int start_rank(struct rank *rank, struct rank_log *log, struct spawn *spawn,
                      const struct ranks_output *output)
{
    int out[2] = {-1, -1}, err[2] = {-1, -1};
    int rc = pipe2(out, O_CLOEXEC) < 0 || pipe2(err, O_CLOEXEC) < 0 ? -errno : 0;
    spawn->stdio[1] = out[1];
    spawn->stdio[2] = err[1];
    if (rc == 0)
        rc = process_spawn(spawn, &rank->pid);
    if (rc < 0) {
        close_pair(out);
        close_pair(err);
        return rc;
    }
    close(out[1]);
    close(err[1]);
    char prefix[16];
    snprintf(prefix, sizeof prefix, "[%u] ", rank->place.rank);
    stream_init(&rank->out, out[0], prefix, output->out, log);
    stream_init(&rank->err, err[0], prefix, output->err, log);
    rank->out.show = rank->err.show = output->show;
    rank->out.rank = rank->err.rank = rank->place.rank;
    rank->out.which = 1;
    rank->err.which = 2;
    return 0;
}

static int start_failed(const struct rank *rank, const char *command, int rc, char *error,
                        size_t bytes)
{
    char why[4352];
    if (rc == -EMFILE || rc == -ENFILE)
        snprintf(error, bytes,
                 "cannot start rank %u: %s (a rank takes 2 descriptors here: raise ulimit -n)",
                 rank->place.rank, strerror(-rc));
    else if (rc == -EAGAIN || rc == -ENOMEM)
        snprintf(error, bytes, "cannot start rank %u: %s", rank->place.rank, strerror(-rc));
    else {
        program_explain(command, rc, why, sizeof why);
        snprintf(error, bytes, "cannot run \"%s\": %s", command, why);
    }
    return rc;
}

int ranks_start(struct ranks *ranks, char **command, const struct environment *environment,
                const struct ranks_output *output, const sigset_t *mask, char *error, size_t bytes)
{
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    /* Rank 0 reads what is piped into gradrun. Not a terminal: reading that from a process group
     * in the background would stop the rank. */
    int first_stdin = fcntl(0, F_GETFD) >= 0 && !isatty(0) ? 0 : null;
    int rc = null < 0 ? -errno : 0;
    if (rc < 0)
        snprintf(error, bytes, "cannot open /dev/null: %s", strerror(-rc));
    for (unsigned i = 0; i < ranks->n && rc == 0; i++) {
        struct rank *rank = &ranks->list[i];
        char **envp = environment_of_rank(environment, &rank->place, environ);
        struct spawn spawn = {
            .argv = command,
            .envp = envp,
            .stdio = {rank->place.rank == 0 ? first_stdin : null, -1, -1},
            .keep = {-1, -1, -1},
            .death_signal = SIGKILL,
            .mask = mask,
        };
        rc =
            envp ? start_rank(rank, ranks->logs ? &ranks->logs[i] : NULL, &spawn, output) : -ENOMEM;
        environment_free(envp);
        if (rc < 0)
            start_failed(rank, command[0], rc, error, bytes);
        else
            ranks->groups[ranks->n_started++] = rank->pid;
    }
    if (null >= 0)
        close(null);
    return rc;
}

void ranks_signal_groups(struct ranks *ranks, int signal)
{
    for (unsigned i = 0; i < ranks->n; i++)
        if (ranks->list[i].pid > 0)
            kill(-ranks->list[i].pid, signal);
}

void ranks_signal(struct ranks *ranks, int signal)
{
    for (unsigned i = 0; i < ranks->n; i++)
        if (ranks->list[i].pid > 0 && !ranks->list[i].is_over)
            kill(ranks->list[i].pid, signal);
}

struct rank *ranks_collect(struct ranks *ranks)
{
    struct rank *responsible = NULL;
    for (unsigned i = 0; i < ranks->n; i++) {
        struct rank *rank = &ranks->list[i];
        if (rank->pid <= 0 || rank->is_over || !process_poll(rank->pid, &rank->ending))
            continue;
        rank->is_over = true;
        ranks->n_over++;
        if (ending_exit_code(rank->ending) == 0)
            continue;
        if (!responsible || (rank->ending.signal && !responsible->ending.signal))
            responsible = rank;
    }
    return responsible;
}

bool ranks_has_pid(const struct ranks *ranks, pid_t pid)
{
    for (unsigned i = 0; i < ranks->n; i++)
        if (ranks->list[i].pid == pid)
            return true;
    return false;
}

void ranks_reap(struct ranks *ranks)
{
    for (unsigned i = 0; i < ranks->n; i++) {
        if (ranks->list[i].pid > 0)
            process_reap(ranks->list[i].pid);
        ranks->list[i].pid = 0;
    }
}
