/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much memory of a GPU is taken, asked without a context: by NVML, which comes with the driver
 * and is opened at run time. The interface is that of the NVML API reference
 * (docs.nvidia.com/deploy/nvml-api).
 *
 * Thread: any, one at a time.
 */
#ifndef GRADD_NVML_H
#define GRADD_NVML_H

#include <stdbool.h>
#include <stdint.h>

/* By all processes. False: there is no NVML, or no such GPU. uuid_text: "GPU-...". */
bool nvml_used_bytes(const char *uuid_text, uint64_t *out_bytes);

#endif
