/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The limit on open files of this process. A run takes some for every host and rank, and what is
 * wanting must be known before anything is started. What we start has the limit that we were
 * started with: a program that uses select() relies on a low one.
 *
 * Thread: any, but one at a time.
 */
#ifndef GRADD_RUN_DESCRIPTORS_H
#define GRADD_RUN_DESCRIPTORS_H

#include <stddef.h>

/*
 * Let this process open so many more, for `what` ("3 hosts"), by raising the soft limit up to the
 * hard one. 0, or -EMFILE with a sentence.
 */
int descriptors_reserve(unsigned n_more, const char *what, char *error, size_t bytes);
/* In a child: the limit as it was. */
void descriptors_restore(void);

#endif
