/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/follower.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "worker/follower_internal.h"

enum { QUEUE_BYTES = 64 * 1024 * 1024 };

static const struct conn_ops coordinator_conn_ops;

struct follower *follower_new(struct epoch *epoch)
{
    struct follower *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->epoch = epoch;
    TAILQ_INIT(&f->ops);
    if (process_sets_init(&f->sets, epoch->size) < 0 || follower_submit_init(f) < 0) {
        follower_free(f);
        return NULL;
    }
    return f;
}

void follower_free(struct follower *f)
{
    if (!f)
        return;
    conn_free(f->conn);
    struct follower_op *op;
    while ((op = TAILQ_FIRST(&f->ops))) {
        TAILQ_REMOVE(&f->ops, op, link);
        follower_op_free(op);
    }
    process_sets_deinit(&f->sets);
    follower_submit_deinit(f);
    free(f);
}

int follower_attach(struct follower *f, int take_fd)
{
    f->conn = conn_new(f->epoch->setup->loop, take_fd, QUEUE_BYTES, &coordinator_conn_ops, f);
    if (!f->conn)
        return -ENOMEM;
    conn_set_manual_flush(f->conn);
    return 0;
}

void follower_close(struct follower *f)
{
    if (f->conn)
        conn_close(f->conn, "");
}

uint32_t follower_set_ranks(const struct follower *f, uint32_t set, const uint32_t **out_ranks)
{
    const struct process_set *found = process_sets_find(&f->sets, set);
    *out_ranks = found ? found->ranks : NULL;
    return found ? found->n_ranks : 0;
}

/* ------------------------------------------------------------------ the connection */

void follower_push(struct follower *f, Pb__Envelope__BodyCase body_case, void *body)
{
    if (!f->conn)
        return;
    Pb__Envelope envelope = PB__ENVELOPE__INIT;
    envelope.body_case = body_case;
    envelope.remote_submit_batch = body; /* the members of the union are all pointers */
    conn_push(f->conn, &envelope);
}

void follower_rank_left(struct follower *f, uint32_t rank, const char *text)
{
    Pb__RemoteRankLeft left = PB__REMOTE_RANK_LEFT__INIT;
    left.rank = rank;
    left.text = (char *)text;
    follower_push(f, PB__ENVELOPE__BODY_REMOTE_RANK_LEFT, &left);
    follower_flush_now(f);
}

void follower_count(struct follower *f, uint64_t finite_check, uint32_t rank, uint64_t count)
{
    Pb__NonfiniteCount message = PB__NONFINITE_COUNT__INIT;
    message.finite_check = finite_check;
    message.rank = rank;
    message.count = count;
    follower_push(f, PB__ENVELOPE__BODY_NONFINITE_COUNT, &message);
}

void follower_set_device(struct follower *f, uint32_t rank, const uint8_t *uuid)
{
    Pb__RemoteDevice device = PB__REMOTE_DEVICE__INIT;
    device.rank = rank;
    device.device = (ProtobufCBinaryData){CUDA_UUID_BYTES, (uint8_t *)uuid};
    follower_push(f, PB__ENVELOPE__BODY_REMOTE_DEVICE, &device);
}

static void on_frame(void *owner, struct conn *conn, struct wire_frame *frame)
{
    const char *wrong = follower_take(owner, frame->envelope);
    if (wrong)
        conn_close(conn, wrong);
}

static void on_batch_end(void *owner, struct conn *conn)
{
    struct follower *f = owner;
    epoch_turn(f->epoch);
}

static void on_closed(void *owner, struct conn *conn, const char *reason)
{
    struct follower *f = owner;
    char text[300];
    snprintf(text, sizeof text, "%s",
             reason[0] ? reason : "the worker there closed the connection");
    conn_free(conn);
    f->conn = NULL;
    if (!f->epoch->is_retired)
        epoch_link_lost(f->epoch, 0, text);
}

static const struct conn_ops coordinator_conn_ops = {
    .on_frame = on_frame,
    .on_batch_end = on_batch_end,
    .on_closed = on_closed,
};
