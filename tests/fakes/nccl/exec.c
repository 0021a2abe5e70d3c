/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An operation on its stream: every rank shows its input in pieces, waits for the others, takes
 * what it needs, waits again. Operations of a communicator run in the order in which they were
 * launched, on whatever streams.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/worker/reduce/convert.h"
#include "daemon/worker/reduce/reduce.h"

#include "fake.h"

/* ---- Signatures ---- */

static const char *const kind_names[] = {
    [KIND_ALL_REDUCE] = "ncclAllReduce",         [KIND_REDUCE] = "ncclReduce",
    [KIND_BROADCAST] = "ncclBroadcast",          [KIND_ALL_GATHER] = "ncclAllGather",
    [KIND_REDUCE_SCATTER] = "ncclReduceScatter", [KIND_ALL_TO_ALL] = "ncclAlltoAll",
};

static void describe(const struct fake_signature *s, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s(count %llu, type %d, operator %d, root %d)", kind_names[s->kind],
             (unsigned long long)s->count, s->type, s->op, s->root);
}

void fake_signature_publish(const struct fake_op *op)
{
    struct shared_rank *self = &op->comm->shared->ranks[op->comm->rank];
    const uint64_t at = op->number % FAKE_HISTORY;

    atomic_store(&self->history[at].number, 0);
    self->history[at].signature = (struct fake_signature){
        .kind = op->kind, .type = op->type, .op = op->op, .root = op->root, .count = op->count};
    atomic_store(&self->history[at].number, op->number);
}

void fake_signature_compare(const struct fake_op *op)
{
    const ncclComm_t comm = op->comm;
    const uint64_t at = op->number % FAKE_HISTORY;
    const struct fake_signature *own = &comm->shared->ranks[comm->rank].history[at].signature;

    for (int i = 0; i < comm->n_ranks; i++) {
        const struct shared_rank *other = &comm->shared->ranks[i];
        struct fake_signature theirs;
        char a[120], b[120];

        if (atomic_load(&other->history[at].number) != op->number)
            continue;
        theirs = other->history[at].signature;
        if (atomic_load(&other->history[at].number) != op->number ||
            memcmp(&theirs, own, sizeof(theirs)) == 0)
            continue;
        describe(own, a, sizeof(a));
        describe(&theirs, b, sizeof(b));
        fake_die("collective %llu of a communicator differs: rank %d issued %s, rank %d %s",
                 (unsigned long long)op->number, comm->rank, a, i, b);
    }
}

/* ---- Waiting ---- */

/* A process that nobody has waited for yet is dead as well. */
static bool is_alive(int pid)
{
    char path[40], text[256], *after;
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    n = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[n > 0 ? n : 0] = '\0';
    after = strrchr(text, ')');
    return after && after[1] == ' ' && after[2] != 'Z' && after[2] != 'X';
}

static void look_for_peers(ncclComm_t comm)
{
    for (int i = 0; i < comm->n_ranks; i++) {
        const struct shared_rank *other = &comm->shared->ranks[i];
        uint32_t state;
        char text[80];

        /* On one machine nobody tells: the real one's kernel waits in shared memory for ever. */
        if (i == comm->rank || strcmp(other->host, fake_settings()->host) == 0)
            continue;
        state = atomic_load(&other->state);
        if (state == RANK_FINALIZED || (state != RANK_GONE && is_alive(other->pid)))
            continue;
        snprintf(text, sizeof(text), "connection to rank %d closed", i);
        fake_comm_set_error(comm, ncclRemoteError, text);
    }
}

bool fake_exec_wait(struct fake_op *op, uint32_t ticks)
{
    if (op->comm->is_stopped)
        return false;
    if (op->kind != KIND_P2P)
        fake_signature_compare(op);
    fake_shared_wait(op->comm->shared, ticks);
    look_for_peers(op->comm);
    return !op->comm->is_stopped;
}

static void wait_for_abort(struct fake_op *op)
{
    while (!op->comm->is_stopped)
        fake_shared_wait(op->comm->shared, atomic_load(&op->comm->shared->ticks));
}

/* All ranks have come to this point of the operation; false: stopped. */
static bool meet(struct fake_op *op)
{
    struct shared *shared = op->comm->shared;
    const uint64_t step = atomic_fetch_add(&shared->ranks[op->comm->rank].steps, 1) + 1;

    fake_shared_changed(shared);
    for (int i = 0; i < op->comm->n_ranks;) {
        const uint32_t ticks = atomic_load(&shared->ticks);

        if (atomic_load(&shared->ranks[i].steps) >= step)
            i++;
        else if (!fake_exec_wait(op, ticks))
            return false;
    }
    return !op->comm->is_stopped;
}

/* ---- Data ---- */

double fake_scalar(int type, const void *p)
{
    union {
        uint8_t bytes[8];
        int8_t i8;
        uint8_t u8;
        int32_t i32;
        int64_t i64;
        double f64;
    } value;
    float f32;
    uint16_t half;

    memcpy(value.bytes, p, fake_type_bytes(type));
    switch (type) {
    case ncclInt8:
        return value.i8;
    case ncclUint8:
        return value.u8;
    case ncclInt32:
        return value.i32;
    case ncclInt64:
        return (double)value.i64;
    case ncclFloat64:
        return value.f64;
    case ncclFloat32:
        memcpy(&f32, p, sizeof(f32));
        return f32;
    default:
        memcpy(&half, p, sizeof(half));
        convert_widen((enum gradd_dtype)type, &half, &f32, 1);
        return f32;
    }
}

struct view {
    const uint8_t *in;
    uint8_t *out;
    size_t size; /* of an element */
    uint64_t n_in;
    double factor;
};

static bool has_input(const struct fake_op *op)
{
    return op->kind != KIND_BROADCAST || op->comm->rank == op->root;
}

static bool has_output(const struct fake_op *op)
{
    return op->kind != KIND_REDUCE || op->comm->rank == op->root;
}

/* False: the memory is not there any more, and the device has faulted. */
static bool find_memory(const struct fake_op *op, struct view *view)
{
    const uint64_t n = (uint64_t)op->comm->n_ranks;
    const bool is_spread = op->kind == KIND_REDUCE_SCATTER || op->kind == KIND_ALL_TO_ALL;
    const bool is_gathered = op->kind == KIND_ALL_GATHER || op->kind == KIND_ALL_TO_ALL;

    *view = (struct view){.size = fake_type_bytes(op->type),
                          .n_in = op->count * (is_spread ? n : 1),
                          .factor = op->factor};
    if (op->count == 0)
        return true;
    if (has_input(op))
        view->in = fake_driver()->view(op->in, view->n_in * view->size);
    if (has_output(op))
        view->out = fake_driver()->view(op->out, op->count * (is_gathered ? n : 1) * view->size);
    if (op->device_factor) {
        const void *factor = fake_driver()->view(op->device_factor, view->size);

        view->factor = factor ? fake_scalar(op->type, factor) : 1;
    }
    if ((has_input(op) && !view->in) || (has_output(op) && !view->out)) {
        fake_driver()->context_fail(op->stream, CUDA_ERROR_ILLEGAL_ADDRESS);
        return false;
    }
    return true;
}

/* The real kernels load and store elements. */
static bool is_aligned(const struct fake_op *op)
{
    const uintptr_t size = fake_type_bytes(op->type);

    if ((!has_input(op) || (uintptr_t)op->in % size == 0) &&
        (!has_output(op) || (uintptr_t)op->out % size == 0))
        return true;
    fake_driver()->context_fail(op->stream, CUDA_ERROR_MISALIGNED_ADDRESS);
    return false;
}

static void show(const struct fake_op *op, const struct view *view, uint64_t begin, uint64_t n)
{
    if (view->in)
        memcpy(fake_shared_slot(op->comm->shared, op->comm->rank), view->in + begin * view->size,
               n * view->size);
}

/* Elements [begin, begin + n) of all inputs, the first of which is `skip` into the slots. */
static void reduce(const struct fake_op *op, const struct view *view, uint64_t skip, uint64_t n,
                   uint8_t *to)
{
    const void *in[FAKE_RANKS];
    void *out[] = {to};
    const struct reduction r = {
        .dtype = (enum gradd_dtype)op->type,
        .redop = op->op == ncclNumOps ? GRADD_SUM : (enum gradd_redop)op->op,
        .n_in = (unsigned)op->comm->n_ranks,
        .n_out = 1,
        .in = in,
        .out = out,
        .divisor = (unsigned)op->comm->n_ranks,
        .prescale = view->factor,
        .postscale = 1,
    };

    for (int i = 0; i < op->comm->n_ranks; i++)
        in[i] = fake_shared_slot(op->comm->shared, i) + skip * view->size;
    reduce_run_scalar(&r, 0, n);
}

/* What of [begin, begin + n) belongs to `segment`, when each has `count`; returns how much. */
static uint64_t overlap(uint64_t begin, uint64_t n, uint64_t segment, uint64_t count,
                        uint64_t *out_first)
{
    const uint64_t low = segment * count, high = low + count;
    const uint64_t first = begin > low ? begin : low;
    const uint64_t last = begin + n < high ? begin + n : high;

    *out_first = first;
    return first < last ? last - first : 0;
}

static void take(const struct fake_op *op, const struct view *view, uint64_t begin, uint64_t n)
{
    const uint64_t rank = (uint64_t)op->comm->rank, size = view->size;
    uint64_t first, mine;

    switch (op->kind) {
    case KIND_ALL_REDUCE:
    case KIND_REDUCE:
        if (has_output(op))
            reduce(op, view, 0, n, view->out + begin * size);
        return;
    case KIND_BROADCAST:
        memcpy(view->out + begin * size, fake_shared_slot(op->comm->shared, op->root), n * size);
        return;
    case KIND_ALL_GATHER:
        for (uint64_t i = 0; i < (uint64_t)op->comm->n_ranks; i++)
            memcpy(view->out + (i * op->count + begin) * size,
                   fake_shared_slot(op->comm->shared, (int)i), n * size);
        return;
    case KIND_REDUCE_SCATTER:
        mine = overlap(begin, n, rank, op->count, &first);
        if (mine > 0)
            reduce(op, view, first - begin, mine, view->out + (first - rank * op->count) * size);
        return;
    case KIND_ALL_TO_ALL:
        mine = overlap(begin, n, rank, op->count, &first);
        for (uint64_t i = 0; i < (uint64_t)op->comm->n_ranks && mine > 0; i++)
            memcpy(view->out + (i * op->count + first - rank * op->count) * size,
                   fake_shared_slot(op->comm->shared, (int)i) + (first - begin) * size,
                   mine * size);
        return;
    case KIND_P2P:
        return;
    }
}

static void exec_collective(struct fake_op *op)
{
    const uint64_t per_slot = FAKE_SLOT_BYTES / fake_type_bytes(op->type);
    struct view view;
    uint64_t begin = 0;

    if (!is_aligned(op) || !find_memory(op, &view))
        return;
    do {
        const uint64_t left = view.n_in - begin, n = left < per_slot ? left : per_slot;

        if (n > 0)
            show(op, &view, begin, n);
        if (!meet(op))
            return;
        fake_signature_compare(op);
        if (n > 0)
            take(op, &view, begin, n);
        if (!meet(op))
            return;
        begin += n;
    } while (begin < view.n_in);
}

/* Operations of a communicator that are on several streams. */
static void wait_for_turn(struct fake_op *op)
{
    while (atomic_load(&op->comm->n_done) + 1 < op->order && !op->comm->is_stopped)
        fake_shared_wait(op->comm->shared, atomic_load(&op->comm->shared->ticks));
}

static void exec(struct fake_op *op)
{
    const struct fake_settings *settings = fake_settings();

    if (op->order == settings->async_at) {
        fake_comm_set_error(op->comm, settings->async_result, "injected by the test");
        wait_for_abort(op);
    } else if (op->order == settings->hang_at) {
        wait_for_abort(op);
    } else if (op->kind == KIND_P2P) {
        fake_exec_parts(op);
    } else {
        exec_collective(op);
    }
}

void fake_exec(void *data)
{
    struct fake_op *op = data;
    ncclComm_t comm = op->comm;

    wait_for_turn(op);
    comm->is_running = true;
    if (!comm->is_stopped)
        exec(op);
    atomic_store(&comm->n_done, op->order);
    comm->is_running = false;
    fake_shared_changed(comm->shared);
    for (struct fake_part *part = op->parts, *next; part; part = next) {
        next = part->next;
        free(part);
    }
    free(op);
}
