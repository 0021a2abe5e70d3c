/* SPDX-License-Identifier: Apache-2.0 */
#include "control/config.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <ini.h>

#include "base/log.h"
#include "gradd/types.h"
#include "wire.h"

#define MIB        (UINT64_C(1) << 20)
#define GIB        (UINT64_C(1) << 30)
#define SECOND_MS  UINT64_C(1000)
#define DAY_MS     (UINT64_C(86400) * 1000)
#define PLACE(key) offsetof(struct config, key)

static const char *const switch_words[] = {[CONFIG_NO] = "no", [CONFIG_YES] = "yes"};
static const char *const listen_words[] = {
    [PEER_LISTEN_NO] = "no", [PEER_LISTEN_YES] = "yes", [PEER_LISTEN_AUTO] = "auto"};
static const char *const backend_words[] = {
    [BACKEND_AUTO] = "auto", [BACKEND_HOST] = "host", [BACKEND_NCCL] = "nccl"};
static const char *const order_words[] = {[PB__QUEUE_ORDER__ORDER_AUTO] = "auto",
                                          [PB__QUEUE_ORDER__ORDER_EVENT] = "event",
                                          [PB__QUEUE_ORDER__ORDER_FLAG] = "flag"};
static const char *const wire_words[] = {"none", "fp16", "bf16"};
const unsigned config_wire_dtypes[] = {0, GRADD_F16, GRADD_BF16};

const struct config_option config_options[] = {
    {"daemon", "socket", CONFIG_TEXT, PLACE(socket), 1, 107, "/run/gradd/gradd.sock", CONFIG_FIXED,
     "Path of the socket on which trainers and gradctl reach the daemon. A socket passed by "
     "the service manager takes precedence.",
     NULL},
    {"daemon", "socket_mode", CONFIG_MODE, PLACE(socket_mode), 0, 0777, "0666", CONFIG_FIXED,
     "Permissions of the socket. Every user may connect by default: who a client is, is decided "
     "by its user id, and jobs of different users do not meet.",
     NULL},
    {"daemon", "admin_group", CONFIG_TEXT, PLACE(admin_group), 0, 255, "gradd-admin",
     CONFIG_RELOADABLE,
     "Members of this group see the jobs of all users, as root does. Empty: no such group.", NULL},
    {"daemon", "node_name", CONFIG_TEXT, PLACE(node_name), 0, 255, "", CONFIG_FIXED,
     "Name of this node in messages and listings. Empty: the host name.", NULL},
    {"daemon", "log_level", CONFIG_LEVEL, PLACE(log_level), 0, 0, "info", CONFIG_RELOADABLE,
     "The least serious messages that are logged. Workers that run already keep their level.",
     NULL},
    {"daemon", "hello_timeout_s", CONFIG_SECONDS, PLACE(hello_timeout_ms), 100, DAY_MS, "10",
     CONFIG_RELOADABLE, "A connection that has not introduced itself by then is closed.", NULL},
    {"daemon", "drain_timeout_s", CONFIG_SECONDS, PLACE(drain_timeout_ms), 0, DAY_MS, "60",
     CONFIG_RELOADABLE,
     "How long a daemon that was asked to stop waits for running jobs to leave before it aborts "
     "them.",
     NULL},
    {"job", "join_timeout_s", CONFIG_SECONDS, PLACE(join_timeout_ms), 100, DAY_MS, "120",
     CONFIG_RELOADABLE,
     "How long a rank waits for the other ranks of its job to join. A trainer may ask for less.",
     NULL},
    {"job", "job_linger_s", CONFIG_SECONDS, PLACE(job_linger_ms), 0, DAY_MS, "60",
     CONFIG_RELOADABLE,
     "How long a worker outlives its last rank, so that the job can join again at once.", NULL},
    {"job", "stall_warn_s", CONFIG_SECONDS, PLACE(stall_warn_ms), 0, DAY_MS, "60",
     CONFIG_RELOADABLE,
     "After how long a tensor that some rank has not submitted is reported. 0: never. Applies to "
     "workers started afterwards.",
     NULL},
    {"job", "op_timeout_s", CONFIG_SECONDS, PLACE(op_timeout_ms), 0, DAY_MS, "600",
     CONFIG_RELOADABLE,
     "After how long such an operation fails on all ranks. 0: never. Applies to workers started "
     "afterwards.",
     NULL},
    {"job", "worker_threads", CONFIG_NUMBER, PLACE(worker_threads), 0, 256, "0", CONFIG_RELOADABLE,
     "Threads of a worker that reduce. 0: the processors that it may use, at most 8. Applies to "
     "workers started afterwards.",
     NULL},
    {"job", "job_memory_bytes", CONFIG_BYTES, PLACE(job_memory_bytes), MIB, UINT64_C(1) << 50,
     "16G", CONFIG_RELOADABLE,
     "Shared memory that the ranks of a job may register on this node, together. Applies to "
     "workers started afterwards.",
     NULL},
    {"job", "fusion_bytes", CONFIG_BYTES, PLACE(fusion_bytes), 0, 4 * GIB, "64M", CONFIG_RELOADABLE,
     "Tensors that become ready together run as one batch until it holds this many bytes. 0: no "
     "limit. Applies to workers started afterwards.",
     NULL},
    {"job", "max_in_flight", CONFIG_NUMBER, PLACE(max_in_flight), 1, 1048576, "16384",
     CONFIG_RELOADABLE,
     "Operations that a rank may have under way. Applies to workers started afterwards.", NULL},
    {"gpu", "backend", CONFIG_WORD, PLACE(backend), 0, 3, "auto", CONFIG_FIXED,
     "Where tensors in device memory are reduced. auto: on the GPUs, with NCCL, where all nodes of "
     "a job have the CUDA driver and NCCL, else on the host. host: on the host; no GPU library is "
     "loaded. nccl: on the GPUs; jobs that can not are refused.",
     backend_words},
    {"gpu", "order", CONFIG_WORD, PLACE(order), 0, 3, "auto", CONFIG_RELOADABLE,
     "How streams of trainers and of the worker wait for each other. event: interprocess events, "
     "which need a /dev/shm that both see. flag: words in shared memory. auto: event, else flag.",
     order_words},
    {"gpu", "max_ctas", CONFIG_CHOICE, PLACE(max_ctas), 1, 64, "auto", CONFIG_RELOADABLE,
     "Thread blocks that NCCL may take of a GPU for a collective. Less slows it down and leaves "
     "more to training under MPS. auto: NCCL decides. Applies to workers started afterwards.",
     NULL},
    {"gpu", "traffic_class", CONFIG_CHOICE, PLACE(traffic_class), 0, 255, "auto", CONFIG_RELOADABLE,
     "Traffic class of NCCL's connections between nodes, as its network knows it. auto: NCCL "
     "decides. Applies to workers started afterwards.",
     NULL},
    {"peer", "peer_listen", CONFIG_WORD, PLACE(peer_listen), 0, 3, "auto", CONFIG_FIXED,
     "Whether other nodes may connect, which jobs on several nodes need. auto: when there is a "
     "cluster key. yes: without a key too, but then on the loopback interface only and for other "
     "daemons of the same user.",
     listen_words},
    {"peer", "peer_port", CONFIG_NUMBER, PLACE(peer_port), 0, 65535, "7010", CONFIG_FIXED,
     "The one TCP port for other nodes: daemons and the data of jobs. 0: any free port. A socket "
     "passed by the service manager takes precedence.",
     NULL},
    {"peer", "peer_address", CONFIG_TEXT, PLACE(peer_address), 0, 63, "", CONFIG_FIXED,
     "Numeric address on which other nodes are awaited. Empty: all interfaces.", NULL},
    {"peer", "cluster_key_file", CONFIG_TEXT, PLACE(cluster_key_file), 0, 255, "", CONFIG_FIXED,
     "File with the secret that all nodes share: at least 32 bytes, readable by its owner only. "
     "Nodes whose keys differ do not talk to each other.",
     NULL},
    {"peer", "peer_heartbeat_s", CONFIG_SECONDS, PLACE(peer_heartbeat_ms), 50, 3600 * SECOND_MS,
     "1", CONFIG_RELOADABLE, "How often daemons of different nodes make sure of each other.", NULL},
    {"peer", "peer_dead_s", CONFIG_SECONDS, PLACE(peer_dead_ms), 200, 3600 * SECOND_MS, "5",
     CONFIG_RELOADABLE,
     "A node that is silent for longer is dead: jobs with ranks on it fail. More than twice "
     "peer_heartbeat_s.",
     NULL},
    {"peer", "ring_streams", CONFIG_NUMBER, PLACE(ring_streams), 1, 8, "1", CONFIG_RELOADABLE,
     "TCP connections between the workers of two nodes. The node of rank 0 decides.", NULL},
    {"peer", "data_encryption", CONFIG_WORD, PLACE(data_encryption), 0, 2, "no", CONFIG_RELOADABLE,
     "Whether tensors travel encrypted between nodes. What daemons say to each other always does; "
     "connections for tensors are always authenticated. The node of rank 0 decides.",
     switch_words},
    {"peer", "wire", CONFIG_WORD, PLACE(wire), 0, 3, "none", CONFIG_RELOADABLE,
     "Type in which float32 tensors travel between nodes; sums are kept in float32. fp16 and bf16 "
     "halve the traffic and round every exchanged value. The node of rank 0 decides.",
     wire_words},
    {"limits", "max_sessions", CONFIG_NUMBER, PLACE(max_sessions), 1, 65536, "4096",
     CONFIG_RELOADABLE,
     "Connections of trainers and users. Some more are kept free for administrators.", NULL},
    {"limits", "max_sessions_per_uid", CONFIG_NUMBER, PLACE(max_sessions_per_uid), 1, 65536, "2048",
     CONFIG_RELOADABLE, "Trainers that one user may have connected.", NULL},
    {"limits", "max_jobs_per_uid", CONFIG_NUMBER, PLACE(max_jobs_per_uid), 1, 4096, "64",
     CONFIG_RELOADABLE, "Jobs, lingering ones included, that one user may have on this node.",
     NULL},
};

enum {
    N_OPTIONS = sizeof config_options / sizeof *config_options,
};
_Static_assert((int)N_OPTIONS <= (int)CONFIG_OPTIONS_MAX, "sources[] has a place for every option");

size_t config_n_options(void)
{
    return N_OPTIONS;
}

static void *place(struct config *config, size_t i)
{
    return (char *)config + config_options[i].offset;
}

static uint64_t number_of(const struct config *config, size_t i)
{
    uint64_t value;
    memcpy(&value, (const char *)config + config_options[i].offset, sizeof value);
    return value;
}

/* ------------------------------------------------------------------ values */

/* Decimal digits, and nothing else, up to `end`. */
static bool parse_digits(const char *text, int base, char **out_end, uint64_t *out_value)
{
    if (!isdigit((unsigned char)*text))
        return false;
    errno = 0;
    *out_value = strtoull(text, out_end, base);
    return errno == 0;
}

static bool parse_bytes(const char *text, uint64_t *out_value)
{
    static const char suffixes[] = "kMGT";
    char *end;
    if (!parse_digits(text, 10, &end, out_value))
        return false;
    if (!*end)
        return true;
    const char *suffix = strchr(suffixes, *end == 'K' ? 'k' : *end);
    if (!suffix || end[1])
        return false;
    uint64_t unit = UINT64_C(1) << (10 * (suffix - suffixes + 1));
    return !__builtin_mul_overflow(*out_value, unit, out_value);
}

static bool parse_seconds(const char *text, uint64_t *out_ms)
{
    if (!isdigit((unsigned char)*text) || strspn(text, "0123456789.") != strlen(text))
        return false;
    char *end;
    double seconds = strtod(text, &end);
    if (*end || !(seconds <= 1e9))
        return false;
    *out_ms = (uint64_t)llround(seconds * 1000);
    return true;
}

static bool parse_number(const struct config_option *option, const char *text, uint64_t *out_value)
{
    char *end;
    enum log_level level;
    switch (option->type) {
    case CONFIG_NUMBER:
        return parse_digits(text, 10, &end, out_value) && !*end;
    case CONFIG_CHOICE:
        *out_value = CONFIG_AUTO;
        return strcmp(text, "auto") == 0 || (parse_digits(text, 10, &end, out_value) && !*end);
    case CONFIG_BYTES:
        return parse_bytes(text, out_value);
    case CONFIG_SECONDS:
        return parse_seconds(text, out_value);
    case CONFIG_MODE:
        return parse_digits(text, 8, &end, out_value) && !*end;
    case CONFIG_LEVEL:
        if (!log_level_parse(text, &level))
            return false;
        *out_value = level;
        return true;
    case CONFIG_WORD:
        for (*out_value = 0; *out_value < option->max; ++*out_value)
            if (strcmp(option->words[*out_value], text) == 0)
                return true;
        return false;
    case CONFIG_TEXT:
        break;
    }
    return false;
}

/* Store the text in row i. False: not what the row allows. */
static bool assign(struct config *config, size_t i, const char *text)
{
    const struct config_option *option = &config_options[i];
    if (option->type == CONFIG_TEXT) {
        size_t length = strlen(text);
        if (length < option->min || length > option->max)
            return false;
        memcpy(place(config, i), text, length + 1);
        return true;
    }
    uint64_t value;
    if (!parse_number(option, text, &value))
        return false;
    if (option->type == CONFIG_CHOICE && value == CONFIG_AUTO && strcmp(text, "auto") != 0)
        return false;
    bool is_free =
        option->type == CONFIG_LEVEL || (option->type == CONFIG_CHOICE && value == CONFIG_AUTO);
    if (!is_free && (value < option->min || value > option->max))
        return false;
    memcpy(place(config, i), &value, sizeof value);
    return true;
}

static void format_value(enum config_type type, uint64_t value, char *out_text, size_t size)
{
    static const char suffixes[] = "kMGT";
    switch (type) {
    case CONFIG_BYTES: {
        int power = 0;
        while (power < 4 && value && value % 1024 == 0) {
            value /= 1024;
            power++;
        }
        snprintf(out_text, size, "%" PRIu64 "%.*s", value, power > 0,
                 suffixes + power - (power > 0));
        return;
    }
    case CONFIG_SECONDS:
        if (value % SECOND_MS)
            snprintf(out_text, size, "%.3f", (double)value / 1000);
        else
            snprintf(out_text, size, "%" PRIu64, value / SECOND_MS);
        return;
    case CONFIG_MODE:
        snprintf(out_text, size, "%04" PRIo64, value);
        return;
    case CONFIG_LEVEL:
        snprintf(out_text, size, "%s", log_level_name((enum log_level)value));
        return;
    case CONFIG_CHOICE:
        if (value == CONFIG_AUTO)
            snprintf(out_text, size, "auto");
        else
            snprintf(out_text, size, "%" PRIu64, value);
        return;
    default:
        snprintf(out_text, size, "%" PRIu64, value);
    }
}

void config_format(const struct config *config, size_t i, char *out_text, size_t size)
{
    const struct config_option *option = &config_options[i];
    if (option->type == CONFIG_TEXT)
        snprintf(out_text, size, "%s", (const char *)config + option->offset);
    else if (option->type == CONFIG_WORD)
        snprintf(out_text, size, "%s", option->words[number_of(config, i)]);
    else
        format_value(option->type, number_of(config, i), out_text, size);
}

void config_allowed(size_t i, char *out_text, size_t size)
{
    static const char *const nouns[] = {
        [CONFIG_NUMBER] = "a number",          [CONFIG_BYTES] = "bytes (suffixes k, M, G, T)",
        [CONFIG_SECONDS] = "seconds",          [CONFIG_MODE] = "octal permissions",
        [CONFIG_CHOICE] = "auto, or a number",
    };
    const struct config_option *option = &config_options[i];
    char min[32], max[32];
    switch (option->type) {
    case CONFIG_TEXT:
        snprintf(out_text, size, "a text of %" PRIu64 " to %" PRIu64 " bytes", option->min,
                 option->max);
        return;
    case CONFIG_LEVEL:
        snprintf(out_text, size, "error, warning, notice, info or debug");
        return;
    case CONFIG_WORD:
        *out_text = '\0';
        for (size_t word = 0, used = 0; word < option->max && used < size; word++)
            used += (size_t)snprintf(out_text + used, size - used, "%s%s",
                                     !word                     ? ""
                                     : word + 1 == option->max ? " or "
                                                               : ", ",
                                     option->words[word]);
        return;
    default:
        format_value(option->type, option->min, min, sizeof min);
        format_value(option->type, option->max, max, sizeof max);
        snprintf(out_text, size, "%s from %s to %s", nouns[option->type], min, max);
    }
}

void config_init(struct config *config)
{
    memset(config, 0, sizeof *config);
    for (size_t i = 0; i < N_OPTIONS; i++) {
        if (!assign(config, i, config_options[i].default_value))
            abort(); /* a row of the table contradicts itself: the unit test says which */
        snprintf(config->sources[i], CONFIG_SOURCE_MAX, "default");
    }
}

/* ------------------------------------------------------------------ assignments */

__attribute__((format(printf, 2, 3))) static int fail(struct config_error *error,
                                                      const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    return -EINVAL;
}

/* Row of a key; section NULL: of any section. N_OPTIONS: none. */
static size_t find(const char *section, const char *key)
{
    for (size_t i = 0; i < N_OPTIONS; i++)
        if (strcmp(config_options[i].key, key) == 0 &&
            (!section || strcmp(config_options[i].section, section) == 0))
            return i;
    return N_OPTIONS;
}

/* Where a key that is not in this section belongs, or which keys there are. */
static int fail_unknown(struct config_error *error, const char *where, const char *section,
                        const char *key)
{
    size_t elsewhere = find(NULL, key);
    if (elsewhere < N_OPTIONS)
        return fail(error, "%s: \"%s\" belongs into section [%s], not [%s]", where, key,
                    config_options[elsewhere].section, section);
    char known[320] = "";
    size_t used = 0;
    for (size_t i = 0; i < N_OPTIONS; i++) {
        if (section && *section && strcmp(config_options[i].section, section) != 0)
            continue;
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "",
                                 config_options[i].key);
        if (used >= sizeof known)
            break;
    }
    if (!used)
        return fail(
            error,
            "%s: unknown section [%.64s]; there are [daemon], [job], [gpu], [peer] and [limits]",
            where, section);
    return fail(error, "%s: unknown key \"%.64s\"; known keys: %s", where, key, known);
}

static int apply(struct config *config, size_t i, const char *value, const char *where,
                 const char *source, struct config_error *error)
{
    if (!assign(config, i, value)) {
        char allowed[128];
        config_allowed(i, allowed, sizeof allowed);
        return fail(error, "%s: %s = \"%.64s\" is not allowed; allowed: %s", where,
                    config_options[i].key, value, allowed);
    }
    snprintf(config->sources[i], CONFIG_SOURCE_MAX, "%s", source);
    return 0;
}

int config_set(struct config *config, const char *assignment, const char *source,
               struct config_error *out_error)
{
    char key[64];
    const char *equals = strchr(assignment, '=');
    if (!equals || equals == assignment || (size_t)(equals - assignment) >= sizeof key)
        return fail(out_error, "%s: \"%.64s\" is not of the form key=value", source, assignment);
    memcpy(key, assignment, (size_t)(equals - assignment));
    key[equals - assignment] = '\0';
    size_t i = find(NULL, key);
    if (i == N_OPTIONS)
        return fail_unknown(out_error, source, NULL, key);
    return apply(config, i, equals + 1, source, source, out_error);
}

/* ------------------------------------------------------------------ files */

/* State of one parse. inih tells its handler no line, so the reader counts them. */
struct parse {
    struct config fresh;
    const char *name;
    FILE *file;
    int line;
    int set_at[N_OPTIONS]; /* line of each key seen, 0: not seen */
    bool has_failed;
    struct config_error *error;
};

static char *read_line(char *buffer, int size, void *data)
{
    struct parse *parse = data;
    if (parse->has_failed || !fgets(buffer, size, parse->file))
        return NULL;
    parse->line++;
    if (!strchr(buffer, '\n') && !feof(parse->file)) {
        fail(parse->error, "%s:%d: the line is longer than %d bytes", parse->name, parse->line,
             size - 2);
        parse->has_failed = true;
        return NULL;
    }
    return buffer;
}

static int on_assignment(void *data, const char *section, const char *key, const char *value)
{
    struct parse *parse = data;
    if (parse->has_failed)
        return 0;
    char where[CONFIG_SOURCE_MAX];
    snprintf(where, sizeof where, "%s:%d", parse->name, parse->line);
    size_t i = find(section, key);
    int rc;
    if (i == N_OPTIONS)
        rc = fail_unknown(parse->error, where, section, key);
    else if (parse->set_at[i])
        rc = fail(parse->error, "%s: \"%s\" is set already in line %d", where, key,
                  parse->set_at[i]);
    else
        rc = apply(&parse->fresh, i, value, where, where, parse->error);
    if (i < N_OPTIONS)
        parse->set_at[i] = parse->line;
    parse->has_failed = rc < 0;
    return rc == 0;
}

static int read_stream(struct config *config, const char *name, FILE *file,
                       struct config_error *out_error)
{
    struct parse *parse = calloc(1, sizeof *parse);
    if (!parse)
        return -ENOMEM;
    parse->fresh = *config;
    parse->name = name;
    parse->file = file;
    parse->error = out_error;
    int line = ini_parse_stream(read_line, parse, on_assignment, parse);
    int rc = 0;
    if (parse->has_failed)
        rc = -EINVAL;
    else if (line != 0)
        rc = fail(out_error, "%s:%d: expected \"key = value\", \"[section]\" or a comment", name,
                  line);
    else if (ferror(file))
        rc = fail(out_error, "%s: can not be read: %s", name, strerror(errno));
    else
        *config = parse->fresh;
    free(parse);
    return rc;
}

int config_read_file(struct config *config, const char *path, struct config_error *out_error)
{
    FILE *file = fopen(path, "re");
    if (!file) {
        int rc = -errno;
        fail(out_error, "%s: can not be opened: %s", path, strerror(-rc));
        return rc;
    }
    int rc = read_stream(config, path, file, out_error);
    fclose(file);
    return rc;
}

int config_read_text(struct config *config, const char *name, const char *text,
                     struct config_error *out_error)
{
    if (!*text)
        return 0; /* fmemopen() refuses an empty buffer */
    FILE *file = fmemopen((char *)text, strlen(text), "r");
    if (!file)
        return -ENOMEM;
    int rc = read_stream(config, name, file, out_error);
    fclose(file);
    return rc;
}

size_t config_take_reloadable(struct config *config, const struct config *fresh, char *out_fixed,
                              size_t size)
{
    size_t n_fixed = 0, used = 0;
    *out_fixed = '\0';
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct config_option *option = &config_options[i];
        size_t bytes = option->type == CONFIG_TEXT ? CONFIG_TEXT_MAX : sizeof(uint64_t);
        const void *value = (const char *)fresh + option->offset;
        if (option->reload == CONFIG_RELOADABLE) {
            memcpy(place(config, i), value, bytes);
            memcpy(config->sources[i], fresh->sources[i], CONFIG_SOURCE_MAX);
        } else if (option->type == CONFIG_TEXT ? strcmp(place(config, i), value) != 0
                                               : memcmp(place(config, i), value, bytes) != 0) {
            n_fixed++;
            if (used < size)
                used += (size_t)snprintf(out_fixed + used, size - used, "%s%s", used ? ", " : "",
                                         option->key);
        }
    }
    return n_fixed;
}

void config_print_options(FILE *file)
{
    const char *section = "";
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct config_option *option = &config_options[i];
        if (strcmp(section, option->section) != 0)
            fprintf(file, "# SECTION [%s]\n\n", section = option->section);
        char allowed[128];
        config_allowed(i, allowed, sizeof allowed);
        fprintf(file, "*%s* = %s\n", option->key, allowed);
        fprintf(file, "\t%s\n\n\tDefault: %s. %s\n\n", option->doc,
                *option->default_value ? option->default_value : "empty",
                option->reload == CONFIG_RELOADABLE ? "Takes effect on reload."
                                                    : "A change needs a restart.");
    }
}
