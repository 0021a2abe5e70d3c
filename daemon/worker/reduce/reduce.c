/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The entry of the CPU reduction: chooses the variant once, then only passes calls on.
 *
 * Invariant: the choice changes no result, only the time. The choice is one atomic pointer to a
 * constant row; threads that race in the first call all compute the same row, so a relaxed store
 * is enough.
 */
#include "variant.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static _Atomic(const struct reduce_variant *) chosen;

static const struct reduce_variant *find(const char *name)
{
    for (size_t i = 0; i < reduce_n_variants; i++) {
        const struct reduce_variant *v = &reduce_variants[i];

        if (name != NULL && strcmp(v->name, name) != 0)
            continue;
        if (v->is_usable == NULL || v->is_usable())
            return v;
    }
    return NULL;
}

static const struct reduce_variant *choose(void)
{
    const struct reduce_variant *v = atomic_load_explicit(&chosen, memory_order_relaxed);
    const char *wanted;

    if (v != NULL)
        return v;
    wanted = getenv("GRADD_KERNELS");
    if (wanted != NULL)
        v = find(wanted);
    if (v == NULL)
        v = find(NULL);
    atomic_store_explicit(&chosen, v, memory_order_relaxed);
    return v;
}

bool reduce_is_supported(int dtype, int redop)
{
    switch (dtype) {
    case GRADD_I8:
    case GRADD_U8:
    case GRADD_I32:
    case GRADD_I64:
    case GRADD_F16:
    case GRADD_F32:
    case GRADD_F64:
    case GRADD_BF16:
        return redop >= GRADD_SUM && redop <= GRADD_AVG;
    }
    return false;
}

const char *reduce_variant(void)
{
    return choose()->name;
}

bool reduce_force_variant(const char *name)
{
    const struct reduce_variant *v = name != NULL ? find(name) : NULL;

    if (v == NULL)
        return false;
    atomic_store_explicit(&chosen, v, memory_order_relaxed);
    return true;
}

void reduce_run(const struct reduction *r, size_t begin, size_t end)
{
    assert(reduce_is_supported((int)r->dtype, (int)r->redop));
    assert(r->n_in > 0 && r->n_out > 0 && begin <= end);
    assert(r->redop != GRADD_AVG || r->divisor > 0);
    choose()->run(r, begin, end);
}

size_t reduce_count_nonfinite(enum gradd_dtype dtype, const void *in, size_t n)
{
    return choose()->count_nonfinite(dtype, in, n);
}
