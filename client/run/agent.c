/* SPDX-License-Identifier: Apache-2.0 */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent_state.h"
#include "lookup.h"

enum { RESOLVER_MS = 10 * 1000 }; /* for a name, while the launcher hears nothing from us */

static void say(struct launch *l, const char *text)
{
    agent_send_text(l->owner, (struct message){.kind = FRAME_SAY}, text);
}

static void show(struct stream *stream, const char *line, size_t bytes)
{
    struct frame_writer writer = {0};
    struct message message = {
        .kind = FRAME_OUTPUT,
        .rank = stream->rank,
        .stream = stream->which,
        .text = line,
        .text_bytes = bytes,
    };
    if (frame_put_message(&writer, &message) == 0)
        sink_push_bytes(stream->sink, writer.data, writer.n);
    frame_writer_deinit(&writer);
}

/* The host is ready, and so is its daemon, which takes others at this port. */
static void tell_ready(struct launch *l, unsigned peer_port)
{
    struct agent *agent = l->owner;
    l->state = LAUNCH_WAITING;
    agent_send_text(agent,
                    (struct message){.kind = FRAME_READY,
                                     .port = peer_port,
                                     .master_port = address_free_port(agent->address)},
                    agent->address);
}

static void give_up(struct launch *l, const char *reason)
{
    launch_say(l, "%s", reason);
    launch_begin_ending(l, LAUNCH_EXIT_FAILED);
}

static void use_socket(struct launch *l)
{
    struct agent *agent = l->owner;
    const char *socket = agent->job.socket;
    char reason[1024];
    unsigned port = 0;
    bool is_coordinator = agent->job.host_index == 0 && agent->job.n_hosts > 1;
    bool is_there = is_coordinator
                        ? (port = daemon_peer_port(socket, l->signal_fd, reason, sizeof reason)) > 0
                        : daemon_answers(socket, l->signal_fd, reason, sizeof reason);
    if (!is_there) {
        give_up(l, reason);
        return;
    }
    l->environment.socket = socket;
    tell_ready(l, port);
}

static void begin(struct launch *l)
{
    struct agent *agent = l->owner;
    const struct job *job = &agent->job;
    if (!agent->address[0])
        give_up(l, "no address of this host is known at which the other hosts reach it: name the "
                   "host by its address");
    else if (job->daemon == JOB_DAEMON_PRIVATE)
        launch_start_private(l, job->n_hosts > 1 ? agent->address : NULL,
                             job->key[0] ? job->key : NULL);
    else if (job->daemon == JOB_DAEMON_SOCKET)
        use_socket(l);
    else
        tell_ready(l, 0);
}

static void on_ready(struct launch *l, unsigned peer_port)
{
    struct agent *agent = l->owner;
    if (agent->job.n_hosts > 1 && peer_port == 0)
        give_up(l, "the private daemon does not say at which port it takes other daemons: is it of "
                   "another version (GRADD_DAEMON)?");
    else
        tell_ready(l, peer_port);
}

static void on_started(struct launch *l)
{
    agent_leave_feed();
    for (unsigned i = 0; i < l->ranks.n; i++) {
        const struct rank *rank = &l->ranks.list[i];
        agent_send(l->owner, &(struct message){.kind = FRAME_STARTED,
                                               .rank = rank->place.rank,
                                               .pid = (uint32_t)rank->pid});
    }
}

static void tell_over(struct launch *l, const struct rank *rank)
{
    const struct agent *agent = l->owner;
    agent_send(l->owner,
               &(struct message){.kind = FRAME_EXITED,
                                 .rank = rank->place.rank,
                                 .pid = (uint32_t)rank->pid,
                                 .code = (uint32_t)rank->ending.code,
                                 .signal = (uint32_t)rank->ending.signal,
                                 .is_asked = agent->is_asked || l->state > LAUNCH_RUNNING});
}

/* The one to blame first. */
static void on_over(struct launch *l, const bool *was_over, const struct rank *failed)
{
    if (failed)
        tell_over(l, failed);
    for (unsigned i = 0; i < l->ranks.n; i++) {
        const struct rank *rank = &l->ranks.list[i];
        if (rank->is_over && !was_over[i] && rank != failed)
            tell_over(l, rank);
    }
}

static void on_ending(struct launch *l, int exit_code)
{
    const struct agent *agent = l->owner;
    if (!agent->is_asked)
        agent_send(l->owner, &(struct message){.kind = FRAME_ENDING, .code = (uint32_t)exit_code});
}

static void on_flushing(struct launch *l)
{
    agent_send(l->owner, &(struct message){.kind = FRAME_DONE, .code = (uint32_t)l->exit_code});
}

static void start(struct launch *l, const struct message *m)
{
    struct agent *agent = l->owner;
    if (l->state != LAUNCH_WAITING)
        return;
    snprintf(agent->master_address, sizeof agent->master_address, "%s", m->text);
    l->environment.master_address = agent->master_address;
    l->environment.master_port = m->master_port;
    if (agent->job.n_hosts > 1 && m->port > 0) {
        address_join(m->text, m->port, agent->coordinator, sizeof agent->coordinator);
        l->environment.coordinator = agent->coordinator;
    }
    launch_start_ranks(l);
}

static void end(struct launch *l, bool is_at_once)
{
    struct agent *agent = l->owner;
    agent->is_asked = true;
    l->has_others = false;
    launch_begin_ending(l, 0);
    if (is_at_once && l->state < LAUNCH_FLUSHING)
        l->kill_at = 0;
}

static void pass_signal(struct launch *l, uint32_t number)
{
    if (number == SIGSTOP || number == SIGCONT)
        ranks_signal_groups(&l->ranks, (int)number);
    if (number == SIGUSR1 || number == SIGUSR2)
        ranks_signal(&l->ranks, (int)number);
}

/* Whoever reads that stream has gone: ranks that write to it shall hear so from the kernel. */
static void mute(struct launch *l, uint32_t which)
{
    for (unsigned i = 0; i < l->ranks.n; i++) {
        struct rank *rank = &l->ranks.list[i];
        if (rank->pid > 0)
            stream_deinit(which == 1 ? &rank->out : &rank->err);
    }
}

static void handle(struct launch *l, const struct message *m)
{
    switch (m->kind) {
    case FRAME_START:
        start(l, m);
        break;
    case FRAME_END:
    case FRAME_KILL:
        end(l, m->kind == FRAME_KILL);
        break;
    case FRAME_INPUT:
        agent_take_input(l, m);
        break;
    case FRAME_SIGNAL:
        pass_signal(l, m->signal);
        break;
    case FRAME_MUTE:
        mute(l, m->stream);
        break;
    case FRAME_PING:
        agent_answer_ping(l->owner);
        break;
    default:
        break;
    }
}

/* Nobody listens any more. */
static void on_lost(struct launch *l)
{
    l->input_fd = -1;
    l->silent_at = INFINITY;
    l->console.out->error = EPIPE;
    l->has_others = false;
    if (l->state == LAUNCH_FLUSHING)
        l->state = LAUNCH_DONE;
    launch_begin_ending(l, LAUNCH_EXIT_FAILED);
}

static void on_input(struct launch *l)
{
    struct agent *agent = l->owner;
    struct frame frame;
    struct message message;
    int rc = inbox_read(&agent->inbox), found = 0;
    if (rc > 0)
        l->silent_at = launch_now_s() + AGENT_SILENCE_S;
    while (rc >= 0 && (found = inbox_next(&agent->inbox, &frame)) > 0)
        if (frame_get_message(&frame, &message) == 0)
            handle(l, &message);
        else
            rc = -EPROTO;
    agent_feed(l);
    if (rc < 0 || found < 0 || launch_now_s() >= l->silent_at)
        on_lost(l);
}

static const struct launch_role role = {
    .begin = begin,
    .say = say,
    .on_ready = on_ready,
    .on_started = on_started,
    .on_over = on_over,
    .on_ending = on_ending,
    .on_input = on_input,
    .on_flushing = on_flushing,
};

/* Standard input and output are the launcher's; what is started here must not meet them. */
static bool take_stdio(struct agent *agent)
{
    int in = fcntl(0, F_DUPFD_CLOEXEC, 3), out = fcntl(1, F_DUPFD_CLOEXEC, 3);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    bool is_good = in >= 0 && out >= 0 && null >= 0 && dup2(null, 0) == 0 && dup2(null, 1) == 1;
    if (null >= 0)
        close(null);
    inbox_init(&agent->inbox, in);
    sink_init_own(&agent->launch.console.sinks[0], out);
    agent->launch.console.out = agent->launch.console.err = &agent->launch.console.sinks[0];
    return is_good;
}

static bool take_job(struct agent *agent)
{
    /* What a login script printed may lack its end of line. */
    static const char greeting[] = "\n" FRAME_GREETING GRADD_VERSION "\n";
    struct frame frame;
    sink_push_bytes(agent->launch.console.out, greeting, sizeof greeting - 1);
    if (!agent_wait(agent, &frame) || job_unpack(&frame, &agent->job) < 0)
        return false;
    agent->first = agent->inbox; /* the job's strings are there */
    return inbox_split(&agent->first, &agent->inbox) == 0;
}

/* The first of these that is an address of this host: the launcher's idea, the one by which its
 * connection came here, what our own resolver says. */
static void find_address(struct agent *agent)
{
    struct lookup lookup = {.fd = -1};
    char by_ssh[ADDRESS_BYTES] = "", program[4096];
    const char *connection = getenv("SSH_CONNECTION");
    if (connection)
        sscanf(connection, "%*s %*s %63s", by_ssh);
    const char *at = strrchr(agent->job.host, '@');
    if (!address_is_own(agent->job.address) && !address_is_own(by_ssh)) {
        build_tree_path("gradrun", program, sizeof program);
        lookup_start(&lookup, program, at ? at + 1 : agent->job.host, agent->launch.rank_mask);
        lookup_wait(&lookup, RESOLVER_MS);
    }
    const char *candidates[] = {agent->job.address, by_ssh, lookup.address,
                                agent->job.n_hosts == 1 ? "127.0.0.1" : ""};
    for (size_t i = 0; i < 4 && !agent->address[0]; i++)
        if (candidates[i][0] && address_is_own(candidates[i]))
            snprintf(agent->address, sizeof agent->address, "%s", candidates[i]);
}

static void set_up(struct agent *agent)
{
    const struct job *job = &agent->job;
    struct launch *l = &agent->launch;
    for (const char **e = job->environment; *e; e++)
        putenv((char *)*e);
    agent->args = (struct args){
        .n_ranks = job->n_places,
        .is_verbose = job->is_verbose,
        .job = job->name,
        .exports = job->exports,
        .settings = job->settings,
        .command = (char **)job->command,
    };
    l->args = &agent->args;
    l->input_fd = agent->inbox.fd;
    l->silent_at = launch_now_s() + AGENT_SILENCE_S;
    l->has_others = job->n_hosts > 1;
    l->output.show = show;
    if (job->wants_output)
        l->output.out = l->output.err = l->console.out;
    if (job->wants_input)
        agent_open_feed(agent);
    find_address(agent);
}

/* The ranks of this host, from begin to end. */
static void run(struct agent *agent)
{
    struct launch *l = &agent->launch;
    char error[512] = "";
    int rc = 0;
    if (chdir(agent->job.directory) < 0) {
        rc = -errno;
        snprintf(error, sizeof error,
                 "working directory %s: %s; start in a directory that all hosts have",
                 agent->job.directory, strerror(-rc));
    }
    if (rc == 0)
        rc = launch_set_up(l, agent->job.places, error, sizeof error);
    if (rc < 0) {
        say(l, error);
        on_ending(l, LAUNCH_EXIT_FAILED);
        on_flushing(l);
        agent_flush(agent);
        return;
    }
    l->environment.n_ranks = agent->job.n_ranks;
    l->environment.n_hosts = agent->job.n_hosts;
    l->environment.host_index = agent->job.host_index;
    launch_drive(l);
}

int agent_run(const struct args *args, const sigset_t *rank_mask)
{
    struct agent agent = {
        .launch = {LAUNCH_INIT, .role = &role, .rank_mask = rank_mask, .owner = &agent}};
    int code = LAUNCH_EXIT_FAILED;
    if (take_stdio(&agent) && take_job(&agent)) {
        set_up(&agent);
        if (agent.job.is_check)
            agent_check(&agent);
        else
            run(&agent);
        code = 0;
    }
    if (agent.feed.is_open)
        sink_deinit(&agent.feed.to);
    launch_tear_down(&agent.launch);
    job_deinit(&agent.job);
    inbox_deinit(&agent.inbox);
    inbox_deinit(&agent.first);
    frame_writer_deinit(&agent.writer);
    return code;
}
