/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Why a command cannot be run, in words that say what to do: exec() tells of a missing program, a
 * missing interpreter and a forgotten "./" by the same error.
 *
 * Thread: any.
 */
#ifndef GRADD_RUN_PROGRAM_H
#define GRADD_RUN_PROGRAM_H

#include <stddef.h>

/* rc is the -errno of execvp(name); looks at the file system and at PATH. */
void program_explain(const char *name, int rc, char *sentence, size_t bytes);

#endif
