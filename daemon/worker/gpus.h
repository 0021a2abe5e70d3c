/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `gradd-worker --gpus`: what GPUs there are and which libraries, in lines that the daemon and
 * people read. A process of its own, because loading the driver takes its time and the daemon
 * never does. Makes no context.
 *
 *   driver VERSION            or  driver - WHY NOT
 *   nccl VERSION [WHAT LACKS] or  nccl - WHY NOT
 *   kernels WHAT
 *   gpu UUID BYTES COMPUTE MODE MPS NAME      MODE: default exclusive prohibited; MPS: mps no-mps
 *   end
 */
#ifndef GRADD_GPUS_H
#define GRADD_GPUS_H

#include <stdio.h>

void gpus_print(FILE *out);

#endif
