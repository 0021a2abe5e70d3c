/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the submitter share: submitter.c (the thread, orders), submitter_launch.c (a
 * batch is launched), submitter_running.c (what runs) and submitter_news.c (what the loop is told).
 *
 * Threads: functions belong to the submitter thread, which never holds the mutex when it calls
 * CUDA or NCCL: the loop may wait for it. Those that tell (submitter_news.c) belong to the loop.
 * Invariant: a submission is at one place: in the queue, in the hands of the thread, in `running`,
 * or on its way back (reported as done).
 */
#ifndef GRADD_SUBMITTER_INTERNAL_H
#define GRADD_SUBMITTER_INTERNAL_H

#include <pthread.h>

#include "spin.h"
#include "worker/backend/nccl/launch.h"
#include "worker/backend/nccl/submitter.h"

struct submitter {
    struct loop *loop;
    struct watch *watch;
    int event_fd; /* written by the thread, read by the loop */
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t work, idle;
    /* Under the mutex. */
    struct submission *first, **tail; /* the queue */
    struct submitter_client *clients; /* that are open */
    bool has_orders, stop;
    bool is_idle;             /* the thread waits for work, and nothing runs */
    _Atomic unsigned n_calls; /* of the loop; read without it */
    struct submission *reports, **reports_tail;
    struct submitter_client *client_reports;
    /* The thread's. */
    struct submission *running; /* launched, in the order given */
    struct launch launch;
    unsigned n_looks; /* without news */
    uint64_t checked_ns;
    unsigned n_seen; /* calls */
    struct spin spin;
};

/* ---- submitter_launch.c */

/* Launch what can be launched, wait for communicators if need be; the rest of its ops have failed.
 * It is among the running then, and reported as enqueued. */
void submitter_launch(struct submitter *s, struct submission *submission);

/* ---- submitter_running.c */

/* Report what is over as done; fail clients for what is late or broken. */
void submitter_look(struct submitter *s);
/* Between two looks: the core is given away, later the thread sleeps for a moment. Returns early
 * when there is work. */
void submitter_pause(struct submitter *s);
/* The same when work has to wait anyway. */
void submitter_pause_fully(struct submitter *s);
/* What runs of a client whose communicators are aborted has no result, and waits for nobody. */
void submitter_abandon(struct submitter *s, const struct submitter_client *client);

/* ---- submitter_news.c */

/* All ops of it are launched or have failed. */
void submitter_report_enqueued(struct submitter *s, struct submission *submission);
/* It is over, and no longer the thread's. */
void submitter_report_done(struct submitter *s, struct submission *submission);
/* Something broke that other ops need too; the first such news counts. text is copied. */
void submitter_fail_client(struct submitter *s, struct submitter_client *client, int status,
                           const char *text, bool broken);
/* Under the mutex: some client->s.tells_... holds. */
void submitter_report_client(struct submitter *s, struct submitter_client *client);
/* Loop: call the clients back with all that has been reported; which may bring more work. */
void submitter_tell(struct submitter *s);
/* Loop: event_fd can be read. */
void submitter_on_news(void *submitter, int fd, unsigned events);

#endif
