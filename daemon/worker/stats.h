/* SPDX-License-Identifier: Apache-2.0 */
/* What gradctl sees of a worker: an epoch's figures as a message; on the coordinator with what the
 * other nodes' workers said last. Thread: loop. */
#ifndef GRADD_STATS_H
#define GRADD_STATS_H

#include "worker/epoch.h"

enum { STATS_GPUS_MAX = 64 };

/* The GPUs in use, at most max of them; devices may be NULL. The messages point into these. */
size_t stats_gpus(struct cuda_device_table *devices, const char *node, Pb__GpuStats *messages,
                  size_t max);

/* Calls push with the reply to request `seq`; epoch may be NULL. The reply is valid in push only.
 */
void stats_reply(struct epoch *epoch, const struct region_quota *quota, uint64_t seq,
                 void (*push)(void *data, Pb__StatsReply *reply), void *data);

#endif
