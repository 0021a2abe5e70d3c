/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/central.h"

static bool is_plain(const struct request *request)
{
    return request->part.in.base && !request->part.queue && !request->check_finite;
}

static bool fits(int kind, int dtype, uint64_t count)
{
    const uint64_t size = dtype_bytes((enum gradd_dtype)dtype);
    return kind == GRADD_ALLREDUCE && size > 0 && count > 0 && count <= CENTRAL_BYTES_MAX / size;
}

bool central_offers(const struct layout *layout, const struct signature *signature,
                    const struct request *request)
{
    /* What is said to the coordinator is not encrypted; and `wire` rounds what travels. */
    const bool is_rounded = layout->wire && signature->dtype == GRADD_F32;
    return !layout->encrypt_data && !is_rounded && !signature->is_device && is_plain(request) &&
           fits(signature->kind, signature->dtype, signature->count);
}

bool central_awaits(const struct request *request, size_t bytes)
{
    const uint32_t kind = request->submitted.kind, dtype = request->submitted.dtype;
    return !request->submitted.is_device && is_plain(request) && request->part.out.base &&
           fits((int)kind, (int)dtype, request->submitted.count) && bytes == request->bytes;
}

bool central_accepts(const Pb__RemoteSubmit *submit)
{
    return submit->data.len == 0 ||
           (!submit->is_device && fits((int)submit->kind, (int)submit->dtype, submit->count) &&
            submit->data.len == submit->count * dtype_bytes((enum gradd_dtype)submit->dtype));
}

bool central_takes(const struct plan_op *op)
{
    const struct signature *s = &op->signature;
    if (s->is_device || !fits(s->kind, s->dtype, s->count))
        return false;
    for (uint32_t i = 0; i < op->n_ranks; i++) {
        const struct request *request = op->parts[i].request;
        if (request && !is_plain(request))
            return false;
    }
    return true;
}
