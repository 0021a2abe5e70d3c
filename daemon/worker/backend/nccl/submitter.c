/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/submitter_internal.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

/* Under the mutex: there is something to do. */
static void call_thread(struct submitter *s)
{
    atomic_fetch_add_explicit(&s->n_calls, 1, memory_order_relaxed);
    pthread_cond_signal(&s->work);
}

/* ------------------------------------------------------------------ orders */

/* What the loop has added so far. */
static struct comm *first_comm(struct submitter *s, const struct submitter_client *client)
{
    pthread_mutex_lock(&s->mutex);
    struct comm *first = client->comms;
    pthread_mutex_unlock(&s->mutex);
    return first;
}

/* Communicators end before what runs on them is let go: what is poisoned goes on without its data,
 * which must not travel to other GPUs. */
static void abort_client(struct submitter *s, struct submitter_client *client)
{
    submitter_look(s); /* what is over is over */
    for (struct comm *comm = first_comm(s, client); comm; comm = comm->next)
        if (!comm_is_single(comm))
            comm_abort(comm);
    submitter_abandon(s, client);
}

static void close_client(struct submitter *s, struct submitter_client *client)
{
    for (struct comm *comm = first_comm(s, client); comm; comm = comm->next)
        if (!comm_is_single(comm))
            comm_close(comm);
}

static void serve(struct submitter *s, struct submitter_client *client, bool aborts)
{
    if (aborts)
        abort_client(s, client);
    else
        close_client(s, client);
    pthread_mutex_lock(&s->mutex);
    if (aborts)
        client->s.tells_aborted = true;
    else
        client->s.tells_closed = true;
    if (!aborts) {
        struct submitter_client **link = &s->clients;
        while (*link != client)
            link = &(*link)->s.next;
        *link = client->s.next;
    }
    submitter_report_client(s, client);
    pthread_mutex_unlock(&s->mutex);
}

static void serve_orders(struct submitter *s)
{
    for (;;) {
        pthread_mutex_lock(&s->mutex);
        struct submitter_client *client = s->clients;
        while (client && !client->s.wants_abort && !client->s.wants_close)
            client = client->s.next;
        const bool aborts = client && client->s.wants_abort;
        if (!client)
            s->has_orders = false;
        else if (aborts)
            client->s.wants_abort = false;
        else
            client->s.wants_close = false;
        pthread_mutex_unlock(&s->mutex);
        if (!client)
            return;
        serve(s, client, aborts);
    }
}

/* ------------------------------------------------------------------ the thread */

/* Work often comes soon after work: met without the cost of a wake-up. */
static void spin_for_work(struct submitter *s)
{
    if (s->running || !spin_begins(&s->spin))
        return;
    const uint64_t deadline = clock_now_ns() + SPIN_NS;
    uint64_t now = clock_now_ns(), before;
    do {
        if (atomic_load_explicit(&s->n_calls, memory_order_relaxed) != s->n_seen) {
            spin_succeeded(&s->spin);
            return;
        }
        before = now;
        sched_yield();
        now = clock_now_ns();
    } while (now < deadline && now - before < SPIN_YIELD_NS);
    spin_failed(&s->spin);
}

/* The next submission, if any; false: it is time to end. */
static bool await_work(struct submitter *s, struct submission **out)
{
    spin_for_work(s);
    pthread_mutex_lock(&s->mutex);
    while (!s->first && !s->has_orders && !s->running && !s->stop) {
        s->is_idle = true;
        pthread_cond_broadcast(&s->idle);
        pthread_cond_wait(&s->work, &s->mutex);
    }
    s->is_idle = false;
    s->n_seen = atomic_load_explicit(&s->n_calls, memory_order_relaxed);
    *out = s->first;
    if (*out && !(s->first = (*out)->s.next))
        s->tail = &s->first;
    const bool goes_on = !s->stop || *out || s->has_orders || s->running;
    pthread_mutex_unlock(&s->mutex);
    return goes_on;
}

static void *run(void *data)
{
    struct submitter *s = data;
    struct submission *submission;
    while (await_work(s, &submission)) {
        serve_orders(s);
        if (submission)
            submitter_launch(s, submission);
        submitter_look(s);
        if (!s->running)
            launch_trim(&s->launch);
        else if (!submission)
            submitter_pause(s);
    }
    launch_deinit(&s->launch);
    return NULL;
}

struct submitter *submitter_new(struct loop *loop)
{
    struct submitter *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    pthread_condattr_t attributes;
    s->loop = loop;
    s->tail = &s->first;
    s->reports_tail = &s->reports;
    launch_init(&s->launch);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->work, &attributes);
    pthread_cond_init(&s->idle, &attributes);
    pthread_condattr_destroy(&attributes);
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->watch =
        s->event_fd >= 0 ? watch_fd(loop, s->event_fd, WATCH_READ, submitter_on_news, s) : NULL;
    if (!s->watch || pthread_create(&s->thread, NULL, run, s) != 0) {
        watch_free(s->watch);
        if (s->event_fd >= 0)
            close(s->event_fd);
        free(s);
        return NULL;
    }
    return s;
}

/* Under the mutex, until the thread has nothing left. False: it still has after the deadline. */
static bool await_idle(struct submitter *s, const struct timespec *deadline)
{
    while (s->first || s->has_orders || !s->is_idle)
        if (pthread_cond_timedwait(&s->idle, &s->mutex, deadline) == ETIMEDOUT)
            return false;
    return true;
}

bool submitter_drain(struct submitter *s, unsigned timeout_s)
{
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += timeout_s;
    for (;;) {
        pthread_mutex_lock(&s->mutex);
        const bool is_idle = await_idle(s, &deadline);
        const bool has_news = s->reports || s->client_reports;
        pthread_mutex_unlock(&s->mutex);
        if (!is_idle || !has_news)
            return is_idle;
        submitter_tell(s);
    }
}

void submitter_free(struct submitter *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->mutex);
    s->stop = true;
    call_thread(s);
    pthread_mutex_unlock(&s->mutex);
    pthread_join(s->thread, NULL);
    submitter_tell(s);
    watch_free(s->watch);
    close(s->event_fd);
    pthread_cond_destroy(&s->work);
    pthread_cond_destroy(&s->idle);
    pthread_mutex_destroy(&s->mutex);
    free(s);
}

/* ------------------------------------------------------------------ from the loop */

void submitter_add_comm(struct submitter_client *client, struct comm *take_comm)
{
    struct submitter *s = client->submitter;
    pthread_mutex_lock(&s->mutex);
    if (!client->comms) {
        client->s.next = s->clients; /* its first: known from now on */
        s->clients = client;
    }
    take_comm->next = client->comms;
    client->comms = take_comm;
    pthread_mutex_unlock(&s->mutex);
}

void submitter_push(struct submitter *s, struct submission *submission)
{
    pthread_mutex_lock(&s->mutex);
    submission->s.next = NULL;
    *s->tail = submission;
    s->tail = &submission->s.next;
    call_thread(s);
    pthread_mutex_unlock(&s->mutex);
}

static void order(struct submitter_client *client, bool *what)
{
    struct submitter *s = client->submitter;
    pthread_mutex_lock(&s->mutex);
    *what = s->has_orders = true;
    call_thread(s);
    pthread_mutex_unlock(&s->mutex);
}

void submitter_abort(struct submitter_client *client, int status, const char *text)
{
    if (atomic_load(&client->is_aborted))
        return;
    client->abort_status = status;
    snprintf(client->abort_text, sizeof client->abort_text, "%s", text);
    atomic_store(&client->is_aborted, true);
    if (client->comms)
        order(client, &client->s.wants_abort);
    else
        client->on_aborted(client);
}

void submitter_close(struct submitter_client *client)
{
    if (client->comms)
        order(client, &client->s.wants_close);
    else
        client->on_closed(client);
}
