/* SPDX-License-Identifier: Apache-2.0 */
#include "command.h"

#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void hint_private_daemons(char *hint, size_t bytes)
{
    /* Where gradrun makes the directory of a private daemon. */
    const char *roots[] = {getenv("XDG_RUNTIME_DIR"), "/tmp"};
    size_t used = 0;
    hint[0] = '\0';
    for (size_t i = 0; i < 2; i++) {
        char pattern[256];
        glob_t found;
        if (!roots[i] || snprintf(pattern, sizeof pattern, "%s/gradrun-*/gradd.sock", roots[i]) >=
                             (int)sizeof pattern)
            continue;
        if (glob(pattern, 0, NULL, &found) != 0)
            continue;
        for (size_t j = 0; j < found.gl_pathc; j++) {
            size_t length = strlen(found.gl_pathv[j]);
            if (access(found.gl_pathv[j], W_OK) < 0 || used + length + 64 > bytes)
                continue;
            used +=
                (size_t)snprintf(hint + used, bytes - used, "%s--socket %s",
                                 used ? ", " : " (private daemons of gradrun: ", found.gl_pathv[j]);
        }
        globfree(&found);
    }
    if (used > 0)
        snprintf(hint + used, bytes - used, ")");
}
