/* SPDX-License-Identifier: Apache-2.0 */
/* All-reduce and reduce-scatter. */
#include "worker/backend/nccl/lower_steps.h"

static bool is_sum(const struct backend_op *op)
{
    return op->redop == GRADD_SUM || op->redop == GRADD_AVG;
}

/* What each input is multiplied by before it meets others: an average of a floating type is divided
 * first, so that the sum of half types does not overflow. */
static double factor_before(const struct backend_op *op)
{
    return op->redop == GRADD_AVG && lower_is_float(op->dtype) ? op->prescale / op->n_ranks
                                                               : op->prescale;
}

/* The factor can be NCCL's. */
static bool is_premul(const struct lowering *l)
{
    return factor_before(l->op) != 1 && lower_is_exclusive(l->map) && is_sum(l->op) &&
           lower_is_float(l->op->dtype);
}

/* ------------------------------------------------------------------ kernels */

/* A reduction is begun, given addresses, and sealed: what is only a copy becomes copies. */
static struct lower_step *begin_reduce(struct lowering *l, enum lower_phase phase, uint32_t local,
                                       uint64_t count)
{
    struct lower_step *step = lower_add(l, phase, LOWER_REDUCE, local);
    step->count = count;
    step->first_address = l->list->n_addresses;
    return step;
}

static void add_input(struct lowering *l, struct lower_step *step, uint64_t address)
{
    lower_add_address(l, address);
    step->n_in++;
}

static void add_output(struct lowering *l, struct lower_step *step, uint64_t address)
{
    lower_add_address(l, address);
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
        lower_copy(l, phase, reduce.gpu, l->list->addresses[first],
                   l->list->addresses[first + 1 + i], reduce.count);
}

/* Ranks of this GPU that are out of data count as zeros; those without a GPU do so at GPU 0. */
static uint32_t n_zeros(const struct lowering *l, uint32_t local)
{
    uint32_t n = 0;
    if (is_sum(l->op))
        return 0; /* zeros add nothing */
    for (uint32_t i = 0; i < l->op->n_ranks; i++) {
        const uint32_t gpu = l->map->gpu_of[i] == LOWER_NO_GPU ? 0 : l->map->gpu_of[i];
        n += lower_local_of(l, gpu) == local && !l->op->parts[i].in.base;
    }
    return n;
}

/* All inputs on the GPU, shifted by so many bytes. */
static void add_inputs(struct lowering *l, struct lower_step *step, uint64_t shift)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (lower_local_of_rank(l, i) == step->gpu && l->op->parts[i].in.base)
            add_input(l, step, lower_at(&l->op->parts[i].in, shift));
}

static void add_outputs(struct lowering *l, struct lower_step *step, uint64_t shift)
{
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (lower_local_of_rank(l, i) == step->gpu && l->op->parts[i].out.base)
            add_output(l, step, lower_at(&l->op->parts[i].out, shift));
}

static uint32_t n_inputs(const struct lowering *l, uint32_t local)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        n += lower_local_of_rank(l, i) == local && l->op->parts[i].in.base;
    return n;
}

/* The GPU's share of a reduction, at `buffer` unless one input can be taken as it is. Returns where
 * it is. */
static uint64_t reduce_locally(struct lowering *l, uint32_t local, uint64_t shift, uint64_t count,
                               uint64_t buffer)
{
    const uint32_t n_in = n_inputs(l, local), n_zero = n_zeros(l, local);
    const double factor = is_premul(l) ? 1 : factor_before(l->op);
    if (n_in == 0)
        return lower_zeros(l, LOWER_BEFORE, local, buffer, count);
    if (n_in == 1 && n_zero == 0 && factor == 1)
        return lower_only_input(l, local, shift);
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
    if (l->op->redop == GRADD_AVG && !lower_is_float(l->op->dtype)) {
        step->redop = GRADD_AVG;
        step->divisor = l->op->n_ranks;
    } else {
        step->redop = GRADD_SUM;
    }
}

/* A reduction without NCCL: all inputs are on this GPU. */
static void reduce_here(struct lowering *l, struct lower_step *step)
{
    step->prescale = l->op->prescale;
    step->postscale = l->op->postscale;
    step->n_zero = n_zeros(l, step->gpu);
    step->divisor = l->op->redop == GRADD_AVG ? l->op->n_ranks : 0;
}

/* ------------------------------------------------------------------ averages of integers */

/* Every rank's input, in every GPU's scratch memory, one after another. Returns how far they are
 * apart, in bytes; scratch_at[] is where they begin on each GPU of this node. */
static uint64_t gather_inputs(struct lowering *l, uint64_t shift, uint64_t count,
                              uint64_t *scratch_at)
{
    uint64_t pitch = 0;
    for (uint32_t local = 0; local < l->map->n_local; local++)
        for (uint32_t i = 0; i < l->op->n_ranks; i++) {
            const uint64_t at = lower_take_scratch(l, local, count);
            if (i == 0)
                scratch_at[local] = at;
            else if (i == 1)
                pitch = at - scratch_at[local];
        }
    for (uint32_t i = 0; i < l->op->n_ranks; i++) {
        const struct backend_part *part = &l->op->parts[i];
        const uint32_t root = l->map->gpu_of[i];
        for (uint32_t gpu = 0; root != LOWER_NO_GPU && gpu < l->map->n_gpus; gpu++) {
            const uint32_t local = lower_local_of(l, gpu);
            if (local == LOWER_NO_GPU)
                continue;
            const uint64_t to = scratch_at[local] + i * pitch;
            if (gpu == root && !part->in.base)
                lower_zeros(l, LOWER_BEFORE, local, to, count);
            struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_BROADCAST, local);
            call->peer = root;
            call->from = gpu == root && part->in.base ? lower_at(&part->in, shift) : to;
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

/* ------------------------------------------------------------------ all-reduce */

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
        const uint32_t local = lower_local_of(l, gpu);
        uint64_t buffer;
        if (local == LOWER_NO_GPU)
            continue;
        if (lower_first_out(l, local, &buffer))
            buffer += shift;
        else
            buffer = lower_take_scratch(l, local, count);
        struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_ALL_REDUCE, local);
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

void lower_allreduce(struct lowering *l)
{
    const uint64_t shift = l->op->begin * l->size, count = l->op->end - l->op->begin;
    if (count == 0)
        return;
    if (l->map->n_gpus > 1) {
        if (lower_is_small_average(l->op))
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

/* ------------------------------------------------------------------ reduce-scatter */

/* Rank i's share of a reduce-scatter is at its output: what remains to be done to it. */
static void finish_share(struct lowering *l, uint32_t i)
{
    const uint64_t out = lower_at(&l->op->parts[i].out, 0);
    struct lower_step *step =
        begin_reduce(l, LOWER_AFTER, lower_local_of_rank(l, i), l->op->counts[i]);
    set_after(l, step);
    add_input(l, step, out);
    add_output(l, step, out);
    seal_reduce(l, LOWER_AFTER, step);
}

static void reduce_scatter_gathered(struct lowering *l)
{
    uint64_t scratch_at[LOWER_GPUS_MAX], at = 0;
    const uint64_t pitch = gather_inputs(l, 0, lower_total_count(l->op), scratch_at);
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->counts[i], i++) {
        const uint32_t local = lower_local_of_rank(l, i);
        if (local == LOWER_NO_GPU)
            continue;
        struct lower_step *step = begin_reduce(l, LOWER_AFTER, local, l->op->counts[i]);
        add_gathered(l, step, scratch_at[local], pitch, at);
        add_output(l, step, lower_at(&l->op->parts[i].out, 0));
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
            const uint32_t local = lower_local_of(l, gpu);
            if (local == LOWER_NO_GPU)
                continue;
            struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_REDUCE_TO, local);
            call->peer = root;
            call->from = sums[local] + at * l->size;
            call->to = gpu == root ? lower_at(&l->op->parts[i].out, 0) : 0;
            call->count = l->op->counts[i];
            set_redop(l, call);
        }
    }
}

static void reduce_scatter_over_gpus(struct lowering *l)
{
    const bool is_one_call = lower_is_exclusive(l->map) && lower_has_equal_counts(l->op);
    const uint64_t total = lower_total_count(l->op);
    uint64_t sums[LOWER_GPUS_MAX];
    for (uint32_t local = 0; local < l->map->n_local; local++) {
        const bool is_whole =
            n_inputs(l, local) == 1 && (is_premul(l) || factor_before(l->op) == 1);
        sums[local] =
            reduce_locally(l, local, 0, total, is_whole ? 0 : lower_take_scratch(l, local, total));
        if (!is_one_call)
            continue;
        struct lower_step *call = lower_add(l, LOWER_CALLS, LOWER_REDUCE_SCATTER, local);
        call->from = sums[local];
        lower_first_out(l, local, &call->to);
        call->count = l->op->counts[0];
        set_redop(l, call);
    }
    if (!is_one_call)
        scatter_calls(l, sums);
    for (uint32_t i = 0; i < l->op->n_ranks; i++)
        if (lower_local_of_rank(l, i) != LOWER_NO_GPU)
            finish_share(l, i);
}

void lower_reduce_scatter(struct lowering *l)
{
    uint64_t at = 0;
    if (lower_total_count(l->op) == 0)
        return;
    if (l->map->n_gpus > 1) {
        if (lower_is_small_average(l->op))
            reduce_scatter_gathered(l);
        else
            reduce_scatter_over_gpus(l);
        return;
    }
    for (uint32_t i = 0; i < l->op->n_ranks; at += l->op->counts[i], i++) {
        if (lower_local_of_rank(l, i) == LOWER_NO_GPU)
            continue;
        struct lower_step *step =
            begin_reduce(l, LOWER_BEFORE, lower_local_of_rank(l, i), l->op->counts[i]);
        reduce_here(l, step);
        add_inputs(l, step, at * l->size);
        add_output(l, step, lower_at(&l->op->parts[i].out, 0));
        seal_reduce(l, LOWER_BEFORE, step);
    }
}
