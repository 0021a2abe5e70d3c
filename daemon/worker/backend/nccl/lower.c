/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/lower.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "worker/plan/signature.h"

void lower_list_init(struct lower_list *list)
{
    *list = (struct lower_list){0};
}

void lower_list_deinit(struct lower_list *list)
{
    for (int i = 0; i < LOWER_PHASES; i++)
        free(list->phases[i].steps);
    free(list->addresses);
    lower_list_init(list);
}

void lower_list_clear(struct lower_list *list)
{
    for (int i = 0; i < LOWER_PHASES; i++)
        list->phases[i].n = 0;
    list->n_addresses = 0;
    memset(list->scratch_bytes, 0, sizeof list->scratch_bytes);
}

uint32_t lower_number_gpus(const uint32_t *keys, uint32_t n_ranks, uint32_t *gpu_of)
{
    uint32_t n_gpus = 0;
    for (uint32_t i = 0; i < n_ranks; i++) {
        uint32_t first = 0;
        while (keys[first] != keys[i])
            first++;
        if (keys[i] == LOWER_NO_GPU)
            gpu_of[i] = LOWER_NO_GPU;
        else
            gpu_of[i] = first < i ? gpu_of[first] : n_gpus++;
    }
    return n_gpus;
}

/* ------------------------------------------------------------------ steps */

/* An op while it is lowered. */
struct lowering {
    struct lower_list *list;
    const struct backend_op *op;
    const struct lower_map *map;
    size_t size; /* of an element */
    bool failed; /* out of memory */
};

static struct lower_step *add(struct lowering *l, enum lower_phase phase, enum lower_kind kind,
                              uint32_t local)
{
    static _Thread_local struct lower_step lost; /* what is written after memory ran out */
    struct lower_steps *steps = &l->list->phases[phase];
    if (steps->n == steps->capacity) {
        size_t capacity = steps->capacity ? 2 * steps->capacity : 64;
        struct lower_step *grown = realloc(steps->steps, capacity * sizeof *grown);
        if (!grown) {
            l->failed = true;
            return &lost;
        }
        steps->steps = grown;
        steps->capacity = capacity;
    }
    struct lower_step *step = &steps->steps[steps->n++];
    *step = (struct lower_step){
        .kind = kind,
        .gpu = local,
        .op = l->op,
        .dtype = l->op->dtype,
        .redop = l->op->redop,
        .prescale = 1,
        .postscale = 1,
    };
    return step;
}

static void add_address(struct lowering *l, uint64_t address)
{
    struct lower_list *list = l->list;
    if (list->n_addresses == list->address_capacity) {
        size_t capacity = list->address_capacity ? 2 * list->address_capacity : 64;
        uint64_t *grown = realloc(list->addresses, capacity * sizeof *grown);
        if (!grown) {
            l->failed = true;
            return;
        }
        list->addresses = grown;
        list->address_capacity = capacity;
    }
    list->addresses[list->n_addresses++] = address;
}

static void copy(struct lowering *l, enum lower_phase phase, uint32_t local, uint64_t from,
                 uint64_t to, uint64_t count)
{
    if (from == to || count == 0)
        return;
    struct lower_step *step = add(l, phase, LOWER_COPY, local);
    step->from = from;
    step->to = to;
    step->count = count * l->size;
}

static uint64_t padded(uint64_t bytes)
{
    return (bytes + LOWER_SCRATCH_ALIGN - 1) / LOWER_SCRATCH_ALIGN * LOWER_SCRATCH_ALIGN;
}

static uint64_t scratch(struct lowering *l, uint32_t local, uint64_t count)
{
    uint64_t *bytes = &l->list->scratch_bytes[local], at = *bytes;
    *bytes += padded(count * l->size);
    return lower_scratch(at);
}

static uint64_t zeros(struct lowering *l, enum lower_phase phase, uint32_t local, uint64_t at,
                      uint64_t count)
{
    struct lower_step *step = add(l, phase, LOWER_ZERO, local);
    step->to = at;
    step->count = count * l->size;
    return at;
}

static uint64_t address_of(const struct backend_span *span, uint64_t shift)
{
    return (uint64_t)(uintptr_t)span->base + shift;
}

/* ------------------------------------------------------------------ who is where */

static uint32_t local_of_rank(const struct lowering *l, uint32_t i)
{
    const uint32_t gpu = l->map->gpu_of[i];
    return gpu == LOWER_NO_GPU ? LOWER_NO_GPU : l->map->local_of[gpu];
}

static uint32_t local_of(const struct lowering *l, uint32_t gpu)
{
    return l->map->local_of[gpu];
}

/* Every rank has a GPU of its own. */
static bool is_exclusive(const struct lower_map *map)
{
    return map->n_gpus == map->n_ranks;
}

static bool is_float(enum gradd_dtype dtype)
{
    return dtype == GRADD_F16 || dtype == GRADD_F32 || dtype == GRADD_F64 || dtype == GRADD_BF16;
}

/* Sums of these may not fit into the type: the average needs all inputs in one place. */
static bool is_small_average(const struct backend_op *op)
{
    return op->redop == GRADD_AVG && !is_float(op->dtype) && op->dtype != GRADD_I64;
}

static bool is_sum(const struct backend_op *op)
{
    return op->redop == GRADD_SUM || op->redop == GRADD_AVG;
}

/* What each input is multiplied by before it meets others: an average of a floating type is divided
 * first, so that the sum of half types does not overflow. */
static double factor_before(const struct backend_op *op)
{
    return op->redop == GRADD_AVG && is_float(op->dtype) ? op->prescale / op->n_ranks
                                                         : op->prescale;
}

/* The factor can be NCCL's. */
static bool is_premul(const struct lowering *l)
{
    return factor_before(l->op) != 1 && is_exclusive(l->map) && is_sum(l->op) &&
           is_float(l->op->dtype);
}

/* The first output on a GPU; false: nobody there wants the result. */
static bool first_out(const struct lowering *l, uint32_t local, uint64_t *out)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++) {
        if (local_of_rank(l, i) != local || !l->op->parts[i].out.base)
            continue;
        *out = address_of(&l->op->parts[i].out, 0);
        return true;
    }
    return false;
}

/* ------------------------------------------------------------------ kernels */

/* A reduction is begun, given addresses, and sealed: what is only a copy becomes copies. */
static struct lower_step *begin_reduce(struct lowering *l, enum lower_phase phase, uint32_t local,
                                       uint64_t count)
{
    struct lower_step *step = add(l, phase, LOWER_REDUCE, local);
    step->count = count;
    step->first_address = l->list->n_addresses;
    return step;
}

static void add_input(struct lowering *l, struct lower_step *step, uint64_t address)
{
    add_address(l, address);
    step->n_in++;
}

static void add_output(struct lowering *l, struct lower_step *step, uint64_t address)
{
    add_address(l, address);
    step->n_out++;
}

static void seal_reduce(struct lowering *l, enum lower_phase phase, struct lower_step *step)
{
    if (l->failed)
        return;
    const bool is_copy = step->n_in == 1 && step->n_zero == 0 && step->prescale == 1 &&
                         step->postscale == 1 && step->divisor <= 1;
    const bool is_nothing = step->count == 0 || step->n_out == 0;
    if (!is_copy && !is_nothing)
        return;
    const struct lower_step reduce = *step;
    const size_t first = reduce.first_address, n_addresses = l->list->n_addresses;
    l->list->phases[phase].n--; /* it was the last */
    for (uint32_t i = 0; !is_nothing && i < reduce.n_out && first + 1 + i < n_addresses; i++)
        copy(l, phase, reduce.gpu, l->list->addresses[first], l->list->addresses[first + 1 + i],
             reduce.count);
}

/* Ranks of this GPU that are out of data count as zeros; those without a GPU do so at GPU 0. */
static uint32_t n_zeros(const struct lowering *l, uint32_t local)
{
    uint32_t n = 0;
    if (is_sum(l->op))
        return 0; /* zeros add nothing */
    for (uint32_t i = 0; i < l->op->n_ranks; i++) {
        const uint32_t gpu = l->map->gpu_of[i] == LOWER_NO_GPU ? 0 : l->map->gpu_of[i];
        n += local_of(l, gpu) == local && !l->op->parts[i].in.base;
    }
    return n;
}

/* All inputs on the GPU, shifted by so many bytes. */
static void add_inputs(struct lowering *l, struct lower_step *step, uint64_t shift)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (local_of_rank(l, i) == step->gpu && l->op->parts[i].in.base)
            add_input(l, step, address_of(&l->op->parts[i].in, shift));
}

static void add_outputs(struct lowering *l, struct lower_step *step, uint64_t shift)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (local_of_rank(l, i) == step->gpu && l->op->parts[i].out.base)
            add_output(l, step, address_of(&l->op->parts[i].out, shift));
}

static uint32_t n_inputs(const struct lowering *l, uint32_t local)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        n += local_of_rank(l, i) == local && l->op->parts[i].in.base;
    return n;
}

static uint64_t only_input(const struct lowering *l, uint32_t local, uint64_t shift)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (local_of_rank(l, i) == local && l->op->parts[i].in.base)
            return address_of(&l->op->parts[i].in, shift);
    return 0;
}

/* The GPU's share of a reduction, at `buffer` unless one input can be taken as it is. Returns where
 * it is. */
static uint64_t reduce_locally(struct lowering *l, uint32_t local, uint64_t shift, uint64_t count,
                               uint64_t buffer)
{
    const uint32_t n_in = n_inputs(l, local), n_zero = n_zeros(l, local);
    const double factor = is_premul(l) ? 1 : factor_before(l->op);
    if (n_in == 0)
        return zeros(l, LOWER_BEFORE, local, buffer, count);
    if (n_in == 1 && n_zero == 0 && factor == 1)
        return only_input(l, local, shift);
    struct lower_step *step = begin_reduce(l, LOWER_BEFORE, local, count);
    step->redop = is_sum(l->op) ? GRADD_SUM : l->op->redop;
    step->prescale = factor;
    step->n_zero = n_zero;
    add_inputs(l, step, shift);
    add_output(l, step, buffer);
    seal_reduce(l, LOWER_BEFORE, step);
    return buffer;
}

/* The operator of NCCL's calls. */
static void set_redop(const struct lowering *l, struct lower_step *call)
{
    if (is_premul(l)) {
        const bool is_average = l->op->redop == GRADD_AVG && l->op->prescale == 1;
        call->redop = is_average ? GRADD_AVG : LOWER_PREMUL_SUM;
        call->factor = factor_before(l->op);
    } else {
        call->redop = is_sum(l->op) ? GRADD_SUM : l->op->redop;
    }
}

/* What remains to be done to a sum of all GPUs: an integer average's division, and the factor. */
static void set_after(const struct lowering *l, struct lower_step *step)
{
    step->postscale = l->op->postscale;
    if (l->op->redop == GRADD_AVG && !is_float(l->op->dtype)) {
        step->redop = GRADD_AVG;
        step->divisor = l->op->n_ranks;
    } else {
        step->redop = GRADD_SUM;
    }
}

/* ------------------------------------------------------------------ kinds */

/* A reduction without NCCL: all inputs are on this GPU. */
static void reduce_here(struct lowering *l, struct lower_step *step)
{
    step->prescale = l->op->prescale;
    step->postscale = l->op->postscale;
    step->n_zero = n_zeros(l, step->gpu);
    step->divisor = l->op->redop == GRADD_AVG ? l->op->n_ranks : 0;
}

/* Every rank's input, in every GPU's scratch memory, one after another. Returns how far they are
 * apart, in bytes; scratch_at[] is where they begin on each GPU of this node. */
static uint64_t gather_inputs(struct lowering *l, uint64_t shift, uint64_t count,
                              uint64_t *scratch_at)
{
    uint64_t pitch = 0;
    for (uint32_t local = 0; local < l->map->n_local; local++)
        for (uint32_t i = 0; i < l->op->n_ranks; i++) {
            const uint64_t at = scratch(l, local, count);
            if (i == 0)
                scratch_at[local] = at;
            else if (i == 1)
                pitch = at - scratch_at[local];
        }
    for (uint32_t i = 0; i < l->op->n_ranks; i++) {
        const struct backend_part *part = &l->op->parts[i];
        const uint32_t root = l->map->gpu_of[i];
        for (uint32_t gpu = 0; root != LOWER_NO_GPU && gpu < l->map->n_gpus; gpu++) {
            const uint32_t local = local_of(l, gpu);
            if (local == LOWER_NO_GPU)
                continue;
            const uint64_t to = scratch_at[local] + i * pitch;
            if (gpu == root && !part->in.base)
                zeros(l, LOWER_BEFORE, local, to, count);
            struct lower_step *call = add(l, LOWER_CALLS, LOWER_BROADCAST, local);
            call->peer = root;
            call->from = gpu == root && part->in.base ? address_of(&part->in, shift) : to;
            call->to = to;
            call->count = count;
        }
    }
    return pitch;
}

/* Elements [skip, skip + count) of all gathered inputs become the step's. */
static void add_gathered(struct lowering *l, struct lower_step *step, uint64_t first,
                         uint64_t pitch, uint64_t skip)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (l->map->gpu_of[i] != LOWER_NO_GPU)
            add_input(l, step, first + i * pitch + skip * l->size);
    reduce_here(l, step);
}

static void allreduce_gathered(struct lowering *l, uint64_t shift, uint64_t count)
{
    uint64_t at[LOWER_GPUS_MAX];
    const uint64_t pitch = gather_inputs(l, shift, count, at);
    for (uint32_t local = 0; local < l->map->n_local; local++) {
        struct lower_step *step = begin_reduce(l, LOWER_AFTER, local, count);
        add_gathered(l, step, at[local], pitch, 0);
        add_outputs(l, step, shift);
        seal_reduce(l, LOWER_AFTER, step);
    }
}

static void allreduce_over_gpus(struct lowering *l, uint64_t shift, uint64_t count)
{
    for (uint32_t gpu = 0; gpu < l->map->n_gpus; gpu++) {
        const uint32_t local = local_of(l, gpu);
        uint64_t buffer;
        if (local == LOWER_NO_GPU)
            continue;
        if (first_out(l, local, &buffer))
            buffer += shift;
        else
            buffer = scratch(l, local, count);
        struct lower_step *call = add(l, LOWER_CALLS, LOWER_ALL_REDUCE, local);
        call->to = buffer;
        call->count = count;
        set_redop(l, call);
        const uint64_t from = reduce_locally(l, local, shift, count, buffer);
        call->from = from;
        struct lower_step *step = begin_reduce(l, LOWER_AFTER, local, count);
        set_after(l, step);
        add_input(l, step, buffer);
        add_outputs(l, step, shift);
        seal_reduce(l, LOWER_AFTER, step);
    }
}

static void lower_allreduce(struct lowering *l)
{
    const uint64_t shift = l->op->begin * l->size, count = l->op->end - l->op->begin;
    if (count == 0)
        return;
    if (l->map->n_gpus > 1) {
        if (is_small_average(l->op))
            allreduce_gathered(l, shift, count);
        else
            allreduce_over_gpus(l, shift, count);
        return;
    }
    for (uint32_t local = 0; local < l->map->n_local; local++) {
        struct lower_step *step = begin_reduce(l, LOWER_BEFORE, local, count);
        reduce_here(l, step);
        add_inputs(l, step, shift);
        add_outputs(l, step, shift);
        seal_reduce(l, LOWER_BEFORE, step);
    }
}

/* From one address to every output on the GPU. */
static void spread(struct lowering *l, enum lower_phase phase, uint32_t local, uint64_t from,
                   uint64_t shift, uint64_t count)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (local_of_rank(l, i) == local && l->op->parts[i].out.base)
            copy(l, phase, local, from, address_of(&l->op->parts[i].out, shift), count);
}

static void lower_broadcast(struct lowering *l)
{
    const uint64_t shift = l->op->begin * l->size, count = l->op->end - l->op->begin;
    const uint32_t root = l->map->gpu_of[l->op->root];
    if (count == 0 || root == LOWER_NO_GPU)
        return;
    for (uint32_t gpu = 0; gpu < l->map->n_gpus; gpu++) {
        const uint32_t local = local_of(l, gpu);
        if (local == LOWER_NO_GPU)
            continue;
        const uint64_t source = address_of(&l->op->parts[l->op->root].in, shift);
        uint64_t buffer = source; /* in place at the root */
        if (gpu != root && first_out(l, local, &buffer))
            buffer += shift;
        else if (gpu != root)
            buffer = scratch(l, local, count);
        if (l->map->n_gpus > 1) {
            struct lower_step *call = add(l, LOWER_CALLS, LOWER_BROADCAST, local);
            call->peer = root;
            call->from = call->to = buffer;
            call->count = count;
        }
        spread(l, LOWER_AFTER, local, buffer, shift, count);
    }
}

static bool has_equal_counts(const struct backend_op *op)
{
    for (uint32_t i = 1; i < op->n_ranks; i++)
        if ((op->kind == GRADD_ALLGATHER ? op->parts[i].count : op->counts[i]) !=
            (op->kind == GRADD_ALLGATHER ? op->parts[0].count : op->counts[0]))
            return false;
    return true;
}

static void allgather_call(struct lowering *l, uint32_t local)
{
    struct lower_step *call = add(l, LOWER_CALLS, LOWER_ALL_GATHER, local);
    call->from = only_input(l, local, 0);
    first_out(l, local, &call->to);
    call->count = l->op->parts[0].count;
}

static void allgather_over_gpus(struct lowering *l)
{
    uint64_t at = 0, buffer;
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->parts[i].count, i++) {
        const uint32_t root = l->map->gpu_of[i];
        for (uint32_t gpu = 0; l->op->parts[i].count > 0 && gpu < l->map->n_gpus; gpu++) {
            const uint32_t local = local_of(l, gpu);
            if (local == LOWER_NO_GPU || !first_out(l, local, &buffer))
                continue;
            struct lower_step *call = add(l, LOWER_CALLS, LOWER_BROADCAST, local);
            call->peer = root;
            call->to = buffer + at * l->size;
            call->from = gpu == root ? address_of(&l->op->parts[i].in, 0) : call->to;
            call->count = l->op->parts[i].count;
        }
    }
    for (uint32_t local = 0; local < l->map->n_local; local++)
        if (first_out(l, local, &buffer))
            spread(l, LOWER_AFTER, local, buffer, 0, at);
}

static void lower_allgather(struct lowering *l)
{
    const bool is_one_call = is_exclusive(l->map) && has_equal_counts(l->op);
    uint64_t at = 0;
    if (l->map->n_gpus > 1) {
        for (uint32_t local = 0; is_one_call && local < l->map->n_local; local++)
            if (l->op->parts[0].count > 0)
                allgather_call(l, local);
        if (!is_one_call)
            allgather_over_gpus(l);
        return;
    }
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->parts[i].count, i++)
        if (local_of_rank(l, i) != LOWER_NO_GPU)
            spread(l, LOWER_BEFORE, local_of_rank(l, i), address_of(&l->op->parts[i].in, 0),
                   at * l->size, l->op->parts[i].count);
}

/* Rank i's share of a reduce-scatter is at its output: what remains to be done to it. */
static void finish_share(struct lowering *l, uint32_t i)
{
    const uint64_t out = address_of(&l->op->parts[i].out, 0);
    struct lower_step *step = begin_reduce(l, LOWER_AFTER, local_of_rank(l, i), l->op->counts[i]);
    set_after(l, step);
    add_input(l, step, out);
    add_output(l, step, out);
    seal_reduce(l, LOWER_AFTER, step);
}

static uint64_t total_count(const struct backend_op *op)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < op->n_ranks; i++)
        total += op->counts[i];
    return total;
}

static void reduce_scatter_gathered(struct lowering *l)
{
    uint64_t scratch_at[LOWER_GPUS_MAX], at = 0;
    const uint64_t pitch = gather_inputs(l, 0, total_count(l->op), scratch_at);
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->counts[i], i++) {
        const uint32_t local = local_of_rank(l, i);
        if (local == LOWER_NO_GPU)
            continue;
        struct lower_step *step = begin_reduce(l, LOWER_AFTER, local, l->op->counts[i]);
        add_gathered(l, step, scratch_at[local], pitch, at);
        add_output(l, step, address_of(&l->op->parts[i].out, 0));
        seal_reduce(l, LOWER_AFTER, step);
    }
}

/* One reduction to each rank's GPU. */
static void scatter_calls(struct lowering *l, const uint64_t *sums)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->counts[i], i++) {
        const uint32_t root = l->map->gpu_of[i];
        for (uint32_t gpu = 0; l->op->counts[i] > 0 && gpu < l->map->n_gpus; gpu++) {
            const uint32_t local = local_of(l, gpu);
            if (local == LOWER_NO_GPU)
                continue;
            struct lower_step *call = add(l, LOWER_CALLS, LOWER_REDUCE_TO, local);
            call->peer = root;
            call->from = sums[local] + at * l->size;
            call->to = gpu == root ? address_of(&l->op->parts[i].out, 0) : 0;
            call->count = l->op->counts[i];
            set_redop(l, call);
        }
    }
}

static void reduce_scatter_over_gpus(struct lowering *l)
{
    const bool is_one_call = is_exclusive(l->map) && has_equal_counts(l->op);
    const uint64_t total = total_count(l->op);
    uint64_t sums[LOWER_GPUS_MAX];
    for (uint32_t local = 0; local < l->map->n_local; local++) {
        const bool is_whole =
            n_inputs(l, local) == 1 && (is_premul(l) || factor_before(l->op) == 1);
        sums[local] = reduce_locally(l, local, 0, total, is_whole ? 0 : scratch(l, local, total));
        if (!is_one_call)
            continue;
        struct lower_step *call = add(l, LOWER_CALLS, LOWER_REDUCE_SCATTER, local);
        call->from = sums[local];
        first_out(l, local, &call->to);
        call->count = l->op->counts[0];
        set_redop(l, call);
    }
    if (!is_one_call)
        scatter_calls(l, sums);
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (local_of_rank(l, i) != LOWER_NO_GPU)
            finish_share(l, i);
}

static void lower_reduce_scatter(struct lowering *l)
{
    uint64_t at = 0;
    if (total_count(l->op) == 0)
        return;
    if (l->map->n_gpus > 1) {
        if (is_small_average(l->op))
            reduce_scatter_gathered(l);
        else
            reduce_scatter_over_gpus(l);
        return;
    }
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->counts[i], i++) {
        if (local_of_rank(l, i) == LOWER_NO_GPU)
            continue;
        struct lower_step *step =
            begin_reduce(l, LOWER_BEFORE, local_of_rank(l, i), l->op->counts[i]);
        reduce_here(l, step);
        add_inputs(l, step, at * l->size);
        add_output(l, step, address_of(&l->op->parts[i].out, 0));
        seal_reduce(l, LOWER_BEFORE, step);
    }
}

/* One rank's message to another: on both sides in the same place of the same order. */
static void message(struct lowering *l, uint32_t from, uint32_t to, uint64_t in_at, uint64_t out_at)
{
    const struct backend_part *sender = &l->op->parts[from], *receiver = &l->op->parts[to];
    const uint32_t from_gpu = l->map->gpu_of[from], to_gpu = l->map->gpu_of[to];
    const uint64_t count = sender->counts[to];
    if (count == 0 || from_gpu == LOWER_NO_GPU || to_gpu == LOWER_NO_GPU)
        return;
    const uint32_t from_local = local_of(l, from_gpu), to_local = local_of(l, to_gpu);
    if (from_gpu == to_gpu) {
        if (from_local != LOWER_NO_GPU)
            copy(l, LOWER_BEFORE, from_local, address_of(&sender->in, in_at * l->size),
                 address_of(&receiver->out, out_at * l->size), count);
        return;
    }
    if (from_local != LOWER_NO_GPU) {
        struct lower_step *call = add(l, LOWER_CALLS, LOWER_SEND, from_local);
        call->peer = to_gpu;
        call->from = address_of(&sender->in, in_at * l->size);
        call->count = count;
    }
    if (to_local != LOWER_NO_GPU) {
        struct lower_step *call = add(l, LOWER_CALLS, LOWER_RECV, to_local);
        call->peer = from_gpu;
        call->to = address_of(&receiver->out, out_at * l->size);
        call->count = count;
    }
}

static void lower_alltoall(struct lowering *l)
{
    for (uint32_t to = 0; to < l->op->n_ranks; to++) {
        uint64_t out_at = 0;
        for (uint32_t from = 0; from < l->op->n_ranks; from++) {
            const uint64_t *counts = l->op->parts[from].counts;
            uint64_t in_at = 0;
            for (uint32_t i = 0; i < to; i++)
                in_at += counts[i];
            message(l, from, to, in_at, out_at);
            out_at += counts[to];
        }
    }
}

static void count_nonfinite(struct lowering *l)
{
    uint32_t input = 0;
    const bool is_scattered = l->op->kind == GRADD_REDUCE_SCATTER;
    for (uint32_t i = 0; i < l->op->n_ranks; i++) {
        if (!l->op->parts[i].in.base)
            continue;
        struct lower_step *step = add(l, LOWER_BEFORE, LOWER_COUNT, local_of_rank(l, i));
        step->from = address_of(&l->op->parts[i].in, is_scattered ? 0 : l->op->begin * l->size);
        step->count = is_scattered ? total_count(l->op) : l->op->end - l->op->begin;
        step->peer = input++;
    }
}

uint64_t lower_scratch_max(const struct backend_op *op, const struct lower_map *map)
{
    const size_t size = dtype_bytes(op->dtype);
    if (map->n_gpus <= 1)
        return 0;
    switch (op->kind) {
    case GRADD_ALLREDUCE:
        return padded((op->end - op->begin) * size) * (is_small_average(op) ? op->n_ranks : 1);
    case GRADD_REDUCE_SCATTER:
        return padded(total_count(op) * size) * (is_small_average(op) ? op->n_ranks : 1);
    case GRADD_BROADCAST:
        return padded((op->end - op->begin) * size);
    default:
        return 0;
    }
}

int lower_op(struct lower_list *list, const struct backend_op *op, const struct lower_map *map)
{
    struct lowering l = {
        .list = list, .op = op, .map = map, .size = dtype_bytes(op->dtype), .failed = false};
    /* Counted first: a reduction in place overwrites its inputs. */
    if (op->nonfinite && is_float(op->dtype) &&
        (op->kind == GRADD_ALLREDUCE || op->kind == GRADD_REDUCE_SCATTER))
        count_nonfinite(&l);
    switch (op->kind) {
    case GRADD_ALLREDUCE:
        lower_allreduce(&l);
        break;
    case GRADD_BROADCAST:
        lower_broadcast(&l);
        break;
    case GRADD_ALLGATHER:
        lower_allgather(&l);
        break;
    case GRADD_REDUCE_SCATTER:
        lower_reduce_scatter(&l);
        break;
    case GRADD_ALLTOALL:
        lower_alltoall(&l);
        break;
    case GRADD_BARRIER:
    case GRADD_SET_ADD:
    case GRADD_SET_REMOVE:
    case GRADD_JOIN:
        break; /* nothing to move */
    }
    return l.failed ? -ENOMEM : 0;
}
