/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a context: from the environment and the caller's options to a joined rank, and back.
 */
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "context.h"
#include "cuda.h"

enum { STAGE_LIMIT_BYTES = 256 << 20 };

static const char *lookup_environment(void *arg, const char *name)
{
    (void)arg;
    return getenv(name);
}

static int discover(const struct gradd_options *options, struct identity *out)
{
    static const char *const names[] = {"rank", "size", "local_rank", "local_size"};
    char sentence[ERROR_TEXT_BYTES];
    int rc;
    if (options->size < 0)
        return error_set(GRADD_ERR_INVALID,
                         "size=%d: a job has at least one rank (0: ask the launcher's variables)",
                         options->size);
    if (options->size > 0) {
        *out = (struct identity){
            .rank = options->rank,
            .size = options->size,
            .local_rank = options->local_rank,
            .local_size = options->local_size,
            .source = "arguments",
        };
        rc = identity_check(out, names, sentence, sizeof sentence);
        if (rc == 0 && !options->job)
            rc = env_job(lookup_environment, NULL, out->job, sentence, sizeof sentence);
    } else {
        rc = env_identity(lookup_environment, NULL, out, sentence, sizeof sentence);
    }
    if (rc == 0)
        rc = env_coordinator(lookup_environment, NULL, out, out->coordinator, sentence,
                             sizeof sentence);
    if (rc < 0)
        return error_set(GRADD_ERR_INVALID, "%s", sentence);
    if (options->job &&
        (size_t)snprintf(out->job, sizeof out->job, "%s", options->job) >= sizeof out->job)
        return error_set(GRADD_ERR_INVALID, "the job's name has more than %zu bytes",
                         sizeof out->job - 1);
    if (!out->job[0])
        return error_set(GRADD_ERR_INVALID, "the job's name is empty");
    return 0;
}

static struct gradd *context_new(void)
{
    struct gradd *g = calloc(1, sizeof *g);
    if (!g)
        return NULL;
    g->event_fd = g->epoll_fd = -1;
    link_init(&g->daemon, -1);
    link_init(&g->worker, -1);
    g->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (g->wake_fd < 0) {
        free(g);
        return NULL;
    }
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&g->lock, NULL);
    pthread_mutex_init(&g->out_lock, NULL);
    return g;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* In a forked child the descriptors are closed already; the rest is this process's own copy. */
static void context_free(struct gradd *g)
{
    link_deinit(&g->daemon);
    link_deinit(&g->worker);
    close_fd(&g->wake_fd);
    close_fd(&g->event_fd);
    close_fd(&g->epoll_fd);
    op_pool_deinit(&g->ops);
    stage_pool_deinit(&g->stage);
    for (size_t i = 0; i < g->regions.n; i++)
        region_unmap(g->regions.regions[i]);
    free(g->regions.regions);
    cuda_free(g->cuda);
    free(g->sets);
    submit_scratch_free(g->scratch);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    pthread_mutex_destroy(&g->out_lock);
    free(g);
}

static void become_solo(struct gradd *g)
{
    g->is_solo = true;
    g->identity.local_size = 1;
    g->n_nodes = 1;
    snprintf(g->device_text, sizeof g->device_text,
             "a world of one has no worker: its ops run in the trainer's own streams");
    g->epoch = 1;
    g->max_in_flight = UINT32_MAX;
    g->memory_bytes = UINT64_MAX;
}

static void set_limits(struct gradd *g)
{
    uint64_t share = g->memory_bytes / (2 * (uint64_t)(g->identity.local_size ?: 1));
    g->stage.limit = share < STAGE_LIMIT_BYTES ? share : STAGE_LIMIT_BYTES;
}

static const char *choose_socket(const struct gradd_options *options)
{
    if (options->socket)
        return options->socket;
    const char *socket = getenv("GRADD_SOCKET");
    return socket && *socket ? socket : "/run/gradd/gradd.sock";
}

int gradd_init(const struct gradd_options *options, struct gradd **out)
{
    struct gradd_options known = {0};
    if (!out)
        return error_set(GRADD_ERR_INVALID, "the place for the context is NULL");
    int rc = options ? validate_struct(&known, sizeof known, options, sizeof known,
                                       "struct gradd_options")
                     : 0;
    if (rc < 0)
        return rc;
    if (!(known.timeout_s >= 0) || isinf(known.timeout_s))
        return error_set(GRADD_ERR_INVALID, "timeout_s=%g is no time to wait", known.timeout_s);
    struct gradd *g = context_new();
    if (!g)
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory or descriptors: %s", strerror(errno));
    rc = discover(&known, &g->identity);
    if (rc == 0 && g->identity.size == 1)
        become_solo(g);
    else if (rc == 0)
        rc = session_join(g, choose_socket(&known), known.timeout_s);
    if (rc < 0) {
        context_free(g);
        return rc;
    }
    set_limits(g);
    fork_watch(g);
    *out = g;
    return 0;
}

void gradd_shutdown(struct gradd *g)
{
    if (!g)
        return;
    fork_unwatch(g);
    bool is_forked = atomic_load(&g->is_forked);
    if (!is_forked && !g->is_solo)
        session_leave(g);
    if (!is_forked && g->cuda && !cuda_stop(g))
        return; /* a stream may still call into this context: it stays, and is lost */
    context_free(g);
}

/* ------------------------------------------------------------------ who am I */

int gradd_rank(const struct gradd *g)
{
    int rc = context_check_alive(g);
    return rc < 0 ? rc : g->identity.rank;
}

int gradd_size(const struct gradd *g)
{
    int rc = context_check_alive(g);
    return rc < 0 ? rc : g->identity.size;
}

int gradd_local_rank(const struct gradd *g)
{
    int rc = context_check_alive(g);
    return rc < 0 ? rc : g->identity.local_rank;
}

int gradd_local_size(const struct gradd *g)
{
    int rc = context_check_alive(g);
    return rc < 0 ? rc : g->identity.local_size;
}

int gradd_node_rank(const struct gradd *g)
{
    int rc = context_check_alive(g);
    return rc < 0 ? rc : g->node_rank;
}

int gradd_n_nodes(const struct gradd *g)
{
    int rc = context_check_alive(g);
    return rc < 0 ? rc : g->n_nodes;
}

uint64_t gradd_epoch(const struct gradd *g)
{
    return context_check_alive(g) < 0 ? 0 : g->epoch;
}

const char *gradd_job(const struct gradd *g)
{
    return g ? g->identity.job : "";
}

const char *gradd_source(const struct gradd *g)
{
    return g ? g->identity.source : "";
}

const char *gradd_version(void)
{
    return GRADD_VERSION;
}

int gradd_abi_version(void)
{
    return GRADD_ABI_VERSION;
}

void gradd_protocol_range(unsigned *out_min, unsigned *out_max)
{
    if (out_min)
        *out_min = WIRE_PROTOCOL_MIN;
    if (out_max)
        *out_max = WIRE_PROTOCOL_MAX;
}
