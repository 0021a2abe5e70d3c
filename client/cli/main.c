/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl: asks the node's daemon how things are, for people and for programs. */
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "command.h"
#include "format.h"

const struct command *const commands[] = {
    &command_status, &command_jobs,    &command_job, &command_peers,
    &command_config, &command_version, NULL};

static const struct {
    struct option option; /* of getopt_long() */
    const char *value, *help;
} option_rows[] = {
    {{"socket", required_argument, NULL, 's'},
     "PATH",
     "the daemon's socket (default: GRADD_SOCKET, else " LINK_DEFAULT_SOCKET ")"},
    {{"json", no_argument, NULL, 'j'}, NULL, "JSON, schema 1"},
    {{"timeout", required_argument, NULL, 't'}, "S", "wait at most S seconds (default: 5)"},
    {{"watch", optional_argument, NULL, 'w'}, "[=S]", "repeat every S seconds (default: 2)"},
    {{"uid", required_argument, NULL, 'u'}, "UID", "job: of this user"},
    {{"help", no_argument, NULL, 'h'}, NULL, "show this"},
    {{"version", no_argument, NULL, 'V'}, NULL, "show this program's version"},
};
enum { N_OPTIONS = sizeof option_rows / sizeof option_rows[0] };

static void print_help(FILE *stream)
{
    fprintf(stream, "usage: gradctl [OPTION]... COMMAND\n\ncommands:\n");
    for (const struct command *const *c = commands; *c; c++)
        fprintf(stream, "  %-8s %-6s %s\n", (*c)->name, (*c)->argument ? (*c)->argument : "",
                (*c)->help);
    fprintf(stream, "\noptions:\n");
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const char *value = option_rows[i].value ? option_rows[i].value : "";
        char left[32];
        snprintf(left, sizeof left, "--%s%s%s", option_rows[i].option.name,
                 *value && *value != '[' ? " " : "", value);
        fprintf(stream, "  %-16s %s\n", left, option_rows[i].help);
    }
    fprintf(stream, "\nexit codes: 0 well, 1 failed, 2 usage, 3 daemon unreachable, 4 not "
                    "permitted,\n5 degraded (status: there are problems; job: stalled or "
                    "failed)\n");
}

static bool parse_seconds(const char *text, double *out)
{
    char *end;
    double s = strtod(text, &end);
    if (end == text || *end || !isfinite(s) || s <= 0 || s > 86400)
        return false;
    *out = s;
    return true;
}

static bool parse_uid(const char *text, uint32_t *out)
{
    char *end;
    errno = 0;
    unsigned long uid = strtoul(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || uid > UINT32_MAX)
        return false;
    *out = (uint32_t)uid;
    return true;
}

static int usage(const char *format, const char *what)
{
    char *safe = format_safe(what);
    fprintf(stderr, "gradctl: ");
    fprintf(stderr, format, safe ? safe : "");
    fprintf(stderr, " (gradctl --help says more)\n");
    free(safe);
    return EXIT_CODE_USAGE;
}

/* One option. 0, EXIT_CODE_USAGE, or -1 when the program is to end well. */
static int take_option(struct options *options, int letter, const char *word)
{
    switch (letter) {
    case 's':
        options->socket = optarg;
        return 0;
    case 'j':
        options->is_json = true;
        return 0;
    case 't':
        return parse_seconds(optarg, &options->timeout_s)
                   ? 0
                   : usage("--timeout %s: seconds above 0 expected", optarg);
    case 'w':
        options->watch_s = 2;
        return !optarg || parse_seconds(optarg, &options->watch_s)
                   ? 0
                   : usage("--watch=%s: seconds above 0 expected", optarg);
    case 'u':
        options->has_uid = true;
        return parse_uid(optarg, &options->uid) ? 0 : usage("--uid %s: a number expected", optarg);
    case 'h':
        print_help(stdout);
        return -1;
    case 'V':
        printf("gradctl %s\n", GRADD_VERSION);
        return -1;
    case ':':
        return usage("%s needs a value", word);
    default:
        return usage("unknown option %s", word);
    }
}

static int parse(struct options *options, int argc, char **argv, const struct command **out)
{
    struct option table[N_OPTIONS + 1] = {{0}};
    for (size_t i = 0; i < N_OPTIONS; i++)
        table[i] = option_rows[i].option;
    int letter, rc;
    while ((letter = getopt_long(argc, argv, ":h", table, NULL)) >= 0)
        if ((rc = take_option(options, letter, argv[optind - 1])) != 0)
            return rc;
    if (optind == argc)
        return usage("no command given%s", "");
    for (const struct command *const *c = commands; *c && !*out; c++)
        if (strcmp((*c)->name, argv[optind]) == 0)
            *out = *c;
    if (!*out)
        return usage("unknown command \"%s\"", argv[optind]);
    int n = argc - optind - 1;
    if ((*out)->argument && n == 0)
        return usage("%s needs the NAME of a job", (*out)->name);
    if (n > ((*out)->argument ? 1 : 0))
        return usage("unexpected argument \"%s\"", argv[argc - 1]);
    if (options->has_uid && !(*out)->takes_uid)
        return usage("%s takes no --uid", (*out)->name);
    options->name = (*out)->argument ? argv[optind + 1] : NULL;
    return 0;
}

static void add_hint(struct link *link, int result)
{
    char hint[512];
    if (result != LINK_UNREACHABLE || strcmp(link->socket, LINK_DEFAULT_SOCKET) != 0)
        return;
    hint_private_daemons(hint, sizeof hint);
    size_t used = strlen(link->error);
    snprintf(link->error + used, sizeof link->error - used, "%s", hint);
}

/* Connect, ask, write: once. */
static int run_once(const struct command *command, const struct options *options, int cancel_fd)
{
    struct link link;
    link_init(&link, options->timeout_s, cancel_fd);
    struct writer *writer = options->is_json
                                ? writer_json_new(stdout, command->name, options->watch_s > 0)
                                : writer_text_new(stdout);
    if (!writer) {
        fprintf(stderr, "gradctl: out of memory\n");
        return LINK_FAILED;
    }
    int opened = link_open(&link, link_socket_path(options->socket), "gradctl", PB__ROLE__ADMIN);
    int result = opened;
    if (opened != LINK_OK && link.fd >= 0) {
        close(link.fd);
        link.fd = -1;
    }
    struct context context = {options, &link, writer};
    if (opened == LINK_OK || (command->is_offline && opened != LINK_CANCELLED)) {
        int ran = command->run(&context);
        result = opened == LINK_OK ? ran : opened;
    }
    bool has_failed = result != LINK_OK && result != EXIT_CODE_DEGRADED;
    if (has_failed && result != LINK_CANCELLED) {
        add_hint(&link, result);
        char *safe = format_safe(link.error);
        writer_error(writer, result, link.error);
        fflush(stdout);
        fprintf(stderr, "gradctl: %s\n", safe ? safe : "out of memory");
        free(safe);
    }
    if (result != LINK_CANCELLED)
        writer_end(writer);
    writer_free(writer);
    link_deinit(&link);
    if (ferror(stdout)) {
        fprintf(stderr, "gradctl: cannot write to standard output: %s\n", strerror(errno));
        return LINK_FAILED;
    }
    return result;
}

/* Repeat until Ctrl-C. A daemon that goes away may come back: that is not the end. */
static int watch(const struct command *command, const struct options *options)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int signal_fd = signalfd(-1, &set, SFD_CLOEXEC);
    if (signal_fd < 0) {
        fprintf(stderr, "gradctl: cannot watch signals: %s\n", strerror(errno));
        return LINK_FAILED;
    }
    bool is_terminal = isatty(STDOUT_FILENO) && !options->is_json;
    struct pollfd stop = {signal_fd, POLLIN, 0};
    int result = LINK_OK;
    do {
        if (is_terminal)
            fputs("\033[H\033[2J", stdout);
        int now = run_once(command, options, signal_fd);
        if (now != LINK_CANCELLED)
            result = now;
        if (ferror(stdout))
            break;
        if (!is_terminal && !options->is_json && now != LINK_CANCELLED) {
            fputc('\n', stdout);
            fflush(stdout);
        }
    } while (poll(&stop, 1, (int)fmin(options->watch_s * 1000, INT_MAX)) == 0);
    close(signal_fd);
    return result;
}

int main(int argc, char **argv)
{
    struct options options = {.timeout_s = 5};
    const struct command *command = NULL;
    int rc = parse(&options, argc, argv, &command);
    if (rc != 0)
        return rc < 0 ? 0 : rc;
    return options.watch_s > 0 ? watch(command, &options) : run_once(command, &options, -1);
}
