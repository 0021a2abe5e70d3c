/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of options: what there is to configure, and what each option may be. Everything else
 * about an option is derived from its row. Data only.
 */
#include "control/config.h"

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
     "After how long a tensor that some rank has not submitted is reported, and a connection "
     "between "
     "two nodes that moves nothing. 0: never. Applies to workers started afterwards.",
     NULL},
    {"job", "op_timeout_s", CONFIG_SECONDS, PLACE(op_timeout_ms), 0, DAY_MS, "600",
     CONFIG_RELOADABLE,
     "After how long such an operation fails on all ranks, and a connection between two nodes that "
     "moves nothing ends the epoch. 0: never. Applies to workers started afterwards.",
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
