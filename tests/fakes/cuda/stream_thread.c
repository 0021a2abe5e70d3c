/* SPDX-License-Identifier: Apache-2.0 */
/* The thread of a stream: runs what is pushed, in order, each item after a seeded random delay. */
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "stream.h"

static _Thread_local CUstream this_stream;

/* xorshift64*: the same delays for the same seed. */
static uint64_t next_random(CUstream s)
{
    s->random ^= s->random >> 12;
    s->random ^= s->random << 25;
    s->random ^= s->random >> 27;
    return s->random * 0x2545f4914f6cdd1dULL;
}

static void delay(CUstream s)
{
    if (fake_settings.delay_us == 0)
        return;
    long us = (long)(next_random(s) % fake_settings.delay_us);
    struct timespec pause = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

static struct item *take(CUstream s)
{
    pthread_mutex_lock(&s->lock);
    while (s->head == NULL && !s->is_closing)
        pthread_cond_wait(&s->changed, &s->lock);
    struct item *item = s->head;
    if (item != NULL && (s->head = item->next) == NULL)
        s->tail = &s->head;
    pthread_mutex_unlock(&s->lock);
    return item;
}

void *fake_stream_thread(void *stream)
{
    CUstream s = stream;
    fake_in_stream_thread = true;
    this_stream = s;
    struct item *item;
    while ((item = take(s)) != NULL) {
        delay(s);
        item->run(item->data);
        free(item);
        pthread_mutex_lock(&s->lock);
        s->done++;
        pthread_cond_broadcast(&s->changed);
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

void fake_stream_append(CUstream s, void (*run)(void *), void *data)
{
    struct item *item = malloc(sizeof *item);
    if (item == NULL)
        fake_die("out of memory");
    *item = (struct item){.run = run, .data = data};
    pthread_mutex_lock(&s->lock);
    *s->tail = item;
    s->tail = &item->next;
    s->pushed++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

void fake_stream_wait_done(CUstream s, uint64_t item)
{
    pthread_mutex_lock(&s->lock);
    while (s->done < item)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

bool fake_stream_is_faulted(void)
{
    return atomic_load(&this_stream->context->sticky) != 0;
}

CUcontext fake_stream_context(void)
{
    return this_stream->context;
}

void fake_stream_fault(CUresult error)
{
    fake_context_fail_in(this_stream->context, error);
}
