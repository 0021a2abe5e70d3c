/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thread for what takes long but must not hold the loop: touching and unmapping large regions.
 * Thread: loop. A chore runs on the chores thread; its done function, on the loop, in order.
 */
#ifndef GRADD_CHORES_H
#define GRADD_CHORES_H

#include "base/loop.h"

struct chores;
struct chore {
    void (*run)(struct chore *chore);  /* chores thread: touches only the chore's own object */
    void (*done)(struct chore *chore); /* loop; may free the chore */
    struct chore *next;
};

struct chores *chores_new(struct loop *loop); /* NULL: no memory, descriptors or threads */
/* Finishes what is queued (its done functions are called), then frees. NULL-safe. */
void chores_free(struct chores *chores);
/* The chore is embedded in its object and must live until done. */
void chores_add(struct chores *chores, struct chore *chore);

#endif
