/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver, if the program has loaded one. The library never loads it.
 *
 * Invariant: once found it is the same for ever, and asking costs one load. Until then asking costs
 * a look at the loader's count of libraries; only when that has changed is the driver looked for.
 */
#include <link.h>
#include <stdatomic.h>

#include "cuda.h"

static _Atomic(const struct cuda_table *) found;
static _Atomic unsigned long long n_seen;

static int count_loaded(struct dl_phdr_info *info, size_t bytes, void *out)
{
    *(unsigned long long *)out = info->dlpi_adds;
    return 1; /* every entry has the same */
}

const struct cuda_table *cuda_driver(void)
{
    const struct cuda_table *table = atomic_load_explicit(&found, memory_order_acquire);
    if (table)
        return table;
    unsigned long long n_loaded = 0;
    dl_iterate_phdr(count_loaded, &n_loaded);
    if (n_loaded == atomic_load_explicit(&n_seen, memory_order_relaxed))
        return NULL;
    table = cuda_table_open(CUDA_OPEN_IF_LOADED, NULL);
    if (table)
        atomic_store_explicit(&found, table, memory_order_release);
    else
        atomic_store_explicit(&n_seen, n_loaded, memory_order_relaxed);
    return table;
}
