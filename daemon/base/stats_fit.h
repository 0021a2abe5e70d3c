/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The figures of a job, cut to what one message can carry. A job of thousands of ranks on hundreds
 * of nodes has more to tell than a frame takes, and a link on which jobs depend does not end for a
 * question that somebody asks.
 *
 * Thread: any, one at a time per object. Invariant: whatever the figures are, `stats` packs to at
 * most STATS_FIT_BYTES_MAX, and what was cut is counted in it.
 */
#ifndef GRADD_BASE_STATS_FIT_H
#define GRADD_BASE_STATS_FIT_H

#include "wire.h"

enum {
    /* The rest of a frame is for what is told with the figures: missing ranks, names of nodes. */
    STATS_FIT_BYTES_MAX = WIRE_FRAME_MAX - (128 << 10),
    STATS_FIT_SILENT_MAX = 256, /* nodes of a job */
};

struct stats_fit {
    Pb__JobStats stats; /* its rows are the other's, which must outlive it */
    void **lists;       /* pointers to rows that stayed; NULL: nothing was cut */
};

/*
 * Every list may keep a share of the room, and more where others leave some. The latest ranks, the
 * longest stalls and the links that carried most stay; ranks then come in their order.
 */
void stats_fit_init(struct stats_fit *fit, const Pb__JobStats *from);
void stats_fit_deinit(struct stats_fit *fit);

#endif
