/* SPDX-License-Identifier: Apache-2.0 */
#include "descriptors.h"

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/resource.h>

static struct rlimit original;
static bool is_raised;

static unsigned n_open(void)
{
    unsigned n = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n; /* "." and ".." are in it, and the directory itself */
}

int descriptors_reserve(unsigned n_more, const char *what, char *error, size_t bytes)
{
    struct rlimit limit;
    rlim_t needed = (rlim_t)n_open() + n_more;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || needed <= limit.rlim_cur)
        return 0;
    if (needed > limit.rlim_max) {
        snprintf(error, bytes,
                 "%s need %llu open files, and at most %llu are allowed here: raise the limit "
                 "(ulimit -Hn, limits.conf, LimitNOFILE=)",
                 what, (unsigned long long)needed, (unsigned long long)limit.rlim_max);
        return -EMFILE;
    }
    struct rlimit raised = {.rlim_cur = needed, .rlim_max = limit.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) < 0)
        return 0; /* whoever opens the one too many says so */
    if (!is_raised)
        original = limit;
    is_raised = true;
    return 0;
}

void descriptors_restore(void)
{
    if (is_raised)
        setrlimit(RLIMIT_NOFILE, &original);
}
