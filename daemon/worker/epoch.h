/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An epoch: one life of the job's membership on this node. Owns the members, their plan and the
 * execution of their ops.
 *
 * Thread: loop. Life: collecting members → running → failed or everybody left → retired (another
 * epoch has begun, or the worker ends) → freed once nothing of it runs on the backend.
 * Invariant: a request that was accepted is completed exactly once, also in a failing epoch; what
 * every rank had submitted before the failure still runs.
 */
#ifndef GRADD_EPOCH_H
#define GRADD_EPOCH_H

#include "worker/exec.h"
#include "worker/layout.h"
#include "worker/member.h"
#include "worker/plan/plan.h"

struct coordinator;
struct cuda_device_table;
struct cuda_import_table;
struct follower;
struct mesh;
struct nccl_table;
struct submitter;

/* What epochs of one worker share; outlives them. */
struct epoch_setup {
    struct loop *loop;
    struct chores *chores;
    struct region_quota *quota;
    const struct backend_ops *backend_ops;
    struct backend *backend;
    /* Device memory: NULL in a worker that takes none. */
    struct cuda_device_table *devices;
    struct cuda_import_table *imports;
    const struct nccl_table *nccl;
    struct submitter *submitter;
    uint32_t max_ctas;     /* of a communicator; 0: NCCL's choice */
    int32_t traffic_class; /* of a communicator; -1: NCCL's choice */
    char job[256];
    char node[256];
    uint32_t max_in_flight;
    uint64_t stall_warn_ns, op_timeout_ns;
    uint64_t peer_dead_ns; /* silence between nodes */
    uint64_t fusion_bytes;
    /* Told to the daemon; data is the worker's. */
    void (*on_links_up)(void *data, uint64_t epoch);
    void (*on_link_lost)(void *data, uint64_t epoch, uint32_t node, const char *text);
    void (*on_member_gone)(void *data, uint64_t epoch, const struct member *member, int status,
                           const char *text);
    void (*on_stall)(void *data, uint64_t epoch, uint32_t n_stalled, const char *text);
    void (*on_failed)(void *data, uint64_t epoch, int status,
                      const char *text); /* by GPUs or NCCL */
    void (*on_over)(void *data); /* the last member is gone, or all were told of the failure */
    /* A GPU's context is lost: once the epoch's failure is told, the process has to go. */
    void (*on_broken)(void *data);
    void *data;
};

struct epoch {
    const struct epoch_setup *setup;
    uint64_t number;
    uint32_t size;
    uint32_t n_local, n_added, n_gone; /* ranks of this node: expected, added, gone */
    uint32_t n_members;                /* local ones and, on the coordinator, remote ones */
    uint32_t n_remote_left;
    char label[288];        /* how sentences begin: "job train7" */
    bool device_path;       /* ops on device memory run on the device: every node can */
    struct backend *device; /* runs them; NULL without a device path */
    bool is_broken;         /* a GPU's context is lost */
    struct plan *plan;      /* NULL on a node that follows */
    struct exec *exec;
    struct member *members;  /* [size]: n_members are used, in order of coming */
    struct member **of_rank; /* [size]: the same by rank; NULL: not known here */
    /* On several nodes; all NULL on one. */
    struct layout *layout;
    struct mesh *mesh;               /* until the links stand */
    struct backend *net;             /* from then on */
    struct coordinator *coordinator; /* on node 0 */
    struct follower *follower;       /* elsewhere */
    struct {                         /* how the epoch ended */
        int status;                  /* 0: it has not failed */
        bool is_announced;           /* members were told, after the last op that still ran */
        int rank, pid;               /* culprit, or -1 */
        char text[512];
    } failure;
    bool is_retired;
    bool is_turning;
    struct watch *stall_timer;
    struct watch *lost_timer; /* waits for the daemon's word on why a member or link is lost */
    char lost_link[300];      /* what is known of the link here; empty: all are well */
    uint32_t lost_node;       /* at its other end */
    char lost_device[640];    /* NCCL lost another node, or something here; else empty */
    bool awaits_cause;        /* ops are broken, and lost_timer is set */
    uint32_t n_stalled;       /* tensors reported as late, and the link that is */
    bool is_link_late;        /* has moved nothing for stall_warn_s, and was reported */
    struct epoch *next;       /* in the worker's list of retired ones */
};

/* take_layout: owned from here on, even on failure; NULL: all ranks are on this node. NULL: out of
 * memory. */
struct epoch *epoch_new(const struct epoch_setup *setup, uint64_t number, uint32_t size,
                        uint32_t n_local, struct layout *take_layout);
/* epoch_is_idle() must hold. NULL-safe. */
void epoch_free(struct epoch *epoch);

struct epoch_member {
    uint32_t rank, local_rank, uid;
    int pid;
    const char *source;
};
/* take_fd is owned. 0, or -EINVAL (a rank twice, or beyond the size), -ENOMEM. */
int epoch_add_member(struct epoch *epoch, const struct epoch_member *who, int take_fd);

/* A data connection from another node; take_fd is owned. */
void epoch_link_arrived(struct epoch *epoch, uint32_t from_node, uint32_t stream, int take_fd);
/* Nothing more will come from that node. The daemons find out why, and whether anybody misses it;
 * without their word the epoch fails after a while. */
void epoch_link_lost(struct epoch *epoch, uint32_t node, const char *text);

/* Like plan_submit(), wherever the plan is. */
int epoch_submit(struct epoch *epoch, struct member *member, uint32_t set, const char *name,
                 const struct signature *signature, struct request *request, const char **out_text);
/* Ranks of a process set; 0 when there is no such set. */
uint32_t epoch_set_ranks(const struct epoch *epoch, uint32_t set, const uint32_t **out_ranks);

/* On the coordinator: the rank of that node, or NULL. */
struct member *epoch_remote_member(struct epoch *epoch, uint32_t rank, uint32_t node);
/* The rank submits nothing more; text says who. */
void epoch_on_rank_left(struct epoch *epoch, struct member *member, const char *text);
/* On the coordinator: all ranks of that node have left in order. */
bool epoch_node_has_left(const struct epoch *epoch, uint32_t node);

/* The rank's device memory is on this GPU. False: it is on another one already. */
bool epoch_on_device(struct epoch *epoch, struct member *member, struct cuda_device *device);

/* Run what became ready and send what there is to say. */
void epoch_turn(struct epoch *epoch);

/* The epoch ends on all members: what all ranks have submitted still runs. rank, pid: culprit, -1.
 */
void epoch_fail(struct epoch *epoch, int status, const char *text, int rank, int pid);

/* The same by this worker, which is named: the daemon is told before the links end, which other
 * nodes would take for the cause. */
void epoch_fail_here(struct epoch *epoch, int status, const char *text);

/* What still needs the daemon can not come about any more. */
void epoch_on_daemon_gone(struct epoch *epoch);

void epoch_on_member_closed(struct epoch *epoch, struct member *member, const char *reason);

/* Take what members have sent, then end all connections. Then epoch_is_idle() becomes true by
 * itself. */
void epoch_retire(struct epoch *epoch);
bool epoch_is_idle(const struct epoch *epoch);
/* It has failed or was retired, and something of it is still on the GPUs, or a GPU is lost with it.
 */
bool epoch_is_draining(const struct epoch *epoch);
/* Nobody is left here, nor, on the coordinator of an epoch that has not failed, elsewhere. */
bool epoch_is_over(const struct epoch *epoch);

#endif
