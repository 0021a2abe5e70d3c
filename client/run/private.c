/* SPDX-License-Identifier: Apache-2.0 */
#include "private.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "link.h"
#include "process.h"

bool daemon_answers(const char *socket, int cancel_fd, char *reason, size_t bytes)
{
    struct link link;
    link_init(&link, 2.0, cancel_fd);
    enum link_result result = link_open(&link, socket, "gradrun", PB__ROLE__TRAINER);
    if (result != LINK_OK)
        snprintf(reason, bytes, "%s", link.error);
    link_deinit(&link);
    return result == LINK_OK;
}

unsigned daemon_peer_port(const char *socket, int cancel_fd, char *reason, size_t bytes)
{
    struct link link;
    Pb__PeersRequest body = PB__PEERS_REQUEST__INIT;
    const Pb__Envelope *reply;
    unsigned port = 0;
    link_init(&link, 2.0, cancel_fd);
    enum link_result result = link_open(&link, socket, "gradrun", PB__ROLE__ADMIN);
    if (result == LINK_OK)
        result = link_request(&link, PB__ENVELOPE__BODY_PEERS_REQUEST, &body,
                              PB__ENVELOPE__BODY_PEERS_REPLY, &reply);
    if (result == LINK_OK) {
        const char *colon = strrchr(reply->peers_reply->listening, ':');
        port = colon ? (unsigned)strtoul(colon + 1, NULL, 10) : 0;
    }
    if (result != LINK_OK)
        snprintf(reason, bytes, "%s", link.error);
    else if (port == 0)
        snprintf(reason, bytes,
                 "the daemon at %s takes no other daemons: set peer_port in its gradd.conf, or "
                 "leave --system and --socket away for private daemons",
                 socket);
    link_deinit(&link);
    return port;
}

void build_tree_path(const char *relative, char *path, size_t bytes)
{
    char program[PATH_MAX], joined[PATH_MAX + 64], canonical[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    program[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(program, '/');
    path[0] = '\0';
    if (!slash)
        return;
    *slash = '\0';
    snprintf(joined, sizeof joined, "%s/%s", program, relative);
    if (realpath(joined, canonical) && strlen(canonical) < bytes && access(canonical, R_OK) == 0)
        snprintf(path, bytes, "%s", canonical);
}

void private_find_program(char *path, size_t bytes)
{
    const char *variable = getenv("GRADD_DAEMON");
    if (variable && *variable) {
        snprintf(path, bytes, "%s", variable);
        return;
    }
    build_tree_path("../../daemon/control/gradd", path, bytes);
    if (!path[0])
        snprintf(path, bytes, "%s", GRADD_SBINDIR "/gradd");
}

/* A directory of mode 0700 in which a socket's path is short enough. */
static int make_dir(struct private_daemon *daemon)
{
    const char *roots[] = {getenv("XDG_RUNTIME_DIR"), "/tmp"};
    errno = 0;
    for (size_t i = 0; i < 2; i++) {
        if (!roots[i] || roots[i][0] != '/')
            continue;
        int n = snprintf(daemon->dir, sizeof daemon->dir, "%s/gradrun-XXXXXX", roots[i]);
        if (n < 0 || (size_t)n >= sizeof daemon->dir)
            continue;
        if (mkdtemp(daemon->dir)) {
            snprintf(daemon->socket, sizeof daemon->socket, "%s/gradd.sock", daemon->dir);
            return 0;
        }
    }
    int rc = errno ? -errno : -ENAMETOOLONG;
    daemon->dir[0] = '\0';
    return rc;
}

static void remove_dir(struct private_daemon *daemon)
{
    DIR *dir = daemon->dir[0] ? opendir(daemon->dir) : NULL;
    struct dirent *d;
    while (dir && (d = readdir(dir)))
        if (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0)
            unlinkat(dirfd(dir), d->d_name, 0);
    if (dir) {
        closedir(dir);
        rmdir(daemon->dir);
    }
    daemon->dir[0] = '\0';
}

/* The daemon must not take a service manager's socket or readiness for its own. */
static char **daemon_environment(void)
{
    static const char *const not_ours[] = {"NOTIFY_SOCKET=", "WATCHDOG_", "LISTEN_",
                                           "GRADD_SOCKET=", "JOURNAL_STREAM="};
    size_t n = 0, kept = 0;
    while (environ[n])
        n++;
    char **list = calloc(n + 1, sizeof *list);
    for (size_t i = 0; list && i < n; i++) {
        bool is_kept = true;
        for (size_t j = 0; j < sizeof not_ours / sizeof not_ours[0]; j++)
            is_kept &= strncmp(environ[i], not_ours[j], strlen(not_ours[j])) != 0;
        if (is_kept)
            list[kept++] = environ[i];
    }
    return list;
}

enum { WORDS_MAX = 24 };

/* The words of the command line: fixed ones, then --set and its value for each setting. */
static char **daemon_arguments(const struct private_daemon *daemon,
                               const struct private_options *options, const char *lifeline,
                               const char *ready, const char *key, const char *address)
{
    const char *fixed[WORDS_MAX] = {options->program,  "--private",  daemon->dir, "--lifeline",
                                    lifeline,          "--ready-fd", ready,       "--log-level",
                                    options->log_level};
    const char *for_peers[] = {"--set", "peer_port=0", "--set", address, "--cluster-key-fd", key};
    size_t n = 9, n_settings = 0;
    if (options->address)
        for (size_t i = 0; i < (options->key ? 6 : 4); i++)
            fixed[n++] = for_peers[i];
    while (options->settings && options->settings[n_settings])
        n_settings++;
    char **argv = calloc(n + 2 * n_settings + 1, sizeof *argv);
    if (!argv)
        return NULL;
    for (size_t i = 0; i < n; i++)
        argv[i] = (char *)fixed[i];
    for (size_t i = 0; i < n_settings; i++) {
        argv[n + 2 * i] = (char *)"--set";
        argv[n + 2 * i + 1] = (char *)options->settings[i];
    }
    return argv;
}

/* The pipes between gradrun and the daemon, as {read, write}. */
struct pipes {
    int lifeline[2], ready[2], output[2], key[2], null;
};

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void pipes_close(struct pipes *p)
{
    for (int i = 0; i < 2; i++) {
        close_fd(&p->lifeline[i]);
        close_fd(&p->ready[i]);
        close_fd(&p->output[i]);
        close_fd(&p->key[i]);
    }
    close_fd(&p->null);
}

static int pipes_open(struct pipes *p, const char *key)
{
    *p = (struct pipes){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}, -1};
    size_t key_bytes = key ? strlen(key) : 0;
    bool is_open = pipe2(p->lifeline, O_CLOEXEC) == 0 && pipe2(p->ready, O_CLOEXEC) == 0 &&
                   pipe2(p->output, O_CLOEXEC) == 0 &&
                   (p->null = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0;
    /* A key is short enough for an empty pipe to take at once. */
    if (is_open && key)
        is_open =
            pipe2(p->key, O_CLOEXEC) == 0 && write(p->key[1], key, key_bytes) == (ssize_t)key_bytes;
    int rc = is_open ? 0 : -errno;
    if (is_open)
        close_fd(&p->key[1]);
    else
        pipes_close(p);
    return rc;
}

static int spawn_daemon(struct private_daemon *daemon, const struct private_options *options,
                        const struct pipes *p)
{
    char lifeline[16], ready[16], key[16], address[128];
    snprintf(lifeline, sizeof lifeline, "%d", p->lifeline[0]);
    snprintf(ready, sizeof ready, "%d", p->ready[1]);
    snprintf(key, sizeof key, "%d", p->key[0]);
    snprintf(address, sizeof address, "peer_address=%s", options->address ? options->address : "");
    char **argv = daemon_arguments(daemon, options, lifeline, ready, key, address);
    char **envp = daemon_environment();
    struct spawn spawn = {
        .argv = argv,
        .envp = envp,
        .stdio = {p->null, p->output[1], p->output[1]},
        .keep = {p->lifeline[0], p->ready[1], p->key[0]},
        .mask = options->mask,
    };
    int rc = argv && envp ? process_spawn(&spawn, &daemon->pid) : -ENOMEM;
    free(argv);
    free(envp);
    return rc;
}

int private_start(struct private_daemon *daemon, const struct private_options *options, char *error,
                  size_t bytes)
{
    *daemon = (struct private_daemon){.lifeline = -1, .ready = -1, .output = -1};
    int rc = make_dir(daemon);
    if (rc < 0) {
        snprintf(error, bytes,
                 "cannot make a directory for the private daemon in "
                 "XDG_RUNTIME_DIR or /tmp: %s",
                 strerror(-rc));
        return rc;
    }
    struct pipes pipes;
    rc = pipes_open(&pipes, options->address ? options->key : NULL);
    if (rc == 0)
        rc = spawn_daemon(daemon, options, &pipes);
    if (rc < 0) {
        snprintf(error, bytes, "cannot start the private daemon %s: %s%s", options->program,
                 strerror(-rc), rc == -ENOENT ? " (GRADD_DAEMON may name another gradd)" : "");
        pipes_close(&pipes);
        remove_dir(daemon);
        return rc;
    }
    daemon->lifeline = pipes.lifeline[1];
    daemon->ready = pipes.ready[0];
    daemon->output = pipes.output[0];
    pipes.lifeline[1] = pipes.ready[0] = pipes.output[0] = -1;
    pipes_close(&pipes);
    return 0;
}

bool private_on_ready(struct private_daemon *daemon, unsigned *out_peer_port)
{
    char line[16] = "";
    ssize_t n = read(daemon->ready, line, sizeof line - 1);
    if (n < 0)
        return false;
    close_fd(&daemon->ready);
    *out_peer_port = (unsigned)strtoul(line, NULL, 10);
    return n > 0;
}

void private_stop(struct private_daemon *daemon)
{
    close_fd(&daemon->lifeline);
    close_fd(&daemon->ready);
}

void private_finish(struct private_daemon *daemon)
{
    private_stop(daemon);
    if (daemon->pid > 0)
        process_reap(daemon->pid);
    daemon->pid = 0;
    remove_dir(daemon);
}
