/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What watches over an epoch on several nodes, whose workers all wait for each other: links between
 * workers that are lost, and a worker that does not answer.
 */
#include <stdio.h>

#include "base/clock.h"
#include "control/job_internal.h"
#include "control/rendezvous.h"
#include "gradd/types.h"

static const uint64_t MS = 1000000;
/* A process that ended closes its links before its daemon can tell why. */
static const uint64_t LOST_LINK_GRACE_NS = UINT64_C(300) * 1000000;
static const uint64_t PING_NS = UINT64_C(500) * 1000000;

/* A rank of that node has not left yet. Only the coordinator knows. */
static bool has_active_rank(const struct job *job, uint32_t node)
{
    const struct roster *running = &job->membership.running;
    for (uint32_t rank = 0; rank < running->size; rank++)
        if (running->of_rank[rank] && job->layout->ranks[rank].node == node)
            return true;
    return false;
}

void job_on_lost_link_limit(void *data)
{
    struct job *job = data;
    if (!job_is_alive(job) || !job->layout || !has_active_rank(job, job->lost_link.node))
        return;
    struct job_failure failure = {GRADD_ERR_RANK_LOST, job->lost_link.text, -1, 0};
    job_fail(job, &failure, TELL_BY_WORKER);
    job_settle(job);
}

void job_on_link_lost(struct job *job, uint32_t reporter, uint32_t node, const char *text)
{
    const struct layout *layout = job->layout;
    if (!job_is_alive(job) || !layout || node >= layout->n_nodes)
        return;
    if (layout->node_rank != 0) {
        rendezvous_link_lost(job, node, text);
        return;
    }
    if (watch_is_armed(job->lost_link.limit) || !has_active_rank(job, node))
        return;
    job->lost_link.node = node;
    bool is_own = node == reporter;
    snprintf(job->lost_link.text, sizeof job->lost_link.text,
             "job %s epoch %llu: the worker of node %s lost its link%s%s: %s", job->membership.name,
             (unsigned long long)layout->epoch, layout->nodes[reporter].name,
             is_own ? "s" : " to node ", is_own ? "" : layout->nodes[node].name, text);
    watch_arm(job->lost_link.limit, LOST_LINK_GRACE_NS);
}

/* It has been asked, and this process has been awake to hear it. */
static bool is_worker_silent(struct job *job, uint64_t limit_ns)
{
    if (job->asked_ns && clock_now_ns() - job->asked_ns >= limit_ns)
        worker_process_drain(job->worker);
    return job->asked_ns && clock_now_ns() - job->asked_ns >= limit_ns;
}

/* All nodes wait for each other's workers: one that is stopped is ended. */
void job_on_ping(void *data)
{
    struct job *job = data;
    uint64_t limit_ns = job->jobs->config->peer_dead_ms * MS;
    if (!job_is_alive(job) || !job->worker)
        return;
    bool is_silent = is_worker_silent(job, limit_ns);
    if (!job_is_alive(job) || !job->worker)
        return;
    if (is_silent) {
        char text[FAULT_TEXT_MAX];
        snprintf(text, sizeof text,
                 "job %s epoch %llu: worker (node %s, pid %d) did not answer for %.3g s and was "
                 "killed",
                 job->membership.name, (unsigned long long)job->membership.epoch, job->jobs->node,
                 (int)worker_process_pid(job->worker), (double)limit_ns / 1e9);
        struct job_failure failure = {GRADD_ERR_RANK_LOST, text, -1, 0};
        worker_process_kill(job->worker);
        job_fail(job, &failure, TELL_AT_ONCE);
        job_settle(job);
        return;
    }
    job_request_stats(job);
    if (!job->asked_ns)
        job->asked_ns = clock_now_ns();
    uint64_t next_ns = PING_NS < limit_ns / 8 ? PING_NS : limit_ns / 8;
    uint64_t left_ns = job->asked_ns + limit_ns - clock_now_ns();
    watch_arm(job->ping, next_ns < left_ns ? next_ns : left_ns);
}
