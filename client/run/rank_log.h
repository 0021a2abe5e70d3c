/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The files of --output: one for each rank, with what it prints, without prefix.
 *
 * Thread: loop.
 *
 * Invariant: a log that has failed ends; nobody waits for it and the job goes on.
 */
#ifndef GRADD_RUN_RANK_LOG_H
#define GRADD_RUN_RANK_LOG_H

#include <stddef.h>

/* Both streams of a rank write to it. */
struct rank_log {
    int fd;    /* -1: none, or given up */
    int error; /* why it was given up: an errno, or 0 */
    char path[4096];
};

/*
 * Make the directory, and DIR/rank.N.log for ranks 0 to n - 1. 0 and a list, which the caller
 * gives to rank_logs_free(), or -errno with a sentence.
 */
int rank_logs_open(const char *dir, unsigned n, struct rank_log **out, char *error, size_t bytes);
void rank_logs_free(struct rank_log *logs, unsigned n);

/* A failure ends the log and is noted in its error. */
void rank_log_write(struct rank_log *log, const char *data, size_t bytes);

#endif
