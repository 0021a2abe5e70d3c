/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sends and receives of a group, all at once: pieces go through one mailbox per pair of ranks.
 * Those to or from one peer keep their order.
 */
#include <string.h>

#include "fake.h"

/* The first unfinished part of its direction and peer is the one that may move. */
static bool is_first(const struct fake_part *parts, const struct fake_part *part)
{
    for (; parts != part; parts = parts->next)
        if (parts->peer == part->peer && parts->is_send == part->is_send &&
            parts->done < parts->bytes)
            return false;
    return true;
}

static bool send_piece(struct fake_op *op, struct fake_part *part, const uint8_t *view)
{
    const int rank = op->comm->rank;
    struct mailbox *mail = &op->comm->shared->mail[rank][part->peer];
    const uint64_t left = part->bytes - part->done;

    if (atomic_load(&mail->is_full))
        return false;
    mail->bytes = (uint32_t)(left < FAKE_MAIL_BYTES ? left : FAKE_MAIL_BYTES);
    mail->total = part->bytes;
    memcpy(fake_shared_mail(op->comm->shared, rank, part->peer), view + part->done, mail->bytes);
    part->done += mail->bytes;
    atomic_store(&mail->is_full, 1);
    return true;
}

static bool receive_piece(struct fake_op *op, struct fake_part *part, uint8_t *view)
{
    const int rank = op->comm->rank;
    struct mailbox *mail = &op->comm->shared->mail[part->peer][rank];

    if (!atomic_load(&mail->is_full))
        return false;
    if (mail->total != part->bytes)
        fake_die("rank %d sends %llu bytes, rank %d receives %llu", part->peer,
                 (unsigned long long)mail->total, rank, (unsigned long long)part->bytes);
    memcpy(view + part->done, fake_shared_mail(op->comm->shared, part->peer, rank), mail->bytes);
    part->done += mail->bytes;
    atomic_store(&mail->is_full, 0);
    return true;
}

/* Moves what can be moved; returns how many parts are unfinished, -1: the device has faulted. */
static int move(struct fake_op *op, bool *out_has_moved)
{
    int n_unfinished = 0;

    *out_has_moved = false;
    for (struct fake_part *part = op->parts; part; part = part->next) {
        uint8_t *view;

        if (part->done == part->bytes)
            continue;
        n_unfinished++;
        if (!is_first(op->parts, part))
            continue;
        view = fake_driver()->view(part->memory, part->bytes);
        if (view == NULL) {
            fake_driver()->context_fail(op->stream, CUDA_ERROR_ILLEGAL_ADDRESS);
            return -1;
        }
        if (part->is_send ? send_piece(op, part, view) : receive_piece(op, part, view))
            *out_has_moved = true;
    }
    return n_unfinished;
}

void fake_exec_parts(struct fake_op *op)
{
    for (;;) {
        const uint32_t ticks = atomic_load(&op->comm->shared->ticks);
        bool has_moved;

        if (move(op, &has_moved) <= 0)
            break;
        if (has_moved)
            fake_shared_changed(op->comm->shared);
        else if (!fake_exec_wait(op, ticks))
            return;
    }
    fake_shared_changed(op->comm->shared);
}
