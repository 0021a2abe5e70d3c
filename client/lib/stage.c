/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Staging of ordinary memory: the ring's arithmetic, the pool of shared buffers, the copies.
 *
 * Invariant: a buffer is lent to one op at a time, from stage_prepare() to stage_release(), and
 * goes back only after the worker has said that the op ended (or the epoch is over, after which
 * nothing is lent again).
 */
#include "stage.h"

#include <stdlib.h>
#include <string.h>

#include "context.h"

enum {
    /* A window that stays in a core's cache: copied in, reduced and copied out while warm. */
    WINDOW_BYTES = 2 << 20,
    CHUNK_BLOCKING = 512 << 10,
    CHUNK_ASYNC = 1 << 20,
    SLAB_BYTES = 1 << 20, /* regions that smaller buffers share */
};

/* ------------------------------------------------------------------ the ring */

uint64_t flow_limit(const struct flow *flow)
{
    uint64_t limit = (flow->is_drained ? flow->drained : flow->done) + flow->window;
    if (limit >= flow->total)
        return flow->total;
    limit -= limit % flow->chunk;
    return limit > flow->fed ? limit : flow->fed;
}

uint64_t flow_span(const struct flow *flow, uint64_t at, uint64_t until)
{
    uint64_t side_by_side = flow->window - at % flow->window;
    return until - at < side_by_side ? until - at : side_by_side;
}

/* ------------------------------------------------------------------ the pool */

unsigned stage_class(uint64_t bytes)
{
    const uint64_t least = (uint64_t)1 << STAGE_CLASS_MIN_SHIFT;
    if (bytes <= least)
        return 0;
    unsigned shift = 63 - (unsigned)__builtin_clzll(bytes);
    uint64_t octave = (uint64_t)1 << shift, quarter = octave / 4;
    return 4 * (shift - STAGE_CLASS_MIN_SHIFT) +
           (unsigned)((bytes - octave + quarter - 1) / quarter);
}

uint64_t stage_class_bytes(unsigned class)
{
    uint64_t octave = (uint64_t)1 << (STAGE_CLASS_MIN_SHIFT + class / 4);
    return octave + class % 4 * (octave / 4);
}

static int remember_region(struct stage_pool *pool, struct region *region)
{
    if (pool->n_regions == pool->regions_capacity) {
        size_t capacity = pool->regions_capacity ? pool->regions_capacity * 2 : 16;
        struct region **regions = realloc(pool->regions, capacity * sizeof *regions);
        if (!regions)
            return -1;
        pool->regions = regions;
        pool->regions_capacity = capacity;
    }
    pool->regions[pool->n_regions++] = region;
    pool->bytes += region->bytes;
    return 0;
}

static void forget_region(struct stage_pool *pool, const struct region *region)
{
    for (size_t i = 0; i < pool->n_regions; i++) {
        if (pool->regions[i] != region)
            continue;
        pool->regions[i] = pool->regions[--pool->n_regions];
        pool->bytes -= region->bytes;
        return;
    }
}

/* Cut the region into idle buffers of one class. How many there are. */
static unsigned carve(struct stage_pool *pool, struct region *region, unsigned class)
{
    uint64_t bytes = stage_class_bytes(class);
    bool is_whole = bytes >= SLAB_BYTES;
    unsigned n = 0;
    for (uint64_t at = 0; at + bytes <= region->bytes; at += bytes) {
        struct stage_buffer *buffer = malloc(sizeof *buffer);
        if (!buffer)
            break;
        *buffer = (struct stage_buffer){region, at, class, is_whole, pool, pool->idle[class]};
        pool->idle[class] = buffer;
        n++;
        if (is_whole)
            break;
    }
    return n;
}

static int new_region(struct gradd *g, struct stage_pool *pool, uint64_t bytes, struct region **out)
{
    return pool->new_region ? pool->new_region(g, pool, bytes, out)
                            : memory_new_region(g, bytes, true, out);
}

static void free_region(struct gradd *g, struct stage_pool *pool, struct region *region)
{
    if (pool->free_region)
        pool->free_region(g, pool, region);
    else
        memory_free_region(g, region);
}

static int add_buffers(struct gradd *g, struct stage_pool *pool, unsigned class)
{
    uint64_t bytes = stage_class_bytes(class);
    if (bytes < SLAB_BYTES)
        bytes = SLAB_BYTES;
    if (pool->bytes + bytes > pool->limit)
        stage_trim(g, pool, pool->bytes + bytes - pool->limit);
    struct region *region;
    int rc = new_region(g, pool, bytes, &region);
    if (rc < 0)
        return rc;
    if (remember_region(pool, region) < 0) {
        free_region(g, pool, region);
        return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    }
    if (carve(pool, region, class) > 0)
        return 0;
    forget_region(pool, region);
    free_region(g, pool, region);
    return error_set(GRADD_ERR_NO_MEMORY, "out of memory");
}

/* Another thread may take what was added while the lock was released, hence a loop. */
int stage_borrow(struct gradd *g, struct stage_pool *pool, uint64_t bytes,
                 struct stage_buffer **out)
{
    unsigned class = stage_class(bytes);
    if (class >= STAGE_CLASSES)
        return error_set(GRADD_ERR_NO_MEMORY, "staging of %llu bytes: beyond all memory",
                         (unsigned long long)bytes);
    while (!pool->idle[class]) {
        int rc = add_buffers(g, pool, class);
        if (rc < 0)
            return rc;
    }
    struct stage_buffer *buffer = pool->idle[class];
    pool->idle[class] = buffer->next;
    buffer->next = NULL;
    pool->lent_bytes += stage_class_bytes(class);
    *out = buffer;
    return 0;
}

void stage_give_back(struct stage_buffer *buffer)
{
    if (!buffer)
        return;
    struct stage_pool *pool = buffer->pool;
    pool->lent_bytes -= stage_class_bytes(buffer->class);
    buffer->next = pool->idle[buffer->class];
    pool->idle[buffer->class] = buffer;
}

void stage_trim(struct gradd *g, struct stage_pool *pool, uint64_t bytes)
{
    for (unsigned class = STAGE_CLASSES; class -- > stage_class(SLAB_BYTES);) {
        while (pool->idle[class] && bytes > 0) {
            struct stage_buffer *buffer = pool->idle[class];
            pool->idle[class] = buffer->next;
            bytes -= buffer->region->bytes < bytes ? buffer->region->bytes : bytes;
            forget_region(pool, buffer->region);
            free_region(g, pool, buffer->region);
            free(buffer);
        }
    }
}

void stage_pool_deinit(struct stage_pool *pool)
{
    for (unsigned class = 0; class < STAGE_CLASSES; class ++) {
        while (pool->idle[class]) {
            struct stage_buffer *buffer = pool->idle[class];
            pool->idle[class] = buffer->next;
            free(buffer);
        }
    }
    for (size_t i = 0; i < pool->n_regions; i++)
        region_unmap(pool->regions[i]);
    free(pool->regions);
    *pool = (struct stage_pool){0};
}

/* ------------------------------------------------------------------ an op's stages */

static void put_in(struct lane *lane, struct stage_buffer *buffer, uint64_t ring_bytes)
{
    lane->region = buffer->region;
    lane->offset = buffer->offset;
    lane->ring_bytes = ring_bytes;
}

/* All-reduce and broadcast: one ring; results replace the inputs in their slots. */
static int prepare_flow(struct gradd *g, struct op *op, enum stage_window window)
{
    struct flow *flow = &op->flow;
    flow->window = flow->total;
    flow->chunk = window == STAGE_ASYNC ? CHUNK_ASYNC : CHUNK_BLOCKING;
    /* Ranks of other nodes are sent whole tensors: there the worker takes no rings, and no op
     * whose data is still being copied. */
    if (g->n_nodes > 1)
        flow->chunk = flow->total;
    bool may_ring = g->n_nodes <= 1 && flow->total > WINDOW_BYTES;
    if (may_ring &&
        (window == STAGE_BLOCKING || g->stage.lent_bytes + flow->total > g->stage.limit))
        flow->window = WINDOW_BYTES;
    struct stage_buffer *buffer;
    int rc = stage_borrow(g, &g->stage, flow->window, &buffer);
    if (rc == GRADD_ERR_NO_MEMORY && may_ring && flow->window > WINDOW_BYTES) {
        flow->window = WINDOW_BYTES;
        rc = stage_borrow(g, &g->stage, flow->window, &buffer);
    }
    if (rc < 0)
        return rc;
    uint64_t ring_bytes = flow->window < flow->total ? flow->window : 0;
    struct lane *owner = op->in.user ? &op->in : &op->out;
    owner->stage = buffer;
    if (op->in.user)
        put_in(&op->in, buffer, ring_bytes);
    if (op->out.user)
        put_in(&op->out, buffer, ring_bytes);
    flow->is_drained = op->out.user != NULL;
    return 0;
}

/* The other kinds: whole buffers, the input copied now. */
static int prepare_whole(struct gradd *g, struct op *op, uint64_t in_bytes, uint64_t out_bytes)
{
    if (op->in.user) {
        int rc = stage_borrow(g, &g->stage, in_bytes, &op->in.stage);
        if (rc < 0)
            return rc;
        put_in(&op->in, op->in.stage, 0);
        memcpy(op->in.region->base + op->in.offset, op->in.user, in_bytes);
    }
    if (op->out.user) {
        int rc = stage_borrow(g, &g->stage, out_bytes, &op->out.stage);
        if (rc < 0)
            return rc;
        put_in(&op->out, op->out.stage, 0);
    }
    return 0;
}

int stage_prepare(struct gradd *g, struct op *op, enum stage_window window)
{
    if (!op->in.user && !op->out.user)
        return 0;
    int rc = op->is_flowing ? prepare_flow(g, op, window)
                            : prepare_whole(g, op, op->in_bytes, op->out_bytes);
    if (rc < 0)
        stage_release(g, op);
    return rc;
}

bool stage_fill_chunk(struct op *op)
{
    struct flow *flow = &op->flow;
    uint64_t limit = flow_limit(flow);
    if (limit == flow->fed)
        return false;
    if (!op->in.user) {
        flow->fed = limit;
        return true;
    }
    uint64_t until = limit - flow->fed > flow->chunk ? flow->fed + flow->chunk : limit;
    uint8_t *ring = op->in.region->base + op->in.offset;
    while (flow->fed < until) {
        uint64_t bytes = flow_span(flow, flow->fed, until);
        memcpy(ring + flow->fed % flow->window, op->in.user + flow->fed, bytes);
        flow->fed += bytes;
    }
    return true;
}

void stage_drain(struct op *op, uint64_t done)
{
    struct flow *flow = &op->flow;
    flow->done = done;
    if (!flow->is_drained) {
        flow->drained = done;
        return;
    }
    const uint8_t *ring = op->out.region->base + op->out.offset;
    while (flow->drained < done) {
        uint64_t bytes = flow_span(flow, flow->drained, done);
        memcpy(op->out.user + flow->drained, ring + flow->drained % flow->window, bytes);
        flow->drained += bytes;
    }
}

void stage_finish(struct op *op)
{
    if (op->is_flowing) {
        if (op->flow.window > 0)
            stage_drain(op, op->flow.total);
        return;
    }
    if (!op->out.user)
        return;
    uint64_t bytes = op->out_bytes;
    if (op->n_counts > 0) {
        uint64_t sum = 0;
        for (size_t i = 0; i < op->n_counts; i++)
            sum += op->counts[i];
        if (sum < bytes / op->element_bytes)
            bytes = sum * op->element_bytes;
    }
    memcpy(op->out.user, op->out.region->base + op->out.offset, bytes);
}

void stage_release(struct gradd *g, struct op *op)
{
    stage_give_back(op->in.stage);
    stage_give_back(op->out.stage);
    op->in.stage = op->out.stage = NULL;
}
