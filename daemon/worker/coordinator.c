/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/coordinator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "worker/central.h"
#include "worker/backend/nccl/nccl.h"
#include "worker/device_map.h"
#include "worker/epoch.h"
#include "worker/execute_message.h"
#include "worker/finite_round.h"
#include "worker/follower.h"

enum { QUEUE_BYTES = 64 * 1024 * 1024 };

struct node {
    struct coordinator *coordinator;
    uint32_t index;
    struct conn *conn; /* NULL: not attached, or over */
    char **names;      /* by id - 1 */
    uint32_t n_names, names_capacity;
};

struct coordinator {
    struct epoch *epoch;
    struct node *nodes; /* [n_nodes]; [0] is this node and unused */
    uint64_t seq;       /* of the last ExecuteBatch */
    uint64_t n_ops;     /* in all of them */
    struct stats_round *stats;
    struct finite_rounds *finite;
    struct device_map devices;
    uint32_t *gpu_of;    /* scratch, by rank */
    char too_large[700]; /* why the op handed out last can not run */
};

static const struct conn_ops node_conn_ops;

struct coordinator *coordinator_new(struct epoch *epoch)
{
    struct coordinator *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    const struct layout *layout = epoch->layout;
    c->epoch = epoch;
    c->nodes = calloc(layout->n_nodes, sizeof *c->nodes);
    c->stats = stats_round_new(epoch->setup->loop, layout->n_nodes);
    c->finite = finite_rounds_new(layout->n_nodes, layout->node_of, layout->size);
    c->gpu_of = calloc(layout->size, sizeof *c->gpu_of);
    if (device_map_init(&c->devices, layout->size) < 0 || !c->nodes || !c->stats || !c->finite ||
        !c->gpu_of) {
        coordinator_free(c);
        return NULL;
    }
    for (uint32_t i = 0; i < layout->n_nodes; i++)
        c->nodes[i] = (struct node){.coordinator = c, .index = i};
    return c;
}

static void node_deinit(struct node *node)
{
    conn_free(node->conn);
    for (uint32_t i = 0; i < node->n_names; i++)
        free(node->names[i]);
    free(node->names);
}

void coordinator_free(struct coordinator *c)
{
    if (!c)
        return;
    for (uint32_t i = 0; c->nodes && i < c->epoch->layout->n_nodes; i++)
        node_deinit(&c->nodes[i]);
    free(c->nodes);
    stats_round_free(c->stats);
    finite_rounds_free(c->finite);
    device_map_deinit(&c->devices);
    free(c->gpu_of);
    free(c);
}

int coordinator_attach(struct coordinator *c, uint32_t index, int take_fd)
{
    struct node *node = &c->nodes[index];
    node->conn = conn_new(c->epoch->setup->loop, take_fd, QUEUE_BYTES, &node_conn_ops, node);
    if (!node->conn)
        return -ENOMEM;
    conn_set_manual_flush(node->conn);
    return 0;
}

void coordinator_flush(struct coordinator *c)
{
    for (uint32_t i = 1; i < c->epoch->layout->n_nodes; i++)
        if (c->nodes[i].conn)
            conn_flush(c->nodes[i].conn);
}

void coordinator_close(struct coordinator *c)
{
    for (uint32_t i = 1; i < c->epoch->layout->n_nodes; i++)
        if (c->nodes[i].conn)
            conn_close(c->nodes[i].conn, "");
}

static void push(struct node *node, Pb__Envelope__BodyCase body_case, void *body)
{
    if (!node->conn)
        return;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.execute_batch = body; /* the members of the union are all pointers */
    conn_push(node->conn, &envelope);
}

/* ------------------------------------------------------------------ to the nodes */

/* False: out of memory. */
static bool number_finite_check(struct coordinator *c, struct plan_op *op)
{
    bool is_asked = false;
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        const struct request *request = op->parts[i].request;
        is_asked |= request && request->check_finite;
    }
    op->finite_check = 0;
    if (!is_asked || finite_is_local(c->finite, op->ranks, op->n_ranks))
        return true;
    op->finite_check = finite_rounds_begin(c->finite, op->ranks, op->n_ranks);
    return op->finite_check;
}

void coordinator_set_device(struct coordinator *c, uint32_t rank, const uint8_t *uuid)
{
    device_map_set(&c->devices, rank, 0, uuid);
}

/* Every node learns of a communicator before the batch that needs it. False: *out_text says why
 * there is none. */
static bool begin_comm(struct coordinator *c, const struct plan_op *op, const char **out_text)
{
    struct backend *nccl = c->epoch->device;
    uint8_t id[NCCL_UNIQUE_ID_BYTES] = {0};
    const uint32_t n_gpus = device_map_number(&c->devices, op->ranks, op->n_ranks, c->gpu_of);
    if (nccl_has_comm(nccl, op->ranks, c->gpu_of, op->n_ranks))
        return true;
    if (n_gpus > 1 && !nccl_unique_id(id, out_text))
        return false;
    Pb__CommBegin begin = PB__COMM_BEGIN__INIT;
    begin.ranks = (uint32_t *)op->ranks;
    begin.n_ranks = op->n_ranks;
    begin.comm_rank = c->gpu_of;
    begin.n_comm_rank = op->n_ranks;
    begin.size = n_gpus;
    begin.unique_id = (ProtobufCBinaryData){sizeof id, id};
    for (uint32_t i = 1; i < c->epoch->layout->n_nodes; i++)
        push(&c->nodes[i], PB__ENVELOPE__BODY_COMM_BEGIN, &begin);
    *out_text = "the coordinator has no memory for a communicator";
    return nccl_comm_begin(nccl, op->ranks, c->gpu_of, op->n_ranks, n_gpus, id, sizeof id);
}

static bool begin_comms(struct coordinator *c, struct plan_op *const *ops, size_t n)
{
    const char *text = "";
    for (size_t i = 0; c->epoch->device && i < n; i++) {
        if (!ops[i]->signature.is_device || begin_comm(c, ops[i], &text))
            continue;
        char sentence[400];
        snprintf(sentence, sizeof sentence, "NCCL has no communicator for \"%.100s\": %s",
                 ops[i]->name, text);
        epoch_fail_here(c->epoch, GRADD_ERR_UNAVAILABLE, sentence);
        return false;
    }
    return true;
}

size_t coordinator_execute(struct coordinator *c, struct plan_op *const *ops, size_t n)
{
    struct execute_message message = {.ops = NULL};
    bool has_memory = true;
    n = execute_count(ops, n);
    for (size_t i = 0; i < n; i++)
        has_memory &= number_finite_check(c, ops[i]);
    if (!begin_comms(c, ops, n))
        return 0;
    if (!has_memory || !execute_message_init(&message, ops, n)) {
        execute_message_deinit(&message);
        epoch_fail_here(c->epoch, GRADD_ERR_NO_MEMORY, "the coordinator has no memory for a batch");
        return 0;
    }
    for (size_t i = 0; i < n; i++) {
        ops[i]->number = ++c->n_ops;
        plan_op_detach(c->epoch->plan, ops[i]);
    }
    message.batch.seq = ++c->seq;
    for (uint32_t i = 1; i < c->epoch->layout->n_nodes; i++)
        push(&c->nodes[i], PB__ENVELOPE__BODY_EXECUTE_BATCH, &message.batch);
    execute_message_deinit(&message);
    return n;
}

/* Only the counts of an all-to-all, one for each pair of ranks, outgrow a frame: with some 1000
 * ranks or more always. */
struct plan_op *coordinator_next(struct coordinator *c)
{
    struct plan_op *op = plan_next(c->epoch->plan);
    if (!op || op->status != GRADD_OK || execute_bytes(op) <= EXECUTE_BYTES_MAX)
        return op;
    snprintf(c->too_large, sizeof c->too_large,
             "%s: \"%.255s\": the counts of %s of %u ranks on several nodes do not fit into one "
             "message (%d bytes); fewer ranks, or smaller counts, would",
             c->epoch->label, op->name, kind_name(op->signature.kind), op->n_ranks,
             EXECUTE_BYTES_MAX);
    op->status = GRADD_ERR_UNSUPPORTED;
    op->text = c->too_large;
    return op;
}

void coordinator_refuse(struct coordinator *c, const struct member *member, uint64_t request,
                        int status, const char *text)
{
    uint32_t rank = member->rank;
    Pb__RemoteFailure failure = PB__REMOTE_FAILURE__INIT;
    failure.requests = &request;
    failure.n_requests = 1;
    failure.ranks = &rank;
    failure.n_ranks = 1;
    failure.code = (uint32_t)-status;
    failure.text = (char *)text;
    push(&c->nodes[member->node], PB__ENVELOPE__BODY_REMOTE_FAILURE, &failure);
}

bool coordinator_count(struct coordinator *c, uint32_t node, uint64_t finite_check, uint32_t rank,
                       uint64_t count)
{
    const struct nonfinite counted = {rank, count};
    struct nonfinite whole;
    const bool *nodes;
    switch (finite_rounds_take(c->finite, node, finite_check, &counted, &whole, &nodes)) {
    case FINITE_WRONG:
        return false;
    case FINITE_WAITS:
        return true;
    case FINITE_DONE:
        break;
    }
    Pb__NonfiniteCount message = PB__NONFINITE_COUNT__INIT;
    message.finite_check = finite_check;
    message.rank = whole.rank;
    message.count = whole.count;
    for (uint32_t i = 1; i < c->epoch->layout->n_nodes; i++)
        if (nodes[i])
            push(&c->nodes[i], PB__ENVELOPE__BODY_NONFINITE_COUNT, &message);
    if (nodes[0])
        exec_counted(c->epoch->exec, finite_check, whole.rank, whole.count);
    return true;
}

/* ------------------------------------------------------------------ figures */

void coordinator_ask_stats(struct coordinator *c, uint64_t seq, stats_round_fn *fn, void *data)
{
    if (!stats_round_begin(c->stats, seq, fn, data))
        return;
    Pb__StatsRequest request = PB__STATS_REQUEST__INIT;
    request.seq = seq;
    for (uint32_t i = 1; i < c->epoch->layout->n_nodes; i++) {
        if (c->nodes[i].conn && !conn_is_closing(c->nodes[i].conn)) {
            push(&c->nodes[i], PB__ENVELOPE__BODY_STATS_REQUEST, &request);
            stats_round_await(c->stats, i);
        } else if (!epoch_node_has_left(c->epoch, i)) {
            stats_round_miss(c->stats, i);
        }
    }
    coordinator_flush(c);
    stats_round_end_if_done(c->stats);
}

const struct stats_round *coordinator_stats(const struct coordinator *c)
{
    return c->stats;
}

void coordinator_give(struct coordinator *c, const struct request *request)
{
    Pb__RemoteResult result = PB__REMOTE_RESULT__INIT;
    result.request = request->id;
    result.rank = request->member->rank;
    result.data.data = request->data;
    result.data.len = request->bytes;
    push(&c->nodes[request->member->node], PB__ENVELOPE__BODY_REMOTE_RESULT, &result);
}

/* ------------------------------------------------------------------ from the nodes */

static void node_lost(struct node *node, const char *text)
{
    struct epoch *epoch = node->coordinator->epoch;
    if (!epoch->is_retired && !epoch_node_has_left(epoch, node->index))
        epoch_link_lost(epoch, node->index, text);
}

/* A message that an honest worker does not send. */
static void protest(struct node *node, const char *text)
{
    conn_close(node->conn, text);
}

/* The name that a submit carries, or refers to. NULL: neither, or no memory. */
static const char *resolve_name(struct node *node, const Pb__RemoteSubmit *submit)
{
    if (submit->name[0] == '\0')
        return submit->name_id > 0 && submit->name_id <= node->n_names
                   ? node->names[submit->name_id - 1]
                   : NULL;
    if (submit->name_id == 0)
        return submit->name;
    if (submit->name_id != node->n_names + 1 || node->n_names >= FOLLOWER_NAMES_MAX)
        return NULL;
    if (node->n_names == node->names_capacity) {
        uint32_t capacity = node->names_capacity ? 2 * node->names_capacity : 256;
        char **names = realloc(node->names, capacity * sizeof *names);
        if (!names)
            return NULL;
        node->names = names;
        node->names_capacity = capacity;
    }
    char *name = strdup(submit->name);
    if (name)
        node->names[node->n_names++] = name;
    return name;
}

static void submit_one(struct node *node, const Pb__RemoteSubmit *submit)
{
    struct epoch *epoch = node->coordinator->epoch;
    struct member *member = epoch_remote_member(epoch, submit->rank, node->index);
    const char *name = member ? resolve_name(node, submit) : NULL;
    if (!name) {
        protest(node, "submits for a rank or under a name that is not its own");
        return;
    }
    /* Request 0 stands for a rank that is out of data. */
    if (submit->request == 0 || !central_accepts(submit)) {
        protest(node, "submits data that does not belong to its op, or an op without a number");
        return;
    }
    struct request *request = member_remote_request(member, submit->request, submit);
    const char *text = "the coordinator has no memory";
    if (!request) {
        coordinator_refuse(node->coordinator, member, submit->request, GRADD_ERR_NO_MEMORY, text);
        return;
    }
    const struct signature signature = {
        .kind = submit->kind,
        .dtype = submit->dtype,
        .redop = submit->redop,
        .root = submit->root,
        .count = submit->count,
        .out_capacity = submit->out_capacity,
        .prescale = submit->prescale == 0 ? 1 : submit->prescale,
        .postscale = submit->postscale == 0 ? 1 : submit->postscale,
        .counts = submit->counts,
        .n_counts = submit->n_counts,
        .dims = submit->dims,
        .n_dims = submit->n_dims,
        .group = submit->group,
        .group_size = submit->group_size,
        .is_device = submit->is_device,
    };
    int status = plan_submit(epoch->plan, submit->rank, submit->set, name, &signature, request,
                             clock_now_ns(), &text);
    if (status != GRADD_OK)
        member_complete(request, status, text, NULL);
}

static void on_node_frame(void *owner, struct conn *conn, struct wire_frame *frame)
{
    struct node *node = owner;
    struct epoch *epoch = node->coordinator->epoch;
    const Pb__Envelope *envelope = frame->envelope;
    if (envelope->body_case == PB__ENVELOPE__BODY_REMOTE_SUBMIT_BATCH) {
        const Pb__RemoteSubmitBatch *batch = envelope->remote_submit_batch;
        for (size_t i = 0; i < batch->n_submits && !conn_is_closing(conn); i++)
            submit_one(node, batch->submits[i]);
    } else if (envelope->body_case == PB__ENVELOPE__BODY_REMOTE_RANK_LEFT) {
        const Pb__RemoteRankLeft *left = envelope->remote_rank_left;
        struct member *member = epoch_remote_member(epoch, left->rank, node->index);
        if (member)
            epoch_on_rank_left(epoch, member, left->text);
    } else if (envelope->body_case == PB__ENVELOPE__BODY_REMOTE_DEVICE) {
        const Pb__RemoteDevice *device = envelope->remote_device;
        if (epoch_remote_member(epoch, device->rank, node->index) &&
            device->device.len == CUDA_UUID_BYTES)
            device_map_set(&node->coordinator->devices, device->rank, node->index,
                           device->device.data);
        else
            protest(node, "names a GPU for a rank that is not its own");
    } else if (envelope->body_case == PB__ENVELOPE__BODY_NONFINITE_COUNT) {
        const Pb__NonfiniteCount *m = envelope->nonfinite_count;
        if (!coordinator_count(node->coordinator, node->index, m->finite_check, m->rank, m->count))
            protest(node, "counted for an op that it has no part in");
    } else if (envelope->body_case == PB__ENVELOPE__BODY_STATS_REPLY) {
        stats_round_take(node->coordinator->stats, node->index, envelope->stats_reply);
    } else {
        protest(node, "sent a message that the coordinator does not know");
    }
}

static void on_node_batch_end(void *owner, struct conn *conn)
{
    struct node *node = owner;
    epoch_turn(node->coordinator->epoch);
}

static void on_node_closed(void *owner, struct conn *conn, const char *reason)
{
    struct node *node = owner;
    char text[300];
    snprintf(text, sizeof text, "%s",
             reason[0] ? reason : "the worker there closed the connection");
    conn_free(conn);
    node->conn = NULL;
    stats_round_drop(node->coordinator->stats, node->index);
    node_lost(node, text);
}

static const struct conn_ops node_conn_ops = {
    .on_frame = on_node_frame,
    .on_batch_end = on_node_batch_end,
    .on_closed = on_node_closed,
};
