/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.cu compiled for the CPU: a launch runs its threads one after the other, the last first,
 * so that a thread that reads what another has written is found.
 */
#ifndef GRADD_TEST_DEVICE_H
#define GRADD_TEST_DEVICE_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* False: there is no such kernel. */
bool device_run(const char *name, unsigned grid_x, unsigned grid_y, unsigned threads,
                const void *params);

#ifdef __cplusplus
}
#endif

#endif
