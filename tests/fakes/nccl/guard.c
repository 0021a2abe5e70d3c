/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NCCL forbids issuing from several threads at once to communicators on one device; the real one
 * then corrupts its state or hangs. A group counts from its first operation to its end.
 */
#include "fake.h"

static struct {
    pthread_t owner;
    unsigned depth;
    const char *function;
} devices[FAKE_DEVICES];

void fake_guard_enter(int physical, const char *function)
{
    pthread_mutex_lock(&fake_lock);
    if (devices[physical].depth > 0 && !pthread_equal(devices[physical].owner, pthread_self()))
        fake_die("two threads at once on device %d: %s while another is in %s", physical, function,
                 devices[physical].function);
    if (devices[physical].depth++ == 0) {
        devices[physical].owner = pthread_self();
        devices[physical].function = function;
    }
    pthread_mutex_unlock(&fake_lock);
}

void fake_guard_leave(int physical)
{
    pthread_mutex_lock(&fake_lock);
    devices[physical].depth--;
    pthread_mutex_unlock(&fake_lock);
}
