/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What gradrun and its agents read from each other: the greeting's line, frames in pieces, and
 * every body. What was understood is written again and has to be understood alike.
 *
 * The first byte of the input is the size of the pieces in which it arrives.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "frame.h"
#include "inbox.h"
#include "job.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool is_true)
{
    if (!is_true)
        abort();
}

static struct frame reread(const struct frame_writer *writer)
{
    struct frame frame;
    size_t used;
    require(frame_find(writer->data, writer->n, &frame, &used) == 1 && used == writer->n);
    return frame;
}

static void take_job(struct frame *frame)
{
    struct job job, again;
    struct frame_writer writer = {0};
    if (job_unpack(frame, &job) < 0)
        return;
    require(job_pack(&writer, &job) == 0);
    struct frame second = reread(&writer);
    require(job_unpack(&second, &again) == 0);
    require(strcmp(again.name, job.name) == 0 && again.n_places == job.n_places &&
            again.host_index == job.host_index);
    job_deinit(&again);
    job_deinit(&job);
    frame_writer_deinit(&writer);
}

static void take_message(struct frame *frame)
{
    struct message message, again;
    struct frame_writer writer = {0};
    if (frame_get_message(frame, &message) < 0)
        return;
    require(message.text[message.text_bytes] == '\0');
    require(frame_put_message(&writer, &message) == 0);
    struct frame second = reread(&writer);
    require(frame_get_message(&second, &again) == 0);
    require(again.kind == message.kind && again.text_bytes == message.text_bytes &&
            memcmp(again.text, message.text, message.text_bytes) == 0);
    frame_writer_deinit(&writer);
}

/* False: no frame will follow. */
static bool take_frames(struct inbox *inbox)
{
    struct frame frame;
    int rc;
    while ((rc = inbox_next(inbox, &frame)) == 1) {
        if (frame.kind == FRAME_JOB)
            take_job(&frame);
        else
            take_message(&frame);
    }
    return rc == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int ends[2];
    struct inbox inbox, rest;
    char line[64];
    bool is_greeted = false;
    if (size == 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return 0;
    size_t piece = data[0] ? data[0] : 4096;
    inbox_init(&inbox, ends[0]);
    for (size_t at = 1; at < size; at += piece) {
        size_t n = size - at < piece ? size - at : piece;
        require(send(ends[1], data + at, n, MSG_NOSIGNAL) == (ssize_t)n);
        require(inbox_read(&inbox) == 1);
        is_greeted = is_greeted || inbox_next_line(&inbox, line, sizeof line) == 1;
        if (is_greeted && !take_frames(&inbox))
            break;
    }
    close(ends[1]);
    require(inbox_split(&inbox, &rest) == 0);
    if (is_greeted)
        take_frames(&rest);
    inbox_deinit(&rest);
    inbox_deinit(&inbox);
    return 0;
}
