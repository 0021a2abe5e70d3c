/* SPDX-License-Identifier: Apache-2.0 */
/* --check: what would run where, and does every host answer, fit and reach its neighbours? */
#include "cluster_state.h"

#include <math.h>
#include <string.h>
#include <time.h>

/* Seconds between two hosts' clocks that confuse logs and file times. */
static const double skew_s = 1.0;

static void ask_to_probe(struct cluster *c, struct remote *remote, unsigned target_index)
{
    const struct remote *target = &c->remotes[target_index];
    const char *address = target_index == 0 && c->args->coordinator_address
                              ? c->args->coordinator_address
                              : target->address;
    if (target == remote || target->port == 0)
        return;
    remote->n_open++;
    cluster_send(c, remote,
                 (struct message){.kind = FRAME_PROBE,
                                  .port = target->port,
                                  .text = address,
                                  .text_bytes = strlen(address)});
}

void cluster_check_begin(struct cluster *c)
{
    unsigned n = c->hosts->n;
    c->state = CLUSTER_RUNNING;
    for (unsigned i = 0; i < n; i++) {
        struct remote *remote = &c->remotes[i];
        /* Joining goes to the first host, the ring to the next. */
        ask_to_probe(c, remote, 0);
        if ((i + 1) % n != 0)
            ask_to_probe(c, remote, (i + 1) % n);
        remote->pinged_at = cluster_now_s();
        cluster_send(c, remote, (struct message){.kind = FRAME_PING});
    }
}

static void say_host(struct cluster *c, const struct remote *remote)
{
    const struct host *host = remote->host;
    char line[1024];
    snprintf(line, sizeof line, "%s: rank%s %u", host->name, host->n_ranks > 1 ? "s" : "",
             host->first_rank);
    size_t n = strlen(line);
    if (host->n_ranks > 1)
        n += (size_t)snprintf(line + n, sizeof line - n, " to %u",
                              host->first_rank + host->n_ranks - 1);
    snprintf(line + n, sizeof line - n, ", %s, address %s, gradrun %s, clock %+.3f s, %s",
             remote->is_local        ? "here"
             : c->args->remote_shell ? c->args->remote_shell
                                     : "through ssh",
             remote->address, GRADD_VERSION, remote->clock_offset_s,
             remote->n_problems ? "not usable" : "ports reachable");
    sink_push(c->console.out, "", line, strlen(line));
}

/* The last answer has come: the result, and the end. */
static void finish(struct cluster *c)
{
    for (unsigned i = 0; i < c->hosts->n; i++)
        if (c->remotes[i].n_open > 0 || c->remotes[i].pinged_at > 0)
            return;
    for (unsigned i = 0; i < c->hosts->n; i++) {
        const struct remote *remote = &c->remotes[i];
        say_host(c, remote);
        if (remote->n_problems > 0)
            c->exit_code = LAUNCH_EXIT_FAILED;
        if (fabs(remote->clock_offset_s) > skew_s)
            cluster_say(c, "host %s: its clock is %.1f s %s ours; set up NTP there",
                        remote->host->name, fabs(remote->clock_offset_s),
                        remote->clock_offset_s > 0 ? "before" : "behind");
    }
    cluster_begin_ending(c);
}

void cluster_check_result(struct cluster *c, struct remote *remote, const struct message *m)
{
    if (m->code != 0) {
        remote->n_problems++;
        cluster_say(c, "host %s: %.*s", remote->host->name, (int)m->text_bytes, m->text);
    }
    if (c->state != CLUSTER_RUNNING)
        return; /* of the host alone, before it was ready */
    if (remote->n_open > 0)
        remote->n_open--;
    finish(c);
}

void cluster_check_clock(struct cluster *c, struct remote *remote, const struct message *m)
{
    struct timespec now;
    if (remote->pinged_at == 0)
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    double half_trip = (cluster_now_s() - remote->pinged_at) / 2;
    remote->clock_offset_s = (double)m->seconds - (double)now.tv_sec +
                             ((double)m->nanoseconds - (double)now.tv_nsec) / 1e9 + half_trip;
    remote->pinged_at = 0;
    if (c->state == CLUSTER_RUNNING)
        finish(c);
}
