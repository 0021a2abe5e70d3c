/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lane: a link with the messages that are to go and to come over it, in the schedule's order.
 *
 * Every message has a header that says which one it is. What comes is compared with what the
 * schedule expects before it counts.
 *
 * Thread: the net thread, except the figures, which any thread may read.
 */
#ifndef GRADD_LANE_H
#define GRADD_LANE_H

#include <stdatomic.h>

#include "worker/backend/net/link.h"
#include "worker/backend/net/schedule.h"

enum {
    LANE_HEADER_BYTES = 24,
    /* Messages that leave in one call: a header by itself would be a packet by itself. */
    LANE_SENDS_MAX = 4,
};

struct lane_queue {
    struct schedule_message *first, **last;
    uint32_t sequence; /* of `first` */
    uint64_t moved;    /* bytes of `first`, header included */
    uint8_t header[LANE_HEADER_BYTES];
    bool is_blocked;  /* until the link is polled */
    short blocked_on; /* for these events */
};

struct lane {
    struct link *link; /* owned; NULL: none */
    uint32_t node, stream;
    struct lane_queue out, in;
    _Atomic uint64_t sent_bytes, received_bytes;
    _Atomic uint64_t busy_ns;          /* spent sending, and waiting for the link to take more */
    _Atomic uint64_t blocked_since_ns; /* not yet in busy_ns; 0: the link took all */
};

/* take_link may be NULL. */
void lane_init(struct lane *lane, struct link *take_link, uint32_t node, uint32_t stream);
void lane_deinit(struct lane *lane);

void lane_queue_out(struct lane *lane, struct schedule_message *message);
void lane_queue_in(struct lane *lane, struct schedule_message *message);

/* What travels: header and payload. */
uint64_t lane_message_bytes(const struct schedule_message *message);

/* Forget the messages, which are about to go. The lane is not to be used any more. */
void lane_clear(struct lane *lane);

enum lane_result {
    LANE_BLOCKED,
    LANE_MOVED, /* some bytes */
    LANE_DONE,  /* the first message is complete and off the lane */
};

/* A negative result: -errno of the link; -EBADMSG: the peer sent another message than expected,
 * described in text. */

/* Send of the first n messages, whose memory is set; then lane_take_sent() until NULL. */
int lane_send(struct lane *lane, unsigned n);
struct schedule_message *lane_take_sent(struct lane *lane);
/* Receive of the first message, whose memory is set. */
int lane_receive(struct lane *lane, char *text, size_t text_bytes);

/* Thread: any. */
uint64_t lane_busy_ns(const struct lane *lane);

/* poll() has reported something for the link. */
void lane_unblock(struct lane *lane);

#endif
