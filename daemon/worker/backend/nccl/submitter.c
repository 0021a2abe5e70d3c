/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/submitter.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "spin.h"
#include "worker/backend/nccl/launch.h"

enum {
    YIELDS = 200,        /* looks between which only the core is given away */
    PAUSE_NS = 50000,    /* then */
    CHECK_NS = 1000000,  /* between questions for NCCL's own errors */
    COUNTERS_STEP = 512, /* 4096 bytes */
};

struct submission_event {
    const struct cuda_device *device; /* NULL: none is used */
    CUevent event;
    bool is_recorded;
};

struct submitter {
    struct loop *loop;
    struct watch *watch;
    int event_fd;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t work, idle;
    /* Under the mutex. */
    struct submission *first, **tail;
    struct submitter_client *clients; /* that are open */
    bool has_orders, stop;
    bool is_idle;             /* the thread waits for work, and nothing runs */
    _Atomic unsigned n_calls; /* of the loop; read without it */
    struct submission *reports, **reports_tail;
    struct submitter_client *client_reports;
    /* The thread's. */
    struct submission *running;
    struct launch launch;
    unsigned n_looks; /* without news */
    uint64_t checked_ns;
    unsigned n_seen; /* calls */
    struct spin spin;
};

/* Under the mutex: there is something to do. */
static void call_thread(struct submitter *s)
{
    atomic_fetch_add_explicit(&s->n_calls, 1, memory_order_relaxed);
    pthread_cond_signal(&s->work);
}

/* ------------------------------------------------------------------ news for the loop */

static void ring(struct submitter *s)
{
    const uint64_t one = 1;
    if (write(s->event_fd, &one, sizeof one) < 0 && errno != EAGAIN)
        abort(); /* an eventfd takes it, or the process is lost */
}

static void report(struct submitter *s, struct submission *submission, bool is_done)
{
    pthread_mutex_lock(&s->mutex);
    if (is_done)
        submission->s.tells_done = true;
    else
        submission->s.tells_enqueued = true;
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

static void report_client(struct submitter *s, struct submitter_client *client)
{
    if (!client->s.is_reported) {
        client->s.is_reported = true;
        client->s.next_report = s->client_reports;
        s->client_reports = client;
    }
    ring(s);
}

/* Something broke that other ops need too. */
static void fail_client(struct submitter *s, struct submitter_client *client, int status,
                        const char *text, bool broken)
{
    pthread_mutex_lock(&s->mutex);
    if (!client->s.is_failed) {
        client->s.is_failed = client->s.tells_failed = true;
        client->s.status = status;
        client->s.broken = broken;
        snprintf(client->s.text, sizeof client->s.text, "%s", text);
        report_client(s, client);
    }
    pthread_mutex_unlock(&s->mutex);
}

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

/* Did the op run on what a rank had not brought, because that rank is lost? */
static bool is_unsure(const struct backend_op *op)
{
    for (uint32_t i = 0; i < op->n_ranks; i++)
        if (op->parts[i].queue && queue_is_unsure(op->parts[i].queue, op->parts[i].ticket))
            return true;
    return false;
}

/* The ops that were launched end as the submission did. */
static void settle(struct submission *submission)
{
    struct backend_batch *batch = submission->batch;
    for (size_t i = 0; i < batch->n_ops; i++) {
        struct backend_op *op = batch->ops[i];
        if (op->status != GRADD_OK)
            continue;
        if (submission->s.status != GRADD_OK) {
            op->status = submission->s.status;
            op->text = submission->s.text;
        } else if (is_unsure(op)) {
            op->status = GRADD_ERR_RANK_LOST;
            op->text = "a rank was lost before its data is known to have been there";
        }
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
            settle(submission);
            submission->client->on_done(submission);
        }
    }
}

static void on_news(void *data, int fd, unsigned events)
{
    struct submitter *s = data;
    uint64_t value;
    if (read(fd, &value, sizeof value) < 0)
        return; /* taken already */
    tell_submissions(s);
    tell_clients(s);
}

/* ------------------------------------------------------------------ what runs */

/* CUDA_SUCCESS: all its work is over. */
static CUresult query(const struct submission *submission)
{
    for (unsigned i = 0; i < submission->s.n_events; i++) {
        const struct submission_event *event = &submission->s.events[i];
        if (!event->is_recorded)
            continue;
        event->device->cuda->ctx_set(event->device->context);
        const CUresult rc = event->device->cuda->event_query(event->event);
        if (rc != CUDA_SUCCESS)
            return rc;
    }
    return CUDA_SUCCESS;
}

/* What GPUs counted goes to the ops. */
static void collect_counters(struct submission *submission)
{
    const struct backend_batch *batch = submission->batch;
    size_t at = 0;
    for (size_t i = 0; submission->s.n_counters > 0 && i < batch->n_ops; i++) {
        const struct backend_op *op = batch->ops[i];
        if (!op->nonfinite)
            continue;
        for (uint32_t rank = 0, input = 0; rank < op->n_ranks; rank++)
            if (op->parts[rank].in.base)
                atomic_store(&op->nonfinite[input++], atomic_load(&submission->s.counters[at++]));
    }
}

static void finish(struct submitter *s, struct submission *submission)
{
    if (submission->s.status == GRADD_OK)
        collect_counters(submission);
    for (unsigned i = 0; i < submission->s.n_events; i++) {
        struct submission_event *event = &submission->s.events[i];
        if (event->device)
            launch_give_event(&s->launch, event->device, event->event);
        *event = (struct submission_event){0};
    }
    report(s, submission, true);
}

static void set_failure(struct submission *submission, int status, const char *text)
{
    if (submission->s.status != GRADD_OK)
        return;
    submission->s.status = status;
    snprintf(submission->s.text, sizeof submission->s.text, "%s", text);
}

static void on_broken(struct submitter *s, struct submission *submission, CUresult rc)
{
    char text[512];
    const struct cuda_device *device = NULL;
    for (unsigned i = 0; i < submission->s.n_events && !device; i++)
        if (submission->s.events[i].is_recorded)
            device = submission->s.events[i].device;
    snprintf(text, sizeof text, "%s: an op failed on the GPU: %s", device ? device->uuid_text : "",
             device ? cuda_table_error(device->cuda, rc) : "");
    set_failure(submission, GRADD_ERR_RANK_LOST, text);
    fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, true);
}

static void on_late(struct submitter *s, struct submission *submission)
{
    char text[512], where[256];
    const double seconds = (double)submission->client->op_timeout_ns / 1e9;
    comm_describe_gpus(submission->comms[0], 0, 3, where, sizeof where);
    snprintf(text, sizeof text,
             "%s: %zu %s of %u ranks did not end on the GPUs within %.3g s (op_timeout_s)", where,
             submission->batch->n_ops, submission->batch->n_ops > 1 ? "ops" : "op",
             submission->batch->ops[0]->n_ranks, seconds);
    submission->s.deadline_ns = 0;
    fail_client(s, submission->client, GRADD_ERR_TIMEOUT, text, false);
}

/* NCCL's own errors, such as a lost connection. */
static void check_comms(struct submitter *s, const struct submission *submission)
{
    const struct comm *last = NULL;
    for (size_t i = 0; i < submission->batch->n_ops; i++) {
        struct comm *comm = submission->comms[i];
        char text[400];
        if (comm == last || comm_is_single(comm))
            continue;
        last = comm;
        if (!comm_check(comm, text, sizeof text))
            fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, false);
    }
}

static void look(struct submitter *s)
{
    const uint64_t now = clock_now_ns();
    const bool is_check = now - s->checked_ns > CHECK_NS;
    struct submission **link = &s->running, *submission;
    while ((submission = *link)) {
        const CUresult rc = query(submission);
        if (rc == CUDA_ERROR_NOT_READY) {
            if (submission->s.deadline_ns && now > submission->s.deadline_ns)
                on_late(s, submission);
            if (is_check && submission->s.uses_nccl)
                check_comms(s, submission);
            link = &submission->s.next;
            continue;
        }
        if (rc != CUDA_SUCCESS)
            on_broken(s, submission, rc);
        *link = submission->s.next;
        finish(s, submission);
    }
    if (is_check)
        s->checked_ns = now;
}

/* Between two looks. Returns early when there is work. */
static void pause_a_while(struct submitter *s)
{
    if (s->n_looks++ < YIELDS) {
        sched_yield();
        return;
    }
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += PAUSE_NS;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&s->mutex);
    if (!s->first && !s->has_orders)
        pthread_cond_timedwait(&s->work, &s->mutex, &until);
    pthread_mutex_unlock(&s->mutex);
}

/* ------------------------------------------------------------------ launching */

static bool is_aborted(const struct submission *submission)
{
    return atomic_load(&submission->client->is_aborted);
}

static void fail_ops(struct submission *submission, size_t begin, size_t end, int status,
                     const char *text)
{
    for (size_t i = begin; i < end; i++) {
        submission->batch->ops[i]->status = status;
        submission->batch->ops[i]->text = text;
    }
}

/* Until the communicator takes calls. False: it never will. */
static bool await_comm(struct submitter *s, struct submission *submission, struct comm *comm)
{
    char text[400] = "";
    s->n_looks = 0; /* most groups are launched within microseconds */
    for (;;) {
        const enum comm_state state = comm_advance(comm, clock_now_ns(), text, sizeof text);
        if (state == COMM_READY)
            return true;
        if (state == COMM_FAILED) {
            set_failure(submission, GRADD_ERR_RANK_LOST, text);
            fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, false);
            return false;
        }
        if (is_aborted(submission))
            return false;
        look(s);
        if (s->n_looks >= YIELDS)
            nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
        else
            pause_a_while(s);
    }
}

static size_t n_inputs(const struct backend_op *op)
{
    size_t n = 0;
    for (uint32_t i = 0; op->nonfinite && i < op->n_ranks; i++)
        n += op->parts[i].in.base != NULL;
    return n;
}

/* Room for the batch's counters, all zero. CUDA_SUCCESS also when there is nothing to count. */
static CUresult prepare_counters(struct submission *submission, const struct cuda_device *device)
{
    const struct backend_batch *batch = submission->batch;
    size_t n = 0;
    for (size_t i = 0; i < batch->n_ops; i++)
        n += n_inputs(batch->ops[i]);
    submission->s.n_counters = 0;
    if (n > submission->s.counters_capacity) {
        const size_t capacity = (n + COUNTERS_STEP - 1) / COUNTERS_STEP * COUNTERS_STEP;
        const size_t bytes = capacity * sizeof(uint64_t);
        void *memory =
            mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
        device->cuda->ctx_set(device->context);
        const CUresult rc = device->cuda->host_register(
            memory, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
        if (rc != CUDA_SUCCESS) {
            munmap(memory, bytes);
            return rc;
        }
        if (submission->s.counters) {
            device->cuda->host_unregister((void *)submission->s.counters);
            munmap((void *)submission->s.counters,
                   submission->s.counters_capacity * sizeof(uint64_t));
        }
        submission->s.counters = memory;
        submission->s.counters_device = device;
        submission->s.counters_capacity = capacity;
    }
    for (size_t i = 0; i < n; i++)
        atomic_store(&submission->s.counters[i], 0);
    submission->s.n_counters = n;
    return CUDA_SUCCESS;
}

/* Where the counters of op number `index` are, as the device sees them; 0: nothing to count. */
static CUdeviceptr counters_of(const struct submission *submission, size_t index,
                               const struct cuda_device *device)
{
    CUdeviceptr base = 0;
    size_t at = 0;
    if (submission->s.n_counters == 0 || !submission->batch->ops[index]->nonfinite)
        return 0;
    for (size_t i = 0; i < index; i++)
        at += n_inputs(submission->batch->ops[i]);
    device->cuda->ctx_set(device->context);
    if (device->cuda->host_device_pointer(&base, (void *)submission->s.counters, 0) != CUDA_SUCCESS)
        return 0;
    return base + at * sizeof(uint64_t);
}

/* Ops from `begin` on the same communicator, as many as one chunk takes. Returns where it ends. */
static size_t gather_chunk(struct submitter *s, struct submission *submission, size_t begin,
                           struct comm *comm)
{
    const struct backend_batch *batch = submission->batch;
    size_t end = begin;
    launch_begin(&s->launch);
    while (end < batch->n_ops && submission->comms[end] == comm) {
        const CUdeviceptr counters =
            comm->map.n_local ? counters_of(submission, end, comm->gpus[0].device) : 0;
        const enum launch_added added = launch_add(&s->launch, comm, batch->ops[end], counters);
        end++;
        /* Other nodes launch it: they must not wait for this one. */
        if (added == LAUNCH_REFUSED && !comm_is_single(comm) && comm->map.n_local > 0 &&
            comm->map.n_local < comm->map.n_gpus)
            fail_client(s, submission->client, batch->ops[end - 1]->status,
                        batch->ops[end - 1]->text, false);
        if (added == LAUNCH_FULL)
            break;
    }
    return end;
}

static bool launch_chunk(struct submitter *s, struct submission *submission, struct comm *comm)
{
    struct launch_result result;
    char text[400];
    launch_calls(&s->launch, comm, &result);
    if (result.status == GRADD_OK && result.has_group) {
        submission->s.uses_nccl = true;
        comm_issued(comm, result.nccl, clock_now_ns(), text, sizeof text);
        if (atomic_load(&comm->state) == COMM_FAILED) {
            set_failure(submission, GRADD_ERR_RANK_LOST, text);
            fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, false);
            return false;
        }
        if (!await_comm(s, submission, comm))
            return false;
    }
    if (result.status == GRADD_OK)
        launch_finish(&s->launch, comm, &result);
    if (result.status == GRADD_OK) {
        atomic_fetch_add(&comm->n_ops, s->launch.n_ops);
        return true;
    }
    set_failure(submission, result.status, result.text);
    fail_client(s, submission->client, result.status, result.text, result.is_device_broken);
    return false;
}

/* Returns where the next chunk begins. */
static size_t start_chunk(struct submitter *s, struct submission *submission, size_t begin)
{
    struct comm *comm = submission->comms[begin];
    const size_t n_ops = submission->batch->n_ops;
    size_t end = n_ops;
    bool is_launched = false;
    if (!is_aborted(submission) && await_comm(s, submission, comm)) {
        end = gather_chunk(s, submission, begin, comm);
        is_launched = s->launch.n_ops == 0 || launch_chunk(s, submission, comm);
    }
    if (is_launched)
        return end;
    if (is_aborted(submission))
        set_failure(submission, submission->client->abort_status, submission->client->abort_text);
    fail_ops(submission, begin, n_ops, submission->s.status, submission->s.text);
    return n_ops;
}

/* NULL: out of memory, or of events. */
static struct submission_event *event_on(struct submitter *s, struct submission *submission,
                                         struct cuda_device *device)
{
    if (device->index >= submission->s.n_events) {
        const unsigned n = device->index + 1;
        struct submission_event *events = realloc(submission->s.events, n * sizeof *events);
        if (!events)
            return NULL;
        memset(events + submission->s.n_events, 0, (n - submission->s.n_events) * sizeof *events);
        submission->s.events = events;
        submission->s.n_events = n;
    }
    struct submission_event *event = &submission->s.events[device->index];
    if (!event->device) {
        if (!launch_take_event(&s->launch, device, &event->event))
            return NULL;
        event->device = device;
    }
    return event;
}

/* What has been launched so far, on every GPU that the batch uses, ends with an event. */
static void record_ends(struct submitter *s, struct submission *submission)
{
    for (size_t i = 0; i < submission->batch->n_ops; i++) {
        const struct comm *comm = submission->comms[i];
        if (i > 0 && comm == submission->comms[i - 1])
            continue;
        for (uint32_t gpu = 0; gpu < comm->map.n_local; gpu++) {
            struct cuda_device *device = comm->gpus[gpu].device;
            struct submission_event *event = event_on(s, submission, device);
            CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;
            if (event) {
                device->cuda->ctx_set(device->context);
                rc = device->cuda->event_record(event->event, device->stream);
                event->is_recorded = rc == CUDA_SUCCESS;
            }
            if (rc != CUDA_SUCCESS) {
                char text[300];
                snprintf(text, sizeof text, "%s: the end of an op cannot be watched: %s",
                         device->uuid_text, cuda_table_error(device->cuda, rc));
                set_failure(submission, GRADD_ERR_RANK_LOST, text);
                fail_client(s, submission->client, GRADD_ERR_RANK_LOST, text, true);
            }
        }
    }
}

static void start(struct submitter *s, struct submission *submission)
{
    const struct backend_batch *batch = submission->batch;
    const uint64_t timeout = submission->client->op_timeout_ns;
    submission->s.status = GRADD_OK;
    submission->s.uses_nccl = false;
    submission->s.n_counters = 0;
    fail_ops(submission, 0, batch->n_ops, GRADD_OK, "");
    for (size_t i = 0; i < batch->n_ops; i++) {
        if (!batch->ops[i]->nonfinite || submission->comms[i]->map.n_local == 0)
            continue;
        prepare_counters(submission, submission->comms[i]->gpus[0].device);
        break;
    }
    for (size_t begin = 0; begin < batch->n_ops;)
        begin = start_chunk(s, submission, begin);
    record_ends(s, submission);
    submission->s.deadline_ns = timeout ? clock_now_ns() + timeout : 0;
    submission->s.next = NULL;
    struct submission **link = &s->running;
    while (*link)
        link = &(*link)->s.next;
    *link = submission;
    report(s, submission, false);
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

/* What waits for trainers that are lost, or for communicators, waits no more. */
static void poison_queues(const struct submission *submission)
{
    for (size_t i = 0; i < submission->batch->n_ops; i++) {
        const struct backend_op *op = submission->batch->ops[i];
        for (uint32_t rank = 0; rank < op->n_ranks; rank++)
            if (op->parts[rank].queue)
                queue_poison(op->parts[rank].queue);
    }
}

/* What ran on communicators that are aborted has no result. They end first: what is poisoned goes
 * on without its data, which must not travel to other GPUs. */
static void abort_client(struct submitter *s, struct submitter_client *client)
{
    look(s); /* what is over is over */
    for (struct comm *comm = first_comm(s, client); comm; comm = comm->next)
        if (!comm_is_single(comm))
            comm_abort(comm);
    for (struct submission *running = s->running; running; running = running->s.next)
        if (running->client == client && running->s.uses_nccl)
            set_failure(running, client->abort_status, client->abort_text);
    for (const struct submission *running = s->running; running; running = running->s.next)
        if (running->client == client)
            poison_queues(running);
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
    report_client(s, client);
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
            start(s, submission);
        look(s);
        if (!s->running)
            launch_trim(&s->launch);
        else if (!submission)
            pause_a_while(s);
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
    s->watch = s->event_fd >= 0 ? watch_fd(loop, s->event_fd, WATCH_READ, on_news, s) : NULL;
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
        tell_submissions(s); /* which may bring more work */
        tell_clients(s);
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
    tell_submissions(s);
    tell_clients(s);
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

void submission_free(struct submission *submission)
{
    if (!submission)
        return;
    if (submission->s.counters) {
        const struct cuda_device *device = submission->s.counters_device;
        device->cuda->ctx_set(device->context);
        device->cuda->host_unregister((void *)submission->s.counters);
        munmap((void *)submission->s.counters, submission->s.counters_capacity * sizeof(uint64_t));
    }
    free(submission->s.events);
    free(submission->comms);
    free(submission);
}
