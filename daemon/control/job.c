/* SPDX-License-Identifier: Apache-2.0 */
#include "control/job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/words.h"
#include "control/job_internal.h"
#include "control/peers.h"
#include "control/rendezvous.h"
#include "control/session.h"
#include "gradd/types.h"

enum {
    MEMORIES_MAX = 1024,
};

static struct job *job_of(const struct member *member)
{
    return (struct job *)((char *)member->membership - offsetof(struct job, membership));
}

/* ------------------------------------------------------------------ life of a job */

static void on_linger_end(void *data);

static void fill_key(struct job_key *key, uid_t uid, const char *name)
{
    memset(key, 0, sizeof *key);
    key->uid = uid;
    strncpy(key->name, name, sizeof key->name - 1);
}

struct job *jobs_find(struct jobs *jobs, uid_t uid, const char *name)
{
    struct job_key key;
    struct job *job;
    fill_key(&key, uid, name);
    HASH_FIND(hh, jobs->by_key, &key, sizeof key, job);
    return job;
}

static unsigned count_of_uid(const struct jobs *jobs, uid_t uid)
{
    unsigned n = 0;
    for (const struct job *job = jobs->by_key; job; job = job->hh.next)
        n += job->key.uid == uid;
    return n;
}

/* Epochs of one name go on counting: what still says "epoch 1" somewhere never means a later one.
 */
static void remember_epoch(struct jobs *jobs, const struct job *job)
{
    struct job_memory *memory = job->membership.epoch ? calloc(1, sizeof *memory) : NULL;
    if (!memory)
        return;
    memory->key = job->key;
    memory->epoch = job->membership.epoch;
    HASH_ADD(hh, jobs->memories, key, sizeof memory->key, memory);
    if (HASH_COUNT(jobs->memories) > MEMORIES_MAX) {
        struct job_memory *oldest = jobs->memories;
        HASH_DELETE(hh, jobs->memories, oldest);
        free(oldest);
    }
}

static uint64_t recall_epoch(struct jobs *jobs, const struct job_key *key)
{
    struct job_memory *memory;
    HASH_FIND(hh, jobs->memories, key, sizeof *key, memory);
    if (!memory)
        return 0;
    uint64_t epoch = memory->epoch;
    HASH_DELETE(hh, jobs->memories, memory);
    free(memory);
    return epoch;
}

static struct job *job_new(struct jobs *jobs, uid_t uid, const char *name)
{
    struct job *job = calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->jobs = jobs;
    job->linger = watch_timer(jobs->loop, on_linger_end, job);
    if (!job->linger || job_epoch_init(job) < 0) {
        job_epoch_deinit(job);
        watch_free(job->linger);
        free(job);
        return NULL;
    }
    fill_key(&job->key, uid, name);
    job->created_ns = clock_now_ns();
    user_name(uid, job->user, sizeof job->user);
    membership_init(&job->membership, uid, name);
    job->first_epoch = job->membership.epoch = recall_epoch(jobs, &job->key);
    HASH_ADD(hh, jobs->by_key, key, sizeof job->key, job);
    return job;
}

static void job_free(struct job *job)
{
    HASH_DELETE(hh, job->jobs->by_key, job);
    remember_epoch(job->jobs, job);
    worker_process_end(job->worker);
    membership_deinit(&job->membership);
    rendezvous_sweep(job);
    job_epoch_deinit(job);
    watch_free(job->linger);
    free(job->stats);
    free(job);
}

void jobs_deinit(struct jobs *jobs)
{
    struct job *job, *next;
    HASH_ITER(hh, jobs->by_key, job, next)
    job_free(job);
    struct job_memory *memory, *next_memory, *memories = jobs->memories;
    HASH_CLEAR(hh, jobs->memories);
    HASH_ITER(hh, memories, memory, next_memory)
    free(memory);
    rendezvous_deinit(jobs);
}

static void on_linger_end(void *data)
{
    struct job *job = data;
    struct jobs *jobs = job->jobs;
    struct log_fields fields = job_fields(job);
    log_line(LOG_LEVEL_DEBUG, "job", &fields, "forgotten");
    job_free(job);
    jobs->on_change(jobs->owner);
}

void job_settle(struct job *job)
{
    const struct membership *m = &job->membership;
    rendezvous_sweep(job);
    rendezvous_forward(job);
    job_try_begin(job);
    bool is_idle = m->state == JOB_LINGERING || m->state == JOB_FAILED;
    if (!is_idle) {
        watch_disarm(job->linger);
    } else if (job->jobs->is_draining || m->epoch == job->first_epoch) {
        watch_arm(job->linger, 0);
    } else if (!watch_is_armed(job->linger)) {
        watch_arm(job->linger, job->jobs->config->job_linger_ms * 1000000);
    }
    job->jobs->on_change(job->jobs->owner);
}

/* ------------------------------------------------------------------ leaving */

static void tell_refused(struct job *job, struct member *member, const struct fault *fault)
{
    if (member->origin)
        rendezvous_refuse(job, member, fault);
    else
        session_on_join_refused(member->session, fault);
}

void job_refuse(struct job *job, struct member *member, const struct fault *fault)
{
    tell_refused(job, member, fault);
    membership_remove(&job->membership, member);
}

void job_dismiss(struct job *job, int code, const char *text)
{
    struct roster *gathering = &job->membership.gathering;
    if (gathering->n == 0)
        return;
    struct fault fault = {.code = code};
    snprintf(fault.text, sizeof fault.text, "%s", text);
    for (uint32_t rank = 0; rank < gathering->size; rank++) {
        if (!gathering->of_rank[rank])
            continue;
        rendezvous_leave(job, gathering->of_rank[rank]);
        tell_refused(job, gathering->of_rank[rank], &fault);
    }
    membership_dismiss(&job->membership);
}

void job_member_leave(struct member *member)
{
    if (member->state == MEMBER_NONE)
        return;
    struct job *job = job_of(member);
    rendezvous_leave(job, member);
    membership_remove(&job->membership, member);
    job_settle(job);
}

void job_member_lost(struct member *member, const char *how)
{
    struct job *job = job_of(member);
    char text[FAULT_TEXT_MAX];
    snprintf(text, sizeof text, "job %s epoch %llu: rank %u (node %s, pid %d) %s",
             job->membership.name, (unsigned long long)job->membership.epoch, member->rank,
             job->jobs->node, (int)member->pid, how);
    struct job_failure failure = {GRADD_ERR_RANK_LOST, text, (int)member->rank, member->pid};
    job_fail(job, &failure, TELL_BY_WORKER);
    membership_remove(&job->membership, member);
    job_settle(job);
}

static bool has_ready_worker(const struct job *job)
{
    return job->worker && worker_process_is_ready(job->worker);
}

/* Why the ranks of this daemon's gathering had to wait. */
static void explain_wait(const struct job *job, double waited_s, char *text, size_t size)
{
    const struct membership *m = &job->membership;
    char who[300];
    membership_describe_missing(m, who, sizeof who);
    if (*who) {
        const struct peers *peers = job->jobs->peers;
        snprintf(text, size,
                 "job %s: %u of %u ranks joined in %.1f s; %s did not: are they started, and with "
                 "the same job name and user?%s",
                 m->name, m->gathering.n, m->gathering.size, waited_s, who,
                 peers && !peers_is_listening(peers)
                     ? " (Ranks of other nodes can not join: this daemon has no cluster key.)"
                     : "");
    } else if (!has_ready_worker(job)) {
        snprintf(text, size, "job %s: its worker was not ready in %.1f s", m->name, waited_s);
    } else {
        membership_describe_active(m, who, sizeof who);
        snprintf(text, size,
                 "job %s: all ranks joined, but for %.1f s epoch %llu still had active %s: a rank "
                 "that does not leave keeps the next epoch waiting",
                 m->name, waited_s, (unsigned long long)m->epoch, who);
    }
}

/* The same for a gathering of another daemon, which has said nothing. */
static void explain_silence(const struct job *job, double waited_s, char *text, size_t size)
{
    const struct peer_link *coordinator = job->membership.gathering.coordinator;
    const char *name = job->membership.name;
    if (coordinator->state != PEER_UP)
        snprintf(text, size,
                 "job %s: the coordinator at %s could not be reached in %.1f s (%s): is gradd "
                 "started there, with this cluster's key, and the port open?",
                 name, coordinator->address_text, waited_s,
                 *coordinator->error ? coordinator->error : "no connection yet");
    else if (!has_ready_worker(job))
        snprintf(text, size, "job %s: its worker on node %s was not ready in %.1f s", name,
                 job->jobs->node, waited_s);
    else
        snprintf(text, size, "job %s: the coordinator, node %s (%s), did not answer in %.1f s",
                 name, coordinator->name, coordinator->address_text, waited_s);
}

void job_join_timed_out(struct member *member, uint64_t waited_ms)
{
    struct job *job = job_of(member);
    char text[FAULT_TEXT_MAX];
    double waited_s = (double)waited_ms / 1000;
    if (job->membership.gathering.coordinator)
        explain_silence(job, waited_s, text, sizeof text);
    else
        explain_wait(job, waited_s, text, sizeof text);
    struct log_fields fields = job_fields(job);
    log_line(LOG_LEVEL_WARNING, "job", &fields, "%s", text);
    job_dismiss(job, GRADD_ERR_TIMEOUT, text);
    job_settle(job);
}

/* ------------------------------------------------------------------ joining */

struct job *job_obtain(struct jobs *jobs, uid_t uid, const char *name, const struct peer *owner,
                       struct fault *out_fault)
{
    struct job *job = jobs_find(jobs, uid, name);
    if (!job && count_of_uid(jobs, uid) >= jobs->config->max_jobs_per_uid) {
        out_fault->code = GRADD_ERR_NO_MEMORY;
        snprintf(out_fault->text, sizeof out_fault->text,
                 "job %s: uid %u has %llu job%s on node %s already (max_jobs_per_uid)", name,
                 (unsigned)uid, (unsigned long long)jobs->config->max_jobs_per_uid,
                 words_s(jobs->config->max_jobs_per_uid), jobs->node);
        return NULL;
    }
    if (!job && !(job = job_new(jobs, uid, name))) {
        out_fault->code = GRADD_ERR_NO_MEMORY;
        snprintf(out_fault->text, sizeof out_fault->text, "job %s: the daemon is out of memory",
                 name);
        return NULL;
    }
    if (owner && !job->has_owner) {
        job->has_owner = true;
        job->owner = *owner;
        job->owner.pidfd = -1;
    }
    return job;
}

/* Who gathers the member's job: this daemon, or one that a link leads to. */
static int find_coordinator(struct jobs *jobs, const char *name, const struct resolved *coordinator,
                            struct member *member, struct fault *out_fault)
{
    member->coordinator = NULL;
    if (!coordinator || !jobs->peers || peers_is_self(jobs->peers, coordinator))
        return 0;
    char why[256], address[RESOLVE_TEXT_MAX];
    member->coordinator = peers_dial(jobs->peers, coordinator, why, sizeof why);
    if (member->coordinator)
        return 0;
    resolve_format(&coordinator->addresses[0], address, sizeof address);
    snprintf(out_fault->text, sizeof out_fault->text,
             "job %s: the coordinator at %s can not be joined: %s", name, address, why);
    return out_fault->code = GRADD_ERR_UNAVAILABLE;
}

int jobs_join(struct jobs *jobs, const char *name, const struct peer *peer,
              const struct resolved *coordinator, struct member *member, struct fault *out_fault)
{
    if (jobs->is_draining) {
        snprintf(out_fault->text, sizeof out_fault->text,
                 "job %s: the daemon of node %s is stopping and takes no new ranks", name,
                 jobs->node);
        return out_fault->code = GRADD_ERR_UNAVAILABLE;
    }
    int rc = find_coordinator(jobs, name, coordinator, member, out_fault);
    if (rc < 0)
        return rc;
    struct job *job = job_obtain(jobs, peer->uid, name, peer, out_fault);
    if (!job)
        return out_fault->code;
    member->last_epoch = job->membership.epoch;
    rc = membership_join(&job->membership, member, out_fault);
    if (rc == 0 && !job->worker) {
        rc = job_start_worker(job, out_fault);
        if (rc < 0)
            membership_remove(&job->membership, member);
    }
    job_settle(job);
    return rc;
}

/* ------------------------------------------------------------------ the end of the daemon */

void jobs_drain(struct jobs *jobs)
{
    jobs->is_draining = true;
    struct job *job, *next;
    HASH_ITER(hh, jobs->by_key, job, next)
    {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text, "job %s: the daemon of node %s is stopping",
                 job->membership.name, jobs->node);
        job_dismiss(job, GRADD_ERR_UNAVAILABLE, text);
        job_settle(job);
    }
}

void jobs_abort(struct jobs *jobs, const char *why)
{
    struct job *job, *next;
    HASH_ITER(hh, jobs->by_key, job, next)
    {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text, "job %s epoch %llu: %s", job->membership.name,
                 (unsigned long long)job->membership.epoch, why);
        struct job_failure failure = {GRADD_ERR_UNAVAILABLE, text, -1, 0};
        job_fail(job, &failure, TELL_AT_ONCE);
        job_settle(job);
    }
}

unsigned jobs_count_running(const struct jobs *jobs)
{
    unsigned n = 0;
    for (const struct job *job = jobs->by_key; job; job = job->hh.next)
        n += job->membership.state == JOB_RUNNING;
    return n;
}
