/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of an engine share: engine.c (programs, and what moves them) and engine_wait.c
 * (what they wait for). Thread: whoever holds the engine's lock.
 */
#ifndef GRADD_ENGINE_INTERNAL_H
#define GRADD_ENGINE_INTERNAL_H

#include "worker/backend/host/strip.h"
#include "worker/backend/net/cell.h"
#include "worker/backend/net/engine.h"
#include "worker/backend/net/lane.h"

struct engine {
    struct schedule_view view;
    struct work work;
    struct lane *lanes;      /* by node * NET_STREAMS_MAX + stream */
    struct lane **used;      /* those with a link */
    struct pollfd *poll_fds; /* this and the next: engine_wait()'s */
    struct lane **polled;
    uint32_t n_used;

    struct program *first, **last, *spare;
    uint32_t n_programs;
    uint64_t next_cell;       /* number of the next program's first cell */
    uint64_t window_end;      /* cells before it may be begun */
    struct strip_list strips; /* of ops within this node */
    struct engine_failure failure;
};

/* The window has reached the message, which may be NULL. */
static inline bool engine_is_open(const struct engine *engine,
                                  const struct schedule_message *message)
{
    return message && message->program->first_cell + message->cell < engine->window_end;
}

#endif
