/* SPDX-License-Identifier: Apache-2.0 */
/* --check on a host: would a job run here, and can other hosts be reached? Starts nothing. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent_state.h"

enum { PROBE_MS = 3000 };

__attribute__((format(printf, 2, 3))) static void report(struct agent *agent, const char *format,
                                                         ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    agent_send_text(agent, (struct message){.kind = FRAME_RESULT, .code = text[0] != '\0'}, text);
}

static bool is_program(const char *command)
{
    const char *path = getenv("PATH");
    if (strchr(command, '/'))
        return access(command, X_OK) == 0;
    while (path && *path) {
        size_t length = strcspn(path, ":");
        char file[4096];
        snprintf(file, sizeof file, "%.*s/%s", (int)length, path, command);
        if (access(file, X_OK) == 0)
            return true;
        path += length + (path[length] != '\0');
    }
    return false;
}

/* The port to test: of the daemon that would be used, else one like a private daemon's. */
static unsigned open_port(struct agent *agent, int *out_fd)
{
    unsigned port = 0;
    char reason[1024] = "";
    const struct job *job = &agent->job;
    *out_fd = -1;
    if (job->daemon == JOB_DAEMON_SOCKET && job->n_hosts > 1)
        port = daemon_peer_port(job->socket, -1, reason, sizeof reason);
    else if (job->daemon == JOB_DAEMON_SOCKET)
        daemon_answers(job->socket, -1, reason, sizeof reason);
    else if ((*out_fd = address_listen(agent->address, &port)) < 0)
        snprintf(reason, sizeof reason, "cannot listen at %s: %s", agent->address,
                 strerror(-*out_fd));
    if (reason[0])
        report(agent, "%s", reason);
    return port;
}

static void check_files(struct agent *agent)
{
    const struct job *job = &agent->job;
    char program[4096];
    if (chdir(job->directory) < 0)
        report(agent, "working directory %s: %s", job->directory, strerror(errno));
    if (job->command[0] && !is_program(job->command[0]))
        report(agent, "there is no program \"%s\"", job->command[0]);
    private_find_program(program, sizeof program);
    if (job->daemon == JOB_DAEMON_PRIVATE && access(program, X_OK) < 0)
        report(agent, "gradd %s: %s", program, strerror(errno));
    if (!agent->address[0])
        report(agent, "no address of this host is known at which the other hosts reach it");
}

static void probe(struct agent *agent, const struct message *m)
{
    int rc = address_try(m->text, m->port, PROBE_MS);
    char target[ADDRESS_BYTES + 16];
    address_join(m->text, m->port, target, sizeof target);
    if (rc < 0)
        report(agent, "cannot connect to %s: %s; a firewall between the hosts?", target,
               strerror(-rc));
    else
        report(agent, "%s", "");
}

int agent_check(struct agent *agent)
{
    int listener;
    struct frame frame;
    struct message m;
    check_files(agent);
    unsigned port = open_port(agent, &listener);
    agent_send_text(agent, (struct message){.kind = FRAME_READY, .port = port}, agent->address);
    while (agent_wait(agent, &frame) && frame_get_message(&frame, &m) == 0 && m.kind != FRAME_END &&
           m.kind != FRAME_KILL) {
        if (m.kind == FRAME_PROBE)
            probe(agent, &m);
        else if (m.kind == FRAME_PING)
            agent_answer_ping(agent);
    }
    if (listener >= 0)
        close(listener);
    agent_send(agent, &(struct message){.kind = FRAME_DONE});
    agent_flush(agent);
    return 0;
}
