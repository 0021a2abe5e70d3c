/* SPDX-License-Identifier: Apache-2.0 */
/* The inside of a stream: a thread and its queue. */
#ifndef GRADD_FAKE_STREAM_H
#define GRADD_FAKE_STREAM_H

#include "fake.h"

struct item {
    struct item *next;
    void (*run)(void *);
    void *data;
};

/* Never freed: a handle that was destroyed is recognised. */
struct CUstream_st {
    struct CUstream_st *next; /* of all streams; under fake_lock */
    CUcontext context;
    unsigned flags;
    bool is_default, is_destroyed;
    int capture; /* CU_STREAM_CAPTURE_STATUS_* */
    int capture_mode;
    pthread_t capture_thread; /* which began it */
    uint64_t waits_for;       /* item of the default stream that is waited for already */
    pthread_mutex_t lock;     /* what follows */
    pthread_cond_t changed;
    struct item *head, **tail;
    uint64_t pushed, done;
    bool is_closing;
    uint64_t random;
};

/* All streams, destroyed ones too; under fake_lock. */
CUstream fake_stream_first(void);
/* The stream's thread. */
void *fake_stream_thread(void *stream);
/* Add to the queue; items run in this order. */
void fake_stream_append(CUstream s, void (*run)(void *), void *data);
void fake_stream_wait_done(CUstream s, uint64_t item);

#endif
