/* SPDX-License-Identifier: Apache-2.0 */
#include "cluster_state.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "agent.h"
#include "descriptors.h"
#include "link.h"
#include "private.h"

static int make_key(char key[JOB_KEY_DIGITS + 1])
{
    unsigned char bytes[JOB_KEY_DIGITS / 2];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return -errno;
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(key + 2 * i, 3, "%02x", bytes[i]);
    explicit_bzero(bytes, sizeof bytes);
    return 0;
}

static int allocate(struct cluster *c, char *error, size_t bytes)
{
    c->n_ranks = hosts_n_ranks(c->hosts);
    c->remotes = calloc(c->hosts->n, sizeof *c->remotes);
    c->ranks = calloc(c->n_ranks, sizeof *c->ranks);
    c->polled = calloc(4 * (size_t)c->hosts->n + 4, sizeof *c->polled);
    if (!c->remotes || !c->ranks || !c->polled)
        return snprintf(error, bytes, "out of memory for %u hosts", c->hosts->n), -ENOMEM;
    for (unsigned i = 0; i < c->hosts->n; i++) {
        const struct host *host = &c->hosts->list[i];
        c->remotes[i] = (struct remote){.host = host,
                                        .index = i,
                                        .is_local = host_is_local(host),
                                        .err = -1,
                                        .from = {.fd = -1},
                                        .lookup = {.fd = -1},
                                        .to = {.fd = -1}};
        for (unsigned rank = 0; rank < host->n_ranks; rank++)
            c->ranks[host->first_rank + rank].host = i;
    }
    return 0;
}

/* Three pipes and a name to look up for each host, a log for each rank. */
static int reserve_descriptors(const struct cluster *c, char *error, size_t bytes)
{
    char what[32];
    unsigned n = c->hosts->n, n_logs = c->args->output_dir ? hosts_n_ranks(c->hosts) : 0;
    snprintf(what, sizeof what, "%u host%s", n, n == 1 ? "" : "s");
    return descriptors_reserve(4 * n + n_logs + 24, what, error, bytes);
}

int cluster_set_up(struct cluster *c, char *error, size_t bytes)
{
    console_init(&c->console);
    uint32_t number = 0;
    int rc = reserve_descriptors(c, error, bytes);
    if (rc < 0)
        return rc;
    rc = c->signal_fd = signals_watch();
    if (rc < 0)
        return snprintf(error, bytes, "cannot watch signals: %s", strerror(-rc)), rc;
    if (!getcwd(c->directory, sizeof c->directory))
        return snprintf(error, bytes,
                        "cannot find out the working directory (has it been removed?): %s",
                        strerror(errno)),
               -errno;
    build_tree_path("gradrun", c->program, sizeof c->program);
    if (!c->program[0])
        return snprintf(error, bytes, "cannot find out this program's own path"), -ENOENT;
    if (make_key(c->key) < 0 || getrandom(&number, sizeof number, 0) != sizeof number)
        return snprintf(error, bytes, "no random numbers: %s", strerror(errno)), -EIO;
    snprintf(c->name, sizeof c->name, "gradrun-%d-%08x", (int)getpid(), number);
    /* Not from a terminal: it could not stop reading when the job goes to the background. */
    if (fcntl(0, F_GETFD) >= 0 && !isatty(0) && !c->args->is_check)
        c->input = INPUT_WANTED;
    rc = allocate(c, error, bytes);
    if (rc == 0 && c->args->output_dir && !c->args->is_check)
        rc = rank_logs_open(c->args->output_dir, c->n_ranks, &c->logs, error, bytes);
    return rc;
}

void cluster_tear_down(struct cluster *c)
{
    for (unsigned i = 0; c->remotes && i < c->hosts->n; i++)
        remote_deinit(&c->remotes[i]);
    rank_logs_free(c->logs, c->n_ranks);
    frame_writer_deinit(&c->writer);
    console_deinit(&c->console);
    if (c->signal_fd >= 0)
        close(c->signal_fd);
    free(c->remotes);
    free(c->ranks);
    free(c->polled);
    explicit_bzero(c->key, sizeof c->key);
}

static bool has_ssh(const struct cluster *c)
{
    bool has_other = false;
    for (unsigned i = 0; i < c->hosts->n; i++)
        has_other |= !c->remotes[i].is_local;
    return has_other && !c->args->remote_shell;
}

void cluster_begin(struct cluster *c)
{
    const struct remote_shell shell = {
        .program = c->program,
        .command = c->args->remote_shell,
        .identity_file = c->args->identity_file,
        .port = c->args->ssh_port,
        .ssh_age = has_ssh(c) ? ssh_find_age(c->mask, c->signal_fd) : SSH_OLD,
        .mask = c->mask,
    };
    char error[512];
    for (unsigned i = 0; i < c->hosts->n && c->state == CLUSTER_PREPARING; i++) {
        struct remote *remote = &c->remotes[i];
        remote->heard_at = cluster_now_s();
        if (remote_start(remote, &shell, error, sizeof error) < 0)
            cluster_fail(c, remote, LAUNCH_EXIT_FAILED, "%s", error);
    }
    cluster_names_begin(c);
    for (unsigned i = 0; i < c->hosts->n; i++)
        if (c->remotes[i].pid == 0)
            c->remotes[i].state = REMOTE_GONE;
}

/* Our address towards the first host that is not this one; "": there is none. */
static void address_for_others(const struct cluster *c, char out[ADDRESS_BYTES])
{
    out[0] = '\0';
    for (unsigned i = 0; i < c->hosts->n && !out[0]; i++)
        if (c->remotes[i].lookup.address[0] && !address_towards(c->remotes[i].lookup.address, out))
            out[0] = '\0';
}

static void find_address(const struct cluster *c, const struct remote *remote,
                         char out[ADDRESS_BYTES])
{
    out[0] = '\0';
    if (remote->is_local && address_is_own(remote->host->name) &&
        !address_is_loopback(remote->host->name))
        snprintf(out, ADDRESS_BYTES, "%s", remote->host->name);
    else if (remote->is_local)
        address_for_others(c, out);
    else if (!address_is_loopback(remote->lookup.address))
        snprintf(out, ADDRESS_BYTES, "%s", remote->lookup.address);
    if (remote->is_local && !out[0])
        snprintf(out, ADDRESS_BYTES, "127.0.0.1");
}

static bool is_forwarded(const char *entry)
{
    static const char *const names[] = {"PATH=", "PYTHONPATH=", "LD_LIBRARY_PATH=", "GRADD_"};
    if (environment_is_identity(entry))
        return false;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strncmp(entry, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

/* Of -x: NAME is ours to look up, the other hosts have not got it. */
static const char *find_entry(const char *name)
{
    size_t length = strlen(name);
    for (char **e = environ; *e; e++)
        if (strncmp(*e, name, length) == 0 && (*e)[length] == '=')
            return *e;
    return name;
}

/* What the agent's environment gets: two lists of borrowed strings. */
struct forwarded {
    const char **environment, **exports;
};

static bool forward(const struct cluster *c, struct forwarded *out)
{
    size_t n = 1, used = 0, n_exports = 0;
    for (char **e = environ; *e; e++)
        n++;
    while (c->args->exports && c->args->exports[n_exports])
        n_exports++;
    out->environment = calloc(n + n_exports, sizeof *out->environment);
    out->exports = calloc(n_exports + 1, sizeof *out->exports);
    if (!out->environment || !out->exports)
        return false;
    for (char **e = environ; *e; e++)
        if (is_forwarded(*e))
            out->environment[used++] = *e;
    for (size_t i = 0; i < n_exports; i++) {
        const char *x = c->args->exports[i];
        out->exports[i] = strchr(x, '=') ? x : find_entry(x);
        out->environment[used++] = out->exports[i];
    }
    return true;
}

static struct place *make_places(const struct cluster *c, const struct remote *remote)
{
    const struct host *host = remote->host;
    struct place *places = calloc(host->n_ranks, sizeof *places);
    for (unsigned i = 0; places && i < host->n_ranks; i++) {
        places[i] = (struct place){
            .rank = host->first_rank + i, .local_rank = i, .local_size = host->n_ranks};
        hosts_cross(c->hosts, remote->index, i, &places[i].cross_rank, &places[i].cross_size);
    }
    return places;
}

static enum job_daemon which_daemon(const struct cluster *c)
{
    if (c->args->socket || c->args->is_system)
        return JOB_DAEMON_SOCKET;
    return c->n_ranks == 1 && !c->args->is_private ? JOB_DAEMON_NONE : JOB_DAEMON_PRIVATE;
}

void cluster_give_job(struct cluster *c, struct remote *remote)
{
    char address[ADDRESS_BYTES];
    find_address(c, remote, address);
    struct forwarded forwarded = {0};
    struct job job = {
        .name = c->args->job ? c->args->job : c->name,
        .directory = c->directory,
        .socket = c->args->socket ? c->args->socket : LINK_DEFAULT_SOCKET,
        .host = remote->host->name,
        .address = address,
        .key = c->key,
        .daemon = which_daemon(c),
        .is_check = c->args->is_check,
        .is_verbose = c->args->is_verbose,
        .wants_output = !c->args->is_quiet || c->logs,
        .wants_input = c->input != INPUT_NONE && remote->index == 0,
        .n_ranks = c->n_ranks,
        .n_hosts = c->hosts->n,
        .host_index = remote->index,
        .places = make_places(c, remote),
        .n_places = remote->host->n_ranks,
        .command = (const char **)c->args->command,
        .settings = c->args->settings,
    };
    int rc = job.places && forward(c, &forwarded) ? 0 : -ENOMEM;
    job.environment = forwarded.environment;
    job.exports = forwarded.exports;
    if (rc == 0)
        rc = job_pack(&c->writer, &job);
    if (rc == 0 && !sink_push_bytes(&remote->to, c->writer.data, c->writer.n))
        rc = -ENOMEM;
    frame_writer_deinit(&c->writer); /* the key was in it */
    free(job.places);
    free(forwarded.environment);
    free(forwarded.exports);
    if (rc == -EMSGSIZE)
        cluster_fail(c, remote, LAUNCH_EXIT_FAILED,
                     "command and environment are longer than %d bytes", FRAME_JOB_MAX);
    else if (rc < 0)
        cluster_fail(c, remote, LAUNCH_EXIT_FAILED, "%s", strerror(-rc));
}

const struct remote *cluster_find_unreachable(const struct cluster *c)
{
    const struct remote *found = NULL;
    bool has_other = false;
    for (unsigned i = c->hosts->n; i-- > 0;) {
        const struct remote *remote = &c->remotes[i];
        bool is_needed =
            which_daemon(c) == JOB_DAEMON_PRIVATE || (i == 0 && !c->args->coordinator_address);
        if (!address_is_loopback(remote->address))
            has_other = true;
        else if (is_needed)
            found = remote;
    }
    return has_other ? found : NULL;
}

void cluster_start(struct cluster *c)
{
    const struct remote *first = &c->remotes[0];
    const char *address =
        c->args->coordinator_address ? c->args->coordinator_address : first->address;
    c->state = CLUSTER_RUNNING;
    if (c->args->timeout_s > 0)
        c->timeout_at = cluster_now_s() + c->args->timeout_s;
    cluster_say_verbose(c, "job %s: %u ranks on %u hosts, coordinator %s at %s port %u",
                        c->args->job ? c->args->job : c->name, c->n_ranks, c->hosts->n,
                        first->host->name, address, first->port);
    for (unsigned i = 0; i < c->hosts->n; i++)
        cluster_send(c, &c->remotes[i],
                     (struct message){.kind = FRAME_START,
                                      .port = first->port,
                                      .master_port = first->master_port,
                                      .text = address,
                                      .text_bytes = strlen(address)});
    for (unsigned i = 0; i < c->hosts->n && c->is_paused; i++)
        cluster_send(c, &c->remotes[i], (struct message){.kind = FRAME_SIGNAL, .signal = SIGSTOP});
}
