/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The addresses of the other hosts, looked up all at once while ssh does the same. An alias that
 * only ssh knows has none here: then the host finds out by itself.
 */
#include <math.h>

#include "cluster_state.h"

/* Seconds; less than an agent waits for its job. */
static const double slow_s = 3, end_s = 20;

void cluster_names_begin(struct cluster *c)
{
    if (c->state != CLUSTER_PREPARING)
        return;
    for (unsigned i = 0; i < c->hosts->n; i++)
        if (!c->remotes[i].is_local)
            lookup_start(&c->remotes[i].lookup, c->program, host_address(&c->hosts->list[i]),
                         c->mask);
    c->names_slow_at = cluster_now_s() + slow_s;
    c->names_end_at = cluster_now_s() + end_s;
}

static const struct remote *find_open(const struct cluster *c, unsigned *out_n)
{
    const struct remote *first = NULL;
    *out_n = 0;
    for (unsigned i = 0; i < c->hosts->n; i++) {
        if (lookup_is_over(&c->remotes[i].lookup))
            continue;
        if (!first)
            first = &c->remotes[i];
        ++*out_n;
    }
    return first;
}

bool cluster_is_looking(const struct cluster *c)
{
    unsigned n;
    return find_open(c, &n) != NULL;
}

void cluster_names_stop(struct cluster *c)
{
    for (unsigned i = 0; i < c->hosts->n; i++)
        lookup_stop(&c->remotes[i].lookup);
    c->names_slow_at = c->names_end_at = INFINITY;
}

static void say(struct cluster *c, const struct remote *first, unsigned n, const char *what)
{
    if (n == 1)
        cluster_say(c, "host %s: its name %s", first->host->name, what);
    else
        cluster_say(c, "host %s, and %u more: their names %s", first->host->name, n - 1, what);
}

void cluster_names_advance(struct cluster *c)
{
    unsigned n;
    double now = cluster_now_s();
    const struct remote *first = find_open(c, &n);
    if (!first) {
        c->names_slow_at = c->names_end_at = INFINITY;
        return;
    }
    if (now >= c->names_slow_at) {
        say(c, first, n,
            "cannot be looked up yet: does the name server (/etc/resolv.conf) answer?");
        c->names_slow_at = INFINITY;
    }
    if (now >= c->names_end_at) {
        say(c, first, n, "could not be looked up here; each host is asked for its address instead");
        cluster_names_stop(c);
    }
}
