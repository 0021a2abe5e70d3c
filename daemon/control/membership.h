/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who belongs to a job: the ranks that gather for the next epoch and the ranks of the last one.
 *
 * Pure: no sockets, clock or log; sessions hand in their members and carry out what is decided.
 * Thread: loop.
 *
 * Invariant: a member is in at most one roster, in the slot of its rank, and its state says which;
 * an epoch begins only when the gathering is whole and nobody is active in the epoch before.
 */
#ifndef GRADD_CONTROL_MEMBERSHIP_H
#define GRADD_CONTROL_MEMBERSHIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    MEMBERSHIP_SIZE_MAX = 4096,
    MEMBERSHIP_NAME_MAX = 255,
    MEMBER_SOURCE_MAX = 48,
    FAULT_TEXT_MAX = 640,
};

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

/* One rank of one trainer. Owned by its session; zeroed is valid (MEMBER_NONE). */
struct member {
    enum member_state state;
    uint32_t rank, size, local_rank, local_size;
    pid_t pid;
    char source[MEMBER_SOURCE_MAX]; /* where its identity came from, in the library's word */
    struct membership *membership;  /* unless MEMBER_NONE */
    uint64_t since_ns;              /* joined at */
    void *session;
};

struct roster {
    uint32_t size; /* 0: empty */
    uint32_t n;
    struct member **of_rank; /* [size], NULL: not here */
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

/* All ranks have gathered and the epoch before is over: membership_begin() may be called. */
bool membership_is_ready(const struct membership *m);

/* The gathering becomes the next epoch; stale members of the last one are let go. */
void membership_begin(struct membership *m);

/* The member goes in order, from whatever roster it is in; becomes MEMBER_NONE. */
void membership_remove(struct membership *m, struct member *member);

/* The running epoch fails: its members become MEMBER_STALE. text is kept as the last error. */
void membership_fail(struct membership *m, const char *text);

/* Empty the gathering. The members (MEMBER_NONE) stay readable by the caller's own list. */
void membership_dismiss(struct membership *m);

/* "ranks 1, 3-5" (or "rank 2"): those that the gathering lacks; "" when it is whole or empty. */
void membership_describe_missing(const struct membership *m, char *out_text, size_t size);
/* The same form for the ranks still active in the running epoch. */
void membership_describe_active(const struct membership *m, char *out_text, size_t size);

/* The member that holds `rank` in this epoch, or NULL. */
struct member *membership_find(const struct membership *m, uint64_t epoch, uint32_t rank);

#endif
