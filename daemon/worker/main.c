/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gradd-worker: started by gradd for one job, with the daemon's channel as descriptor 3. It holds
 * no capability; what it may do is decided before it starts.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/log.h"
#include "worker/gpus.h"
#include "worker/worker.h"

enum { CHANNEL_FD = 3 };

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--version") == 0) {
        puts("gradd-worker " GRADD_VERSION);
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "--gpus") == 0) {
        gpus_print(stdout);
        return 0;
    }
    if (argc > 1 || fcntl(CHANNEL_FD, F_SETFD, FD_CLOEXEC) < 0) {
        fputs("gradd-worker: started by gradd, with a socket as descriptor 3; not by hand\n",
              stderr);
        return 2;
    }
    log_init("gradd-worker", LOG_LEVEL_INFO);
    signal(SIGPIPE, SIG_IGN);
    /* The daemon supervises the process group; a terminal's Ctrl-C is for it to pass on. */
    signal(SIGINT, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, 0); /* training goes on when the daemon restarts */
    struct loop *loop = loop_new();
    struct worker *worker = loop ? worker_new(loop, CHANNEL_FD) : NULL;
    if (!worker) {
        log_error("worker", "cannot start: %s", strerror(errno));
        loop_free(loop);
        return 1;
    }
    int rc = loop_run(loop);
    worker_free(worker);
    loop_free(loop);
    return rc < 0 ? 1 : 0;
}
