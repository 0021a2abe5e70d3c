/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/submitter_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ------------------------------------------------------------------ from the thread */

static void ring(struct submitter *s)
{
    const uint64_t one = 1;
    if (write(s->event_fd, &one, sizeof one) < 0 && errno != EAGAIN)
        abort(); /* an eventfd takes it, or the process is lost */
}

/* tells: its field that says what there is to tell. */
static void report(struct submitter *s, struct submission *submission, bool *tells)
{
    pthread_mutex_lock(&s->mutex);
    *tells = true;
    if (!submission->s.is_reported) {
        submission->s.is_reported = true;
        submission->s.next_report = NULL;
        *s->reports_tail = submission;
        s->reports_tail = &submission->s.next_report;
    }
    pthread_mutex_unlock(&s->mutex);
    s->n_looks = 0;
    ring(s);
}

void submitter_report_enqueued(struct submitter *s, struct submission *submission)
{
    report(s, submission, &submission->s.tells_enqueued);
}

void submitter_report_done(struct submitter *s, struct submission *submission)
{
    report(s, submission, &submission->s.tells_done);
}

void submitter_report_client(struct submitter *s, struct submitter_client *client)
{
    if (!client->s.is_reported) {
        client->s.is_reported = true;
        client->s.next_report = s->client_reports;
        s->client_reports = client;
    }
    ring(s);
}

void submitter_fail_client(struct submitter *s, struct submitter_client *client, int status,
                           const char *text, bool broken)
{
    pthread_mutex_lock(&s->mutex);
    if (!client->s.is_failed) {
        client->s.is_failed = client->s.tells_failed = true;
        client->s.status = status;
        client->s.broken = broken;
        snprintf(client->s.text, sizeof client->s.text, "%s", text);
        submitter_report_client(s, client);
    }
    pthread_mutex_unlock(&s->mutex);
}

/* ------------------------------------------------------------------ to the clients */

static void tell_client(struct submitter_client *client, bool failed, bool aborted, bool closed)
{
    if (failed)
        client->on_failed(client, client->s.status, client->s.text, client->s.broken);
    if (aborted)
        client->on_aborted(client);
    if (closed)
        client->on_closed(client);
}

static void tell_clients(struct submitter *s)
{
    for (;;) {
        pthread_mutex_lock(&s->mutex);
        struct submitter_client *client = s->client_reports;
        if (!client) {
            pthread_mutex_unlock(&s->mutex);
            return;
        }
        s->client_reports = client->s.next_report;
        client->s.is_reported = false;
        const bool failed = client->s.tells_failed, aborted = client->s.tells_aborted,
                   closed = client->s.tells_closed;
        client->s.tells_failed = client->s.tells_aborted = client->s.tells_closed = false;
        pthread_mutex_unlock(&s->mutex);
        tell_client(client, failed, aborted, closed);
    }
}

static void tell_submissions(struct submitter *s)
{
    for (;;) {
        pthread_mutex_lock(&s->mutex);
        struct submission *submission = s->reports;
        if (!submission) {
            pthread_mutex_unlock(&s->mutex);
            return;
        }
        if (!(s->reports = submission->s.next_report))
            s->reports_tail = &s->reports;
        submission->s.is_reported = false;
        const bool enqueued = submission->s.tells_enqueued, done = submission->s.tells_done;
        submission->s.tells_enqueued = submission->s.tells_done = false;
        pthread_mutex_unlock(&s->mutex);
        if (enqueued)
            submission->client->on_enqueued(submission);
        if (done) {
            submission_settle(submission);
            submission->client->on_done(submission);
        }
    }
}

void submitter_tell(struct submitter *s)
{
    tell_submissions(s);
    tell_clients(s);
}

void submitter_on_news(void *submitter, int fd, unsigned events)
{
    (void)events;
    uint64_t value;
    if (read(fd, &value, sizeof value) < 0)
        return; /* taken already */
    submitter_tell(submitter);
}
