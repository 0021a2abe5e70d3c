/* SPDX-License-Identifier: Apache-2.0 */
#include "control/daemon.h"

#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/systemd.h"
#include "base/words.h"
#include "control/admin.h"
#include "control/descriptors.h"
#include "control/rendezvous.h"
#include "gradd/types.h"

enum {
    UID_RESERVE = 8, /* connections of one user beyond max_sessions_per_uid, to ask */
};

static const uint64_t MS = 1000000;
static const uint64_t ENDING_LIMIT_NS = UINT64_C(5) * 1000000000;

/* ------------------------------------------------------------------ configuration */

int daemon_configure(const struct daemon_arguments *arguments, struct config *out_config,
                     struct config_error *out_error)
{
    config_init(out_config);
    int rc = 0;
    if (arguments->config_file)
        rc = config_read_file(out_config, arguments->config_file, out_error);
    if (rc == -ENOENT && !arguments->needs_config_file)
        rc = 0;
    for (size_t i = 0; i < arguments->n_settings && rc == 0; i++)
        rc = config_set(out_config, arguments->settings[i], "--set", out_error);
    if (arguments->private_dir && rc == 0) {
        char setting[512];
        snprintf(setting, sizeof setting, "socket=%.400s/gradd.sock", arguments->private_dir);
        rc = config_set(out_config, setting, "--private", out_error);
    }
    if (rc == 0 && out_config->peer_dead_ms < 2 * out_config->peer_heartbeat_ms) {
        snprintf(out_error->text, sizeof out_error->text,
                 "peer_dead_s = %g is not allowed; allowed: at least twice peer_heartbeat_s = %g",
                 (double)out_config->peer_dead_ms / 1000,
                 (double)out_config->peer_heartbeat_ms / 1000);
        rc = -EINVAL;
    }
    return rc;
}

/* Looked up once per configuration: a directory server may take its time. */
static void look_up_admin_group(struct daemon *daemon)
{
    const char *name = daemon->config.admin_group;
    daemon->has_admin_group = false;
    if (!*name || daemon->arguments->private_dir)
        return;
    const struct group *group = getgrnam(name);
    if (!group) {
        log_notice("config",
                   "there is no group %s (admin_group): only root sees the jobs of all "
                   "users",
                   name);
        return;
    }
    daemon->has_admin_group = true;
    daemon->admin_group = group->gr_gid;
}

bool daemon_is_admin(const struct daemon *daemon, const struct peer *peer)
{
    return peer->uid == 0 || peer->uid == geteuid() ||
           (daemon->has_admin_group && peer_is_in_group(peer, daemon->admin_group));
}

unsigned daemon_max_sessions(const struct daemon *daemon)
{
    uint64_t limit = daemon->config.max_sessions;
    return limit < daemon->max_sessions ? (unsigned)limit : daemon->max_sessions;
}

/* Known once it is clear whether other nodes are listened for. */
static void share_descriptors(struct daemon *daemon, uint64_t limit)
{
    daemon->max_sessions = descriptors_sessions(limit, peers_is_listening(&daemon->peers));
    if (daemon->max_sessions < daemon->config.max_sessions)
        log_info("config",
                 "max_sessions is %u: %" PRIu64 " descriptors (LimitNOFILE) allow no more",
                 daemon->max_sessions, limit);
}

static void notify_status(const struct daemon *daemon, const char *prefix)
{
    char text[768];
    unsigned n = jobs_count_running(&daemon->jobs);
    if (daemon->state != DAEMON_RUNNING)
        snprintf(text, sizeof text, "%sSTATUS=draining %u job%s", prefix, n, words_s(n));
    else if (*daemon->config_error.text)
        snprintf(text, sizeof text, "%sSTATUS=running; not reloaded: %s", prefix,
                 daemon->config_error.text);
    else
        snprintf(text, sizeof text, "%sSTATUS=running", prefix);
    systemd_notify(text);
}

static void reload(struct daemon *daemon)
{
    char text[128], fixed[256];
    snprintf(text, sizeof text, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64, clock_now_ns() / 1000);
    systemd_notify(text);
    struct config *fresh = malloc(sizeof *fresh);
    struct config_error error = {"out of memory"};
    if (fresh && daemon_configure(daemon->arguments, fresh, &error) == 0) {
        if (config_take_reloadable(&daemon->config, fresh, fixed, sizeof fixed))
            log_warning("config", "reloaded; a restart is needed for %s", fixed);
        else
            log_notice("config", "reloaded");
        log_set_level((enum log_level)daemon->config.log_level);
        look_up_admin_group(daemon);
        daemon->config_error.text[0] = '\0';
    } else {
        log_error("config", "%s; the configuration stays as it was", error.text);
        daemon->config_error = error;
    }
    free(fresh);
    notify_status(daemon, "READY=1\n");
}

/* ------------------------------------------------------------------ connections */

/* Why this connection has to go, or NULL. Only administrators may use the reserve. */
static const char *find_excess(const struct daemon *daemon, const struct session *fresh)
{
    uint64_t limit = daemon_max_sessions(daemon);
    if (daemon->n_sessions > limit + DESCRIPTORS_ADMINS)
        return "too many connections";
    if (fresh->is_admin)
        return NULL;
    if (daemon->n_sessions > limit)
        return "too many connections (max_sessions)";
    uint64_t n_of_uid = 0;
    const struct session *session;
    TAILQ_FOREACH(session, &daemon->sessions, link)
    n_of_uid += session->peer.uid == fresh->peer.uid;
    if (n_of_uid > daemon->config.max_sessions_per_uid + UID_RESERVE)
        return "too many connections of this user (max_sessions_per_uid)";
    return NULL;
}

static void on_connection(void *data, int take_fd)
{
    struct daemon *daemon = data;
    struct session *session = session_new(daemon, take_fd);
    const char *excess = session ? find_excess(daemon, session) : NULL;
    if (excess)
        session_reject(session, GRADD_ERR_NO_MEMORY, excess);
}

static int open_listener(struct daemon *daemon)
{
    int fd = daemon->arguments->private_dir ? -1 : systemd_take_listener();
    if (fd < 0) {
        int rc = listener_bind(daemon->config.socket, (mode_t)daemon->config.socket_mode, &fd);
        if (rc < 0) {
            log_error("listener", "%s: %s", daemon->config.socket,
                      rc == -EADDRINUSE ? "another daemon answers on this socket" : strerror(-rc));
            return rc;
        }
        snprintf(daemon->socket_path, sizeof daemon->socket_path, "%s", daemon->config.socket);
    }
    daemon->listener = listener_new(daemon->loop, fd, on_connection, daemon);
    return daemon->listener ? 0 : -ENOMEM;
}

/* ------------------------------------------------------------------ other nodes */

static int read_cluster_key(struct daemon *daemon)
{
    struct cluster_key *key = &daemon->peers.key;
    const char *file = daemon->config.cluster_key_file;
    int fd = daemon->arguments->cluster_key_fd;
    char error[CONFIG_TEXT_MAX + 160];
    int rc = 0;
    if (fd >= 0)
        rc = cluster_key_read_fd(key, fd, error, sizeof error);
    else if (*file)
        rc = cluster_key_read_file(key, file, error, sizeof error);
    if (rc < 0)
        log_error("peer", "%s", error);
    return rc;
}

static bool listens_for_peers(const struct daemon *daemon)
{
    switch ((enum config_peer_listen)daemon->config.peer_listen) {
    case PEER_LISTEN_NO:
        return false;
    case PEER_LISTEN_YES:
        return true;
    case PEER_LISTEN_AUTO:
        break;
    }
    return daemon->peers.key.is_set ||
           (daemon->arguments->private_dir && daemon->arguments->sets_peer_port);
}

static int start_peers(struct daemon *daemon)
{
    daemon->peers.loop = daemon->loop;
    daemon->peers.config = &daemon->config;
    daemon->peers.node = daemon->node;
    daemon->peers.ops = &rendezvous_peers_ops;
    daemon->peers.owner = &daemon->jobs;
    int rc = read_cluster_key(daemon);
    if (rc < 0)
        return rc;
    int fd = daemon->arguments->private_dir ? -1 : systemd_take_peer_listener();
    rc = peers_start(&daemon->peers, listens_for_peers(daemon), fd);
    if (rc == 0)
        daemon->jobs.peers = &daemon->peers;
    return rc;
}

/* ------------------------------------------------------------------ the end */

static void check_end(void *data)
{
    struct daemon *daemon = data;
    if (daemon->state == DAEMON_DRAINING && jobs_count_running(&daemon->jobs) == 0) {
        daemon->state = DAEMON_ENDING;
        watch_arm(daemon->drain_timer, ENDING_LIMIT_NS);
    }
    if (daemon->state == DAEMON_ENDING && !daemon->jobs.by_key && worker_process_count() == 0)
        loop_stop(daemon->loop);
}

static void on_job_change(void *data)
{
    struct daemon *daemon = data;
    if (daemon->state != DAEMON_RUNNING)
        loop_defer(daemon->loop, check_end, daemon);
}

static void on_stats(void *data, struct job *job);

static void abort_jobs(struct daemon *daemon, const char *why)
{
    unsigned n = jobs_count_running(&daemon->jobs);
    if (n)
        log_warning("daemon", "aborting %u job%s: %s", n, words_s(n), why);
    char text[256];
    snprintf(text, sizeof text, "the daemon of node %s was stopped: %s", daemon->node, why);
    jobs_abort(&daemon->jobs, text);
    check_end(daemon);
}

static void drain(struct daemon *daemon, const char *why)
{
    if (daemon->state != DAEMON_RUNNING) {
        if (daemon->state == DAEMON_DRAINING)
            abort_jobs(daemon, "asked to stop a second time");
        return;
    }
    daemon->state = DAEMON_DRAINING;
    log_notice("daemon", "%s: draining, jobs running: %u", why, jobs_count_running(&daemon->jobs));
    char prefix[96];
    snprintf(prefix, sizeof prefix, "STOPPING=1\nEXTEND_TIMEOUT_USEC=%" PRIu64 "\n",
             (daemon->config.drain_timeout_ms + 15000) * 1000);
    notify_status(daemon, prefix);
    watch_arm(daemon->drain_timer, daemon->config.drain_timeout_ms * MS);
    jobs_drain(&daemon->jobs);
    check_end(daemon);
}

static void on_drain_timer(void *data)
{
    struct daemon *daemon = data;
    if (daemon->state == DAEMON_DRAINING) {
        abort_jobs(daemon, "drain_timeout_s passed");
    } else {
        log_error("daemon", "workers that have not ended and are killed: %u",
                  worker_process_count());
        worker_process_kill_all();
        loop_stop(daemon->loop);
    }
}

/* ------------------------------------------------------------------ signals and timers */

static void on_signal(void *data, int number)
{
    struct daemon *daemon = data;
    switch (number) {
    case SIGCHLD:
        worker_process_reap();
        gpus_reap(&daemon->gpus);
        on_job_change(daemon);
        break;
    case SIGHUP:
        reload(daemon);
        break;
    default:
        drain(daemon, strsignal(number));
    }
}

static void on_lifeline(void *data, int fd, unsigned events)
{
    (void)events;
    struct daemon *daemon = data;
    char bytes[64];
    ssize_t n = read(fd, bytes, sizeof bytes);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    watch_free(daemon->lifeline);
    daemon->lifeline = NULL;
    drain(daemon, "the process that this private daemon serves has ended");
}

static void on_watchdog(void *data)
{
    struct daemon *daemon = data;
    systemd_notify("WATCHDOG=1");
    watch_arm(daemon->watchdog, systemd_watchdog_us() * 1000 / 3);
}

static int watch_everything(struct daemon *daemon)
{
    struct loop *loop = daemon->loop;
    bool is_private = daemon->arguments->private_dir != NULL;
    signal(SIGPIPE, SIG_IGN);
    daemon->on_terminate = watch_signal(loop, SIGTERM, on_signal, daemon);
    daemon->on_reload = watch_signal(loop, SIGHUP, on_signal, daemon);
    daemon->on_child = watch_signal(loop, SIGCHLD, on_signal, daemon);
    daemon->drain_timer = watch_timer(loop, on_drain_timer, daemon);
    daemon->watchdog = watch_timer(loop, on_watchdog, daemon);
    if (!daemon->on_terminate || !daemon->on_reload || !daemon->on_child || !daemon->drain_timer ||
        !daemon->watchdog)
        return -ENOMEM;
    /* Ctrl-C on a launcher reaches its private daemon too, which goes by its lifeline. */
    if (is_private)
        signal(SIGINT, SIG_IGN);
    else if (!(daemon->on_interrupt = watch_signal(loop, SIGINT, on_signal, daemon)))
        return -ENOMEM;
    int fd = daemon->arguments->lifeline_fd;
    if (fd >= 0 && !(daemon->lifeline = watch_fd(loop, fd, WATCH_READ, on_lifeline, daemon)))
        return -ENOMEM;
    if (systemd_watchdog_us())
        on_watchdog(daemon);
    return 0;
}

/* ------------------------------------------------------------------ run */

static void on_stats(void *data, struct job *job)
{
    admin_on_stats(data, job);
}

static void on_remote_stats(void *data, const Pb__RemoteJobReply *reply)
{
    admin_on_remote_stats(data, reply);
}

static void name_node(struct daemon *daemon)
{
    if (*daemon->config.node_name)
        snprintf(daemon->node, sizeof daemon->node, "%s", daemon->config.node_name);
    else if (gethostname(daemon->node, sizeof daemon->node - 1) < 0)
        snprintf(daemon->node, sizeof daemon->node, "localhost");
}

static void on_gpus(void *data)
{
    struct daemon *daemon = data;
    worker_process_configure_all(&daemon->workers);
}

static void ask_gpus(struct daemon *daemon)
{
    if (daemon->config.backend == BACKEND_HOST)
        gpus_skip(&daemon->gpus, "backend = host");
    else
        gpus_start(&daemon->gpus, daemon->loop, daemon->workers.program, on_gpus, daemon);
}

static int start(struct daemon *daemon)
{
    daemon->loop = loop_new();
    if (!daemon->loop)
        return -ENOMEM;
    name_node(daemon);
    uint64_t n_descriptors = descriptors_raise_limit();
    look_up_admin_group(daemon);
    int rc = worker_setup_init(&daemon->workers, daemon->loop, &daemon->config, daemon->node);
    if (rc < 0) {
        log_error("worker", "gradd-worker is not found (GRADD_WORKER, build tree, %s)",
                  GRADD_LIBEXEC_DIR);
        return rc;
    }
    daemon->workers.gpus = &daemon->gpus;
    daemon->jobs = (struct jobs){
        .loop = daemon->loop,
        .config = &daemon->config,
        .setup = &daemon->workers,
        .node = daemon->node,
        .on_change = on_job_change,
        .on_stats = on_stats,
        .on_remote_stats = on_remote_stats,
        .owner = daemon,
    };
    rc = watch_everything(daemon);
    if (rc == 0)
        ask_gpus(daemon);
    if (rc == 0)
        rc = open_listener(daemon);
    if (rc == 0)
        rc = start_peers(daemon);
    share_descriptors(daemon, n_descriptors);
    return rc;
}

static void tell_ready(struct daemon *daemon)
{
    log_notice("daemon", "gradd %s listens on %s", GRADD_VERSION,
               *daemon->socket_path ? daemon->socket_path : "the socket it was passed");
    if (peers_is_listening(&daemon->peers)) {
        char address[RESOLVE_TEXT_MAX];
        resolve_format(&daemon->peers.listening, address, sizeof address);
        log_notice("daemon", "other nodes are awaited on %s%s", address,
                   daemon->peers.key.is_set ? "" : ", without a key: on this machine only");
    }
    notify_status(daemon, "READY=1\n");
    int fd = daemon->arguments->ready_fd;
    if (fd < 0)
        return;
    /* A line: the port for other nodes, if there is one. */
    char line[16] = "\n";
    if (peers_is_listening(&daemon->peers))
        snprintf(line, sizeof line, "%u\n", peers_port(&daemon->peers));
    ssize_t n = write(fd, line, strlen(line));
    (void)n; /* nobody waits any more: not our trouble */
    close(fd);
}

static void tear_down(struct daemon *daemon)
{
    struct session *session;
    while ((session = TAILQ_FIRST(&daemon->sessions))) {
        if (session->conn)
            conn_flush(session->conn);
        job_member_leave(&session->member);
        session_free(session);
    }
    jobs_deinit(&daemon->jobs);
    gpus_stop(&daemon->gpus);
    peers_stop(&daemon->peers);
    listener_free(daemon->listener);
    if (*daemon->socket_path)
        unlink(daemon->socket_path);
    if (daemon->arguments->private_dir)
        rmdir(daemon->arguments->private_dir);
    struct watch *watches[] = {daemon->on_terminate, daemon->on_interrupt, daemon->on_reload,
                               daemon->on_child,     daemon->watchdog,     daemon->drain_timer,
                               daemon->lifeline};
    for (size_t i = 0; i < sizeof watches / sizeof *watches; i++)
        watch_free(watches[i]);
    loop_free(daemon->loop);
}

int daemon_run(const struct daemon_arguments *arguments, const struct config *config)
{
    struct daemon *daemon = calloc(1, sizeof *daemon);
    if (!daemon)
        return EXIT_FAILURE;
    daemon->arguments = arguments;
    daemon->config = *config;
    daemon->started_ns = clock_now_ns();
    TAILQ_INIT(&daemon->sessions);
    int rc = start(daemon);
    if (rc == 0) {
        tell_ready(daemon);
        rc = loop_run(daemon->loop);
        log_notice("daemon", "stopped");
    }
    tear_down(daemon);
    free(daemon);
    return rc == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
