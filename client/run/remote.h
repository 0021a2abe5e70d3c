/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The launcher's side of one host: the process that leads there (ssh, another remote shell, or the
 * agent itself for this host), and what it says.
 *
 * Thread: loop.
 *
 * Invariant: whoever ends first, launcher, remote shell or agent, the other two learn it by the
 * end of a pipe.
 */
#ifndef GRADD_RUN_REMOTE_H
#define GRADD_RUN_REMOTE_H

#include "address.h"
#include "args.h"
#include "hosts.h"
#include "inbox.h"
#include "lookup.h"
#include "process.h"
#include "sink.h"
#include "ssh.h"

enum remote_state {
    REMOTE_CONNECTING, /* no greeting yet */
    REMOTE_GREETED,    /* has the job, is getting ready */
    REMOTE_READY,      /* waits for the start, or runs */
    REMOTE_DONE,       /* nothing is left there; its process is about to end */
    REMOTE_GONE,       /* its process has ended */
};

struct remote {
    const struct host *host; /* borrowed */
    unsigned index;
    bool is_local;
    enum remote_state state;
    pid_t pid; /* 0: not started, or gone */
    struct sink to;
    struct inbox from;
    int err;          /* the process's standard error; -1: closed */
    char words[4096]; /* its last words: stderr, and stdout before the greeting */
    size_t n_words;
    struct lookup lookup;        /* of its name; never begun for this host */
    double heard_at;             /* monotonic seconds */
    double pinged_at;            /* for the clock; 0: no question is open */
    struct ending ending;        /* when GONE */
    char address[ADDRESS_BYTES]; /* when READY: what the host says */
    unsigned port, master_port;
    unsigned n_open, n_problems; /* --check: unanswered probes, and what is wrong */
    double clock_offset_s;
};

/* How to get there. Strings are borrowed. */
struct remote_shell {
    const char *program; /* this gradrun, by its absolute path */
    const char *command; /* --rsh; NULL: ssh */
    const char *identity_file;
    unsigned port;
    enum ssh_age ssh_age;
    const sigset_t *mask;
};

/* The words to execute: NULL-terminated, freed by remote_words_free(). NULL: out of memory. */
char **remote_words(const struct remote_shell *shell, const struct host *host, bool is_local);
void remote_words_free(char **words);

/* 0, or -errno with a sentence. */
int remote_start(struct remote *remote, const struct remote_shell *shell, char *error,
                 size_t bytes);
void remote_deinit(struct remote *remote);

/* Queue a frame. */
void remote_send(struct remote *remote, struct frame_writer *writer, const struct message *message);

/* Read its standard error, which is kept as its last words; at the end it is closed. */
void remote_hear_words(struct remote *remote);
/* Look for the greeting. 1: it is there; 0: not yet; -EPROTO: of another version (a sentence). */
int remote_greet(struct remote *remote, char *error, size_t bytes);

/*
 * Why there was no greeting, or no more word, in a sentence for the user, from how the process
 * ended and what it said last. Pure.
 */
struct remote_loss {
    const char *host, *program, *words;
    bool is_local, is_ssh, has_greeted;
    struct ending ending;
};
void remote_explain(const struct remote_loss *loss, char *sentence, size_t bytes);

#endif
