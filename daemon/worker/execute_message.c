/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/execute_message.h"

#include <stdlib.h>

#include "worker/member.h"

enum { FINITE_CHECK_BYTES = 11 };

static void fill_part(Pb__ExecutePart *message, const struct plan_op *op, uint32_t i)
{
    const struct request *request = op->parts[i].request;
    *message = (Pb__ExecutePart)PB__EXECUTE_PART__INIT;
    if (!request)
        return; /* out of data */
    message->request = request->member->is_remote ? request->id : 1;
    if (op->signature.kind == GRADD_ALLGATHER || op->signature.kind == GRADD_ALLTOALL)
        message->count = op->parts[i].count;
    if (op->signature.kind == GRADD_ALLTOALL) {
        message->counts = (uint64_t *)request->part.counts;
        message->n_counts = op->n_ranks;
    }
}

/* All but its parts. */
static void fill_op(Pb__Execute *message, const struct plan_op *op)
{
    const struct signature *s = &op->signature;
    *message = (Pb__Execute)PB__EXECUTE__INIT;
    message->set = op->set;
    if (op->set != 0) {
        message->ranks = (uint32_t *)op->ranks;
        message->n_ranks = op->n_ranks;
    }
    message->kind = s->kind;
    message->dtype = s->dtype;
    message->redop = s->redop;
    message->root = s->root;
    message->count = s->count;
    message->prescale = s->prescale == 1 ? 0 : s->prescale;
    message->postscale = s->postscale == 1 ? 0 : s->postscale;
    if (s->kind == GRADD_REDUCE_SCATTER || s->kind == GRADD_SET_ADD) {
        message->counts = (uint64_t *)s->counts;
        message->n_counts = s->n_counts;
    }
    message->result = op->result;
    message->is_device = s->is_device;
    message->finite_check = op->finite_check;
}

/* A message in a message: a tag of one byte and the length come before it. */
static size_t nested_bytes(size_t bytes)
{
    size_t n = 2;
    for (size_t rest = bytes; rest >= 0x80; rest >>= 7)
        n++;
    return n + bytes;
}

size_t execute_bytes(const struct plan_op *op)
{
    Pb__Execute message;
    Pb__ExecutePart part;
    fill_op(&message, op);
    size_t bytes = FINITE_CHECK_BYTES + pb__execute__get_packed_size(&message);
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        fill_part(&part, op, i);
        bytes += nested_bytes(pb__execute_part__get_packed_size(&part));
    }
    return nested_bytes(bytes);
}

size_t execute_count(struct plan_op *const *ops, size_t n)
{
    size_t bytes = 0, n_fitting = 0;
    while (n_fitting < n && (bytes += execute_bytes(ops[n_fitting])) <= EXECUTE_BYTES_MAX)
        n_fitting++;
    if (n_fitting == n)
        return n;
    size_t n_whole = n_fitting;
    while (n_whole > 0 && ops[n_whole - 1]->n_following > 0)
        n_whole--;
    return n_whole > 0 ? n_whole : n_fitting;
}

static bool reserve(struct execute_message *m, struct plan_op *const *ops, size_t n)
{
    size_t n_parts = 0;
    for (size_t i = 0; i < n; i++)
        n_parts += ops[i]->n_ranks;
    *m = (struct execute_message){
        .batch = PB__EXECUTE_BATCH__INIT,
        .ops = calloc(n, sizeof *m->ops),
        .op_pointers = calloc(n, sizeof(*m->op_pointers)),
        .parts = calloc(n_parts, sizeof *m->parts),
        .part_pointers = calloc(n_parts, sizeof(*m->part_pointers)),
    };
    return m->ops && m->op_pointers && m->parts && m->part_pointers;
}

bool execute_message_init(struct execute_message *m, struct plan_op *const *ops, size_t n)
{
    if (!reserve(m, ops, n))
        return false;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t n_ranks = ops[i]->n_ranks;
        fill_op(&m->ops[i], ops[i]);
        m->ops[i].parts = m->part_pointers + at;
        m->ops[i].n_parts = n_ranks;
        for (uint32_t k = 0; k < n_ranks; k++, at++) {
            fill_part(&m->parts[at], ops[i], k);
            m->part_pointers[at] = &m->parts[at];
        }
        m->op_pointers[i] = &m->ops[i];
    }
    m->batch.ops = m->op_pointers;
    m->batch.n_ops = n;
    return true;
}

void execute_message_deinit(struct execute_message *m)
{
    free(m->ops);
    free(m->op_pointers);
    free(m->parts);
    free(m->part_pointers);
    *m = (struct execute_message){.ops = NULL};
}
