/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words that streams wait for, and the watchdog that ends these waits when the worker is gone.
 *
 * The watchdog is the library's only thread. It is made with the first word, because from then on a
 * stream can wait for something that only the worker, or somebody in its place, will write, while
 * the program's own threads may all be waiting for that stream. It calls no CUDA function, and it
 * takes no lock but out_lock.
 *
 * Invariant: a page that was added is poisoned after the worker's end, whichever came first, and
 * stays so: a GPU may still write what a worker that is gone had put into its stream.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "cuda.h"

enum { AGAIN_MS = 50 };

struct cuda_watch {
    struct gradd *g;
    pthread_t thread;
    int wake_fd;
    atomic_bool is_stopping, is_full;
};

/* ------------------------------------------------------------------ poison */

static _Atomic uint64_t *word_at(const struct cuda_page *page, unsigned index)
{
    return (_Atomic uint64_t *)(void *)page->region->base + index;
}

static void poison_page(const struct cuda_page *page)
{
    for (unsigned i = 0; i < page->n_words; i++)
        atomic_store(word_at(page, page->first_word + i), (uint64_t)INT64_MAX);
}

void cuda_poison(struct cuda *cuda)
{
    atomic_store(&cuda->is_poisoned, true);
    for (struct cuda_page *page = atomic_load(&cuda->pages); page; page = page->next)
        poison_page(page);
}

static void add_page(struct cuda *cuda, struct cuda_page *page)
{
    page->next = atomic_load(&cuda->pages);
    atomic_store(&cuda->pages, page);
    if (atomic_load(&cuda->is_poisoned))
        poison_page(page);
}

/* ------------------------------------------------------------------ the thread */

static void *watch(void *arg)
{
    struct cuda_watch *w = arg;
    bool is_over = w->g->worker.fd < 0;
    while (!atomic_load(&w->is_stopping)) {
        bool is_full = atomic_load(&w->is_full);
        struct pollfd fds[2] = {
            {.fd = is_over ? -1 : w->g->worker.fd, .events = POLLRDHUP | (is_full ? POLLOUT : 0)},
            {.fd = w->wake_fd, .events = POLLIN},
        };
        if (poll(fds, 2, is_over ? AGAIN_MS : -1) < 0 && errno != EINTR)
            break;
        if (is_over && atomic_load(&w->g->cuda->is_poisoned))
            cuda_poison(w->g->cuda);
        uint64_t count;
        if (fds[1].revents && read(w->wake_fd, &count, sizeof count) < 0)
            continue; /* nothing was there */
        if (fds[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) {
            cuda_poison(w->g->cuda);
            is_over = true;
        } else if (fds[0].revents & POLLOUT) {
            atomic_store(&w->is_full, channel_flush_out(w->g));
        }
    }
    return NULL;
}

static void wake(struct cuda_watch *w)
{
    uint64_t one = 1;
    if (write(w->wake_fd, &one, sizeof one) < 0)
        return; /* the counter is full: it is readable already */
}

void cuda_watch_flush(struct cuda *cuda)
{
    if (!cuda->watch)
        return;
    atomic_store(&cuda->watch->is_full, true);
    wake(cuda->watch);
}

/* No signal handler of the program runs on it. */
static int start_thread(struct cuda_watch *w)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&w->thread, NULL, watch, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc == 0)
        pthread_setname_np(w->thread, "gradd-watch");
    return rc;
}

static int start(struct gradd *g)
{
    if (g->cuda->watch)
        return 0;
    struct cuda_watch *w = calloc(1, sizeof *w);
    int code = ENOMEM;
    if (w) {
        w->g = g;
        w->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        code = w->wake_fd < 0 ? errno : start_thread(w);
        if (code != 0 && w->wake_fd >= 0)
            close(w->wake_fd);
    }
    if (code != 0) {
        free(w);
        return error_set(GRADD_ERR_NO_MEMORY, "no thread to watch the worker: %s", strerror(code));
    }
    g->cuda->watch = w;
    return 0;
}

void cuda_watch_stop(struct cuda *cuda)
{
    struct cuda_watch *w = cuda->watch;
    if (!w)
        return;
    atomic_store(&w->is_stopping, true);
    wake(w);
    pthread_join(w->thread, NULL);
}

void cuda_watch_free(struct cuda *cuda)
{
    if (!cuda->watch)
        return;
    close(cuda->watch->wake_fd);
    free(cuda->watch);
    cuda->watch = NULL;
}

/* ------------------------------------------------------------------ pages */

static CUresult map_page(const struct cuda_table *table, struct cuda_page *page)
{
    void *base = page->region->base;
    CUresult rc = table->host_register(base, page->region->bytes,
                                       CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = table->host_device_pointer(&page->device, base, 0);
    if (rc != CUDA_SUCCESS)
        table->host_unregister(base);
    return rc;
}

int cuda_page_new(struct gradd *g, struct cuda_gpu *gpu, size_t bytes, unsigned first_word,
                  unsigned n_words, int *out_fd, struct cuda_page **out)
{
    struct cuda *cuda = g->cuda;
    int fd = -1, rc = start(g);
    struct cuda_page *page = rc == 0 ? calloc(1, sizeof *page) : NULL;
    if (rc == 0 && !page)
        rc = error_set(GRADD_ERR_NO_MEMORY, "out of memory");
    if (rc == 0)
        rc = out_fd ? region_map(bytes, &page->region, &fd)
                    : memory_new_region(g, bytes, true, &page->region);
    if (rc == 0 && (rc = cuda_enter(cuda, gpu)) == 0) {
        CUresult result = map_page(cuda->table, page);
        cuda_events_reserve(cuda, gpu, 2); /* for who marks, and for who waits */
        cuda_leave(cuda);
        if (result != CUDA_SUCCESS)
            rc = cuda_failure(cuda, result, "registering a page for streams to wait on");
    }
    if (rc < 0) {
        if (fd >= 0)
            close(fd);
        if (page && page->region && out_fd)
            region_unmap(page->region);
        else if (page && page->region)
            memory_free_region(g, page->region);
        free(page);
        return rc;
    }
    page->first_word = first_word;
    page->n_words = n_words;
    add_page(cuda, page);
    if (out_fd)
        *out_fd = fd;
    *out = page;
    return 0;
}

void cuda_pages_stop(struct cuda *cuda)
{
    if (!cuda->gpus || cuda_enter(cuda, cuda->gpus) < 0)
        return;
    for (struct cuda_page *page = atomic_load(&cuda->pages); page; page = page->next)
        cuda->table->host_unregister(page->region->base);
    cuda_leave(cuda);
}

void cuda_pages_free(struct cuda *cuda)
{
    struct cuda_page *page = atomic_load(&cuda->pages);
    atomic_store(&cuda->pages, NULL);
    while (page) {
        struct cuda_page *next = page->next;
        region_unmap(page->region);
        free(page);
        page = next;
    }
}
