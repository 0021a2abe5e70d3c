/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When to look again instead of sleeping. A wake-up from sleep costs many times a small message, so
 * who expects an answer soon yields the core and looks again for a short while. That pays only
 * while nobody else wants the core and the answer does come soon: each spin that fails makes the
 * next ones rarer, each that succeeds makes them usual again.
 *
 * Thread: that of its owner. Used by trainers and workers alike.
 */
#ifndef GRADD_SPIN_H
#define GRADD_SPIN_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    SPIN_NS = 50000,       /* how long to look */
    SPIN_YIELD_NS = 30000, /* a yield that took longer let somebody else work */
    SPIN_SKIP_MAX = 1024,  /* waits without spinning, after repeated failures */
};

/* Zeroed is valid. */
struct spin {
    unsigned skip;     /* waits to come that do not spin */
    unsigned failures; /* the last penalty */
};

/* May this wait spin? */
static inline bool spin_begins(struct spin *spin)
{
    if (spin->skip == 0)
        return true;
    spin->skip--;
    return false;
}

static inline void spin_succeeded(struct spin *spin)
{
    spin->failures /= 2;
}

static inline void spin_failed(struct spin *spin)
{
    spin->failures = spin->failures * 2 + 1;
    if (spin->failures > SPIN_SKIP_MAX)
        spin->failures = SPIN_SKIP_MAX;
    spin->skip = spin->failures;
}

#endif
