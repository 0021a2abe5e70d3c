/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gradrun's command line. One table of options drives the parser and --help. Pure: strings in,
 * struct or sentence out.
 *
 * Thread: any.
 *
 * Invariant: after args_parse() returned 0 the values are in range and the command is not empty.
 */
#ifndef GRADD_RUN_ARGS_H
#define GRADD_RUN_ARGS_H

#include <stdbool.h>
#include <stdio.h>

enum { ARGS_RANKS_MAX = 1024, ARGS_JOB_NAME_MAX = 128 };

/* Strings are borrowed from argv. Lists are NULL-terminated and owned by args. */
struct args {
    unsigned n_ranks; /* 0: as many as the hosts have slots */
    bool is_verbose, is_quiet, is_private, is_system, is_check, wants_help, wants_version;
    const char *output_dir; /* NULL: none */
    const char *socket;     /* NULL: GRADD_SOCKET, else the system's */
    const char *job;        /* NULL: a name of our own */
    const char *hosts;      /* -H; NULL: none */
    const char *host_file;  /* NULL: none */
    const char *identity_file, *remote_shell;
    const char *coordinator_address;
    unsigned ssh_port;     /* 0: ssh's own */
    double timeout_s;      /* 0: none */
    const char **exports;  /* -x: NAME or NAME=VALUE */
    const char **settings; /* --set: key=value for the private daemon */
    char **command;
};

/*
 * Parse argv[1..]; options end at the first word that is none, or at "--". 0, or -EINVAL with a
 * sentence in error, or -ENOMEM. --help and --version end the parsing at once.
 */
int args_parse(struct args *args, int argc, char **argv, char *error, size_t error_bytes);
void args_deinit(struct args *args);
/* Are there hosts on the command line, or something that only hosts have? */
bool args_has_hosts(const struct args *args);
void args_print_help(FILE *stream);

#endif
