/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who belongs to a job: the ranks that gather for the next epoch and the ranks of the last one.
 *
 * Pure: no sockets, clock or log; sessions hand in their members and carry out what is decided.
 * Thread: loop.
 *
 * A gathering belongs to this daemon, which then knows all of its ranks, also those on other nodes;
 * or to the daemon of another node, the coordinator, and then only ranks of this node are here.
 *
 * Invariant: a member is in at most one roster, in the slot of its rank, and its state says which;
 * all members of a gathering name the same coordinator; an epoch begins only when nobody is active
 * in the epoch before and, where this daemon coordinates, when the gathering is whole.
 */
#ifndef GRADD_CONTROL_MEMBERSHIP_H
#define GRADD_CONTROL_MEMBERSHIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct peer_link; /* a link to the daemon of another node */

enum {
    MEMBERSHIP_SIZE_MAX = 4096,
    MEMBERSHIP_NAME_MAX = 255,
    MEMBER_SOURCE_MAX = 48,
    FAULT_TEXT_MAX = 640,
};

/* Of epochs that other nodes name: the next one is always another number. */
#define MEMBERSHIP_EPOCH_MAX (UINT64_MAX / 2)

enum job_state {
    JOB_LINGERING, /* nobody is here; the worker stays for a while */
    JOB_GATHERING, /* ranks wait for others; no epoch is alive */
    JOB_RUNNING,   /* an epoch has active ranks; others may gather for the next one */
    JOB_FAILED,    /* the last epoch failed and nobody has joined again */
};

enum member_state {
    MEMBER_NONE,    /* in no job */
    MEMBER_WAITING, /* in the gathering */
    MEMBER_ACTIVE,  /* in an epoch that is alive */
    MEMBER_STALE,   /* in an epoch that has failed; holds no slot of a living one */
};

/*
 * One rank of one trainer. Owned by its session, or by the job when its node is another; zeroed is
 * valid (MEMBER_NONE).
 */
struct member {
    enum member_state state;
    uint32_t rank, size, local_rank;
    uint32_t local_size; /* 0: not known, and then nor is local_rank */
    pid_t pid;
    const char *node;               /* NULL: this one */
    struct peer_link *origin;       /* to that node; NULL: it is on this node */
    struct peer_link *coordinator;  /* to the node that gathers its job; NULL: this daemon does */
    uint64_t last_epoch;            /* of the job, that its node knows */
    bool takes_devices;             /* a rank of another node: that one takes device memory */
    bool is_forwarded;              /* the coordinator has been told */
    uint64_t forwarded_ns;          /* when */
    char source[MEMBER_SOURCE_MAX]; /* where its identity came from, in the library's word */
    struct membership *membership;  /* unless MEMBER_NONE */
    uint64_t since_ns;              /* joined at */
    uint64_t deadline_ns;           /* of its wait */
    void *session;
};

struct roster {
    uint32_t size;                 /* of the job; 0: empty */
    uint32_t n;                    /* members here */
    struct peer_link *coordinator; /* that all of them name; NULL: this daemon */
    struct member **of_rank;       /* [size], NULL: not here */
};

struct membership {
    char name[MEMBERSHIP_NAME_MAX + 1];
    uid_t uid;
    enum job_state state;
    uint64_t epoch;  /* of `running`; 0: none yet */
    bool has_failed; /* that epoch */
    struct roster gathering, running;
    char last_error[FAULT_TEXT_MAX];
};

/* An error for a client: the negative enum gradd_status and a sentence. */
struct fault {
    int code;
    char text[FAULT_TEXT_MAX];
};

const char *job_state_name(enum job_state state);

/* 0, or GRADD_ERR_INVALID with *out_fault: name, rank or size make no sense. */
int membership_check_join(const char *job, uint32_t rank, uint32_t size, struct fault *out_fault);

void membership_init(struct membership *m, uid_t uid, const char *name);
/* Frees memory and lets every member go (MEMBER_NONE). Idempotent. */
void membership_deinit(struct membership *m);

/*
 * Put a checked member (MEMBER_NONE; rank, size and pid set) into the gathering.
 * 0, or a negative enum gradd_status with *out_fault; the member is then as before.
 */
int membership_join(struct membership *m, struct member *member, struct fault *out_fault);

/* Nobody is active any more: an epoch may begin. */
bool membership_is_free(const struct membership *m);

/* This daemon coordinates, all ranks have gathered, and the epoch before is over. */
bool membership_is_ready(const struct membership *m);

/* The number of the gathering's epoch: above all that its nodes have seen. */
uint64_t membership_next_epoch(const struct membership *m);

/*
 * The gathering (NULL), or its ranks r with takes[r], become the epoch of that number; stale
 * members of the last one are let go. Only when membership_is_free(). 0, or -ENOMEM (nothing has
 * changed).
 */
int membership_begin(struct membership *m, uint64_t epoch, const bool *takes);

/* The member goes in order, from whatever roster it is in; becomes MEMBER_NONE. */
void membership_remove(struct membership *m, struct member *member);

/* The running epoch fails: its members become MEMBER_STALE. text is kept as the last error. */
void membership_fail(struct membership *m, const char *text);

/* The gathering belongs to another daemon, or (NULL) to this one after all. */
void membership_move(struct membership *m, struct peer_link *coordinator);

/* Empty the gathering. The members (MEMBER_NONE) stay readable by the caller's own list. */
void membership_dismiss(struct membership *m);

/* "ranks 1, 3-5" (or "rank 2"): those that the gathering lacks; "" when it is whole or empty. */
void membership_describe_missing(const struct membership *m, char *out_text, size_t size);
/* The same form for the ranks still active in the running epoch. */
void membership_describe_active(const struct membership *m, char *out_text, size_t size);

/* The member that holds `rank` in this epoch, or NULL. */
struct member *membership_find(const struct membership *m, uint64_t epoch, uint32_t rank);

#endif
