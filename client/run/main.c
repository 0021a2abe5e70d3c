/* SPDX-License-Identifier: Apache-2.0 */
/* gradrun: runs a command as the ranks of one job, on this node or on several hosts. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agent.h"
#include "args.h"
#include "cluster.h"
#include "environment.h"
#include "front.h"
#include "launch.h"
#include "lookup.h"

static int check_exports(const struct args *args, char *error, size_t bytes)
{
    for (const char **x = args->exports; x && *x; x++)
        if (environment_check_export(*x, environ, error, bytes) < 0)
            return -1;
    return 0;
}

int main(int argc, char **argv)
{
    struct args args;
    char error[512];
    int code = LAUNCH_EXIT_USAGE;
    if (argc == 2 && strcmp(argv[1], "--agent") == 0)
        return front_run(agent_run, NULL);
    if (argc == 3 && strcmp(argv[1], "--lookup") == 0)
        return lookup_main(argv[2]);
    if (args_parse(&args, argc, argv, error, sizeof error) < 0 ||
        (!args.wants_help && !args.wants_version &&
         check_exports(&args, error, sizeof error) < 0)) {
        fprintf(stderr, "gradrun: %s\n", error);
    } else if (args.wants_help) {
        args_print_help(stdout);
        code = 0;
    } else if (args.wants_version) {
        printf("gradrun %s\n", GRADD_VERSION);
        code = 0;
    } else {
        code = args_has_hosts(&args) ? cluster_main(&args) : front_run(launch_run, &args);
    }
    args_deinit(&args);
    return code;
}
