/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random numbers that a seed repeats: Marsaglia's xorshift64. A state per test program; whoever
 * wants other numbers in each run sets it, and prints what it was.
 */
#ifndef TEST_RANDOM_H
#define TEST_RANDOM_H

#include <stddef.h>
#include <stdint.h>

static uint64_t random_state = 88172645463325252; /* never 0 */

static inline uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* 0 to n - 1. */
static inline unsigned random_below(size_t n)
{
    return (unsigned)((random_bits() >> 20) % n);
}

#endif
