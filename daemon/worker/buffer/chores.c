/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/buffer/chores.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct queue {
    struct chore *first, **tail;
};

struct chores {
    pthread_t thread;
    pthread_mutex_t mutex; /* guards to_do, finished and is_stopping */
    pthread_cond_t wake;
    struct queue to_do, finished;
    bool is_stopping, has_thread;
    int event_fd;
    struct watch *watch;
};

static void queue_init(struct queue *queue)
{
    queue->first = NULL;
    queue->tail = &queue->first;
}

static void queue_push(struct queue *queue, struct chore *chore)
{
    chore->next = NULL;
    *queue->tail = chore;
    queue->tail = &chore->next;
}

static struct chore *queue_pop(struct queue *queue)
{
    struct chore *chore = queue->first;
    if (chore && !(queue->first = chore->next))
        queue->tail = &queue->first;
    return chore;
}

static void *chores_thread(void *data)
{
    struct chores *chores = data;
    pthread_mutex_lock(&chores->mutex);
    for (;;) {
        struct chore *chore = queue_pop(&chores->to_do);
        if (chore) {
            pthread_mutex_unlock(&chores->mutex);
            chore->run(chore);
            pthread_mutex_lock(&chores->mutex);
            queue_push(&chores->finished, chore);
            eventfd_write(chores->event_fd, 1);
        } else if (chores->is_stopping) {
            break;
        } else {
            pthread_cond_wait(&chores->wake, &chores->mutex);
        }
    }
    pthread_mutex_unlock(&chores->mutex);
    return NULL;
}

static void finish(struct chores *chores)
{
    for (;;) {
        pthread_mutex_lock(&chores->mutex);
        struct chore *chore = queue_pop(&chores->finished);
        pthread_mutex_unlock(&chores->mutex);
        if (!chore)
            return;
        chore->done(chore);
    }
}

static void on_finished(void *data, int fd, unsigned events)
{
    eventfd_t count;
    eventfd_read(fd, &count);
    finish(data);
}

struct chores *chores_new(struct loop *loop)
{
    struct chores *chores = calloc(1, sizeof *chores);
    if (!chores)
        return NULL;
    pthread_mutex_init(&chores->mutex, NULL);
    pthread_cond_init(&chores->wake, NULL);
    queue_init(&chores->to_do);
    queue_init(&chores->finished);
    chores->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (chores->event_fd >= 0)
        chores->watch = watch_fd(loop, chores->event_fd, WATCH_READ, on_finished, chores);
    chores->has_thread =
        chores->watch && pthread_create(&chores->thread, NULL, chores_thread, chores) == 0;
    if (!chores->has_thread) {
        chores_free(chores);
        return NULL;
    }
    return chores;
}

void chores_free(struct chores *chores)
{
    if (!chores)
        return;
    if (chores->has_thread) {
        pthread_mutex_lock(&chores->mutex);
        chores->is_stopping = true;
        pthread_cond_signal(&chores->wake);
        pthread_mutex_unlock(&chores->mutex);
        pthread_join(chores->thread, NULL);
        finish(chores);
        struct chore *chore; /* of what done functions have added since */
        while ((chore = queue_pop(&chores->to_do))) {
            chore->run(chore);
            chore->done(chore);
        }
    }
    watch_free(chores->watch);
    if (chores->event_fd >= 0)
        close(chores->event_fd);
    pthread_cond_destroy(&chores->wake);
    pthread_mutex_destroy(&chores->mutex);
    free(chores);
}

void chores_add(struct chores *chores, struct chore *chore)
{
    pthread_mutex_lock(&chores->mutex);
    queue_push(&chores->to_do, chore);
    pthread_cond_signal(&chores->wake);
    pthread_mutex_unlock(&chores->mutex);
}
