/* SPDX-License-Identifier: Apache-2.0 */
/* gradctl with a daemon that lies: the reply's bytes go through every command and both writers.
 * The first byte chooses the command and the writer; the rest is what the daemon sends. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "command.h"
#include "records.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* main.c of gradctl is not linked: this is its table. */
static const struct command *const all[] = {&command_status, &command_jobs, &command_job,
                                            &command_config, &command_version};
const struct command *const commands[] = {NULL};

static FILE *null_stream;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    signal(SIGPIPE, SIG_IGN);
    null_stream = fopen("/dev/null", "w");
    return null_stream ? 0 : 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int ends[2];
    if (size < 1 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return 0;
    unsigned choice = *data++;
    size--;
    struct record record;
    while (record_next(&data, &size, &record))
        send_frame(ends[1], record.bytes, record.n);
    shutdown(ends[1], SHUT_WR);
    struct link link;
    link_init(&link, 5.0, -1);
    link.fd = ends[0];
    const struct options options = {.timeout_s = 5.0, .name = "job", .is_json = choice & 1};
    const struct command *command = all[choice / 2 % (sizeof all / sizeof *all)];
    struct writer *writer = options.is_json ? writer_json_new(null_stream, command->name, false)
                                            : writer_text_new(null_stream);
    struct context context = {&options, &link, writer};
    if (writer) {
        int result = command->run(&context);
        if (result == LINK_FAILED && !*link.error)
            abort();
        writer_end(writer);
        writer_free(writer);
    }
    link_deinit(&link);
    close(ends[1]);
    return 0;
}
