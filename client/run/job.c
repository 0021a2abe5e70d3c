/* SPDX-License-Identifier: Apache-2.0 */
#include "job.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"

enum {
    FLAG_CHECK = 1,
    FLAG_VERBOSE = 2,
    FLAG_OUTPUT = 4,
    FLAG_INPUT = 8,
    FLAGS = 15,
    LIST_MAX = 65536,
    PLACE_BYTES = 4 * 5,
};

static void put_string(struct frame_writer *w, const char *text)
{
    frame_put_text(w, text ? text : "", text ? strlen(text) : 0);
}

static void put_list(struct frame_writer *w, const char **list)
{
    uint32_t n = 0;
    while (list && list[n])
        n++;
    frame_put_u32(w, n);
    for (uint32_t i = 0; i < n; i++)
        put_string(w, list[i]);
}

static void put_places(struct frame_writer *w, const struct job *job)
{
    frame_put_u32(w, job->n_places);
    for (uint32_t i = 0; i < job->n_places; i++) {
        const struct place *p = &job->places[i];
        const uint32_t numbers[] = {p->rank, p->local_rank, p->local_size, p->cross_rank,
                                    p->cross_size};
        for (size_t j = 0; j < sizeof numbers / sizeof numbers[0]; j++)
            frame_put_u32(w, numbers[j]);
    }
}

int job_pack(struct frame_writer *w, const struct job *job)
{
    uint32_t flags = (job->is_check ? FLAG_CHECK : 0) | (job->is_verbose ? FLAG_VERBOSE : 0) |
                     (job->wants_output ? FLAG_OUTPUT : 0) | (job->wants_input ? FLAG_INPUT : 0);
    frame_begin(w, FRAME_JOB);
    put_string(w, job->name);
    put_string(w, job->directory);
    put_string(w, job->socket);
    put_string(w, job->host);
    put_string(w, job->address);
    put_string(w, job->key);
    frame_put_u32(w, job->daemon);
    frame_put_u32(w, flags);
    frame_put_u32(w, job->n_ranks);
    frame_put_u32(w, job->n_hosts);
    frame_put_u32(w, job->host_index);
    put_places(w, job);
    put_list(w, job->command);
    put_list(w, job->environment);
    put_list(w, job->exports);
    put_list(w, job->settings);
    return frame_end(w);
}

/* A count of things that take at least so many bytes each: never more than there can be. */
static uint32_t get_count(struct frame *frame, size_t max, size_t bytes_each)
{
    uint32_t n = frame_get_u32(frame);
    if (n <= max && n * bytes_each <= (size_t)(frame->end - frame->at))
        return n;
    frame->is_bad = true;
    return 0;
}

/* NULL when out of memory; an empty list when the frame is bad. */
static const char **get_list(struct frame *frame)
{
    uint32_t n = get_count(frame, LIST_MAX, 5);
    const char **list = calloc(n + 1, sizeof *list);
    for (uint32_t i = 0; list && i < n; i++)
        list[i] = frame_get_text(frame, NULL);
    return list;
}

static void get_place(struct frame *frame, struct place *place)
{
    place->rank = frame_get_u32(frame);
    place->local_rank = frame_get_u32(frame);
    place->local_size = frame_get_u32(frame);
    place->cross_rank = frame_get_u32(frame);
    place->cross_size = frame_get_u32(frame);
}

static bool is_valid(const struct job *job)
{
    if (job->daemon > JOB_DAEMON_SOCKET || job->n_ranks < 1 || job->n_ranks > ARGS_RANKS_MAX ||
        job->n_places < 1 || job->n_places > job->n_ranks || job->host_index >= job->n_hosts ||
        job->directory[0] != '/' || !job->name[0] || strlen(job->name) > ARGS_JOB_NAME_MAX ||
        (!job->command[0] && !job->is_check))
        return false;
    for (uint32_t i = 0; i < job->n_places; i++)
        if (job->places[i].rank >= job->n_ranks)
            return false;
    const char **lists[] = {job->environment, job->exports, job->settings};
    for (size_t i = 0; i < 3; i++)
        for (const char **entry = lists[i]; *entry; entry++)
            if ((*entry)[0] == '=' || !strchr(*entry, '='))
                return false;
    return job->key[0] == '\0' || strlen(job->key) == JOB_KEY_DIGITS;
}

int job_unpack(struct frame *frame, struct job *out)
{
    if (frame->kind != FRAME_JOB)
        return -EPROTO;
    struct job job = {0};
    const char **texts[] = {&job.name, &job.directory, &job.socket,
                            &job.host, &job.address,   &job.key};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        *texts[i] = frame_get_text(frame, NULL);
    job.daemon = frame_get_u32(frame);
    uint32_t flags = frame_get_u32(frame);
    job.is_check = flags & FLAG_CHECK;
    job.is_verbose = flags & FLAG_VERBOSE;
    job.wants_output = flags & FLAG_OUTPUT;
    job.wants_input = flags & FLAG_INPUT;
    job.n_ranks = frame_get_u32(frame);
    job.n_hosts = frame_get_u32(frame);
    job.host_index = frame_get_u32(frame);
    job.n_places = get_count(frame, ARGS_RANKS_MAX, PLACE_BYTES);
    job.places = calloc(job.n_places + 1, sizeof *job.places);
    for (uint32_t i = 0; job.places && i < job.n_places; i++)
        get_place(frame, &job.places[i]);
    job.command = get_list(frame);
    job.environment = get_list(frame);
    job.exports = get_list(frame);
    job.settings = get_list(frame);
    int rc = 0;
    if (!job.places || !job.command || !job.environment || !job.exports || !job.settings)
        rc = -ENOMEM;
    else if (frame->is_bad || frame->at != frame->end || flags & ~(uint32_t)FLAGS ||
             !is_valid(&job))
        rc = -EPROTO;
    if (rc < 0)
        job_deinit(&job);
    else
        *out = job;
    return rc;
}

void job_deinit(struct job *job)
{
    free(job->places);
    free(job->command);
    free(job->environment);
    free(job->exports);
    free(job->settings);
    *job = (struct job){0};
}
