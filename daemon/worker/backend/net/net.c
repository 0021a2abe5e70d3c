/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend's two sides: the loop hands batches over and is told when they are done; the net
 * thread drives the engine. Between them two queues under one mutex and one eventfd each way.
 *
 * A small batch that meets an idle engine is begun on the loop thread, and ended there if all peers
 * have sent already: waking a thread takes longer than the exchange. The engine has a lock for
 * that, taken before the mutex; the loop thread never waits for it.
 */
#include "worker/backend/net/net.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "worker/backend/net/engine.h"
#include "worker/plan/signature.h"

enum { SMALL_BYTES = 64 * 1024 }; /* begun on the loop thread: some ten microseconds */

struct batch_queue {
    struct backend_batch *first, **last;
};

struct backend {
    struct net_setup setup;
    pthread_mutex_t lock; /* of the engine */
    struct engine *engine;
    pthread_t thread;
    bool has_thread;
    int wake_fd; /* the loop has something for the thread */
    int tell_fd; /* and the other way round */
    struct watch *watch;

    pthread_mutex_t mutex; /* guards what follows */
    struct batch_queue incoming, done, broken;
    struct engine_failure failure; /* by a peer, or by net_abort() */
    bool is_stopping;

    /* The loop's: why no batch runs any more. */
    struct engine_failure ended;
    bool has_told;

    /* The loop's: net_find_stall(). */
    uint64_t n_given, n_ended; /* batches with data */
    uint64_t progress;         /* at the last look: only ever grows */
    uint64_t progress_ns;      /* of the look that saw it change; 0: nothing was under way */
};

static void queue_init(struct batch_queue *queue)
{
    queue->first = NULL;
    queue->last = &queue->first;
}

static void queue_push(struct batch_queue *queue, struct backend_batch *batch)
{
    batch->next = NULL;
    *queue->last = batch;
    queue->last = &batch->next;
}

static struct backend_batch *queue_pop(struct batch_queue *queue)
{
    struct backend_batch *batch = queue->first;
    if (batch && !(queue->first = batch->next))
        queue->last = &queue->first;
    return batch;
}

/* ------------------------------------------------------------------ with the engine's lock */

/* Everything that is not done is broken. Called with the mutex held. */
static void break_all(struct backend *net)
{
    struct backend_batch *batch;
    while ((batch = engine_take_unfinished(net->engine)))
        queue_push(&net->broken, batch);
    while ((batch = queue_pop(&net->incoming)))
        queue_push(&net->broken, batch);
}

/* The next batch for the engine, or NULL. */
static struct backend_batch *take_incoming(struct backend *net)
{
    struct backend_batch *batch = NULL;
    pthread_mutex_lock(&net->mutex);
    if (net->failure.status == GRADD_OK && engine_has_room(net->engine))
        batch = queue_pop(&net->incoming);
    pthread_mutex_unlock(&net->mutex);
    return batch;
}

/* The other nodes count on this batch: without it the epoch is over. */
static void fail_start(struct backend *net, struct backend_batch *batch, int error)
{
    const char *text = error == -ENOMEM ? "the worker has no memory for this batch"
                                        : "the worker has no data connection to a node of the job";
    pthread_mutex_lock(&net->mutex);
    queue_push(&net->broken, batch);
    if (net->failure.status == GRADD_OK) {
        net->failure.status = error == -ENOMEM ? GRADD_ERR_NO_MEMORY : GRADD_ERR_INTERNAL;
        net->failure.node = net->setup.node_rank;
        snprintf(net->failure.text, sizeof net->failure.text, "%s", text);
    }
    pthread_mutex_unlock(&net->mutex);
}

/* Exchange what both sides have for each other. True: there is something for the loop. */
static bool meet(struct backend *net)
{
    struct backend_batch *batch;
    bool has_news = false;
    while ((batch = take_incoming(net))) {
        int result = engine_start(net->engine, batch); /* not under the mutex: it may take time */
        if (result < 0)
            fail_start(net, batch, result);
    }
    pthread_mutex_lock(&net->mutex);
    while ((batch = engine_take_done(net->engine))) {
        queue_push(&net->done, batch);
        has_news = true;
    }
    if (net->failure.status == GRADD_OK)
        net->failure = *engine_failure(net->engine);
    if (net->failure.status != GRADD_OK) {
        break_all(net);
        has_news |= net->broken.first != NULL || engine_failure(net->engine)->status != GRADD_OK;
    }
    pthread_mutex_unlock(&net->mutex);
    return has_news;
}

static bool has_incoming(struct backend *net)
{
    pthread_mutex_lock(&net->mutex);
    bool has = net->incoming.first != NULL;
    pthread_mutex_unlock(&net->mutex);
    return has;
}

static bool has_failed(struct backend *net)
{
    pthread_mutex_lock(&net->mutex);
    bool has = net->failure.status != GRADD_OK;
    pthread_mutex_unlock(&net->mutex);
    return has;
}

/* ------------------------------------------------------------------ net thread */

static bool is_stopping(struct backend *net)
{
    pthread_mutex_lock(&net->mutex);
    bool is = net->is_stopping;
    pthread_mutex_unlock(&net->mutex);
    return is;
}

static void *net_thread(void *data)
{
    struct backend *net = data;
    eventfd_t count;
    pthread_mutex_lock(&net->lock);
    while (!is_stopping(net)) {
        if (meet(net))
            eventfd_write(net->tell_fd, 1);
        if (!has_failed(net) && engine_turn(net->engine))
            continue;
        engine_wait(net->engine, net->wake_fd, &net->lock);
        eventfd_read(net->wake_fd, &count);
    }
    pthread_mutex_unlock(&net->lock);
    return NULL;
}

/* ------------------------------------------------------------------ loop */

static void complete(struct backend_batch *batch, int status, const char *text)
{
    for (size_t i = 0; i < batch->n_ops; i++) {
        batch->ops[i]->status = status;
        batch->ops[i]->text = text;
    }
    batch->done(batch->data, batch);
}

/* One that has been given to the net thread. */
static void finish(struct backend *net, struct backend_batch *batch, int status, const char *text)
{
    net->n_ended++;
    complete(batch, status, text);
}

static struct backend_batch *pop_locked(struct backend *net, struct batch_queue *queue)
{
    pthread_mutex_lock(&net->mutex);
    struct backend_batch *batch = queue_pop(queue);
    pthread_mutex_unlock(&net->mutex);
    return batch;
}

static void deliver_done(struct backend *net)
{
    struct backend_batch *batch;
    while ((batch = pop_locked(net, &net->done)))
        finish(net, batch, GRADD_OK, "");
}

static void on_told(void *data, int fd, unsigned events)
{
    struct backend *net = data;
    struct backend_batch *batch;
    eventfd_t count;
    if (eventfd_read(fd, &count) < 0)
        return;
    pthread_mutex_lock(&net->mutex);
    if (net->ended.status == GRADD_OK)
        net->ended = net->failure;
    pthread_mutex_unlock(&net->mutex);
    deliver_done(net);
    while ((batch = pop_locked(net, &net->broken)))
        finish(net, batch, net->ended.status, net->ended.text);
    if (net->ended.status != GRADD_OK && !net->has_told) {
        net->has_told = true;
        net->setup.on_lost(net->setup.data, net->ended.node, net->ended.text);
    }
}

static bool is_small(const struct backend_batch *batch)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < batch->n_ops && bytes <= SMALL_BYTES; i++) {
        const struct backend_op *op = batch->ops[i];
        if (op->kind != GRADD_ALLREDUCE && op->kind != GRADD_BROADCAST)
            return false;
        bytes += (op->end - op->begin) * dtype_bytes(op->dtype);
    }
    return bytes <= SMALL_BYTES;
}

/* Begin what is incoming on this thread, if nothing else is under way. False: the net thread is
 * busy and will see it. */
static bool begin_here(struct backend *net)
{
    bool has_news = false;
    if (pthread_mutex_trylock(&net->lock) != 0)
        return false;
    if (engine_is_idle(net->engine)) {
        has_news = meet(net);
        if (!has_failed(net))
            engine_turn(net->engine);
        has_news |= meet(net);
    }
    const bool is_over = engine_is_idle(net->engine) && !has_incoming(net);
    pthread_mutex_unlock(&net->lock);
    if (!is_over) /* before the callbacks, which may take their time */
        eventfd_write(net->wake_fd, 1);
    if (has_news && has_failed(net))
        eventfd_write(net->tell_fd, 1); /* told from the loop, not from inside run() */
    deliver_done(net);
    return true;
}

static bool has_data(const struct backend_batch *batch)
{
    for (size_t i = 0; i < batch->n_ops; i++)
        if (batch->ops[i]->kind <= GRADD_ALLTOALL)
            return true;
    return false;
}

static void net_run(struct backend *net, struct backend_batch *batch)
{
    if (net->ended.status != GRADD_OK) {
        complete(batch, net->ended.status, net->ended.text);
        return;
    }
    if (!has_data(batch)) {
        complete(batch, GRADD_OK, "");
        return;
    }
    net->n_given++;
    pthread_mutex_lock(&net->mutex);
    queue_push(&net->incoming, batch);
    pthread_mutex_unlock(&net->mutex);
    if (!is_small(batch) || !begin_here(net))
        eventfd_write(net->wake_fd, 1);
}

void net_abort(struct backend *net, int status, const char *text)
{
    if (net->ended.status != GRADD_OK)
        return;
    net->ended.status = status;
    snprintf(net->ended.text, sizeof net->ended.text, "%s", text);
    net->has_told = true; /* whoever aborts knows */
    pthread_mutex_lock(&net->mutex);
    if (net->failure.status == GRADD_OK)
        net->failure = net->ended;
    pthread_mutex_unlock(&net->mutex);
    eventfd_write(net->wake_fd, 1);
}

/* ------------------------------------------------------------------ stalls */

bool net_is_busy(const struct backend *net)
{
    return net->n_given != net->n_ended;
}

static uint64_t progress_of(const struct backend *net)
{
    struct net_link_stats stats[NET_NODES_MAX];
    uint64_t progress = net->n_ended;
    size_t n = engine_stats(net->engine, stats, NET_NODES_MAX);
    for (size_t i = 0; i < n; i++)
        progress += stats[i].sent_bytes + stats[i].received_bytes;
    return progress;
}

/* False: it waits for no link, or is at work. */
static bool describe_stall(struct backend *net, struct net_stall *out)
{
    struct engine_stall stall;
    if (pthread_mutex_trylock(&net->lock) != 0)
        return false;
    bool is_waiting = engine_describe_stall(net->engine, &stall);
    pthread_mutex_unlock(&net->lock);
    if (!is_waiting)
        return false;
    out->node = stall.node;
    out->is_sure = stall.is_sure;
    snprintf(out->text, sizeof out->text, "%s", stall.text);
    return true;
}

bool net_find_stall(struct backend *net, uint64_t now_ns, struct net_stall *out)
{
    const uint64_t before = net->progress;
    if (!net_is_busy(net) || net->ended.status != GRADD_OK) {
        net->progress_ns = 0;
        return false;
    }
    net->progress = progress_of(net);
    if (!net->progress_ns || net->progress != before || !describe_stall(net, out)) {
        net->progress_ns = now_ns;
        return false;
    }
    out->waited_ns = now_ns - net->progress_ns;
    return true;
}

void net_give_up(struct backend *net, uint32_t node, const char *text)
{
    pthread_mutex_lock(&net->mutex);
    if (net->failure.status == GRADD_OK) {
        net->failure.status = GRADD_ERR_RANK_LOST;
        net->failure.node = node;
        snprintf(net->failure.text, sizeof net->failure.text, "%s", text);
    }
    pthread_mutex_unlock(&net->mutex);
    eventfd_write(net->wake_fd, 1);
}

size_t net_stats(const struct backend *net, struct net_link_stats *out, size_t capacity)
{
    return engine_stats(net->engine, out, capacity);
}

/* ------------------------------------------------------------------ life */

static void net_free(struct backend *net)
{
    if (!net)
        return;
    if (net->has_thread) {
        pthread_mutex_lock(&net->mutex);
        net->is_stopping = true;
        pthread_mutex_unlock(&net->mutex);
        eventfd_write(net->wake_fd, 1);
        pthread_join(net->thread, NULL);
    }
    watch_free(net->watch);
    engine_free(net->engine);
    if (net->wake_fd >= 0)
        close(net->wake_fd);
    if (net->tell_fd >= 0)
        close(net->tell_fd);
    pthread_mutex_destroy(&net->mutex);
    pthread_mutex_destroy(&net->lock);
    free(net);
}

static bool start_thread(struct backend *net)
{
    sigset_t all, before;
    sigfillset(&all); /* signals are the loop thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    net->has_thread = pthread_create(&net->thread, NULL, net_thread, net) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return net->has_thread;
}

struct backend *net_new(const struct net_setup *setup, const char **out_text)
{
    struct backend *net = calloc(1, sizeof *net);
    struct engine *engine = engine_new(setup);
    if (!net || !engine) {
        engine_free(engine);
        free(net);
        *out_text = "no memory for the data connections";
        return NULL;
    }
    net->setup = *setup;
    net->setup.links = NULL;
    net->engine = engine;
    pthread_mutex_init(&net->mutex, NULL);
    pthread_mutex_init(&net->lock, NULL);
    queue_init(&net->incoming);
    queue_init(&net->done);
    queue_init(&net->broken);
    net->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    net->tell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (net->tell_fd >= 0)
        net->watch = watch_fd(setup->loop, net->tell_fd, WATCH_READ, on_told, net);
    if (net->wake_fd < 0 || !net->watch || !start_thread(net)) {
        net_free(net);
        *out_text = "no descriptors or threads for the data connections";
        return NULL;
    }
    return net;
}

static unsigned net_n_threads(const struct backend *net)
{
    return 1;
}

const struct backend_ops backend_net = {
    .name = "net",
    .free = net_free,
    .run = net_run,
    .n_threads = net_n_threads,
};
