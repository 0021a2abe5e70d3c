/* SPDX-License-Identifier: Apache-2.0 */
/* Grammar of the sentences for people. Thread: any. */
#ifndef GRADD_BASE_WORDS_H
#define GRADD_BASE_WORDS_H

#include <stdint.h>

/* The end of a regular plural: "%u job%s", n, words_s(n). */
static inline const char *words_s(uint64_t n)
{
    return n == 1 ? "" : "s";
}

#endif
