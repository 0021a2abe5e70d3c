/* SPDX-License-Identifier: Apache-2.0 */
/* How most fuzzers begin: only errors are logged, and a peer that is gone is an error like others.
 */
#include <signal.h>

#include "base/log.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    signal(SIGPIPE, SIG_IGN);
    log_init("fuzz", LOG_LEVEL_ERROR);
    return 0;
}
