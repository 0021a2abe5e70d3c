/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/host/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* One thread's part of the pieces. On a cache line of its own. */
struct share {
    _Alignas(64) atomic_uint_fast64_t next;
    uint64_t end;
};

struct pool_thread {
    struct pool *pool;
    unsigned index;
    pthread_t thread;
};

struct pool {
    unsigned n_threads;
    struct pool_thread *threads;
    unsigned n_started;
    pthread_mutex_t mutex; /* guards generation, n_wanted, n_inside and is_stopping */
    pthread_cond_t wake;   /* a list has come */
    pthread_cond_t idle;   /* n_inside became 0 */
    uint64_t generation;   /* of lists; a thread runs each at most once */
    unsigned n_wanted;     /* threads that may still enter this list */
    unsigned n_inside;     /* threads that hold a pointer to it */
    bool is_stopping;
    bool is_busy;    /* loop only: started, done() not called yet */
    bool tells_loop; /* the last piece writes event_fd */

    const struct strip_list *list; /* while n_inside > 0 or the caller waits */
    struct share *shares;          /* [n_threads] */
    atomic_uint_fast64_t n_finished;
    int event_fd;
    struct watch *watch;
    pool_done_fn *done;
    void *data;
};

/*
 * Take pieces until none is left: first those of the thread's own share, which it took for the same
 * tensors last time and may still have in its caches, then the others'. True for the one caller
 * that finished the last.
 */
static bool run_pieces(struct pool *pool, const struct strip_list *list, unsigned index)
{
    const uint64_t n_pieces = list->n_pieces;
    uint64_t n_mine = 0, piece;
    for (unsigned i = 0; i < pool->n_threads; i++) {
        struct share *share = &pool->shares[(index + i) % pool->n_threads];
        while ((piece = atomic_fetch_add_explicit(&share->next, 1, memory_order_relaxed)) <
               share->end) {
            strip_list_run_piece(list, piece);
            n_mine++;
        }
    }
    return n_mine > 0 &&
           atomic_fetch_add_explicit(&pool->n_finished, n_mine, memory_order_acq_rel) + n_mine ==
               n_pieces;
}

static void *pool_thread(void *data)
{
    const struct pool_thread *self = data;
    struct pool *pool = self->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->mutex);
    while (!pool->is_stopping) {
        if (pool->generation == seen || pool->n_wanted == 0) {
            pthread_cond_wait(&pool->wake, &pool->mutex);
            continue;
        }
        seen = pool->generation;
        pool->n_wanted--;
        pool->n_inside++;
        const struct strip_list *list = pool->list;
        bool tells_loop = pool->tells_loop;
        pthread_mutex_unlock(&pool->mutex);
        bool is_last = run_pieces(pool, list, self->index);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->n_inside == 0)
            pthread_cond_signal(&pool->idle);
        if (is_last && tells_loop)
            eventfd_write(pool->event_fd, 1);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static void on_list_done(void *data, int fd, unsigned events)
{
    struct pool *pool = data;
    eventfd_t count;
    if (eventfd_read(fd, &count) < 0)
        return;
    pthread_mutex_lock(&pool->mutex);
    while (pool->n_inside > 0) /* they have no piece left: a few instructions */
        pthread_cond_wait(&pool->idle, &pool->mutex);
    pool->n_wanted = 0;
    pthread_mutex_unlock(&pool->mutex);
    pool->is_busy = false;
    pool->done(pool->data);
}

/* Only while no thread is inside a list. */
static void deal(struct pool *pool, const struct strip_list *list)
{
    for (unsigned i = 0; i < pool->n_threads; i++) {
        struct share *share = &pool->shares[i];
        atomic_store_explicit(&share->next, list->n_pieces * i / pool->n_threads,
                              memory_order_relaxed);
        share->end = list->n_pieces * (i + 1) / pool->n_threads;
    }
    atomic_store_explicit(&pool->n_finished, 0, memory_order_relaxed);
}

static void post(struct pool *pool, const struct strip_list *list, unsigned n_wanted,
                 bool tells_loop)
{
    pthread_mutex_lock(&pool->mutex);
    pool->list = list;
    pool->tells_loop = tells_loop;
    deal(pool, list);
    pool->n_wanted = n_wanted;
    pool->generation++;
    if (n_wanted == 1)
        pthread_cond_signal(&pool->wake);
    else
        pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_start(struct pool *pool, const struct strip_list *list)
{
    pool->is_busy = true;
    post(pool, list, pool->n_threads, true);
}

void pool_run(struct pool *pool, const struct strip_list *list)
{
    if (pool->n_threads > 1)
        post(pool, list, pool->n_threads - 1, false);
    else
        deal(pool, list);
    run_pieces(pool, list, 0);
    pthread_mutex_lock(&pool->mutex);
    pool->n_wanted = 0; /* a thread that has not woken yet need not come */
    while (pool->n_inside > 0)
        pthread_cond_wait(&pool->idle, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

bool pool_is_busy(const struct pool *pool)
{
    return pool->is_busy;
}

unsigned pool_n_threads(const struct pool *pool)
{
    return pool->n_threads;
}

static unsigned start_threads(struct pool *pool)
{
    sigset_t all, before;
    sigfillset(&all); /* signals are the loop thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->n_started < pool->n_threads) {
        struct pool_thread *self = &pool->threads[pool->n_started];
        *self = (struct pool_thread){.pool = pool, .index = pool->n_started};
        if (pthread_create(&self->thread, NULL, pool_thread, self) != 0)
            break;
        pool->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool->n_started;
}

struct pool *pool_new(struct loop *loop, unsigned n_threads, pool_done_fn *done, void *data)
{
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->idle, NULL);
    pool->n_threads = n_threads;
    pool->done = done;
    pool->data = data;
    pool->threads = calloc(n_threads, sizeof *pool->threads);
    pool->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pool->event_fd >= 0)
        pool->watch = watch_fd(loop, pool->event_fd, WATCH_READ, on_list_done, pool);
    pool->shares = aligned_alloc(64, n_threads * sizeof *pool->shares);
    if (!pool->threads || !pool->shares || !pool->watch || start_threads(pool) < n_threads) {
        pool_free(pool);
        return NULL;
    }
    return pool;
}

void pool_free(struct pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->mutex);
    pool->is_stopping = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->n_started; i++)
        pthread_join(pool->threads[i].thread, NULL);
    watch_free(pool->watch);
    if (pool->event_fd >= 0)
        close(pool->event_fd);
    pthread_cond_destroy(&pool->idle);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->threads);
    free(pool->shares);
    free(pool);
}
