/* SPDX-License-Identifier: Apache-2.0 */
/* gradd, the control daemon of a node: reads its command line and runs. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "control/daemon.h"

static const char DEFAULT_CONFIG_FILE[] = "/etc/gradd/gradd.conf";

enum {
    EXIT_USAGE = 2,
};

enum action {
    ACTION_RUN,
    ACTION_CHECK_CONFIG,
};

static const char usage[] =
    "usage: gradd [OPTION]...\n"
    "The control daemon of gradd: trainers of this node join their jobs through it.\n"
    "\n"
    "  --config FILE          read FILE instead of /etc/gradd/gradd.conf\n"
    "  --set KEY=VALUE        set an option; takes precedence over the file\n"
    "  --log-level LEVEL      error, warning, notice, info or debug\n"
    "  --check-config [FILE]  say whether the configuration is valid, and exit\n"
    "  --print-options        print all options as a part of a manual page (scdoc), and exit\n"
    "  --private DIR          serve one launcher: socket DIR/gradd.sock, no configuration file\n"
    "  --lifeline FD          drain and exit when FD reaches end of file\n"
    "  --ready-fd FD          write a line to FD once connections are accepted: the port for\n"
    "                         other nodes, if there is one\n"
    "  --cluster-key-fd FD    read the key for other nodes from FD, up to its end\n"
    "  --foreground           do not detach (always so)\n"
    "  --version, --help\n";

enum option_code {
    OPTION_CONFIG = 256,
    OPTION_SET,
    OPTION_LOG_LEVEL,
    OPTION_CHECK_CONFIG,
    OPTION_PRINT_OPTIONS,
    OPTION_PRIVATE,
    OPTION_LIFELINE,
    OPTION_READY_FD,
    OPTION_CLUSTER_KEY_FD,
    OPTION_FOREGROUND,
    OPTION_VERSION,
    OPTION_HELP,
};

static const struct option options[] = {
    {"config", required_argument, NULL, OPTION_CONFIG},
    {"set", required_argument, NULL, OPTION_SET},
    {"log-level", required_argument, NULL, OPTION_LOG_LEVEL},
    {"check-config", no_argument, NULL, OPTION_CHECK_CONFIG},
    {"print-options", no_argument, NULL, OPTION_PRINT_OPTIONS},
    {"private", required_argument, NULL, OPTION_PRIVATE},
    {"lifeline", required_argument, NULL, OPTION_LIFELINE},
    {"ready-fd", required_argument, NULL, OPTION_READY_FD},
    {"cluster-key-fd", required_argument, NULL, OPTION_CLUSTER_KEY_FD},
    {"foreground", no_argument, NULL, OPTION_FOREGROUND},
    {"version", no_argument, NULL, OPTION_VERSION},
    {"help", no_argument, NULL, OPTION_HELP},
    {NULL, 0, NULL, 0},
};

static _Noreturn void fail_usage(const char *problem, const char *what)
{
    fprintf(stderr, "gradd: %s%s\nTry: gradd --help\n", problem, what);
    exit(EXIT_USAGE);
}

static int parse_fd(const char *text)
{
    char *end;
    long fd = strtol(text, &end, 10);
    if (!*text || *end || fd < 0 || fd > 1 << 20)
        fail_usage("not a file descriptor: ", text);
    return (int)fd;
}

static void add_setting(struct daemon_arguments *arguments, const char *setting)
{
    if (arguments->n_settings == SETTINGS_MAX)
        fail_usage("too many --set", "");
    arguments->settings[arguments->n_settings++] = setting;
    if (strncmp(setting, "peer_port=", strlen("peer_port=")) == 0)
        arguments->sets_peer_port = true;
}

static void set_log_level(struct daemon_arguments *arguments, const char *level)
{
    static char setting[64]; /* as long-lived as argv, where the other settings are */
    snprintf(setting, sizeof setting, "log_level=%s", level);
    add_setting(arguments, setting);
}

static _Noreturn void print_and_exit(int code)
{
    if (code == OPTION_HELP)
        fputs(usage, stdout);
    else if (code == OPTION_VERSION)
        printf("gradd %s\n", GRADD_VERSION);
    else
        config_print_options(stdout);
    exit(EXIT_SUCCESS);
}

static enum action parse_arguments(int argc, char **argv, struct daemon_arguments *arguments)
{
    enum action action = ACTION_RUN;
    int code;
    while ((code = getopt_long(argc, argv, "+", options, NULL)) != -1) {
        switch (code) {
        case OPTION_CONFIG:
            arguments->config_file = optarg;
            arguments->needs_config_file = true;
            break;
        case OPTION_SET:
            add_setting(arguments, optarg);
            break;
        case OPTION_LOG_LEVEL:
            set_log_level(arguments, optarg);
            break;
        case OPTION_CHECK_CONFIG:
            action = ACTION_CHECK_CONFIG;
            break;
        case OPTION_PRIVATE:
            arguments->private_dir = optarg;
            break;
        case OPTION_LIFELINE:
            arguments->lifeline_fd = parse_fd(optarg);
            break;
        case OPTION_READY_FD:
            arguments->ready_fd = parse_fd(optarg);
            break;
        case OPTION_CLUSTER_KEY_FD:
            arguments->cluster_key_fd = parse_fd(optarg);
            break;
        case OPTION_FOREGROUND:
            break;
        case OPTION_PRINT_OPTIONS:
        case OPTION_VERSION:
        case OPTION_HELP:
            print_and_exit(code);
        default:
            fprintf(stderr, "Try: gradd --help\n");
            exit(EXIT_USAGE);
        }
    }
    if (action == ACTION_CHECK_CONFIG && optind < argc) {
        arguments->config_file = argv[optind++];
        arguments->needs_config_file = true;
    }
    if (optind < argc)
        fail_usage("unexpected argument: ", argv[optind]);
    if (arguments->private_dir && arguments->needs_config_file)
        fail_usage("--private reads no configuration file", "");
    if (arguments->private_dir)
        arguments->config_file = NULL;
    return action;
}

int main(int argc, char **argv)
{
    struct daemon_arguments arguments = {
        .config_file = DEFAULT_CONFIG_FILE,
        .lifeline_fd = -1,
        .ready_fd = -1,
        .cluster_key_fd = -1,
    };
    static struct config config;
    struct config_error error;
    enum action action = parse_arguments(argc, argv, &arguments);
    if (daemon_configure(&arguments, &config, &error) < 0) {
        fprintf(stderr, "gradd: %s\n", error.text);
        return EXIT_FAILURE;
    }
    if (action == ACTION_CHECK_CONFIG) {
        const char *file = arguments.config_file;
        bool is_read = file && access(file, F_OK) == 0;
        printf("%s: %s\n", file ? file : "command line",
               file && !is_read ? "not there, the defaults are valid" : "valid");
        return EXIT_SUCCESS;
    }
    log_init("gradd", (enum log_level)config.log_level);
    return daemon_run(&arguments, &config);
}
