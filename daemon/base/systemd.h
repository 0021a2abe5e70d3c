/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the service manager offers: readiness, watchdog, socket activation, journal. systemd.c
 * (libsystemd) or systemd_fallback.c (none of it; the calls succeed and do nothing) is built.
 * Thread: any.
 */
#ifndef GRADD_SYSTEMD_H
#define GRADD_SYSTEMD_H

#include <stdbool.h>
#include <stdint.h>

struct log_fields;

/* Send a notification such as "READY=1\nSTATUS=…". Nothing happens without NOTIFY_SOCKET. */
void systemd_notify(const char *state);
/* Microseconds within which WATCHDOG=1 is expected, 0: no watchdog. */
uint64_t systemd_watchdog_us(void);
/*
 * Listening sockets that were passed to this process (LISTEN_FDS), or -1; taken by the caller: the
 * Unix socket for trainers, and the TCP socket for other nodes (named "peer", or the first one).
 */
int systemd_take_listener(void);
int systemd_take_peer_listener(void);
/* True when stderr is connected to the journal and systemd_journal() works. */
bool systemd_has_journal(void);
/* Write a line with GRADD_SUBSYSTEM, GRADD_JOB, GRADD_EPOCH, GRADD_RANK, GRADD_PID fields. 0 or
 * -errno. */
int systemd_journal(int level, const char *program, const char *subsystem,
                    const struct log_fields *fields, const char *text);

#endif
