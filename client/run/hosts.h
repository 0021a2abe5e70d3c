/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hosts of a run: -H and --hostfile in the forms of Horovod and of MPI, and which ranks each
 * host gets. Pure but for hosts_read() and hosts_is_local(): text in, a list or a sentence out.
 *
 * Thread: any.
 *
 * Invariant: names are valid and different; none can be taken for an option of a remote shell.
 */
#ifndef GRADD_RUN_HOSTS_H
#define GRADD_RUN_HOSTS_H

#include <stdbool.h>
#include <stddef.h>

enum { HOSTS_MAX = 512, HOSTS_NAME_MAX = 255, HOSTS_SLOTS_MAX = 1024 };

struct host {
    char name[HOSTS_NAME_MAX + 1]; /* as given; may be user@host */
    unsigned n_slots;
    unsigned first_rank, n_ranks; /* after hosts_place() */
};

struct hosts {
    struct host *list;
    unsigned n;
};

void hosts_deinit(struct hosts *hosts);

/* The functions that parse add to what is there: 0, or -EINVAL or -ENOMEM with a sentence. */

/* "host[:slots],..."; an IPv6 address stands in brackets: "[fd00::1]:2". */
int hosts_parse_list(struct hosts *hosts, const char *text, char *error, size_t bytes);
/*
 * One host a line, '#' begins a comment: "host", "host:N", "host slots=N", with MPI's
 * "max_slots=M" beside it. file is for the sentence.
 */
int hosts_parse_text(struct hosts *hosts, const char *file, const char *text, char *error,
                     size_t bytes);
/* The same from a file; also -errno of reading it. */
int hosts_read(struct hosts *hosts, const char *file, char *error, size_t bytes);

/*
 * Give ranks to hosts in order, until n_ranks (0: as many as there are slots) have a place; hosts
 * that get none are dropped. 0, or -EINVAL with a sentence.
 */
int hosts_place(struct hosts *hosts, unsigned n_ranks, char *error, size_t bytes);
unsigned hosts_n_ranks(const struct hosts *hosts);

/*
 * Of a rank with this local rank on host `index`: how many hosts have such a local rank, and which
 * of them this one is (Horovod's cross size and cross rank).
 */
void hosts_cross(const struct hosts *hosts, unsigned index, unsigned local_rank,
                 unsigned *out_cross_rank, unsigned *out_cross_size);

/* The part of the name that can be resolved: without user@. */
const char *host_address(const struct host *host);
/* Is it this machine: localhost, a loopback address, our host name, an address of ours? */
bool host_is_local(const struct host *host);

#endif
