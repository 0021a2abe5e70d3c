/* SPDX-License-Identifier: Apache-2.0 */
#include "control/membership.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/words.h"
#include "gradd/types.h"

static const char *const state_names[] = {
    [JOB_LINGERING] = "lingering",
    [JOB_GATHERING] = "gathering",
    [JOB_RUNNING] = "running",
    [JOB_FAILED] = "failed",
};

/* edges[from] is the set of states that may follow. */
#define TO(state) (1u << (state))
static const unsigned edges[] = {
    [JOB_LINGERING] = TO(JOB_GATHERING),
    [JOB_GATHERING] = TO(JOB_RUNNING) | TO(JOB_LINGERING) | TO(JOB_FAILED),
    [JOB_RUNNING] = TO(JOB_GATHERING) | TO(JOB_LINGERING) | TO(JOB_FAILED),
    [JOB_FAILED] = TO(JOB_GATHERING),
};

const char *job_state_name(enum job_state state)
{
    return state_names[state];
}

__attribute__((format(printf, 3, 4))) static int fail(struct fault *fault, int code,
                                                      const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(fault->text, sizeof fault->text, format, args);
    va_end(args);
    fault->code = code;
    return code;
}

/* The state follows from who is here; the table guards against a way that nobody thought of. */
static void settle(struct membership *m)
{
    enum job_state next;
    if (m->running.n > 0 && !m->has_failed)
        next = JOB_RUNNING;
    else if (m->gathering.n > 0)
        next = JOB_GATHERING;
    else
        next = m->has_failed ? JOB_FAILED : JOB_LINGERING;
    if (next == m->state)
        return;
    assert(edges[m->state] & TO(next));
    m->state = next;
}

/* ------------------------------------------------------------------ rosters */

static void roster_clear(struct roster *roster)
{
    for (uint32_t rank = 0; rank < roster->size; rank++) {
        struct member *member = roster->of_rank[rank];
        if (!member)
            continue;
        member->state = MEMBER_NONE;
        member->membership = NULL;
    }
    free(roster->of_rank);
    *roster = (struct roster){.size = 0};
}

static void describe(const struct roster *roster, bool is_here, char *out_text, size_t size)
{
    size_t used = 0;
    unsigned n_parts = 0;
    bool is_plural = false;
    char list[256] = "";
    for (uint32_t rank = 0; rank < roster->size && used < sizeof list - 32; rank++) {
        if (!roster->of_rank[rank] == is_here)
            continue;
        uint32_t last = rank;
        while (last + 1 < roster->size && !roster->of_rank[last + 1] != is_here)
            last++;
        used +=
            (size_t)snprintf(list + used, sizeof list - used, "%s%u", n_parts ? ", " : "", rank);
        if (last > rank)
            used += (size_t)snprintf(list + used, sizeof list - used, "-%u", last);
        is_plural = is_plural || n_parts > 0 || last > rank;
        n_parts++;
        rank = last;
        if (used >= sizeof list - 32 && last + 1 < roster->size)
            snprintf(list + used, sizeof list - used, ", …");
    }
    if (n_parts)
        snprintf(out_text, size, "%s %s", is_plural ? "ranks" : "rank", list);
    else
        *out_text = '\0';
}

void membership_describe_missing(const struct membership *m, char *out_text, size_t size)
{
    describe(&m->gathering, false, out_text, size);
}

void membership_describe_active(const struct membership *m, char *out_text, size_t size)
{
    describe(&m->running, true, out_text, size);
}

/* ------------------------------------------------------------------ life */

void membership_init(struct membership *m, uid_t uid, const char *name)
{
    *m = (struct membership){.uid = uid, .state = JOB_LINGERING};
    snprintf(m->name, sizeof m->name, "%s", name);
}

void membership_deinit(struct membership *m)
{
    roster_clear(&m->gathering);
    roster_clear(&m->running);
}

int membership_check_join(const char *job, uint32_t rank, uint32_t size, struct fault *out_fault)
{
    size_t length = strlen(job);
    if (length == 0 || length > MEMBERSHIP_NAME_MAX)
        return fail(out_fault, GRADD_ERR_INVALID, "a job name has 1 to %d bytes, this one %zu",
                    MEMBERSHIP_NAME_MAX, length);
    for (const char *c = job; *c; c++)
        if (*c < 0x20 || *c > 0x7e || *c == '/')
            return fail(out_fault, GRADD_ERR_INVALID,
                        "a job name consists of printable ASCII without '/'; byte %td of this "
                        "one is 0x%02x",
                        c - job, (unsigned char)*c);
    if (size == 0 || size > MEMBERSHIP_SIZE_MAX)
        return fail(out_fault, GRADD_ERR_INVALID, "job %s: size is 1 to %d ranks, not %u", job,
                    MEMBERSHIP_SIZE_MAX, size);
    if (rank >= size)
        return fail(out_fault, GRADD_ERR_INVALID, "job %s: rank %u is not below the size %u", job,
                    rank, size);
    return 0;
}

/* "(pid 7)", or "(node b, pid 7)" when that is another node. */
static const char *who(const struct member *member, char *text, size_t size)
{
    if (member->node)
        snprintf(text, size, "(node %s, pid %d)", member->node, (int)member->pid);
    else
        snprintf(text, size, "(pid %d)", (int)member->pid);
    return text;
}

/* The same of somebody who is here already. */
static const char *holder_name(const struct member *holder, char *text, size_t size)
{
    if (holder->node)
        snprintf(text, size, "pid %d of node %s", (int)holder->pid, holder->node);
    else
        snprintf(text, size, "pid %d", (int)holder->pid);
    return text;
}

static int check_agreement(const struct membership *m, const struct member *member,
                           struct fault *fault)
{
    const struct roster *gathering = &m->gathering;
    char present[300], me[300];
    describe(gathering, true, present, sizeof present);
    if (gathering->size != member->size)
        return fail(fault, GRADD_ERR_DISAGREE,
                    "job %s: rank %u %s says the job has %u rank%s, %s said %u", m->name,
                    member->rank, who(member, me, sizeof me), member->size, words_s(member->size),
                    present, gathering->size);
    if (gathering->coordinator && member->coordinator &&
        gathering->coordinator != member->coordinator)
        return fail(fault, GRADD_ERR_DISAGREE,
                    "job %s: rank %u %s names another address of a coordinator than %s: "
                    "GRADD_COORDINATOR has to be the same address for all ranks of a node",
                    m->name, member->rank, who(member, me, sizeof me), present);
    if (gathering->coordinator != member->coordinator)
        return fail(fault, GRADD_ERR_DISAGREE,
                    "job %s: rank %u %s names %s as its coordinator, %s named %s: "
                    "GRADD_COORDINATOR has to be the node of rank 0 for all of them",
                    m->name, member->rank, who(member, me, sizeof me),
                    member->coordinator ? "another node" : "this node", present,
                    gathering->coordinator ? "another node" : "this node");
    return 0;
}

static int check_slot(const struct membership *m, const struct member *member, struct fault *fault)
{
    const struct roster *gathering = &m->gathering;
    const struct member *holder = NULL;
    char me[300], them[300];
    if (member->last_epoch > MEMBERSHIP_EPOCH_MAX)
        return fail(fault, GRADD_ERR_INVALID, "job %s: rank %u %s names epoch %llu, out of range",
                    m->name, member->rank, who(member, me, sizeof me),
                    (unsigned long long)member->last_epoch);
    if (!m->has_failed && member->rank < m->running.size)
        holder = m->running.of_rank[member->rank];
    /* News from different nodes come in any order: the holder may have left already. Then its
     * successor waits for that to become known. */
    if (holder && holder->origin == member->origin)
        return fail(fault, GRADD_ERR_DUPLICATE,
                    "job %s: rank %u %s joins, but %s holds this rank in epoch %llu", m->name,
                    member->rank, who(member, me, sizeof me),
                    holder_name(holder, them, sizeof them), (unsigned long long)m->epoch);
    int rc = gathering->size ? check_agreement(m, member, fault) : 0;
    if (rc < 0)
        return rc;
    holder = gathering->size ? gathering->of_rank[member->rank] : NULL;
    if (holder)
        return fail(fault, GRADD_ERR_DUPLICATE,
                    "job %s: rank %u %s joins, but %s waits as this rank already", m->name,
                    member->rank, who(member, me, sizeof me),
                    holder_name(holder, them, sizeof them));
    return 0;
}

int membership_join(struct membership *m, struct member *member, struct fault *out_fault)
{
    assert(member->state == MEMBER_NONE);
    int rc = check_slot(m, member, out_fault);
    if (rc < 0)
        return rc;
    struct roster *gathering = &m->gathering;
    if (!gathering->size) {
        gathering->of_rank = calloc(member->size, sizeof *gathering->of_rank);
        if (!gathering->of_rank)
            return fail(out_fault, GRADD_ERR_NO_MEMORY, "job %s: the daemon is out of memory",
                        m->name);
        gathering->size = member->size;
        gathering->coordinator = member->coordinator;
    }
    gathering->of_rank[member->rank] = member;
    gathering->n++;
    member->state = MEMBER_WAITING;
    member->membership = m;
    settle(m);
    return 0;
}

bool membership_is_free(const struct membership *m)
{
    return m->has_failed || m->running.n == 0;
}

bool membership_is_ready(const struct membership *m)
{
    return m->gathering.size && m->gathering.n == m->gathering.size && !m->gathering.coordinator &&
           membership_is_free(m);
}

uint64_t membership_next_epoch(const struct membership *m)
{
    uint64_t last = m->epoch;
    for (uint32_t rank = 0; rank < m->gathering.size; rank++) {
        const struct member *member = m->gathering.of_rank[rank];
        if (member && member->last_epoch > last)
            last = member->last_epoch;
    }
    return last + 1;
}

/* Move the ranks that are taken out of the gathering, into a roster of their own. */
static int split_gathering(struct membership *m, const bool *takes, struct roster *out)
{
    struct roster *gathering = &m->gathering;
    *out = (struct roster){.size = gathering->size, .coordinator = gathering->coordinator};
    out->of_rank = calloc(gathering->size, sizeof *out->of_rank);
    if (!out->of_rank)
        return -ENOMEM;
    for (uint32_t rank = 0; rank < gathering->size; rank++) {
        if (!takes[rank] || !gathering->of_rank[rank])
            continue;
        out->of_rank[rank] = gathering->of_rank[rank];
        gathering->of_rank[rank] = NULL;
        out->n++;
        gathering->n--;
    }
    if (gathering->n == 0)
        roster_clear(gathering);
    return 0;
}

int membership_begin(struct membership *m, uint64_t epoch, const bool *takes)
{
    assert(membership_is_free(m) && epoch > m->epoch);
    struct roster fresh = m->gathering;
    if (takes) {
        int rc = split_gathering(m, takes, &fresh);
        if (rc < 0)
            return rc;
    } else {
        m->gathering = (struct roster){.size = 0};
    }
    roster_clear(&m->running);
    m->running = fresh;
    m->epoch = epoch;
    m->has_failed = false;
    m->last_error[0] = '\0';
    for (uint32_t rank = 0; rank < m->running.size; rank++)
        if (m->running.of_rank[rank])
            m->running.of_rank[rank]->state = MEMBER_ACTIVE;
    settle(m);
    return 0;
}

void membership_remove(struct membership *m, struct member *member)
{
    if (member->state == MEMBER_NONE)
        return;
    assert(member->membership == m);
    struct roster *roster = member->state == MEMBER_WAITING ? &m->gathering : &m->running;
    assert(roster->of_rank[member->rank] == member);
    roster->of_rank[member->rank] = NULL;
    roster->n--;
    member->state = MEMBER_NONE;
    member->membership = NULL;
    if (roster->n == 0)
        roster_clear(roster);
    settle(m);
}

void membership_fail(struct membership *m, const char *text)
{
    if (m->running.n == 0 || m->has_failed)
        return;
    m->has_failed = true;
    snprintf(m->last_error, sizeof m->last_error, "%s", text);
    for (uint32_t rank = 0; rank < m->running.size; rank++)
        if (m->running.of_rank[rank])
            m->running.of_rank[rank]->state = MEMBER_STALE;
    settle(m);
}

void membership_move(struct membership *m, struct peer_link *coordinator)
{
    m->gathering.coordinator = coordinator;
    for (uint32_t rank = 0; rank < m->gathering.size; rank++) {
        if (!m->gathering.of_rank[rank])
            continue;
        m->gathering.of_rank[rank]->coordinator = coordinator;
        m->gathering.of_rank[rank]->is_forwarded = false;
    }
}

void membership_dismiss(struct membership *m)
{
    roster_clear(&m->gathering);
    settle(m);
}

struct member *membership_find(const struct membership *m, uint64_t epoch, uint32_t rank)
{
    return epoch == m->epoch && rank < m->running.size ? m->running.of_rank[rank] : NULL;
}
