/* SPDX-License-Identifier: Apache-2.0 */
#include "args.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum kind { KIND_FLAG, KIND_RANKS, KIND_PORT, KIND_SECONDS, KIND_TEXT, KIND_LIST };

static const struct option {
    const char *names[3]; /* as written, with their dashes */
    const char *value;    /* what help calls it; NULL for a flag */
    enum kind kind;
    size_t offset; /* into struct args */
    const char *help;
} options[] = {
    {{"-np", "-n", "--np"},
     "N",
     KIND_RANKS,
     offsetof(struct args, n_ranks),
     "ranks to start (required without hosts; else all slots of the hosts)"},
    {{"-H", "--hosts", "--host"},
     "HOST[:SLOTS],...",
     KIND_TEXT,
     offsetof(struct args, hosts),
     "start the ranks on these hosts, in order, SLOTS (default 1) on each"},
    {{"--hostfile", "-hostfile", "--machinefile"},
     "FILE",
     KIND_TEXT,
     offsetof(struct args, host_file),
     "the hosts, one a line: HOST, HOST:N or HOST slots=N"},
    {{"-v", "--verbose"},
     NULL,
     KIND_FLAG,
     offsetof(struct args, is_verbose),
     "say what gradrun does, and how each rank ended"},
    {{"-q", "--quiet"},
     NULL,
     KIND_FLAG,
     offsetof(struct args, is_quiet),
     "do not show the ranks' output (use with --output)"},
    {{"-o", "--output"},
     "DIR",
     KIND_TEXT,
     offsetof(struct args, output_dir),
     "also write each rank's output to DIR/rank.N.log"},
    {{"-x"},
     "NAME[=VALUE]",
     KIND_LIST,
     offsetof(struct args, exports),
     "set a variable for the ranks; without VALUE: require that it is set"},
    {{"--timeout"},
     "S",
     KIND_SECONDS,
     offsetof(struct args, timeout_s),
     "end everything after S seconds, with exit code 124"},
    {{"--socket"},
     "PATH",
     KIND_TEXT,
     offsetof(struct args, socket),
     "use the daemon at PATH (default: GRADD_SOCKET, else /run/gradd/gradd.sock)"},
    {{"--private"},
     NULL,
     KIND_FLAG,
     offsetof(struct args, is_private),
     "start a private daemon for this job even if the node has one"},
    {{"--system"},
     NULL,
     KIND_FLAG,
     offsetof(struct args, is_system),
     "with hosts: use the daemon that each host has, instead of private ones"},
    {{"--set"},
     "KEY=VALUE",
     KIND_LIST,
     offsetof(struct args, settings),
     "an option of gradd.conf for the private daemon"},
    {{"--job"},
     "NAME",
     KIND_TEXT,
     offsetof(struct args, job),
     "name of the job (default: one that no other gradrun has)"},
    {{"--ssh-port"},
     "PORT",
     KIND_PORT,
     offsetof(struct args, ssh_port),
     "where the hosts' sshd listens (default: what ssh's configuration says)"},
    {{"--ssh-identity-file"},
     "FILE",
     KIND_TEXT,
     offsetof(struct args, identity_file),
     "the private key for ssh"},
    {{"--rsh"},
     "COMMAND",
     KIND_TEXT,
     offsetof(struct args, remote_shell),
     "instead of ssh; called as COMMAND HOST SHELL-COMMAND"},
    {{"--coordinator-address"},
     "ADDRESS",
     KIND_TEXT,
     offsetof(struct args, coordinator_address),
     "where the other hosts reach the first one (default: found out)"},
    {{"--check"},
     NULL,
     KIND_FLAG,
     offsetof(struct args, is_check),
     "say what would run where, test the hosts, and start nothing"},
    {{"-h", "--help"}, NULL, KIND_FLAG, offsetof(struct args, wants_help), "show this"},
    {{"-V", "--version"},
     NULL,
     KIND_FLAG,
     offsetof(struct args, wants_version),
     "show the version"},
};
enum { N_OPTIONS = sizeof options / sizeof options[0] };

static const struct option *find_option(const char *word, size_t length)
{
    for (size_t i = 0; i < N_OPTIONS; i++)
        for (size_t j = 0; j < 3 && options[i].names[j]; j++)
            if (strlen(options[i].names[j]) == length &&
                memcmp(options[i].names[j], word, length) == 0)
                return &options[i];
    return NULL;
}

static int append(const char ***list, const char *value)
{
    size_t n = 0;
    while (*list && (*list)[n])
        n++;
    const char **longer = realloc(*list, (n + 2) * sizeof *longer);
    if (!longer)
        return -ENOMEM;
    longer[n] = value;
    longer[n + 1] = NULL;
    *list = longer;
    return 0;
}

static bool parse_ranks(const char *text, unsigned *out)
{
    char *end;
    errno = 0;
    unsigned long n = strtoul(text, &end, 10);
    if (errno || end == text || *end || !isdigit((unsigned char)text[0]) || n < 1 ||
        n > ARGS_RANKS_MAX)
        return false;
    *out = (unsigned)n;
    return true;
}

static bool parse_port(const char *text, unsigned *out)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);
    if (*end || !isdigit((unsigned char)text[0]) || n < 1 || n > 65535)
        return false;
    *out = (unsigned)n;
    return true;
}

static bool parse_seconds(const char *text, double *out)
{
    char *end;
    double s = strtod(text, &end);
    if (end == text || *end || !isfinite(s) || s <= 0 || s > 1e9)
        return false;
    *out = s;
    return true;
}

/* Store one value. NULL, or what was expected instead. */
static const char *store(struct args *args, const struct option *option, const char *value,
                         int *out_rc)
{
    void *field = (char *)args + option->offset;
    switch (option->kind) {
    case KIND_FLAG:
        *(bool *)field = true;
        return NULL;
    case KIND_RANKS:
        return parse_ranks(value, field) ? NULL : "a number of ranks from 1 to 1024";
    case KIND_PORT:
        return parse_port(value, field) ? NULL : "a port from 1 to 65535";
    case KIND_SECONDS:
        return parse_seconds(value, field) ? NULL : "a number of seconds above 0";
    case KIND_TEXT:
        *(const char **)field = value;
        return *value ? NULL : "a value that is not empty";
    case KIND_LIST:
        *out_rc = append(field, value);
        return NULL;
    }
    return NULL;
}

static bool is_variable_name(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (!(isalnum((unsigned char)text[i]) || text[i] == '_') ||
            (i == 0 && isdigit((unsigned char)text[0])))
            return false;
    return length > 0;
}

bool args_has_hosts(const struct args *args)
{
    return args->hosts || args->host_file || args->is_check;
}

/* What a daemon is asked for and what it is given must fit. */
static int check_daemon(const struct args *args, char *error, size_t bytes)
{
    bool is_private =
        args->is_private || (args_has_hosts(args) && !args->socket && !args->is_system);
    if (args->is_private && args->socket)
        return snprintf(error, bytes, "--private and --socket exclude each other"), -EINVAL;
    if (args->is_system && (args->is_private || args->socket))
        return snprintf(error, bytes, "--system and --%s exclude each other",
                        args->is_private ? "private" : "socket"),
               -EINVAL;
    if (args->settings && !is_private)
        return snprintf(error, bytes,
                        "--set is for a private daemon: add --private (the node's daemon has its "
                        "own gradd.conf)"),
               -EINVAL;
    return 0;
}

static int check_hosts(const struct args *args, char *error, size_t bytes)
{
    const struct {
        const char *name;
        bool is_given;
    } of_hosts[] = {
        {"--ssh-port", args->ssh_port}, {"--ssh-identity-file", args->identity_file},
        {"--rsh", args->remote_shell},  {"--coordinator-address", args->coordinator_address},
        {"--system", args->is_system},
    };
    if (args->hosts && args->host_file)
        return snprintf(error, bytes, "-H and --hostfile exclude each other"), -EINVAL;
    for (size_t i = 0; i < sizeof of_hosts / sizeof of_hosts[0]; i++)
        if (of_hosts[i].is_given && !args->hosts && !args->host_file)
            return snprintf(error, bytes, "%s needs hosts: give -H or --hostfile",
                            of_hosts[i].name),
                   -EINVAL;
    if (args->remote_shell && (args->ssh_port || args->identity_file))
        return snprintf(error, bytes,
                        "--rsh takes ssh's place: give port and key to that command instead of "
                        "--ssh-port and --ssh-identity-file"),
               -EINVAL;
    return 0;
}

static int check(const struct args *args, char *error, size_t bytes)
{
    if (args->n_ranks == 0 && !args->hosts && !args->host_file)
        return snprintf(error, bytes, "how many ranks? give -np N"), -EINVAL;
    if (!args->command[0] && !args->is_check)
        return snprintf(error, bytes, "no command given"), -EINVAL;
    if (check_daemon(args, error, bytes) < 0 || check_hosts(args, error, bytes) < 0)
        return -EINVAL;
    if (args->job && strlen(args->job) > ARGS_JOB_NAME_MAX)
        return snprintf(error, bytes, "--job: at most %d bytes", ARGS_JOB_NAME_MAX), -EINVAL;
    for (const char **x = args->exports; x && *x; x++)
        if (!is_variable_name(*x, strcspn(*x, "=")))
            return snprintf(error, bytes, "-x %s: not the name of a variable", *x), -EINVAL;
    for (const char **s = args->settings; s && *s; s++)
        if (!strchr(*s, '='))
            return snprintf(error, bytes, "--set %s: KEY=VALUE expected", *s), -EINVAL;
    return 0;
}

/* One option at argv[*at], which is advanced past its value. */
static int parse_option(struct args *args, char **argv, int *at, char *error, size_t bytes)
{
    const char *word = argv[*at];
    size_t length = strcspn(word, "=");
    const struct option *option = find_option(word, length);
    if (!option)
        return snprintf(error, bytes, "unknown option %s (gradrun --help lists them)", word),
               -EINVAL;
    const char *value = word[length] ? word + length + 1 : NULL;
    if (option->kind == KIND_FLAG && value)
        return snprintf(error, bytes, "%s takes no value", option->names[0]), -EINVAL;
    if (option->kind != KIND_FLAG && !value)
        value = argv[++*at];
    if (option->kind != KIND_FLAG && !value)
        return snprintf(error, bytes, "%s needs %s", word, option->value), -EINVAL;
    int rc = 0;
    const char *expected = store(args, option, value, &rc);
    if (expected)
        return snprintf(error, bytes, "%.*s %s: expected %s", (int)length, word, value, expected),
               -EINVAL;
    if (rc < 0)
        snprintf(error, bytes, "out of memory");
    return rc;
}

int args_parse(struct args *args, int argc, char **argv, char *error, size_t error_bytes)
{
    *args = (struct args){0};
    int at = 1;
    for (; at < argc && argv[at][0] == '-' && argv[at][1]; at++) {
        if (strcmp(argv[at], "--") == 0) {
            at++;
            break;
        }
        int rc = parse_option(args, argv, &at, error, error_bytes);
        if (rc < 0)
            return rc;
        if (args->wants_help || args->wants_version)
            return 0;
    }
    args->command = argv + at;
    return check(args, error, error_bytes);
}

void args_deinit(struct args *args)
{
    free(args->exports);
    free(args->settings);
    *args = (struct args){0};
}

void args_print_help(FILE *stream)
{
    fprintf(stream,
            "usage: gradrun -np N [OPTION]... COMMAND [ARGUMENT]...\n"
            "       gradrun [-np N] -H HOST:SLOTS,... [OPTION]... COMMAND [ARGUMENT]...\n\n"
            "Run COMMAND as N ranks of one job, on this node, through its gradd or a private\n"
            "one, or on several hosts. Ends the other ranks when one fails, and returns its\n"
            "code.\n\n");
    for (size_t i = 0; i < N_OPTIONS; i++) {
        char left[64] = "";
        size_t used = 0;
        for (size_t j = 0; j < 3 && options[i].names[j]; j++)
            used += (size_t)snprintf(left + used, sizeof left - used, "%s%s", j ? ", " : "",
                                     options[i].names[j]);
        if (options[i].value)
            snprintf(left + used, sizeof left - used, " %s", options[i].value);
        fprintf(stream, "  %-24s %s\n", left, options[i].help);
    }
}
