/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many bytes an element of each type has: the one table of library, worker and kernels. A
 * function that is always inlined, since kernels pass a constant and want one back.
 *
 * Thread: any.
 */
#ifndef GRADD_PROTO_DTYPE_H
#define GRADD_PROTO_DTYPE_H

#include <stddef.h>

#include <gradd/types.h>

/* 0: no such type. */
static inline __attribute__((always_inline)) size_t element_size(int dtype)
{
    switch (dtype) {
    case GRADD_I8:
    case GRADD_U8:
        return 1;
    case GRADD_F16:
    case GRADD_BF16:
        return 2;
    case GRADD_I32:
    case GRADD_F32:
        return 4;
    case GRADD_I64:
    case GRADD_F64:
        return 8;
    default:
        return 0;
    }
}

#endif
