/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elements of any type as tests compare them: bit for bit, but NaN equals NaN. Of half types it
 * looks at bits, and so needs none of the conversions that it helps to test.
 */
#ifndef TEST_ELEMENT_H
#define TEST_ELEMENT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <gradd/types.h>

/* Is the element at p, which may have any address, a NaN? */
static inline bool element_is_nan(int dtype, const void *p)
{
    uint16_t half;
    float single;
    double twofold;
    switch (dtype) {
    case GRADD_F16:
        memcpy(&half, p, sizeof half);
        return (half & 0x7fff) > 0x7c00;
    case GRADD_BF16:
        memcpy(&half, p, sizeof half);
        return (half & 0x7fff) > 0x7f80;
    case GRADD_F32:
        memcpy(&single, p, sizeof single);
        return isnan(single);
    case GRADD_F64:
        memcpy(&twofold, p, sizeof twofold);
        return isnan(twofold);
    default:
        return false;
    }
}

#endif
