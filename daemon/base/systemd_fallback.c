/* SPDX-License-Identifier: Apache-2.0 */
/* A build without libsystemd: nobody is notified and nothing is inherited. */
#include "base/systemd.h"

#include <errno.h>

void systemd_notify(const char *state)
{
    (void)state;
}

uint64_t systemd_watchdog_us(void)
{
    return 0;
}

int systemd_take_listener(void)
{
    return -1;
}

int systemd_take_peer_listener(void)
{
    return -1;
}

bool systemd_has_journal(void)
{
    return false;
}

int systemd_journal(int level, const char *program, const char *subsystem,
                    const struct log_fields *fields, const char *text)
{
    (void)level;
    (void)program;
    (void)subsystem;
    (void)fields;
    (void)text;
    return -ENOSYS;
}
