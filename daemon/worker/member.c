/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a member and its connection: who may say what, and what its end means.
 */
#include "worker/member.h"

#include <errno.h>

#include "spin.h"
#include "worker/epoch.h"
#include "worker/member_internal.h"

enum { QUEUE_BYTES = 8 * 1024 * 1024 }; /* unsent, before a trainer counts as not reading */

static void on_leave(struct member *member, struct wire_frame *frame)
{
    conn_close(member->conn, "left");
    member->state = MEMBER_LEFT;
}

static const struct {
    Pb__Envelope__BodyCase body_case;
    void (*handle)(struct member *member, struct wire_frame *frame);
} handlers[] = {
    {PB__ENVELOPE__BODY_SUBMIT_BATCH, member_on_submit_batch},
    {PB__ENVELOPE__BODY_FEED_BATCH, member_on_feed_batch},
    {PB__ENVELOPE__BODY_REGISTER, member_on_register},
    {PB__ENVELOPE__BODY_UNREGISTER, member_on_unregister},
    {PB__ENVELOPE__BODY_LEAVE, on_leave},
    {PB__ENVELOPE__BODY_REGISTER_CHUNKS, member_on_register_chunks},
    {PB__ENVELOPE__BODY_OPEN_QUEUE, member_on_open_queue},
    {PB__ENVELOPE__BODY_CLOSE_QUEUE, member_on_close_queue},
};

static bool takes_fds(const struct wire_frame *frame)
{
    return frame->envelope->body_case == PB__ENVELOPE__BODY_REGISTER ||
           frame->envelope->body_case == PB__ENVELOPE__BODY_REGISTER_CHUNKS ||
           frame->envelope->body_case == PB__ENVELOPE__BODY_OPEN_QUEUE;
}

static void on_frame(void *owner, struct conn *conn, struct wire_frame *frame)
{
    struct member *member = owner;
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        if (handlers[i].body_case != frame->envelope->body_case)
            continue;
        if (frame->n_fds > 0 && !takes_fds(frame)) {
            conn_push_error(conn, -GRADD_ERR_PROTOCOL, "descriptors where none belong");
            conn_close(conn, "descriptors where none belong");
            return;
        }
        handlers[i].handle(member, frame);
        return;
    }
    conn_push_error(conn, -GRADD_ERR_PROTOCOL, "a message that the worker does not know");
}

static void on_batch_end(void *owner, struct conn *conn)
{
    struct member *member = owner;
    epoch_turn(member->epoch);
    /* Ranks in step submit again at once. */
    loop_spin(member->epoch->setup->loop, SPIN_NS);
}

static void on_closed(void *owner, struct conn *conn, const char *reason)
{
    struct member *member = owner;
    epoch_on_member_closed(member->epoch, member, reason);
}

static const struct conn_ops member_conn_ops = {
    .on_frame = on_frame,
    .on_batch_end = on_batch_end,
    .on_closed = on_closed,
};

int member_init(struct member *member, struct epoch *epoch, uint32_t rank, int take_fd)
{
    *member = (struct member){.epoch = epoch, .state = MEMBER_ENDED, .rank = rank};
    SLIST_INIT(&member->spare);
    SLIST_INIT(&member->all);
    region_table_init(&member->regions, epoch->setup->chores, epoch->setup->quota);
    if (epoch->device_path)
        member->regions.imports = epoch->setup->imports;
    queue_table_init(&member->queues, epoch->setup->chores,
                     epoch->device_path ? epoch->setup->devices : NULL);
    member->conn = conn_new(epoch->setup->loop, take_fd, QUEUE_BYTES, &member_conn_ops, member);
    if (!member->conn)
        return -ENOMEM;
    conn_set_manual_flush(member->conn);
    conn_pause(member->conn);
    member->state = MEMBER_ACTIVE;
    return 0;
}

void member_init_remote(struct member *member, struct epoch *epoch, uint32_t rank)
{
    const struct layout *layout = epoch->layout;
    *member = (struct member){
        .epoch = epoch,
        .state = MEMBER_ACTIVE,
        .is_remote = true,
        .rank = rank,
        .node = layout->node_of[rank],
        .local_rank = layout->local_rank[rank],
        .pid = layout->pids[rank],
    };
    SLIST_INIT(&member->spare);
    SLIST_INIT(&member->all);
}

void member_start(struct member *member)
{
    if (member->conn)
        conn_resume(member->conn);
}

void member_disconnect(struct member *member, enum member_state state)
{
    member->state = state;
    if (!member->conn)
        return;
    conn_free(member->conn);
    member->conn = NULL;
    member->n_done = member->n_enqueued = 0;
    queue_table_deinit(&member->queues, state != MEMBER_LEFT);
    region_table_deinit(&member->regions);
}

void member_deinit(struct member *member)
{
    member_disconnect(member, member->state);
    HASH_CLEAR(hh, member->streamed); /* some may not have ended */
    struct request *request;
    while ((request = SLIST_FIRST(&member->all))) {
        SLIST_REMOVE_HEAD(&member->all, in_all);
        request_free(request);
    }
}
