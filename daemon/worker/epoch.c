/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/epoch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "worker/backend/nccl/nccl.h"
#include "worker/backend/net/net.h"
#include "worker/central.h"
#include "worker/coordinator.h"
#include "worker/follower.h"
#include "worker/mesh.h"

enum {
    /* The daemon watches the process itself and knows better how it ended: wait that long. */
    LOST_GRACE_MS = 200,
    LOST_LINK_GRACE_MS = 500, /* the daemon asks another node's */
    ENTRIES_PER_RANK = 4,     /* ops waiting or owed, as a multiple of max_in_flight */
    COMM_TIMEOUT_S = 120,     /* for a communicator to come up, without an op_timeout_s */
    BATCH_MAX = 256,          /* ops; what nodes execute as one must fit into a frame */
};

static const uint64_t ms = 1000000, second = 1000000000;

static void on_stall_timer(void *data);
static void on_lost_timer(void *data);
static void on_exec_flush(void *data);
static void on_exec_batch(void *data, struct plan_op *const *ops, size_t n);
static bool on_exec_counted(void *data, const struct plan_op *op, uint32_t rank, uint64_t count);
static bool on_exec_is_central(void *data, const struct plan_op *op);
static void on_device_failed(void *data, int status, const char *text, bool broken);
static void on_device_drained(void *data);
static void on_mesh_up(void *data);
static void on_mesh_lost(void *data, uint32_t node, const char *text);

static const struct mesh_ops mesh_ops = {.on_up = on_mesh_up, .on_lost = on_mesh_lost};

static void describe_member(const struct epoch *epoch, const struct member *member, char *text,
                            size_t bytes)
{
    const char *node = epoch->layout ? epoch->layout->nodes[member->node].name : epoch->setup->node;
    snprintf(text, bytes, "rank %u (node %.40s, pid %d)", member->rank, node, member->pid);
}

static void describe_to_plan(const struct epoch *epoch, const struct member *member)
{
    char text[96];
    describe_member(epoch, member, text, sizeof text);
    if (epoch->plan)
        plan_describe_rank(epoch->plan, member->rank, text);
}

static const struct exec_ops exec_ops_single = {.on_flush = on_exec_flush};
static const struct exec_ops exec_ops_nodes = {.on_flush = on_exec_flush,
                                               .is_central = on_exec_is_central,
                                               .on_batch = on_exec_batch,
                                               .on_counted = on_exec_counted};

static struct plan_op *next_of_plan(void *data)
{
    return plan_next(data);
}

static void done_to_plan(void *data, struct plan_op *op)
{
    plan_op_done(data, op);
}

static struct plan_op *next_of_follower(void *data)
{
    return follower_next(data);
}

static void done_to_follower(void *data, struct plan_op *op)
{
    follower_op_done(data, op);
}

/* The ranks of other nodes, as the coordinator's plan sees them. */
static void add_remote_members(struct epoch *epoch)
{
    const struct layout *layout = epoch->layout;
    for (uint32_t rank = 0; rank < epoch->size; rank++) {
        if (layout->node_of[rank] == layout->node_rank)
            continue;
        struct member *member = &epoch->members[epoch->n_members++];
        member_init_remote(member, epoch, rank);
        describe_to_plan(epoch, member);
    }
}

/* Who decides what runs: the plan here, or the coordinator's elsewhere. */
static bool open_order(struct epoch *epoch)
{
    const struct epoch_setup *setup = epoch->setup;
    const struct layout *layout = epoch->layout;
    struct exec_source source = {.batch_max = BATCH_MAX, .batch_bytes = setup->fusion_bytes};
    if (layout && layout->node_rank != 0) {
        epoch->follower = follower_new(epoch);
        source.next = next_of_follower;
        source.done = done_to_follower;
        source.data = epoch->follower;
        source.batch_max = SIZE_MAX; /* the coordinator has cut them */
        source.batch_bytes = UINT64_MAX;
    } else {
        const struct plan_limits limits = {
            .max_entries = setup->max_in_flight * ENTRIES_PER_RANK,
            .stall_warn_ns = setup->stall_warn_ns,
            .op_timeout_ns = setup->op_timeout_ns,
        };
        epoch->plan = plan_new(epoch->label, epoch->size, &limits);
        source.next = next_of_plan;
        source.done = done_to_plan;
        source.data = epoch->plan;
    }
    if (!source.data)
        return false;
    if (epoch->plan && layout) {
        epoch->coordinator = coordinator_new(epoch);
        if (!epoch->coordinator)
            return false;
        add_remote_members(epoch);
    }
    epoch->exec = exec_new(&source, layout ? &exec_ops_nodes : &exec_ops_single, epoch);
    return epoch->exec;
}

/* The backend of ops on device memory, where the epoch takes them. */
static bool open_device_backend(struct epoch *epoch)
{
    const struct epoch_setup *setup = epoch->setup;
    const struct nccl_setup nccl = {
        .loop = setup->loop,
        .submitter = setup->submitter,
        .job = setup->job,
        .n_ranks = epoch->size,
        .max_ctas = setup->max_ctas,
        .traffic_class = setup->traffic_class,
        .op_timeout_ns = setup->op_timeout_ns,
        .create_timeout_ns = setup->op_timeout_ns ? setup->op_timeout_ns : COMM_TIMEOUT_S * second,
        .is_alone = !epoch->layout,
        .on_failed = on_device_failed,
        .on_drained = on_device_drained,
        .data = epoch,
    };
    if (!epoch->device_path)
        return true;
    epoch->device = nccl_new(&nccl);
    if (epoch->device)
        exec_set_device_backend(epoch->exec, &backend_nccl, epoch->device);
    return epoch->device;
}

struct epoch *epoch_new(const struct epoch_setup *setup, uint64_t number, uint32_t size,
                        uint32_t n_local, struct layout *take_layout)
{
    struct epoch *epoch = calloc(1, sizeof *epoch);
    if (!epoch) {
        layout_free(take_layout);
        return NULL;
    }
    epoch->setup = setup;
    epoch->number = number;
    epoch->size = size;
    epoch->n_local = n_local;
    epoch->layout = take_layout;
    epoch->device_path = setup->devices && (!take_layout || take_layout->device_path);
    snprintf(epoch->label, sizeof epoch->label, "job %s", setup->job);
    epoch->members = calloc(size, sizeof *epoch->members);
    epoch->stall_timer = watch_timer(setup->loop, on_stall_timer, epoch);
    epoch->lost_timer = watch_timer(setup->loop, on_lost_timer, epoch);
    if (!epoch->members || !epoch->stall_timer || !epoch->lost_timer || !open_order(epoch) ||
        !open_device_backend(epoch)) {
        epoch_free(epoch);
        return NULL;
    }
    if (!epoch->layout) {
        exec_set_backend(epoch->exec, setup->backend_ops, setup->backend, NULL);
    } else {
        epoch->mesh = mesh_new(setup->loop, epoch->layout, setup->peer_dead_ns, &mesh_ops, epoch);
        if (!epoch->mesh) {
            epoch_free(epoch);
            return NULL;
        }
        mesh_start(epoch->mesh);
    }
    return epoch;
}

void epoch_free(struct epoch *epoch)
{
    if (!epoch)
        return;
    mesh_free(epoch->mesh);
    if (epoch->net)
        backend_net.free(epoch->net);
    backend_nccl.free(epoch->device);
    for (uint32_t i = 0; epoch->members && i < epoch->n_members; i++)
        member_deinit(&epoch->members[i]);
    exec_free(epoch->exec);
    plan_free(epoch->plan);
    coordinator_free(epoch->coordinator);
    follower_free(epoch->follower);
    watch_free(epoch->stall_timer);
    watch_free(epoch->lost_timer);
    free(epoch->members);
    layout_free(epoch->layout);
    free(epoch);
}

int epoch_add_member(struct epoch *epoch, const struct epoch_member *who, int take_fd)
{
    const struct layout *layout = epoch->layout;
    bool is_wrong = who->rank >= epoch->size || epoch->n_added == epoch->n_local ||
                    epoch->n_members == epoch->size ||
                    (layout && layout->node_of[who->rank] != layout->node_rank);
    for (uint32_t i = 0; i < epoch->n_members; i++)
        is_wrong |= epoch->members[i].rank == who->rank;
    if (is_wrong) {
        close(take_fd);
        return -EINVAL;
    }
    struct member *member = &epoch->members[epoch->n_members];
    int rc = member_init(member, epoch, who->rank, take_fd);
    if (rc < 0)
        return rc;
    epoch->n_members++;
    epoch->n_added++;
    member->local_rank = who->local_rank;
    member->pid = who->pid;
    member->uid = who->uid;
    member->node = layout ? layout->node_rank : 0;
    snprintf(member->source, sizeof member->source, "%s", who->source);
    describe_to_plan(epoch, member);
    if (!layout || epoch->net || epoch->failure.status)
        member_start(member);
    return 0;
}

/* ------------------------------------------------------------------ several nodes */

/* The coordinator's daemon knows best why, and tells; ops that the link broke wait for that. */
void epoch_link_lost(struct epoch *epoch, uint32_t node, const char *text)
{
    if (epoch->is_retired || epoch->failure.status)
        return;
    bool is_waiting = watch_is_armed(epoch->lost_timer);
    if (!epoch->lost_link[0] || !is_waiting) {
        snprintf(epoch->lost_link, sizeof epoch->lost_link, "node %s lost node %s: %.150s",
                 epoch->setup->node, epoch->layout->nodes[node].name, text);
        epoch->lost_node = node;
    }
    if (!is_waiting)
        watch_arm(epoch->lost_timer, LOST_LINK_GRACE_MS * ms);
    epoch->setup->on_link_lost(epoch->setup->data, epoch->number, node, text);
}

static void on_mesh_lost(void *data, uint32_t node, const char *text)
{
    epoch_link_lost(data, node, text);
}

static void on_net_lost(void *data, uint32_t node, const char *text)
{
    struct epoch *epoch = data;
    if (!epoch->coordinator || !epoch_node_has_left(epoch, node))
        epoch_link_lost(epoch, node, text);
}

static struct link *take_link(struct epoch *epoch, uint32_t node, uint32_t stream)
{
    const struct layout *layout = epoch->layout;
    int fd = mesh_take(epoch->mesh, node, stream);
    if (fd < 0)
        return NULL;
    return layout->encrypt_data ? link_tls_new(fd, layout->secret, node < layout->node_rank)
                                : link_tcp_new(fd);
}

/* The links become the backend's, which owns them even when this fails. */
static bool open_net(struct epoch *epoch)
{
    const struct layout *layout = epoch->layout;
    struct link **links = calloc((size_t)layout->n_nodes * NET_STREAMS_MAX, sizeof(*links));
    if (!links)
        return false;
    for (uint32_t node = 0; node < layout->n_nodes; node++)
        for (uint32_t stream = 0; stream < layout->ring_streams; stream++)
            links[node * NET_STREAMS_MAX + stream] = take_link(epoch, node, stream);
    const struct net_setup setup = {
        .loop = epoch->setup->loop,
        .node_rank = layout->node_rank,
        .n_nodes = layout->n_nodes,
        .ring_streams = layout->ring_streams,
        .links = links,
        .wire = layout->wire,
        .on_lost = on_net_lost,
        .data = epoch,
    };
    const char *text = "";
    epoch->net = net_new(&setup, &text);
    free(links);
    if (!epoch->net)
        log_error("worker", "%s: %s", epoch->label, text);
    return epoch->net;
}

static bool open_negotiation(struct epoch *epoch)
{
    if (epoch->follower)
        return follower_attach(epoch->follower, mesh_take(epoch->mesh, 0, MESH_NEGOTIATION)) == 0;
    for (uint32_t node = 1; node < epoch->layout->n_nodes; node++)
        if (coordinator_attach(epoch->coordinator, node,
                               mesh_take(epoch->mesh, node, MESH_NEGOTIATION)) < 0)
            return false;
    return true;
}

static void start_members(struct epoch *epoch)
{
    for (uint32_t i = 0; i < epoch->n_members; i++)
        member_start(&epoch->members[i]);
}

static void on_mesh_up(void *data)
{
    struct epoch *epoch = data;
    if (epoch->failure.status || epoch->is_retired)
        return;
    if (!open_net(epoch) || !open_negotiation(epoch)) {
        epoch_link_lost(epoch, epoch->layout->node_rank, "no memory for the links between nodes");
        return;
    }
    exec_set_backend(epoch->exec, &backend_net, epoch->net, epoch->layout->node_of);
    start_members(epoch);
    epoch->setup->on_links_up(epoch->setup->data, epoch->number);
}

void epoch_link_arrived(struct epoch *epoch, uint32_t from_node, uint32_t stream, int take_fd)
{
    if (epoch->mesh && !epoch->net)
        mesh_arrived(epoch->mesh, from_node, stream, take_fd);
    else
        close(take_fd);
}

int epoch_submit(struct epoch *epoch, struct member *member, uint32_t set, const char *name,
                 const struct signature *signature, struct request *request, const char **out_text)
{
    if (epoch->follower)
        return follower_submit(epoch->follower, member, set, name, signature, request, out_text);
    return plan_submit(epoch->plan, member->rank, set, name, signature, request, clock_now_ns(),
                       out_text);
}

uint32_t epoch_set_ranks(const struct epoch *epoch, uint32_t set, const uint32_t **out_ranks)
{
    return epoch->follower ? follower_set_ranks(epoch->follower, set, out_ranks)
                           : plan_set_ranks(epoch->plan, set, out_ranks);
}

struct member *epoch_remote_member(struct epoch *epoch, uint32_t rank, uint32_t node)
{
    for (uint32_t i = 0; i < epoch->n_members; i++) {
        struct member *member = &epoch->members[i];
        if (member->is_remote && member->rank == rank && member->node == node)
            return member;
    }
    return NULL;
}

bool epoch_on_device(struct epoch *epoch, struct member *member, struct cuda_device *device)
{
    if (member->device)
        return member->device == device;
    member->device = device;
    nccl_set_device(epoch->device, member->rank, device);
    if (epoch->follower)
        follower_set_device(epoch->follower, member->rank, device->uuid);
    if (epoch->coordinator)
        coordinator_set_device(epoch->coordinator, member->rank, device->uuid);
    return true;
}

/* Told before the links end, which other nodes take for the cause. */
static void fail_by_device(struct epoch *epoch, int status, const char *text)
{
    epoch->setup->on_failed(epoch->setup->data, epoch->number, status, text);
    epoch_fail(epoch, status, text, -1, 0);
}

/* The ops on devices can not go on; with them the epoch. */
static void on_device_failed(void *data, int status, const char *text, bool broken)
{
    struct epoch *epoch = data;
    char sentence[640];
    snprintf(sentence, sizeof sentence, "%s epoch %llu: worker (node %.80s, pid %d): %s",
             epoch->label, (unsigned long long)epoch->number, epoch->setup->node, (int)getpid(),
             text);
    epoch->is_broken |= broken;
    if (epoch->failure.status || epoch->is_retired) {
        if (broken && (epoch->failure.is_announced || !epoch->failure.status))
            epoch->setup->on_broken(epoch->setup->data);
        return;
    }
    if (!epoch->layout || broken || status != GRADD_ERR_RANK_LOST) {
        fail_by_device(epoch, status, sentence);
        return;
    }
    /* It may be the consequence of what happened elsewhere: the daemons know better. */
    if (!epoch->lost_device[0])
        memcpy(epoch->lost_device, sentence, sizeof sentence);
    if (!watch_is_armed(epoch->lost_timer))
        watch_arm(epoch->lost_timer, LOST_LINK_GRACE_MS * ms);
}

static void check_idle(struct epoch *epoch)
{
    if (epoch->is_retired && epoch_is_idle(epoch))
        epoch->setup->on_over(epoch->setup->data);
}

static void on_device_drained(void *data)
{
    check_idle(data);
}

bool epoch_node_has_left(const struct epoch *epoch, uint32_t node)
{
    for (uint32_t i = 0; i < epoch->n_members; i++)
        if (epoch->members[i].node == node && epoch->members[i].state != MEMBER_LEFT)
            return false;
    return true;
}

static void on_exec_batch(void *data, struct plan_op *const *ops, size_t n)
{
    struct epoch *epoch = data;
    if (epoch->coordinator)
        coordinator_execute(epoch->coordinator, ops, n);
}

static bool on_exec_counted(void *data, const struct plan_op *op, uint32_t rank, uint64_t count)
{
    struct epoch *epoch = data;
    const struct layout *layout = epoch->layout;
    uint32_t i = 0;
    while (i < op->n_ranks && layout->node_of[op->ranks[i]] != layout->node_rank)
        i++;
    if (i == op->n_ranks)
        return false; /* only other nodes have ranks in it */
    if (epoch->follower)
        follower_count(epoch->follower, op->finite_check, rank, count);
    else
        coordinator_count(epoch->coordinator, 0, op->finite_check, rank, count);
    return true;
}

static bool on_exec_is_central(void *data, const struct plan_op *op)
{
    const struct epoch *epoch = data;
    return epoch->coordinator && central_takes(op);
}

/* ------------------------------------------------------------------ turns */

static void flush_members(struct epoch *epoch)
{
    /* Other nodes first: they are farther away. */
    if (epoch->coordinator)
        coordinator_flush(epoch->coordinator);
    if (epoch->follower)
        follower_flush(epoch->follower);
    for (uint32_t i = 0; i < epoch->n_members; i++)
        member_flush(&epoch->members[i]);
}

/* Something waits: look at it when it would become late, and every second while it is. */
static void watch_stalls(struct epoch *epoch)
{
    bool is_waiting = (epoch->plan && plan_n_waiting(epoch->plan) > 0) || epoch->n_stalled > 0 ||
                      exec_has_starved(epoch->exec);
    if (!is_waiting || watch_is_armed(epoch->stall_timer))
        return;
    uint64_t delay = second;
    const uint64_t warn = epoch->setup->stall_warn_ns, timeout = epoch->setup->op_timeout_ns;
    if (warn && warn / 2 < delay)
        delay = warn / 2;
    if (timeout && timeout / 2 < delay)
        delay = timeout / 2;
    watch_arm(epoch->stall_timer, delay < 5 * ms ? 5 * ms : delay);
}

/* Broken ops end with the cause, or after a while without it. */
static void await_cause(struct epoch *epoch)
{
    if (epoch->awaits_cause || epoch->failure.status || !exec_has_broken(epoch->exec))
        return;
    epoch->awaits_cause = true;
    if (!watch_is_armed(epoch->lost_timer))
        watch_arm(epoch->lost_timer, LOST_LINK_GRACE_MS * ms);
}

void epoch_turn(struct epoch *epoch)
{
    if (epoch->is_turning)
        return;
    epoch->is_turning = true;
    exec_turn(epoch->exec);
    await_cause(epoch);
    flush_members(epoch);
    epoch->is_turning = false;
    if (!epoch->is_retired)
        watch_stalls(epoch);
}

static void announce_failure(struct epoch *epoch);

static void on_exec_flush(void *data)
{
    struct epoch *epoch = data;
    await_cause(epoch);
    flush_members(epoch);
    announce_failure(epoch);
    check_idle(epoch);
}

/* ------------------------------------------------------------------ stalls */

struct stall_report {
    struct epoch *epoch;
    uint32_t n_stalled;
    bool has_new;
    char text[512];
};

/* The member of a rank, or NULL. */
static const struct member *find_member(const struct epoch *epoch, uint32_t rank)
{
    for (uint32_t i = 0; i < epoch->n_members; i++)
        if (epoch->members[i].rank == rank)
            return &epoch->members[i];
    return NULL;
}

static void on_stall(void *data, const struct plan_stall *stall)
{
    struct stall_report *report = data;
    struct epoch *epoch = report->epoch;
    report->n_stalled++;
    if (!stall->is_new)
        return;
    char who[300] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < stall->n_missing && used + 100 < sizeof who; i++) {
        char one[96] = "";
        const struct member *member = find_member(epoch, stall->missing[i]);
        if (member)
            describe_member(epoch, member, one, sizeof one);
        used += (size_t)snprintf(who + used, sizeof who - used, "%s%s", i ? ", " : "", one);
    }
    report->has_new = true;
    snprintf(report->text, sizeof report->text, "%s: \"%.150s\": %s waits for %s since %.3g s",
             epoch->label, stall->name, kind_name(stall->kind), who,
             (double)stall->waited_ns / 1e9);
    log_line(LOG_LEVEL_WARNING, "plan",
             &(struct log_fields){.job = epoch->setup->job, .epoch = epoch->number}, "%s",
             report->text);
}

static void on_stall_timer(void *data)
{
    struct epoch *epoch = data;
    struct stall_report report = {.epoch = epoch};
    const uint64_t now = clock_now_ns();
    if (epoch->plan)
        plan_check(epoch->plan, now, on_stall, &report);
    exec_check(epoch->exec, now, epoch->setup->stall_warn_ns, epoch->setup->op_timeout_ns, on_stall,
               &report);
    epoch_turn(epoch);
    if (report.has_new || report.n_stalled != epoch->n_stalled) {
        epoch->n_stalled = report.n_stalled;
        epoch->setup->on_stall(epoch->setup->data, epoch->number, report.n_stalled, report.text);
    }
    watch_stalls(epoch);
}

/* ------------------------------------------------------------------ ends */

bool epoch_is_over(const struct epoch *epoch)
{
    return epoch->n_gone == epoch->n_local &&
           (epoch->n_remote_left == epoch->n_members - epoch->n_added || epoch->failure.status);
}

static void check_over(struct epoch *epoch)
{
    if (epoch_is_over(epoch))
        epoch->setup->on_over(epoch->setup->data);
}

/* Tell the members, once what still ran has been told. */
static void announce_failure(struct epoch *epoch)
{
    if (!epoch->failure.status || epoch->failure.is_announced || !exec_is_idle(epoch->exec))
        return;
    epoch->failure.is_announced = true;
    for (uint32_t i = 0; i < epoch->n_members; i++)
        member_push_failed(&epoch->members[i], epoch->number, epoch->failure.status,
                           epoch->failure.text, epoch->failure.rank, epoch->failure.pid);
    flush_members(epoch);
    epoch->setup->on_over(epoch->setup->data);
    if (epoch->is_broken)
        epoch->setup->on_broken(epoch->setup->data);
}

/* What waits for a rank, for data or for another node ends now. */
static void fail_waiting(struct epoch *epoch, int status, const char *text)
{
    if (epoch->plan)
        plan_fail_all(epoch->plan, status, text);
    if (epoch->follower)
        follower_fail_all(epoch->follower, status, text);
    exec_abort(epoch->exec, status, text);
    if (epoch->net)
        net_abort(epoch->net, status, text);
    if (epoch->device && (epoch->failure.status || !exec_is_idle(epoch->exec)))
        nccl_abort(epoch->device, status, text);
    exec_turn(epoch->exec);
}

void epoch_fail(struct epoch *epoch, int status, const char *text, int rank, int pid)
{
    if (epoch->failure.status)
        return;
    exec_turn(epoch->exec); /* what all ranks have submitted runs to its end */
    epoch->failure.status = status;
    epoch->failure.rank = rank;
    epoch->failure.pid = pid;
    snprintf(epoch->failure.text, sizeof epoch->failure.text, "%s", text);
    watch_disarm(epoch->lost_timer);
    log_line(LOG_LEVEL_DEBUG, "epoch",
             &(struct log_fields){.job = epoch->setup->job,
                                  .epoch = epoch->number,
                                  .has_rank = rank >= 0,
                                  .rank = rank,
                                  .pid = pid},
             "failed: %s", text); /* the daemon logs it for the operator */
    fail_waiting(epoch, status, text);
    for (uint32_t i = 0; i < epoch->n_members; i++)
        if (epoch->members[i].state == MEMBER_ENDED)
            epoch->members[i].state = MEMBER_LOST;
    if (epoch->coordinator)
        coordinator_close(epoch->coordinator);
    if (epoch->follower)
        follower_close(epoch->follower);
    flush_members(epoch);
    announce_failure(epoch);
    start_members(epoch); /* the links may not stand yet, and members leave all the same */
    check_over(epoch);    /* who is left may be on other nodes only */
}

/* The member's connection is over and what it has sent has been taken. */
static void member_is_gone(struct epoch *epoch, struct member *member, enum member_state state,
                           int status, const char *text)
{
    member_disconnect(member, state);
    epoch->n_gone++;
    epoch->setup->on_member_gone(epoch->setup->data, epoch->number, member, status, text);
    check_over(epoch);
}

void epoch_on_rank_left(struct epoch *epoch, struct member *member, const char *text)
{
    if (member->is_remote && member->state == MEMBER_ACTIVE) {
        member->state = MEMBER_LEFT;
        epoch->n_remote_left++;
        check_over(epoch);
    }
    if (epoch->plan)
        plan_rank_left(epoch->plan, member->rank, GRADD_ERR_RANK_LOST, text);
    else
        follower_rank_left(epoch->follower, member->rank, text);
    epoch_turn(epoch);
}

/* "D", "S", "Z", … of a process, or 0 when there is none. */
static char process_state(int pid)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    char *end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return end && end[1] == ' ' ? end[2] : 0;
}

static void describe_loss(const struct epoch *epoch, const struct member *member,
                          const char *reason, char *text, size_t bytes)
{
    char who[96];
    char state = member->pid > 0 ? process_state(member->pid) : 0;
    describe_member(epoch, member, who, sizeof who);
    if (reason[0])
        snprintf(text, bytes, "%s: %s was cut off: %s", epoch->label, who, reason);
    else if (state == 0 || state == 'Z')
        snprintf(text, bytes, "%s: %s ended without leaving the job", epoch->label, who);
    else
        snprintf(text, bytes, "%s: %s closed its connection without leaving the job", epoch->label,
                 who);
}

/* A node whose ranks have all left in order takes its links with it, and nobody misses them. */
static bool needs_lost_node(const struct epoch *epoch)
{
    if (exec_has_broken(epoch->exec))
        return true;
    if (!epoch->lost_link[0])
        return false;
    /* The coordinator knows who has left, be it a moment after the link was lost. */
    return epoch->coordinator ? !epoch_node_has_left(epoch, epoch->lost_node)
                              : !epoch->net || epoch->lost_node == 0;
}

/* The daemon has said nothing: fail with what can be seen from here. */
static void on_lost_timer(void *data)
{
    struct epoch *epoch = data;
    for (uint32_t i = 0; i < epoch->n_members; i++) {
        struct member *member = &epoch->members[i];
        if (member->state != MEMBER_ENDED)
            continue;
        char text[400];
        describe_loss(epoch, member, "", text, sizeof text);
        epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, (int)member->rank, member->pid);
        return;
    }
    if (epoch->lost_device[0]) {
        fail_by_device(epoch, GRADD_ERR_RANK_LOST, epoch->lost_device);
    } else if (needs_lost_node(epoch)) {
        char text[640];
        snprintf(text, sizeof text, "%s epoch %llu: %s", epoch->label,
                 (unsigned long long)epoch->number,
                 epoch->lost_link[0] ? epoch->lost_link
                 : epoch->layout     ? "the links between its nodes are gone"
                                     : "an op ended without its data, and nobody has said why");
        epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, -1, 0);
    }
}

void epoch_on_daemon_gone(struct epoch *epoch)
{
    if (!epoch->mesh || epoch->net)
        return; /* one node, or the links stand */
    char text[400];
    snprintf(text, sizeof text,
             "%s epoch %llu: the daemon of node %s was gone before the links to other nodes stood",
             epoch->label, (unsigned long long)epoch->number, epoch->setup->node);
    epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, -1, 0);
}

void epoch_on_member_closed(struct epoch *epoch, struct member *member, const char *reason)
{
    char text[400] = "";
    if (member->state == MEMBER_LEFT) {
        char who[96];
        describe_member(epoch, member, who, sizeof who);
        snprintf(text, sizeof text, "%s has left the job", who);
        member_is_gone(epoch, member, MEMBER_LEFT, GRADD_OK, "");
        epoch_on_rank_left(epoch, member, text);
        return;
    }
    describe_loss(epoch, member, reason, text, sizeof text);
    bool is_cut = reason[0];
    member_is_gone(epoch, member, is_cut ? MEMBER_LOST : MEMBER_ENDED, GRADD_ERR_RANK_LOST, text);
    if (epoch->failure.status || epoch->is_retired)
        return;
    if (is_cut)
        epoch_fail(epoch, GRADD_ERR_RANK_LOST, text, (int)member->rank, member->pid);
    else
        watch_arm(epoch->lost_timer, LOST_GRACE_MS * ms);
}

void epoch_retire(struct epoch *epoch)
{
    if (epoch->is_retired)
        return;
    for (uint32_t i = 0; i < epoch->n_members; i++)
        if (epoch->members[i].conn)
            conn_drain(epoch->members[i].conn);
    epoch->is_retired = true;
    exec_turn(epoch->exec);
    fail_waiting(epoch, GRADD_ERR_RANK_LOST, "the job has begun another epoch");
    for (uint32_t i = 0; i < epoch->n_members; i++) {
        member_flush(&epoch->members[i]);
        member_disconnect(&epoch->members[i], epoch->members[i].state);
    }
    watch_disarm(epoch->stall_timer);
    watch_disarm(epoch->lost_timer);
}

bool epoch_is_idle(const struct epoch *epoch)
{
    return exec_is_idle(epoch->exec) && !epoch_is_draining(epoch);
}

bool epoch_is_draining(const struct epoch *epoch)
{
    return epoch->is_broken || (epoch->device && nccl_is_draining(epoch->device));
}
