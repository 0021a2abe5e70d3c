/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The variables that tell a rank who it is: gradd's own, torchrun's and Horovod's. Pure: the
 * ranks' environment is built as a list, gradrun's own stays as it is.
 *
 * Thread: any.
 *
 * Invariant: a name stands in the list once; what the user gave with -x wins over what gradrun
 * would set, except for the identity of a rank, which -x may not touch.
 */
#ifndef GRADD_RUN_ENVIRONMENT_H
#define GRADD_RUN_ENVIRONMENT_H

#include <stdbool.h>
#include <stddef.h>

/* What all ranks of a host share. Strings are borrowed. */
struct environment {
    const char *socket; /* NULL: none, for a world of one */
    const char *job;
    const char *library;        /* GRADD_LIBRARY, or NULL to leave it alone */
    const char *coordinator;    /* address:port of host 0's daemon, or NULL: one host */
    const char *master_address; /* of host 0; NULL: loopback */
    unsigned master_port;       /* 0: not known */
    unsigned n_ranks;           /* of the whole job */
    unsigned host_index, n_hosts;
    const char **exports; /* NULL-terminated, or NULL */
};

/* What is a rank's own. */
struct place {
    unsigned rank;
    unsigned local_rank, local_size; /* on its host */
    unsigned cross_rank, cross_size; /* among the ranks that have this local rank */
};

/* Is it one of the variables that gradrun sets for each rank, whatever the user says? */
bool environment_is_identity(const char *entry);

/* May -x name this variable? 0, or -EINVAL with a sentence. `inherited` is our own environment. */
int environment_check_export(const char *export, char **inherited, char *error, size_t bytes);

/*
 * The environment of one rank: a NULL-terminated list that the caller frees with
 * environment_free(). NULL when out of memory.
 */
char **environment_of_rank(const struct environment *environment, const struct place *place,
                           char **inherited);
void environment_free(char **list);

#endif
