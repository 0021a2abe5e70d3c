/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The configuration of gradd. One table of options drives the parser, `gradd --check-config`,
 * `gradctl config` and the manual page gradd.conf(5).
 *
 * Thread: loop. Invariant: a struct config holds only values that the table allows; a file with an
 * error changes nothing.
 */
#ifndef GRADD_CONTROL_CONFIG_H
#define GRADD_CONTROL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum {
    CONFIG_TEXT_MAX = 256,
    CONFIG_SOURCE_MAX = 320,
    CONFIG_OPTIONS_MAX = 48,
};

enum config_type {
    CONFIG_TEXT,    /* char[CONFIG_TEXT_MAX] */
    CONFIG_NUMBER,  /* uint64_t */
    CONFIG_BYTES,   /* uint64_t; written with an optional suffix k, M or G */
    CONFIG_SECONDS, /* uint64_t milliseconds; written in seconds, fractions allowed */
    CONFIG_MODE,    /* uint64_t; written in octal */
    CONFIG_LEVEL,   /* uint64_t, an enum log_level; written as a word */
    CONFIG_WORD,    /* uint64_t, which of the row's words it is */
    CONFIG_CHOICE,  /* uint64_t, or CONFIG_AUTO, written as the word auto */
};

enum config_reload {
    CONFIG_FIXED,      /* a change needs a restart */
    CONFIG_RELOADABLE, /* a change takes effect on reload */
};

enum config_peer_listen {
    PEER_LISTEN_NO,
    PEER_LISTEN_YES,
    PEER_LISTEN_AUTO, /* with a cluster key; a private daemon also when it is given a port */
};

/* Of a CONFIG_CHOICE: left to who knows better. */
#define CONFIG_AUTO UINT64_MAX

enum config_backend {
    BACKEND_AUTO, /* device memory on the device where that works */
    BACKEND_HOST, /* through shared memory always */
    BACKEND_NCCL, /* on the device, or no job */
};

enum config_switch {
    CONFIG_NO,
    CONFIG_YES,
};

struct config {
    char socket[CONFIG_TEXT_MAX];
    uint64_t socket_mode;
    char admin_group[CONFIG_TEXT_MAX];
    char node_name[CONFIG_TEXT_MAX];
    uint64_t log_level;
    uint64_t hello_timeout_ms;
    uint64_t drain_timeout_ms;
    uint64_t join_timeout_ms;
    uint64_t job_linger_ms;
    uint64_t stall_warn_ms;
    uint64_t op_timeout_ms;
    uint64_t worker_threads;
    uint64_t job_memory_bytes;
    uint64_t fusion_bytes;
    uint64_t max_in_flight;
    uint64_t backend; /* enum config_backend */
    uint64_t order;   /* enum QueueOrder of trainer.proto */
    uint64_t max_ctas;
    uint64_t traffic_class;
    uint64_t peer_listen; /* enum config_peer_listen */
    uint64_t peer_port;
    char peer_address[CONFIG_TEXT_MAX];
    char cluster_key_file[CONFIG_TEXT_MAX];
    uint64_t peer_heartbeat_ms;
    uint64_t peer_dead_ms;
    uint64_t ring_streams;
    uint64_t data_encryption; /* enum config_switch */
    uint64_t wire;            /* 0, or an index into config_wire_dtypes */
    uint64_t max_sessions;
    uint64_t max_sessions_per_uid;
    uint64_t max_jobs_per_uid;
    char sources[CONFIG_OPTIONS_MAX][CONFIG_SOURCE_MAX]; /* by row: "default", file:line, … */
};

struct config_option {
    const char *section, *key;
    enum config_type type;
    size_t offset;     /* of the value in struct config */
    uint64_t min, max; /* in the unit that is stored; texts: of the length; words: how many */
    const char *default_value;
    enum config_reload reload;
    const char *doc;
    const char *const *words; /* CONFIG_WORD */
};

/* The enum gradd_dtype of each word of `wire`; 0: tensors travel as they are. */
extern const unsigned config_wire_dtypes[];

extern const struct config_option config_options[];
size_t config_n_options(void);

/* What was wrong, as a sentence that starts with where ("gradd.conf:12: …"). */
struct config_error {
    char text[512];
};

void config_init(struct config *config); /* all defaults */

/* Read an INI file over *config. 0, or -EINVAL / -errno with *out_error; *config is then unchanged.
 */
int config_read_file(struct config *config, const char *path, struct config_error *out_error);

/* The same from a string; name stands for the file in errors and sources. */
int config_read_text(struct config *config, const char *name, const char *text,
                     struct config_error *out_error);

/* Apply "key=value"; source is what `gradctl config` shows. 0 or -EINVAL. */
int config_set(struct config *config, const char *assignment, const char *source,
               struct config_error *out_error);

/* The value of row i as it would be written in the file. */
void config_format(const struct config *config, size_t i, char *out_text, size_t size);

/* What the type and the limits of row i allow, in words. */
void config_allowed(size_t i, char *out_text, size_t size);

/*
 * Take the reloadable values of `fresh` over into `config`. Returns how many fixed options differ
 * and writes their keys, separated by ", ".
 */
size_t config_take_reloadable(struct config *config, const struct config *fresh, char *out_fixed,
                              size_t size);

/* The options as a part of gradd.conf(5) in scdoc's markup. */
void config_print_options(FILE *file);

#endif
