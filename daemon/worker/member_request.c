/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of ops, one per submission of a rank: recycled, so that nothing is allocated once a
 * trainer's usual number of ops is warm.
 */
#include <stdlib.h>
#include <string.h>

#include "worker/member_internal.h"

struct request *request_new(struct member *member, uint64_t id)
{
    struct request *request = SLIST_FIRST(&member->spare);
    if (request) {
        SLIST_REMOVE_HEAD(&member->spare, link);
    } else {
        request = calloc(1, sizeof *request);
        if (!request)
            return NULL;
        SLIST_INSERT_HEAD(&member->all, request, in_all);
    }
    *request = (struct request){
        .member = member,
        .id = id,
        .counts = request->counts,
        .counts_capacity = request->counts_capacity,
        .data = request->data,
        .in_all = request->in_all,
    };
    member->stats.in_flight++;
    return request;
}

static void request_unpin(struct request *request)
{
    region_unpin(request->in_region);
    region_unpin(request->out_region);
    region_unpin(request->signal_region);
    queue_unpin(request->part.queue);
    request->in_region = request->out_region = request->signal_region = NULL;
    request->part.queue = NULL;
}

void request_release(struct request *request)
{
    struct member *member = request->member;
    if (request->is_streamed)
        HASH_DEL(member->streamed, request);
    request_unpin(request);
    member->stats.in_flight--;
    SLIST_INSERT_HEAD(&member->spare, request, link);
}

void request_free(struct request *request)
{
    request_unpin(request); /* it may not have been completed */
    free(request->counts);
    free(request->data);
    free(request);
}

bool request_copy_counts(struct request *request, const uint64_t *from, size_t n)
{
    if (n > request->counts_capacity) {
        uint64_t *counts = realloc(request->counts, n * sizeof *counts);
        if (!counts)
            return false;
        request->counts = counts;
        request->counts_capacity = n;
    }
    if (n)
        memcpy(request->counts, from, n * sizeof *from);
    request->part.counts = request->counts;
    return true;
}

/* The op may run here. */
static bool request_copy_data(struct request *request, ProtobufCBinaryData data)
{
    if (data.len == 0)
        return true;
    if (!request->data && !(request->data = malloc(CENTRAL_BYTES_MAX)))
        return false;
    memcpy(request->data, data.data, data.len);
    request->part.in.base = request->part.out.base = request->data;
    return true;
}

struct request *member_remote_request(struct member *member, uint64_t id,
                                      const Pb__RemoteSubmit *submit)
{
    struct request *request = request_new(member, id);
    if (!request)
        return NULL;
    if (!request_copy_counts(request, submit->counts, submit->n_counts) ||
        !request_copy_data(request, submit->data)) {
        request_release(request);
        return NULL;
    }
    request->part.count = submit->count;
    request->ready = submit->count;
    request->check_finite = submit->check_finite;
    request->bytes = submit->count * dtype_bytes(submit->dtype);
    return request;
}
