/* SPDX-License-Identifier: Apache-2.0 */
/* The variants of every CPU without kernels of its own: the scalar reference, nothing else. */
#include "variant.h"

const struct reduce_variant reduce_variants[] = {
    {"scalar", NULL, reduce_run_scalar, reduce_finite_scalar},
};
const size_t reduce_n_variants = sizeof(reduce_variants) / sizeof(reduce_variants[0]);
