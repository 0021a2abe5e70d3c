/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A member: one trainer's rank in an epoch, with its socket, its regions and its requests.
 *
 * Thread: loop. A member lives as long as its epoch, so that requests may point to it whatever
 * happens to the trainer; only the connection ends earlier.
 */
#ifndef GRADD_MEMBER_H
#define GRADD_MEMBER_H

#include <sys/queue.h>

#include "base/conn.h"
#include "worker/backend/backend.h"
#include "worker/buffer/queue.h"
#include "worker/buffer/region.h"
#include "worker/plan/signature.h"

struct epoch;
struct member;

enum { CENTRAL_BYTES_MAX = 1024 }; /* of an input that goes to the coordinator: see central.h */

enum member_state {
    MEMBER_ACTIVE, /* connected */
    MEMBER_ENDED,  /* its connection is over; why is about to be decided (epoch_on_lost) */
    MEMBER_LEFT,   /* said Leave */
    MEMBER_LOST,   /* ended without Leave */
};

/* One rank's part of an op, from its submission to its completion. Recycled by its member. */
struct request {
    struct member *member;
    uint64_t id;
    struct backend_part part;
    uint64_t ready;   /* elements that may be executed */
    bool is_streamed; /* submitted with ready < count: wants Progress, gets Feed */
    bool check_finite;
    void *run;                                             /* exec's, once the op is ready */
    struct region *in_region, *out_region, *signal_region; /* pinned, as part.queue is */
    _Atomic uint64_t *signal; /* in signal_region: gets signal_value when the op has ended */
    uint64_t signal_value;
    bool is_enqueued; /* device memory: launched, and the trainer may wait for it */
    uint64_t bytes;
    uint64_t remote_id; /* on a node that does not coordinate: what the coordinator calls it */
    const char *name;   /* the same: the follower's */
    struct {            /* the same: what it was submitted as, whatever the coordinator says */
        uint32_t kind, dtype;
        int32_t root;
        uint64_t count, out_count, n_counts;
        bool is_device;
    } submitted;
    UT_hash_handle hh_remote;
    uint64_t *counts;
    size_t counts_capacity;
    uint8_t *data;     /* remote: room for input and result, CENTRAL_BYTES_MAX; NULL: none so far */
    bool is_central;   /* the op runs on the coordinator alone */
    UT_hash_handle hh; /* while streamed: by id */
    SLIST_ENTRY(request) link; /* while spare */
    SLIST_ENTRY(request) in_all;
};

struct member_stats {
    uint64_t ops_done, ops_failed, bytes;
    uint32_t in_flight;
    double late_mean_us, late_max_us; /* over recent ops: weights halve about every 45 ops */
    char last_tensor[PLAN_NAME_MAX + 1];
};

enum { MEMBER_DONE_MAX = 256 };

struct member {
    struct epoch *epoch;
    enum member_state state;
    uint32_t rank, local_rank, uid;
    int pid;
    char source[64];
    bool is_remote;    /* on the coordinator: the rank of another node; no connection, no regions */
    uint32_t node;     /* index of its node in the job */
    struct conn *conn; /* NULL: over, or remote */
    struct region_table regions;
    struct queue_table queues;
    struct cuda_device *device; /* that its queues are on; NULL: none yet */
    struct request *streamed;
    SLIST_HEAD(, request) spare, all;
    uint64_t done_ids[MEMBER_DONE_MAX]; /* successes not sent yet */
    size_t n_done;
    uint64_t enqueued_ids[MEMBER_DONE_MAX]; /* launched ones, not sent yet */
    size_t n_enqueued;
    struct member_stats stats;
};

/* take_fd is owned. 0 or -ENOMEM (then the member has state MEMBER_ENDED). */
int member_init(struct member *member, struct epoch *epoch, uint32_t rank, int take_fd);
/* A rank of another node, as the coordinator sees it. */
void member_init_remote(struct member *member, struct epoch *epoch, uint32_t rank);
void member_deinit(struct member *member);
/* Read what the trainer sends: not before the epoch can take it. */
void member_start(struct member *member);
/* End the connection and give up the regions; state says why. Idempotent. */
void member_disconnect(struct member *member, enum member_state state);

/* On the coordinator: a remote member's request, known to its node by this id; its data has been
 * looked at. NULL: no memory. */
struct request *member_remote_request(struct member *member, uint64_t id,
                                      const Pb__RemoteSubmit *submit);

/* What a completion says besides its status. */
struct request_result {
    const uint64_t *counts; /* NULL: none */
    size_t n_counts;
    uint64_t nonfinite; /* bad elements of nonfinite_rank's input */
    uint32_t nonfinite_rank;
};
/* The request has ended: tell the trainer, release what it held. result may be NULL. */
void member_complete(struct request *request, int status, const char *text,
                     const struct request_result *result);
/* The request's op is launched and its queue marked: the trainer's stream may wait for it. */
void member_enqueued(struct request *request);
/* Elements below `done` are final. */
void member_progress(struct request *request, uint64_t done);
/* Send what has been queued. */
void member_flush(struct member *member);
void member_push_failed(struct member *member, uint64_t epoch, int status, const char *text,
                        int rank, int pid);

#endif
