/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The context: its life, its identity, and the handles of its submissions.
 *
 * Invariant: an op that was submitted ends exactly once, by its completion or by the epoch's
 * failure; its record lives until its submission has ended, was released and nobody waits.
 */
#include "context.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { STAGE_LIMIT_BYTES = 256 << 20 };

uint64_t context_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ------------------------------------------------------------------ entering */

static int check_alive(const struct gradd *g)
{
    if (!g)
        return error_set(GRADD_ERR_INVALID, "the context is NULL");
    if (atomic_load_explicit(&g->is_forked, memory_order_relaxed))
        return error_set(GRADD_ERR_FORKED,
                         "job %s, rank %d: this process is a fork of the one that joined: call "
                         "gradd_init() here, or use the context in the parent only",
                         g->identity.job, g->identity.rank);
    return 0;
}

int context_enter(struct gradd *g)
{
    int rc = check_alive(g);
    if (rc == 0)
        pthread_mutex_lock(&g->lock);
    return rc;
}

void context_leave(struct gradd *g)
{
    pthread_mutex_unlock(&g->lock);
}

int context_check(const struct gradd *g)
{
    return g->failure ? error_set(g->failure, "%s", g->failure_text) : 0;
}

/* ------------------------------------------------------------------ the end of ops */

static void drop_feed(struct gradd *g, struct op *op)
{
    struct op **at = &g->feeds;
    while (*at && *at != op)
        at = &(*at)->next_feed;
    if (*at)
        *at = op->next_feed;
    op->has_feed = false;
}

/* Process sets come and go by ops of their own. 0 or -ENOMEM. */
static int note_set(struct gradd *g, struct op *op)
{
    if (op->kind == GRADD_SET_REMOVE)
        context_remove_set(g, op->set.id);
    if (op->kind != GRADD_SET_ADD || op->n_counts == 0)
        return 0;
    op->set.id = (uint32_t)op->counts[0];
    return context_add_set(g, &op->set);
}

void context_end_op(struct gradd *g, struct op *op, int status, const char *text)
{
    struct op *lead = op->lead;
    if (status == GRADD_OK && note_set(g, op) < 0) {
        status = GRADD_ERR_NO_MEMORY;
        text = "out of memory for the new process set";
    }
    if (status == GRADD_OK)
        stage_finish(op);
    if (op->has_feed)
        drop_feed(g, op);
    op_drop_regions(op);
    stage_release(g, op);
    op->state = OP_ENDED;
    g->ops.n_running--;
    if (status != GRADD_OK && lead->status == GRADD_OK) {
        lead->status = status;
        lead->text = text ? strdup(text) : NULL;
    }
    if (--lead->n_running > 0)
        return;
    g->has_ended = true;
    context_reap(g, lead);
}

void context_reap(struct gradd *g, struct op *lead)
{
    if (lead->n_running > 0 || !lead->is_released || lead->n_waiting > 0)
        return;
    while (lead) {
        struct op *next = lead->next;
        op_free(&g->ops, lead);
        lead = next;
    }
}

void context_fail(struct gradd *g, int status, const char *format, ...)
{
    if (g->failure)
        return;
    g->failure = status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(g->failure_text, sizeof g->failure_text, format, arguments);
    va_end(arguments);

    struct op *op;
    for (uint32_t slot = 0; (op = op_at(&g->ops, slot)); slot++)
        if (op->state == OP_RUNNING)
            context_end_op(g, op, status, NULL);
    for (struct region *region = g->unanswered; region; region = region->next) {
        region->is_answered = true;
        region->status = status;
    }
    g->has_ended = true;
}

/* ------------------------------------------------------------------ sets */

const struct process_set *context_find_set(const struct gradd *g, uint32_t id)
{
    for (size_t i = 0; i < g->n_sets; i++)
        if (g->sets[i].id == id)
            return &g->sets[i];
    return NULL;
}

int context_add_set(struct gradd *g, const struct process_set *set)
{
    if (context_find_set(g, set->id))
        return 0;
    struct process_set *sets = realloc(g->sets, (g->n_sets + 1) * sizeof *sets);
    if (!sets)
        return -ENOMEM;
    g->sets = sets;
    sets[g->n_sets++] = *set;
    return 0;
}

void context_remove_set(struct gradd *g, uint32_t id)
{
    for (size_t i = 0; i < g->n_sets; i++)
        if (g->sets[i].id == id)
            g->sets[i] = g->sets[--g->n_sets];
}

/* ------------------------------------------------------------------ regions */

static bool is_answered(const void *arg)
{
    return ((const struct region *)arg)->is_answered;
}

static void forget_unanswered(struct gradd *g, const struct region *region)
{
    struct region **at = &g->unanswered;
    while (*at && *at != region)
        at = &(*at)->next;
    if (*at)
        *at = region->next;
}

/* Tell the worker, wait for its answer. */
static int register_region(struct gradd *g, struct region *region, int fd)
{
    region->id = ++g->next_region;
    Pb__Register message = PB__REGISTER__INIT;
    message.region = region->id;
    message.bytes = region->bytes;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = PB__ENVELOPE__BODY_REGISTER;
    envelope.register_ = &message;
    int rc = channel_push(g, &envelope, &fd, 1);
    if (rc < 0)
        return error_set(GRADD_ERR_NO_MEMORY, "shared memory of %zu bytes: %s", region->bytes,
                         strerror(-rc));
    region->next = g->unanswered;
    g->unanswered = region;
    channel_flush(g);
    channel_wait(g, is_answered, region, WAIT_FOREVER);
    forget_unanswered(g, region);
    if (g->failure)
        return context_check(g);
    if (region->status != GRADD_OK)
        return error_set(region->status, "%s",
                         region->text ? region->text : "the worker refused shared memory");
    return 0;
}

static int new_region(struct gradd *g, size_t bytes, bool is_staging, struct region **out)
{
    struct region *region;
    int fd;
    if (bytes > g->memory_bytes)
        return error_set(GRADD_ERR_NO_MEMORY,
                         "job %s: shared memory of %zu bytes, the job's quota is %llu",
                         g->identity.job, bytes, (unsigned long long)g->memory_bytes);
    pthread_mutex_unlock(&g->lock);
    int rc = region_map(bytes, &region, &fd);
    pthread_mutex_lock(&g->lock);
    if (rc < 0)
        return rc;
    region->is_staging = is_staging;
    rc = context_check(g);
    if (rc == 0 && !g->is_solo)
        rc = register_region(g, region, fd);
    close(fd);
    if (rc == 0 && !is_staging && region_table_add(&g->regions, region) < 0) {
        context_free_region(g, region);
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    }
    if (rc == 0)
        *out = region;
    else
        region_unmap(region);
    return rc;
}

int context_new_region(struct gradd *g, size_t bytes, bool is_staging, struct region **out)
{
    int rc = new_region(g, bytes, is_staging, out);
    if (rc != GRADD_ERR_NO_MEMORY || g->failure)
        return rc;
    /* Idle staging buffers are ours to return to the job's quota. */
    uint64_t before = g->stage.bytes;
    stage_trim(g, UINT64_MAX);
    return g->stage.bytes < before ? new_region(g, bytes, is_staging, out) : rc;
}

void context_free_region(struct gradd *g, struct region *region)
{
    if (!g->is_solo && !g->failure) {
        Pb__Unregister message = PB__UNREGISTER__INIT;
        message.region = region->id;
        Pb__Envelope envelope = PB__ENVELOPE__INIT;
        envelope.body_case = PB__ENVELOPE__BODY_UNREGISTER;
        envelope.unregister = &message;
        channel_push(g, &envelope, NULL, 0);
        channel_flush(g);
    }
    region_unmap(region);
}

/* ------------------------------------------------------------------ init and shutdown */

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
    free(g->sets);
    submit_scratch_free(g->scratch);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static void become_solo(struct gradd *g)
{
    g->is_solo = true;
    g->identity.local_size = 1;
    g->n_nodes = 1;
    g->epoch = 1;
    g->max_in_flight = UINT32_MAX;
    g->memory_bytes = UINT64_MAX;
}

static void set_limits(struct gradd *g)
{
    cpu_set_t cores;
    int n_cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    g->may_spin = g->identity.local_size + 1 <= n_cores;
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
    if (!atomic_load(&g->is_forked) && !g->is_solo)
        session_leave(g);
    context_free(g);
}

/* ------------------------------------------------------------------ who am I */

int gradd_rank(const struct gradd *g)
{
    int rc = check_alive(g);
    return rc < 0 ? rc : g->identity.rank;
}

int gradd_size(const struct gradd *g)
{
    int rc = check_alive(g);
    return rc < 0 ? rc : g->identity.size;
}

int gradd_local_rank(const struct gradd *g)
{
    int rc = check_alive(g);
    return rc < 0 ? rc : g->identity.local_rank;
}

int gradd_local_size(const struct gradd *g)
{
    int rc = check_alive(g);
    return rc < 0 ? rc : g->identity.local_size;
}

int gradd_node_rank(const struct gradd *g)
{
    int rc = check_alive(g);
    return rc < 0 ? rc : g->node_rank;
}

int gradd_n_nodes(const struct gradd *g)
{
    int rc = check_alive(g);
    return rc < 0 ? rc : g->n_nodes;
}

uint64_t gradd_epoch(const struct gradd *g)
{
    return check_alive(g) < 0 ? 0 : g->epoch;
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

/* ------------------------------------------------------------------ memory */

void *gradd_alloc(struct gradd *g, size_t bytes)
{
    if (context_enter(g) < 0)
        return NULL;
    struct region *region;
    int rc = context_check(g);
    if (rc == 0)
        rc = context_new_region(g, bytes, false, &region);
    void *memory = rc == 0 ? region->base : NULL;
    context_leave(g);
    return memory;
}

int gradd_free(struct gradd *g, void *memory)
{
    if (!memory)
        return GRADD_OK;
    int rc = context_enter(g);
    if (rc < 0)
        return rc;
    struct region *region = region_table_find(&g->regions, memory);
    if (!region || region->base != memory) {
        rc = error_set(GRADD_ERR_INVALID, "%p was not returned by gradd_alloc() of this context",
                       memory);
    } else if (region->n_uses > 0) {
        rc = error_set(GRADD_ERR_INVALID, "memory %p is in use by %u ops in flight: wait for them",
                       memory, region->n_uses);
    } else {
        region_table_remove(&g->regions, region);
        context_free_region(g, region);
    }
    context_leave(g);
    return rc;
}
