/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What ssh is called with, so that the way to an agent is a plain pipe whatever ssh_config says of
 * the host: no other command, no terminal, no background, no input from /dev/null, nobody to be
 * asked, no master connection that stays behind. A master that is there already is used: it may be
 * all that a second factor lets in.
 *
 * Thread: any; ssh_find_age() waits for a process.
 */
#ifndef GRADD_RUN_SSH_H
#define GRADD_RUN_SSH_H

#include <signal.h>

/* An option that an ssh does not know is an error, and then so is it in its ssh_config. */
enum ssh_age {
    SSH_OLD, /* knows what all know */
    SSH_7_6, /* and RemoteCommand */
    SSH_8_7, /* and SessionType, StdinNull, ForkAfterAuthentication */
};

/*
 * Of the ssh in PATH, which is asked about its options and connects nowhere. SSH_OLD when it can
 * not be told: it has not answered within seconds, or signal_fd has something else to say.
 */
enum ssh_age ssh_find_age(const sigset_t *mask, int signal_fd);

/* The words from "ssh" on, without port, key and host; NULL-terminated. */
const char *const *ssh_words(enum ssh_age age);

#endif
