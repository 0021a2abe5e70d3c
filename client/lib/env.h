/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is this process? Its rank and job, from the variables that its launcher set.
 *
 * Thread: any. Pure but for the lookup it is given.
 */
#ifndef GRADD_CLIENT_ENV_H
#define GRADD_CLIENT_ENV_H

#include <stddef.h>
#include <stdint.h>

enum { ENV_JOB_BYTES = 256, ENV_COORDINATOR_BYTES = 320 };

struct identity {
    int32_t rank, size, local_rank;
    int32_t local_size; /* 0: not known */
    char job[ENV_JOB_BYTES];
    char coordinator[ENV_COORDINATOR_BYTES]; /* "host[:port]" of rank 0's node; "": this node */
    const char *source;                      /* static storage */
};

/* Looks a variable up, as getenv() does. An empty value counts as unset. */
typedef const char *env_lookup(void *arg, const char *name);

/*
 * Rank, size, local rank and job. 0, or -1 with a sentence: the variables contradict each other,
 * are not numbers, or name a node instead of a process.
 */
int env_identity(env_lookup *lookup, void *arg, struct identity *out, char *out_sentence,
                 size_t sentence_bytes);

/* Only the job's name, for an identity given otherwise. Same results. */
int env_job(env_lookup *lookup, void *arg, char out_job[ENV_JOB_BYTES], char *out_sentence,
            size_t sentence_bytes);

/*
 * Where the daemon of rank 0's node is, for this identity: GRADD_COORDINATOR, else, when the job is
 * known to span several nodes, MASTER_ADDR (the port is then the daemon's own peer_port), else "".
 * Same results.
 */
int env_coordinator(env_lookup *lookup, void *arg, const struct identity *id,
                    char out_coordinator[ENV_COORDINATOR_BYTES], char *out_sentence,
                    size_t sentence_bytes);

/* Do the numbers of an identity fit together? Same results; names: what to call the four. */
int identity_check(const struct identity *id, const char *const names[4], char *out_sentence,
                   size_t sentence_bytes);

#endif
