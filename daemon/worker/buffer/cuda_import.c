/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/buffer/cuda_import.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <gradd/types.h>
#include <uthash.h>

#include "worker/buffer/cuda_mapping.h"

enum import_state {
    IMPORT_WAITING, /* for the device */
    IMPORT_OPENING,
    IMPORT_READY,
    IMPORT_CLOSING,
};

/* A step on the chores thread: it reads and writes `import->mapping` and itself, nothing else. */
struct step {
    struct chore chore; /* first */
    struct cuda_import *import;
    int fds[CUDA_CHUNKS_AT_ONCE]; /* of chunks */
    uint64_t bytes[CUDA_CHUNKS_AT_ONCE];
    unsigned n;
    struct cuda_mapping_result result;
    struct step *next; /* while the device is being opened */
};

struct cuda_import {
    struct {
        uint8_t uuid[CUDA_UUID_BYTES];
        uint8_t handle[CUDA_HANDLE_BYTES];
    } key;
    UT_hash_handle hh; /* legacy, and not closing */
    struct cuda_import_table *table;
    enum import_state state;
    struct cuda_device *device; /* once open */
    struct cuda_mapping mapping;
    struct step step; /* opening, then closing */
    unsigned n_steps; /* on the chores thread */
    bool is_unmapping;
    struct step *parked; /* chunks that came before the device was open, in order */
    struct step **parked_tail;
    LIST_HEAD(, cuda_import_user) users;
    struct cuda_import_user *last; /* told when all is closed; NULL: nobody */
    uint64_t counted_bytes;        /* in the device's statistics */
};

CUdeviceptr cuda_import_base(const struct cuda_import_user *user)
{
    return user->import->mapping.base;
}

struct cuda_device *cuda_import_device(const struct cuda_import_user *user)
{
    return user->import->device;
}

/* ------------------------------------------------------------------ chores thread */

static void run_open(struct chore *chore)
{
    struct step *step = (struct step *)chore;
    cuda_mapping_open(&step->import->mapping, &step->result);
}

static void run_chunks(struct chore *chore)
{
    struct step *step = (struct step *)chore;
    cuda_mapping_add(&step->import->mapping, step->fds, step->bytes, step->n, &step->result);
    for (unsigned i = 0; i < step->n; i++)
        close(step->fds[i]);
}

static void run_close(struct chore *chore)
{
    cuda_mapping_close(&((struct step *)chore)->import->mapping);
}

/* ------------------------------------------------------------------ ends */

static void drop_parked(struct cuda_import *import)
{
    struct step *step;
    while ((step = import->parked)) {
        import->parked = step->next;
        for (unsigned i = 0; i < step->n; i++)
            close(step->fds[i]);
        free(step);
    }
    import->parked_tail = &import->parked;
}

static void import_free(struct cuda_import *import)
{
    struct cuda_import_user *last = import->last;
    drop_parked(import);
    free(import);
    if (last)
        last->closed(last);
}

static void forget_handle(struct cuda_import *import)
{
    if (import->mapping.is_legacy && import->state != IMPORT_CLOSING)
        HASH_DEL(import->table->by_handle, import);
}

static void on_closed(struct chore *chore)
{
    import_free(((struct step *)chore)->import);
}

/* Nobody uses it, and nothing of it is under way: unmap it. */
static void close_import(struct cuda_import *import)
{
    if (import->is_unmapping)
        return;
    import->is_unmapping = true;
    import->step = (struct step){
        .chore = {.run = run_close, .done = on_closed},
        .import = import,
    };
    chores_add(import->table->chores, &import->step.chore);
}

static void uncount(struct cuda_import *import)
{
    if (import->state != IMPORT_READY)
        return;
    import->device->n_imports--;
    import->device->import_bytes -= import->counted_bytes;
}

static void detach(struct cuda_import_user *user)
{
    LIST_REMOVE(user, link);
    user->import = NULL;
}

/* The last user is gone. */
static void abandon(struct cuda_import *import)
{
    uncount(import);
    forget_handle(import);
    bool is_waiting = import->state == IMPORT_WAITING;
    import->state = IMPORT_CLOSING;
    if (is_waiting) {
        cuda_device_forget_waiter(import->table->devices, import);
        import_free(import);
    } else if (import->n_steps == 0) {
        close_import(import);
    }
}

void cuda_import_release(struct cuda_import_user *user)
{
    struct cuda_import *import = user->import;
    detach(user);
    if (LIST_EMPTY(&import->users)) {
        import->last = user;
        abandon(import);
    } else {
        user->closed(user);
    }
}

/* Everybody who waits is refused; steps under way find nobody. */
static void refuse(struct cuda_import *import, int status, const char *text)
{
    struct cuda_import_user *user;
    forget_handle(import);
    import->state = IMPORT_CLOSING;
    while ((user = LIST_FIRST(&import->users))) {
        detach(user);
        user->opened(user, status, text);
    }
}

/* ------------------------------------------------------------------ opening, loop */

static void tell_user(struct cuda_import_user *user)
{
    struct cuda_import *import = user->import;
    char text[160];
    if (user->bytes <= import->mapping.bytes) {
        user->opened(user, GRADD_OK, "");
        return;
    }
    snprintf(text, sizeof text, "the allocation has %llu bytes, the message says %llu",
             (unsigned long long)import->mapping.bytes, (unsigned long long)user->bytes);
    detach(user);
    if (LIST_EMPTY(&import->users))
        abandon(import);
    user->opened(user, GRADD_ERR_INVALID, text);
}

static void import_is_ready(struct cuda_import *import)
{
    struct cuda_import_user *user, *next;
    import->state = IMPORT_READY;
    import->counted_bytes = import->mapping.bytes;
    import->device->n_imports++;
    import->device->import_bytes += import->counted_bytes;
    for (user = LIST_FIRST(&import->users); user; user = next) {
        next = LIST_NEXT(user, link);
        tell_user(user);
    }
}

static void on_step(struct chore *chore)
{
    struct step *step = (struct step *)chore;
    struct cuda_import *import = step->import;
    import->n_steps--;
    if (import->state == IMPORT_OPENING && step->result.status != GRADD_OK)
        refuse(import, step->result.status, step->result.text);
    else if (import->state == IMPORT_OPENING && step->result.is_complete)
        import_is_ready(import);
    bool is_over = import->state == IMPORT_CLOSING && import->n_steps == 0;
    if (step != &import->step)
        free(step);
    if (is_over)
        close_import(import);
}

static void start_step(struct cuda_import *import, struct step *step)
{
    import->n_steps++;
    chores_add(import->table->chores, &step->chore);
}

static void on_device(void *data, struct cuda_device *device)
{
    struct cuda_import *import = data;
    if (!device || device->status != GRADD_OK) {
        refuse(import, device ? device->status : GRADD_ERR_NO_MEMORY,
               device ? device->text : "the worker has no memory");
        import_free(import);
        return;
    }
    import->device = device;
    import->state = IMPORT_OPENING;
    import->mapping.cuda = device->cuda;
    import->mapping.context = device->context;
    import->mapping.ordinal = device->ordinal;
    import->step = (struct step){
        .chore = {.run = run_open, .done = on_step},
        .import = import,
    };
    start_step(import, &import->step);
    struct step *step;
    while ((step = import->parked)) {
        import->parked = step->next;
        start_step(import, step);
    }
    import->parked_tail = &import->parked;
}

static void user_refuse(struct cuda_import_user *user, int status, const char *text)
{
    user->import = NULL;
    user->opened(user, status, text);
}

static struct cuda_import *import_new(struct cuda_import_table *table,
                                      struct cuda_import_user *user, const uint8_t *uuid)
{
    struct cuda_import *import = calloc(1, sizeof *import);
    if (!import)
        return NULL;
    import->table = table;
    import->parked_tail = &import->parked;
    import->mapping.bytes = user->bytes;
    memcpy(import->key.uuid, uuid, CUDA_UUID_BYTES);
    LIST_INIT(&import->users);
    LIST_INSERT_HEAD(&import->users, user, link);
    user->import = import;
    return import;
}

void cuda_import_handle(struct cuda_import_table *table, struct cuda_import_user *user,
                        const uint8_t *uuid, const uint8_t *handle)
{
    struct cuda_import *import, probe = {0};
    memcpy(probe.key.uuid, uuid, sizeof probe.key.uuid);
    memcpy(probe.key.handle, handle, sizeof probe.key.handle);
    HASH_FIND(hh, table->by_handle, &probe.key, sizeof probe.key, import);
    if (import) {
        user->import = import;
        LIST_INSERT_HEAD(&import->users, user, link);
        if (import->state == IMPORT_READY)
            tell_user(user);
        return;
    }
    import = import_new(table, user, uuid);
    if (!import) {
        user_refuse(user, GRADD_ERR_NO_MEMORY, "the worker has no memory");
        return;
    }
    import->key = probe.key;
    import->mapping.is_legacy = true;
    memcpy(import->mapping.handle.reserved, handle, CUDA_HANDLE_BYTES);
    HASH_ADD(hh, table->by_handle, key, sizeof import->key, import);
    cuda_device_open(table->devices, uuid, on_device, import);
}

void cuda_import_chunks(struct cuda_import_table *table, struct cuda_import_user *user,
                        const uint8_t *uuid, uint32_t n_chunks)
{
    if (n_chunks == 0 || n_chunks > CUDA_CHUNKS_MAX) {
        user_refuse(user, GRADD_ERR_INVALID, "it has no chunks, or more than 65536");
        return;
    }
    struct cuda_import *import = import_new(table, user, uuid);
    if (!import) {
        user_refuse(user, GRADD_ERR_NO_MEMORY, "the worker has no memory");
        return;
    }
    import->mapping.n_chunks = n_chunks;
    cuda_device_open(table->devices, uuid, on_device, import);
}

void cuda_import_add_chunks(struct cuda_import_user *user, int *fds, const uint64_t *bytes,
                            unsigned n)
{
    struct cuda_import *import = user->import;
    if (n == 0)
        return; /* the rest is still to come */
    struct step *step = n <= CUDA_CHUNKS_AT_ONCE ? calloc(1, sizeof *step) : NULL;
    if (!step || import->mapping.is_legacy || import->state == IMPORT_READY) {
        for (unsigned i = 0; i < n; i++)
            close(fds[i]);
        free(step);
    } else {
        step->chore = (struct chore){.run = run_chunks, .done = on_step};
        step->import = import;
        step->n = n;
        memcpy(step->fds, fds, n * sizeof *fds);
        memcpy(step->bytes, bytes, n * sizeof *bytes);
        if (import->state == IMPORT_WAITING) {
            *import->parked_tail = step;
            import->parked_tail = &step->next;
        } else {
            start_step(import, step);
        }
    }
    for (unsigned i = 0; i < n; i++)
        fds[i] = -1;
}
