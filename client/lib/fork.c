/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork(): the child inherits the memory of a context but must not speak for it.
 *
 * All contexts are on one list. Around fork() every lock is held, so that the child's copy is
 * whole; the child then closes the connections and marks the context, which makes every call
 * refuse. Lock order: the list, then contexts, then their outgoing
 * halves.
 */
#include <pthread.h>
#include <unistd.h>

#include "context.h"

static LIST_HEAD(, gradd) contexts = LIST_HEAD_INITIALIZER(contexts);
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
    struct gradd *g;
    pthread_mutex_lock(&list_lock);
    LIST_FOREACH(g, &contexts, all)
    {
        pthread_mutex_lock(&g->lock);
        pthread_mutex_lock(&g->out_lock);
    }
}

static void after_fork_in_parent(void)
{
    struct gradd *g;
    LIST_FOREACH(g, &contexts, all)
    {
        pthread_mutex_unlock(&g->out_lock);
        pthread_mutex_unlock(&g->lock);
    }
    pthread_mutex_unlock(&list_lock);
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void after_fork_in_child(void)
{
    struct gradd *g;
    LIST_FOREACH(g, &contexts, all)
    {
        atomic_store(&g->is_forked, true);
        link_deinit(&g->daemon);
        link_deinit(&g->worker);
        close_fd(&g->wake_fd);
        close_fd(&g->event_fd);
        close_fd(&g->epoll_fd);
        /* Threads that waited here are in the parent only. */
        pthread_cond_init(&g->changed, NULL);
        pthread_mutex_unlock(&g->out_lock);
        pthread_mutex_unlock(&g->lock);
    }
    pthread_mutex_unlock(&list_lock);
}

static void install(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void fork_watch(struct gradd *g)
{
    pthread_once(&once, install);
    pthread_mutex_lock(&list_lock);
    LIST_INSERT_HEAD(&contexts, g, all);
    pthread_mutex_unlock(&list_lock);
}

void fork_unwatch(struct gradd *g)
{
    pthread_mutex_lock(&list_lock);
    LIST_REMOVE(g, all);
    pthread_mutex_unlock(&list_lock);
}
