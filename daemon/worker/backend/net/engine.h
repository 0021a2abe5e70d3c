/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What turns schedules into traffic: the lanes to all nodes, the programs under way, the window.
 *
 * Programs follow each other without a gap: the cells of the next one enter the window as those of
 * the one before leave it. Memory is bounded by the window.
 *
 * Thread: one at a time, whoever holds the engine's lock; engine_wait() lets go of it while it
 * waits.
 */
#ifndef GRADD_ENGINE_H
#define GRADD_ENGINE_H

#include <pthread.h>

#include "worker/backend/net/net.h"

struct engine;

struct engine_failure {
    int status; /* GRADD_OK: none */
    uint32_t node;
    char text[256];
};

/* Takes the links of the setup, even on failure (NULL). */
struct engine *engine_new(const struct net_setup *setup);
void engine_free(struct engine *engine);

/* True when no batch is under way. */
bool engine_is_idle(const struct engine *engine);
/* True when another batch may be started. */
bool engine_has_room(const struct engine *engine);
/* 0 or -ENOMEM. */
int engine_start(struct engine *engine, struct backend_batch *batch);

/* Move and compute until nothing can be done without waiting, or a batch is done, or for a few
 * milliseconds. True: call again. Not after a failure. */
bool engine_turn(struct engine *engine);
const struct engine_failure *engine_failure(const struct engine *engine);

/* The next batch that is done, or NULL. */
struct backend_batch *engine_take_done(struct engine *engine);
/* The next batch that is not done; for after a failure. The engine forgets it, and can only wait
 * and be freed afterwards. */
struct backend_batch *engine_take_unfinished(struct engine *engine);

/* Wait, without the lock, until something can be done or fd is readable. */
void engine_wait(struct engine *engine, int fd, pthread_mutex_t *lock);

/* What is waited for, when nothing moves. */
struct engine_stall {
    uint32_t node;
    bool is_sure;   /* the link or its other end, and not somebody whom that end waits for */
    char text[140]; /* "stream 0: 24 of 65560 bytes of a message received" */
};

/* False: the engine waits for no link. */
bool engine_describe_stall(const struct engine *engine, struct engine_stall *out);

/* Any thread. */
size_t engine_stats(const struct engine *engine, struct net_link_stats *out, size_t capacity);

#endif
