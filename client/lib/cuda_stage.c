/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The staged way: pinned host memory that the worker shares, words that it stores when an op has
 * ended, and messages that are sent by a stream once its copies have arrived.
 *
 * Invariants: a word's values only grow, and it has one op at a time; a host function calls no CUDA
 * function, takes out_lock only, and touches nothing of the context once it has counted itself off.
 */
#include <stdlib.h>

#include "cuda.h"

enum { WORDS_A_PAGE = 1024 };

struct cuda_launch {
    struct gradd *g;
    struct wire_out frames;
    struct cuda_launch *next;
};

/* ------------------------------------------------------------------ pinned memory */

static int new_shared(struct gradd *g, struct stage_pool *pool, size_t bytes, struct region **out)
{
    int rc = memory_new_region(g, bytes, true, out);
    if (rc != GRADD_ERR_NO_MEMORY || pool->bytes == pool->lent_bytes)
        return rc;
    stage_trim(g, pool, UINT64_MAX); /* the quota may be used up by idle buffers */
    return memory_new_region(g, bytes, true, out);
}

int cuda_pinned_new(struct gradd *g, struct stage_pool *pool, size_t bytes, struct region **out)
{
    struct cuda *cuda = pool->owner;
    struct region *region;
    int rc = new_shared(g, pool, bytes, &region);
    if (rc < 0)
        return rc;
    rc = cuda_enter(cuda, cuda->gpus);
    if (rc == 0) {
        CUresult result =
            cuda->table->host_register(region->base, region->bytes, CU_MEMHOSTREGISTER_PORTABLE);
        cuda_leave(cuda);
        if (result != CUDA_SUCCESS)
            rc = cuda_failure(cuda, result, "pinning shared memory");
    }
    if (rc < 0)
        memory_free_region(g, region);
    else
        *out = region;
    return rc;
}

void cuda_pinned_free(struct gradd *g, struct stage_pool *pool, struct region *region)
{
    struct cuda *cuda = pool->owner;
    if (cuda_enter(cuda, cuda->gpus) == 0) {
        cuda->table->host_unregister(region->base);
        cuda_leave(cuda);
    }
    memory_free_region(g, region);
}

void cuda_pinned_stop(struct cuda *cuda)
{
    if (!cuda->gpus || cuda_enter(cuda, cuda->gpus) < 0)
        return;
    for (size_t i = 0; i < cuda->pinned.n_regions; i++)
        cuda->table->host_unregister(cuda->pinned.regions[i]->base);
    cuda_leave(cuda);
}

/* ------------------------------------------------------------------ words */

static int add_words(struct gradd *g, struct cuda_gpu *gpu)
{
    struct cuda *cuda = g->cuda;
    struct cuda_page *page;
    if (cuda->n_word_blocks == sizeof cuda->word_blocks / sizeof *cuda->word_blocks)
        return error_set(GRADD_ERR_NO_MEMORY, "too many ops in flight: wait for some first");
    int rc = cuda_page_new(g, gpu, WORDS_A_PAGE * 8, 0, WORDS_A_PAGE, NULL, &page);
    struct cuda_word *words = rc == 0 ? calloc(WORDS_A_PAGE, sizeof *words) : NULL;
    if (!words)
        return rc < 0 ? rc : error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    cuda->word_blocks[cuda->n_word_blocks++] = words;
    for (uint32_t i = WORDS_A_PAGE; i-- > 0;) {
        words[i].page = page;
        words[i].index = i;
        words[i].next = cuda->idle_words;
        cuda->idle_words = &words[i];
    }
    return 0;
}

int cuda_word_take(struct gradd *g, struct cuda_gpu *gpu, struct cuda_word **out)
{
    struct cuda *cuda = g->cuda;
    while (!cuda->idle_words) { /* another thread may take them while the lock is released */
        int rc = add_words(g, gpu);
        if (rc < 0)
            return rc;
    }
    struct cuda_word *word = cuda->idle_words;
    cuda->idle_words = word->next;
    word->value++;
    *out = word;
    return 0;
}

void cuda_word_put(struct cuda *cuda, struct cuda_word *word)
{
    if (!word)
        return;
    word->next = cuda->idle_words;
    cuda->idle_words = word;
}

void cuda_word_store(const struct cuda_word *word, uint64_t value)
{
    _Atomic uint64_t *at = (_Atomic uint64_t *)(void *)word->page->region->base + word->index;
    uint64_t now = atomic_load(at);
    while (now < value && !atomic_compare_exchange_weak(at, &now, value)) {
    }
}

CUresult cuda_word_wait(struct cuda *cuda, struct cuda_gpu *gpu, const struct cuda_word *word,
                        uint64_t value, CUstream stream)
{
    CUresult rc = cuda->table->stream_wait_value(
        stream, word->page->device + 8 * (uint64_t)word->index, value, CU_STREAM_WAIT_VALUE_GEQ);
    if (rc == CUDA_SUCCESS)
        cuda_use_note(cuda, gpu, stream);
    return rc;
}

void cuda_words_free(struct cuda *cuda)
{
    while (cuda->n_word_blocks > 0)
        free(cuda->word_blocks[--cuda->n_word_blocks]);
}

/* ------------------------------------------------------------------ launches */

struct cuda_launch *cuda_launch_new(struct gradd *g)
{
    struct cuda *cuda = g->cuda;
    if (!cuda->idle_launches)
        cuda->idle_launches = atomic_exchange(&cuda->sent_launches, NULL);
    struct cuda_launch *launch = cuda->idle_launches;
    if (launch) {
        cuda->idle_launches = launch->next;
        return launch;
    }
    launch = calloc(1, sizeof *launch);
    if (launch) {
        launch->g = g;
        wire_out_init(&launch->frames, SIZE_MAX);
    }
    return launch;
}

struct wire_out *cuda_launch_frames(struct cuda_launch *launch)
{
    return &launch->frames;
}

static void give_back(struct cuda *cuda, struct cuda_launch *launch)
{
    launch->next = atomic_load(&cuda->sent_launches);
    while (!atomic_compare_exchange_weak(&cuda->sent_launches, &launch->next, launch)) {
    }
}

/* A host function: on a thread of the driver. */
static void send_frames(void *data)
{
    struct cuda_launch *launch = data;
    struct cuda *cuda = launch->g->cuda;
    if (channel_send_frames(launch->g, &launch->frames))
        cuda_watch_flush(cuda);
    give_back(cuda, launch);
    atomic_fetch_sub(&cuda->n_launches, 1);
}

CUresult cuda_launch_add(struct cuda *cuda, struct cuda_launch *launch, CUstream stream)
{
    atomic_fetch_add(&cuda->n_launches, 1);
    CUresult rc = cuda->table->launch_host(stream, send_frames, launch);
    if (rc != CUDA_SUCCESS) {
        atomic_fetch_sub(&cuda->n_launches, 1);
        wire_out_deinit(&launch->frames);
        give_back(cuda, launch);
    }
    return rc;
}

void cuda_launches_free(struct cuda *cuda)
{
    struct cuda_launch *lists[] = {cuda->idle_launches, atomic_load(&cuda->sent_launches)};
    for (unsigned i = 0; i < 2; i++) {
        while (lists[i]) {
            struct cuda_launch *launch = lists[i];
            lists[i] = launch->next;
            wire_out_deinit(&launch->frames);
            free(launch);
        }
    }
}
