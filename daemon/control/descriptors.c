/* SPDX-License-Identifier: Apache-2.0 */
#include "control/descriptors.h"

#include <sys/resource.h>

#include "control/peer_visitor.h"
#include "control/resolve.h"

enum {
    PER_SESSION = 3,  /* socket, pidfd, and what is on its way */
    PER_LISTENER = 2, /* socket, and the one that is given up when none is left */
    PER_LOOKUP = 4,   /* files and sockets of the system's resolver */

    STANDARD = 3,    /* streams of the process */
    LOOP = 3,        /* epoll, and the pair that signals come through */
    STARTER = 3,     /* lifeline, key, ready */
    GPU_PROBE = 1,   /* pipe from gradd-worker --gpus */
    LOOKUP_PIPE = 2, /* from the threads that look names up */
    MOMENTS = 16,    /* open within one turn: pairs for a trainer and its worker, files of /proc */
    WORKERS = 64,    /* a socket each; most have sessions, which may need less than they count */
    LINKS = 256,     /* to the daemons of other nodes */

    OWN = STANDARD + LOOP + STARTER + GPU_PROBE + LOOKUP_PIPE + LOOKUPS_MAX * PER_LOOKUP + MOMENTS +
          PER_LISTENER + WORKERS + DESCRIPTORS_ADMINS * PER_SESSION,
    OF_PEERS = PER_LISTENER + VISITORS_MAX + LINKS,
};

uint64_t descriptors_raise_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return 0;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
}

uint64_t descriptors_reserved(bool has_peers)
{
    return OWN + (has_peers ? OF_PEERS : 0);
}

unsigned descriptors_sessions(uint64_t limit, bool has_peers)
{
    uint64_t reserved = descriptors_reserved(has_peers);
    uint64_t n = limit > reserved ? (limit - reserved) / PER_SESSION : 0;
    return n > DESCRIPTORS_SESSIONS_MAX ? DESCRIPTORS_SESSIONS_MAX : n < 1 ? 1 : (unsigned)n;
}
