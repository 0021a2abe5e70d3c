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

#include <stddef.h>

/* What all ranks of a run share. Strings are borrowed. */
struct environment {
    const char *socket; /* NULL: none, for a world of one */
    const char *job;
    const char *library; /* GRADD_LIBRARY, or NULL to leave it alone */
    unsigned n_ranks;
    unsigned master_port; /* 0: not known */
    const char **exports; /* NULL-terminated, or NULL */
};

/* May -x name this variable? 0, or -EINVAL with a sentence. `inherited` is our own environment. */
int environment_check_export(const char *export, char **inherited, char *error, size_t bytes);

/*
 * The environment of one rank: a NULL-terminated list that the caller frees with
 * environment_free(). NULL when out of memory.
 */
char **environment_of_rank(const struct environment *environment, unsigned rank, char **inherited);
void environment_free(char **list);

#endif
