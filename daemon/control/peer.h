/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is at the other end of a Unix socket, and how that process ended.
 *
 * Thread: any. The kernel's word is all that counts here: nothing in it comes from the peer.
 */
#ifndef GRADD_CONTROL_PEER_H
#define GRADD_CONTROL_PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum {
    PEER_GROUPS_MAX = 128,
};

struct peer {
    uid_t uid;
    gid_t gid;
    pid_t pid; /* 0: the process is in a pid namespace that we can not see */
    int pidfd; /* readable once the process has ended; -1: not known */
    gid_t groups[PEER_GROUPS_MAX];
    int n_groups; /* supplementary ones; none when there are more than fit */
};

/* 0 or -errno. Zeroed with pidfd -1 is the dead state. */
int peer_init(struct peer *peer, int socket_fd);
void peer_deinit(struct peer *peer);

bool peer_is_in_group(const struct peer *peer, gid_t group);
bool peer_has_ended(const struct peer *peer);

/* How the process ended, as waitpid() tells it. False as below. */
bool peer_end_status(const struct peer *peer, int *out_status);

/*
 * How the process ended, as the end of a sentence: "was killed by signal 9 (Killed)", "exited with
 * status 3". False, with "ended": the kernel does not tell, or not before its parent has waited.
 */
bool peer_describe_end(const struct peer *peer, char *out_text, size_t size);

/* The same from a wait status. */
void describe_wait_status(int status, char *out_text, size_t size);

/* Name of a user of this machine's own /etc/passwd, or "". Asks no directory server: it could make
 * the daemon wait. */
void user_name(uid_t uid, char *out_name, size_t size);

#endif
