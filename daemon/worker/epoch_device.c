/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ops on device memory: the epoch's backend on GPUs, which rank is on which GPU, and what becomes
 * of the epoch when one fails.
 */
#include <stdio.h>
#include <unistd.h>

#include "worker/backend/nccl/nccl.h"
#include "worker/coordinator.h"
#include "worker/epoch_internal.h"
#include "worker/follower.h"

enum { COMM_TIMEOUT_S = 120 }; /* for a communicator to come up, without an op_timeout_s */

static const uint64_t second = 1000000000;

/* The ops on devices can not go on; with them the epoch. */
static void on_device_failed(void *data, int status, const char *text, bool broken)
{
    struct epoch *epoch = data;
    char sentence[640];
    snprintf(sentence, sizeof sentence, "%s epoch %llu: worker (node %.80s, pid %d): %s",
             epoch->label, (unsigned long long)epoch->number, epoch->setup->node, (int)getpid(),
             text);
    epoch->is_broken |= broken;
    if (epoch->failure.status || epoch->is_retired) {
        if (broken && (epoch->failure.is_announced || !epoch->failure.status))
            epoch->setup->on_broken(epoch->setup->data);
        return;
    }
    if (!epoch->layout || broken || status != GRADD_ERR_RANK_LOST)
        epoch_fail_by_device(epoch, status, sentence);
    else
        epoch_suspect_device(epoch, sentence);
}

static void on_device_drained(void *data)
{
    epoch_check_idle(data);
}

bool epoch_open_device_backend(struct epoch *epoch)
{
    const struct epoch_setup *setup = epoch->setup;
    const struct nccl_setup nccl = {
        .loop = setup->loop,
        .submitter = setup->submitter,
        .job = setup->job,
        .n_ranks = epoch->size,
        .max_ctas = setup->max_ctas,
        .traffic_class = setup->traffic_class,
        .op_timeout_ns = setup->op_timeout_ns,
        .create_timeout_ns = setup->op_timeout_ns ? setup->op_timeout_ns : COMM_TIMEOUT_S * second,
        .is_alone = !epoch->layout,
        .on_failed = on_device_failed,
        .on_drained = on_device_drained,
        .data = epoch,
    };
    if (!epoch->device_path)
        return true;
    epoch->device = nccl_new(&nccl);
    if (epoch->device)
        exec_set_device_backend(epoch->exec, &backend_nccl, epoch->device);
    return epoch->device;
}

bool epoch_on_device(struct epoch *epoch, struct member *member, struct cuda_device *device)
{
    if (member->device)
        return member->device == device;
    member->device = device;
    nccl_set_device(epoch->device, member->rank, device);
    if (epoch->follower)
        follower_set_device(epoch->follower, member->rank, device->uuid);
    if (epoch->coordinator)
        coordinator_set_device(epoch->coordinator, member->rank, device->uuid);
    return true;
}

bool epoch_is_draining(const struct epoch *epoch)
{
    return epoch->is_broken || (epoch->device && nccl_is_draining(epoch->device));
}
